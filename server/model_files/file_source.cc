#include "server/model_files/file_source.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::model_files {
namespace {

constexpr size_t kMaxPathLength = 4096;
constexpr size_t kMaxShownLength = 200;

absl::Status InvalidPath(const std::string& path, const char* problem) {
  const std::string shown = Shown(path);
  return MakeError(
      ErrorReason::kInvalidField,
      absl::StrCat("path must be relative, without `..`, and stay under the server's load root; '", shown, "' ", problem),
      {{"field", "path"}, {"actual", shown}});
}

absl::Status CheckPath(const std::string& path) {
  if (path.size() > kMaxPathLength) return InvalidPath(path, "is too long");
  if (path.find('\0') != std::string::npos) return InvalidPath(path, "has a NUL character");
  if (path.front() == '/') return InvalidPath(path, "is absolute");
  for (const absl::string_view component : absl::StrSplit(path, '/')) {
    if (component == "..") return InvalidPath(path, "has `..`");
  }
  return absl::OkStatus();
}

bool IsBeneath(const std::string& path, const std::string& root) {
  return path.size() > root.size() && path.compare(0, root.size(), root) == 0 && (root == "/" || path[root.size()] == '/');
}

// The path without links; empty if it does not exist.
std::string RealPath(const std::string& path) {
  char* resolved = realpath(path.c_str(), nullptr);
  if (resolved == nullptr) return "";
  std::string text(resolved);
  free(resolved);
  return text;
}

absl::StatusOr<std::shared_ptr<ReadableFile>> Take(int descriptor) {
  HEADWATER_ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> file, ReadableFromDescriptor(descriptor));
  return std::shared_ptr<ReadableFile>(std::move(file));
}

absl::Status OpenError(int error) {
  if (error == ENOENT || error == ENOTDIR || error == ELOOP) return absl::NotFoundError("no such file");
  return MakeError(ErrorReason::kFileCorrupt,
                   absl::StrCat("the file cannot be opened: ", std::error_code(error, std::generic_category()).message()),
                   {{"errno", absl::StrCat(error)}});
}

std::vector<std::string> SortedNames(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> names;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class RootedFiles : public FileSource {
 public:
  explicit RootedFiles(const std::string& root) : root_(RealPath(root)) {}

  absl::StatusOr<std::shared_ptr<ReadableFile>> Open(const std::string& path) const override {
    HEADWATER_RETURN_IF_ERROR(CheckPath(path));
    if (root_.empty()) return absl::NotFoundError("the load root is not there");
    const std::string resolved = RealPath(absl::StrCat(root_, "/", path));
    if (resolved.empty()) return absl::NotFoundError("no such file");
    if (!IsBeneath(resolved, root_)) return InvalidPath(path, "leads out of it");
    const int descriptor = open(resolved.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (descriptor < 0) return OpenError(errno);
    // A directory on the way may have become a link since: the open file's place decides.
    if (RealPath(absl::StrCat("/proc/self/fd/", descriptor)) != resolved) {
      close(descriptor);
      return InvalidPath(path, "changed while it was opened");
    }
    return Take(descriptor);
  }

  std::vector<std::string> List(const std::string& folder) const override {
    if (root_.empty() || !CheckPath(folder).ok()) return {};
    const std::string resolved = RealPath(absl::StrCat(root_, "/", folder));
    if (resolved != root_ && !IsBeneath(resolved, root_)) return {};
    return SortedNames(resolved);
  }

 private:
  const std::string root_;
};

class AllFiles : public FileSource {
 public:
  absl::StatusOr<std::shared_ptr<ReadableFile>> Open(const std::string& path) const override {
    // O_NONBLOCK: opening a FIFO must not block.
    const int descriptor = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    return descriptor < 0 ? OpenError(errno) : Take(descriptor);
  }
  std::vector<std::string> List(const std::string& folder) const override { return SortedNames(folder); }
};

}  // namespace

std::unique_ptr<FileSource> FilesUnder(const std::string& root) { return std::make_unique<RootedFiles>(root); }

std::unique_ptr<FileSource> LocalFiles() { return std::make_unique<AllFiles>(); }

std::string Shown(const std::string& text) { return absl::CHexEscape(text.substr(0, kMaxShownLength)); }

}  // namespace headwater::model_files
