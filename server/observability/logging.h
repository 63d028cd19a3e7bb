// Structured logs: one line for each event on stderr, as key=value pairs or as JSON.
//
//   Log(LogLevel::kInfo, "head_created", {{"request_id", id}, {"head", name}, {"planned_bytes", bytes}});
//
// No thread waits for the reader of stderr: lines that do not fit are lost, and a later line `log_lines_lost` has their number.
// Thread-safe. Tensor contents, session ids and tokens are never logged; values that clients chose are escaped.
#ifndef HEADWATER_SERVER_OBSERVABILITY_LOGGING_H_
#define HEADWATER_SERVER_OBSERVABILITY_LOGGING_H_

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"

namespace headwater::observability {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };

// A key with its value. Numbers and booleans stay unquoted in JSON.
struct LogField {
  LogField(const char* field_key, const std::string& field_value) : key(field_key), value(field_value) {}
  LogField(const char* field_key, const char* field_value) : key(field_key), value(field_value) {}
  LogField(const char* field_key, int64_t number) : key(field_key), value(std::to_string(number)), bare(true) {}
  LogField(const char* field_key, double number);  // three decimals
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

// Changes the level alone, at any time.
absl::Status SetLogLevel(const std::string& level);

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

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_LOGGING_H_
