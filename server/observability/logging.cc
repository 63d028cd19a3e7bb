#include "server/observability/logging.h"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <new>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/civil_time.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::observability {
namespace {

constexpr int kPatienceMs = 100;

// Whether a write of PIPE_BUF bytes does not block.
bool AwaitRoom(int fd, int timeout_ms) {
  pollfd polled = {fd, POLLOUT, 0};
  int ready = 0;
  do {
    ready = poll(&polled, 1, timeout_ms);
  } while (ready < 0 && errno == EINTR);
  return ready > 0;  // also for what fails at once, as without a reader
}

}  // namespace

bool LineWriter::WriteAll(std::string_view text, size_t* written) {
  while (*written < text.size()) {
    has_room_ = AwaitRoom(fd_, has_room_ ? kPatienceMs : 0);
    if (!has_room_) return false;
    // A pipe that is ready takes so much at once.
    const ssize_t count = write(fd_, text.data() + *written, std::min<size_t>(text.size() - *written, PIPE_BUF));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    *written += static_cast<size_t>(count);
  }
  return true;
}

bool LineWriter::Write(std::string_view lines) {
  size_t written = 0;
  if (is_midway_ && !WriteAll("\n", &written)) return false;
  is_midway_ = false;
  written = 0;
  const bool is_done = WriteAll(lines, &written);
  is_midway_ = !is_done && written > 0;
  return is_done;
}

namespace {

std::atomic<LogFormat> g_format{LogFormat::kText};
constexpr const char* kLevelNames[] = {"debug", "info", "warning", "error", "off"};  // by LogLevel; "off" lets none through
std::atomic<size_t> g_level{static_cast<size_t>(LogLevel::kInfo)};

std::string Now() { return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone()); }

absl::Status SetLogLevel(const std::string& level) {
  const auto* const found = std::find(std::begin(kLevelNames), std::end(kLevelNames), level);
  if (found == std::end(kLevelNames)) {
    return absl::InvalidArgumentError("log level: expected debug, info, warning, error or off, got \"" + level + "\"");
  }
  g_level = static_cast<size_t>(found - std::begin(kLevelNames));
  return absl::OkStatus();
}

// Writes to stderr, and counts the lines that LineWriter reports as lost. The next line that is written follows a line with their
// number.
void WriteLine(const std::string& line) {
  static absl::Mutex mutex(absl::kConstInit);
  static LineWriter writer(STDERR_FILENO);
  static int64_t lost = 0;
  absl::MutexLock lock(&mutex);
  std::string lines;
  if (lost > 0) lines = FormatLogLine(g_format, Now(), LogLevel::kWarning, "log_lines_lost", {{"lines", lost}}) + "\n";
  lost = writer.Write(lines + line + "\n") ? 0 : lost + 1;
}

// A double-quoted string in which nothing can end the line or the string.
std::string Quote(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", byte);
      quoted += escaped;
    } else {
      quoted += c;
    }
  }
  quoted += '"';
  return quoted;
}

// Text format: bare where that is unambiguous.
std::string TextValue(const std::string& value) {
  if (value.empty()) return "\"\"";
  for (const char c : value) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (byte <= 0x20 || byte >= 0x7f || c == '"' || c == '=' || c == '\\') return Quote(value);
  }
  return value;
}

constexpr char kTimePlace[] = "0000-00-00T00:00:00Z";  // replaced at the end

std::string& EndLine() {
  static auto* const line = new std::string();
  return *line;
}

// Allocates nothing and takes no lock: this thread may be in the middle of a line of the log.
[[noreturn]] void EndNow() {
  static std::atomic<bool> begun{false};
  while (begun.exchange(true)) pause();  // another thread ends the process
  const absl::CivilSecond now = absl::ToCivilSecond(absl::Now(), absl::UTCTimeZone());
  char time[64];
  std::snprintf(time, sizeof(time), "%04d-%02d-%02dT%02d:%02d:%02dZ", static_cast<int>(now.year()), now.month(), now.day(),
                now.hour(), now.minute(), now.second());
  EndLine().replace(EndLine().find(kTimePlace), sizeof(kTimePlace) - 1, time, sizeof(kTimePlace) - 1);
  LineWriter(STDERR_FILENO).Write(EndLine());
  _exit(kNoMemoryStatus);
}

}  // namespace

absl::Status ConfigureLogging(const std::string& level, const std::string& format) {
  if (format != "text" && format != "json") {
    return absl::InvalidArgumentError("log format: expected text or json, got \"" + format + "\"");
  }
  HEADWATER_RETURN_IF_ERROR(SetLogLevel(level));
  g_format = format == "json" ? LogFormat::kJson : LogFormat::kText;
  return absl::OkStatus();
}

std::string FormatLogLine(LogFormat format, const std::string& time, LogLevel level, const char* event,
                          const std::vector<LogField>& fields) {
  const bool json = format == LogFormat::kJson;
  std::string line = json ? absl::StrCat("{\"time\":", Quote(time)) : time;
  const auto add = [&](const char* key, const std::string& value) {
    absl::StrAppend(&line, json ? ",\"" : " ", key, json ? "\":" : "=", value);
  };
  add("level", json ? Quote(kLevelNames[static_cast<size_t>(level)]) : kLevelNames[static_cast<size_t>(level)]);
  add("event", json ? Quote(event) : event);
  for (const LogField& field : fields)
    add(field.key, field.bare ? field.value : json ? Quote(field.value) : TextValue(field.value));
  return json ? line + "}" : line;
}

void Log(LogLevel level, const char* event, const std::vector<LogField>& fields) {
  if (static_cast<size_t>(level) >= g_level) WriteLine(FormatLogLine(g_format, Now(), level, event, fields));
}

void EndWithoutMemory(LogFormat format) {
  EndLine() = FormatLogLine(format, kTimePlace, LogLevel::kError, "out_of_memory",
                            {{"message", "an allocation failed; the process ends, and heads come back at its next start"}}) +
              "\n";
  std::set_new_handler(&EndNow);
}

LogLevelFile::LogLevelFile(std::string path, std::string usual_level)
    : path_(std::move(path)), usual_level_(std::move(usual_level)), level_(usual_level_) {
  Look();
  look_.emplace(absl::Seconds(1), [this] { Look(); });
}

void LogLevelFile::Look() {
  std::string text(64, '\0');  // longer content is no level
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
