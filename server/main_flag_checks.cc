#include "server/main_flag_checks.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace headwater {
namespace {

absl::Status PathError(const char* flag, const char* what, const std::string& path, int error) {
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", what, " ", path, ": ", std::strerror(error)));
}

bool IsFolder(const std::string& path) {
  struct stat info = {};
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

}  // namespace

absl::Status CheckAtLeast(const char* flag, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": expected >= ", least, ", got ", value));
}

absl::Status CheckPositive(const char* flag, absl::Duration value) {
  if (value > absl::ZeroDuration()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": expected a duration > 0, got ", absl::FormatDuration(value)));
}

absl::StatusOr<int> ParseMode(const char* flag, const std::string& text) {
  int mode = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), mode, 8);
  if (error == std::errc() && end == text.data() + text.size() && mode >= 0 && mode <= 0777) return mode;
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": expected permissions from 0 to 0777, in octal, got \"", text, "\""));
}

absl::Status CheckReadable(const char* flag, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  if (access(path.c_str(), R_OK) != 0) return PathError(flag, "cannot read", path, errno);
  return IsFolder(path) ? PathError(flag, "cannot read", path, EISDIR) : absl::OkStatus();
}

absl::Status CheckReplaceable(const char* flag, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  if (IsFolder(path)) return PathError(flag, "cannot write", path, EISDIR);
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  if (access(folder.c_str(), W_OK | X_OK) != 0) return PathError(flag, "cannot write into the folder of", path, errno);
  return absl::OkStatus();
}

}  // namespace headwater
