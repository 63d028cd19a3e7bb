#include "server/observability/memory_end.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <new>
#include <string>

#include "absl/time/civil_time.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/observability/line_writer.h"

namespace headwater::observability {
namespace {

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

void EndWithoutMemory(LogFormat format) {
  EndLine() = FormatLogLine(format, kTimePlace, LogLevel::kError, "out_of_memory",
                            {{"message", "an allocation failed; the process ends, and heads come back at its next start"}}) +
              "\n";
  std::set_new_handler(&EndNow);
}

}  // namespace headwater::observability
