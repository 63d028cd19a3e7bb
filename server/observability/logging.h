// Structured logs: one line for each event on stderr, as key=value pairs or as JSON.
//
//   Log(LogLevel::kInfo, "head_created", {{"request_id", id}, {"head", name}, {"planned_bytes", bytes}});
//
// No thread waits for the reader of stderr: lines that do not fit are lost, and a later line `log_lines_lost` has their number.
// Thread-safe. Tensor contents, session ids and tokens are never logged; values that clients chose are escaped.
#ifndef HEADWATER_SERVER_OBSERVABILITY_LOGGING_H_
#define HEADWATER_SERVER_OBSERVABILITY_LOGGING_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "server/observability/repeated_task.h"

namespace headwater::observability {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };

// A key with its value. Numbers and booleans stay unquoted in JSON.
struct LogField {
  LogField(const char* field_key, std::string field_value) : key(field_key), value(std::move(field_value)) {}
  LogField(const char* field_key, int64_t number) : key(field_key), value(std::to_string(number)), bare(true) {}
  LogField(const char* field_key, double number) : key(field_key), value(absl::StrFormat("%.3f", number)), bare(true) {}
  // `true` or `false`. A template, so that no pointer is taken for a boolean.
  template <typename T, typename = std::enable_if_t<std::is_same_v<T, bool>>>
  LogField(const char* field_key, T flag) : key(field_key), value(flag ? "true" : "false"), bare(true) {}

  const char* key;  // lower_snake_case, static
  std::string value;
  bool bare = false;  // a number or a boolean
};

// Sets the process's level (`debug`, `info`, `warning`, `error`, `off`) and format (`text`, `json`). InvalidArgument for other
// words. Before the first call: info, text.
absl::Status ConfigureLogging(const std::string& level, const std::string& format);

// Writes one line, if `level` is enabled. `event` is a static lower_snake_case word.
void Log(LogLevel level, const char* event, const std::vector<LogField>& fields);

// The line that Log() writes, without its end. `time` is the timestamp to print. Exposed for tests.
std::string FormatLogLine(LogFormat format, const std::string& time, LogLevel level, const char* event,
                          const std::vector<LogField>& fields);

// EX_OSERR of sysexits.h.
inline constexpr int kNoMemoryStatus = 71;

// From now on a failing `new` (docs/adr/0025-host-memory.md) ends the process with kNoMemoryStatus, after one line in the log:
// event=out_of_memory. Memory whose absence is an error uses headwater/kernels/planned_bytes.h.
void EndWithoutMemory(LogFormat format);

// Writes lines to a descriptor without blocking on a reader that is gone, full or stalled. One thread at a time. The process must
// ignore SIGPIPE and SIGXFSZ.
class LineWriter {
 public:
  // `fd` stays the caller's.
  explicit LineWriter(int fd) : fd_(fd) {}

  // Writes whole lines with their line ends. False if they are lost: a pipe's reader is gone, a disk is full, or there is no room.
  // Waits at most 100 ms for room, and not at all after lines were lost for lack of room, until there is some.
  bool Write(std::string_view lines);

 private:
  // Writes all of `text`; false if that fails. *written: the bytes written.
  bool WriteAll(std::string_view text, size_t* written);

  const int fd_;
  bool has_room_ = true;    // when last tried
  bool is_midway_ = false;  // the last line written is cut off
};

// Sets the log level from a file that may change. Reads it every second, regardless of its times: mounted files are replaced in
// many ways. A change is logged as a warning, unless both levels exclude warnings.
class LogLevelFile {
 public:
  // The file's only word is the level (ConfigureLogging()). While the file is missing or empty, `usual_level`, a valid level,
  // holds. Any other content leaves the level unchanged and is logged once.
  LogLevelFile(std::string path, std::string usual_level);

 private:
  void Look();

  const std::string path_;
  const std::string usual_level_;
  std::string seen_;                  // the word that the file had, of the thread once it runs, like the next
  std::string level_;                 // that holds
  std::optional<RepeatedTask> look_;  // last: it uses the members above
};

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_LOGGING_H_
