#include "server/observability/logging.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/observability/line_writer.h"
#include "spdlog/sinks/base_sink.h"
#include "spdlog/spdlog.h"

namespace headwater::observability {
namespace {

std::atomic<LogFormat> g_format{LogFormat::kText};

std::string Now() { return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone()); }

// Writes to stderr, and counts the lines that are lost there, as LineWriter says: the next one that is not lost is preceded by one
// with their number.
class StderrSink final : public spdlog::sinks::base_sink<std::mutex> {
 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    std::string lines;
    if (lost_ > 0) lines = FormatLogLine(g_format, Now(), LogLevel::kWarning, "log_lines_lost", {{"lines", lost_}}) + "\n";
    lines.append(message.payload.data(), message.payload.size()).append("\n");
    lost_ = writer_.Write(lines) ? 0 : lost_ + 1;
  }
  void flush_() override {}

 private:
  LineWriter writer_{STDERR_FILENO};
  int64_t lost_ = 0;
};

spdlog::logger& Logger() {
  static const auto* const logger =
      new std::shared_ptr<spdlog::logger>(std::make_shared<spdlog::logger>("headwater", std::make_shared<StderrSink>()));
  return **logger;
}

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

const char* LevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "error";
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

}  // namespace

LogField::LogField(const char* field_key, double number) : key(field_key), bare(true) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.3f", number);
  value = text;
}

absl::Status SetLogLevel(const std::string& level) {
  spdlog::level::level_enum chosen = spdlog::level::info;
  if (level == "debug") {
    chosen = spdlog::level::debug;
  } else if (level == "warning") {
    chosen = spdlog::level::warn;
  } else if (level == "error") {
    chosen = spdlog::level::err;
  } else if (level == "off") {
    chosen = spdlog::level::off;
  } else if (level != "info") {
    return absl::InvalidArgumentError("log level: expected debug, info, warning, error or off, got \"" + level + "\"");
  }
  Logger().set_level(chosen);
  return absl::OkStatus();
}

absl::Status ConfigureLogging(const std::string& level, const std::string& format) {
  if (format != "text" && format != "json") {
    return absl::InvalidArgumentError("log format: expected text or json, got \"" + format + "\"");
  }
  if (absl::Status status = SetLogLevel(level); !status.ok()) return status;
  g_format = format == "json" ? LogFormat::kJson : LogFormat::kText;
  return absl::OkStatus();
}

std::string FormatLogLine(LogFormat format, const std::string& time, LogLevel level, const char* event,
                          const std::vector<LogField>& fields) {
  const bool json = format == LogFormat::kJson;
  std::string line;
  if (json) {
    line.append("{\"time\":").append(Quote(time)).append(",\"level\":\"").append(LevelName(level));
    line.append("\",\"event\":\"").append(event).append("\"");
  } else {
    line.append(time).append(" level=").append(LevelName(level)).append(" event=").append(event);
  }
  for (const LogField& field : fields) {
    if (json) {
      line.append(",\"").append(field.key).append("\":").append(field.bare ? field.value : Quote(field.value));
    } else {
      line.append(" ").append(field.key).append("=").append(field.bare ? field.value : TextValue(field.value));
    }
  }
  if (json) line += '}';
  return line;
}

void Log(LogLevel level, const char* event, const std::vector<LogField>& fields) {
  spdlog::logger& logger = Logger();
  if (!logger.should_log(ToSpdlog(level))) return;
  const std::string line = FormatLogLine(g_format, Now(), level, event, fields);
  logger.log(ToSpdlog(level), spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace headwater::observability
