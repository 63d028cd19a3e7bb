#include "server/observability/log_level_file.h"

#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/time/time.h"
#include "server/observability/logging.h"

namespace headwater::observability {
namespace {

constexpr absl::Duration kInterval = absl::Seconds(1);
constexpr size_t kMostBytes = 64;  // of what is read

}  // namespace

LogLevelFile::LogLevelFile(std::string path, std::string usual_level)
    : path_(std::move(path)), usual_level_(std::move(usual_level)), level_(usual_level_) {
  Look();
  look_.emplace(kInterval, [this] { Look(); });
}

void LogLevelFile::Look() {
  std::string text(kMostBytes, '\0');
  std::ifstream file(path_, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(file.gcount() > 0 ? static_cast<size_t>(file.gcount()) : 0);
  const std::string word(absl::StripAsciiWhitespace(text));
  if (word == seen_) return;
  seen_ = word;
  const std::string wanted = word.empty() ? usual_level_ : word;
  if (!SetLogLevel(wanted).ok()) {
    // The log omits the content: the file may have been named by mistake, for example a file of tokens.
    Log(LogLevel::kWarning, "log_level_not_taken",
        {{"path", path_}, {"message", "log level: expected debug, info, warning, error or off as the file's only word"}});
    return;
  }
  if (wanted == level_) return;
  // A change is logged at the more verbose of both levels.
  const bool told_before = level_ != "error" && level_ != "off";
  if (told_before) SetLogLevel(level_).IgnoreError();
  Log(LogLevel::kWarning, "log_level_changed", {{"from", level_}, {"to", wanted}});
  if (told_before) SetLogLevel(wanted).IgnoreError();
  level_ = wanted;
}

}  // namespace headwater::observability
