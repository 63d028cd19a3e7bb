// LogLevelFile: sets the log level from a file that may change while the process runs.
#ifndef HEADWATER_SERVER_OBSERVABILITY_LOG_LEVEL_FILE_H_
#define HEADWATER_SERVER_OBSERVABILITY_LOG_LEVEL_FILE_H_

#include <optional>
#include <string>

#include "server/observability/repeated_task.h"

namespace headwater::observability {

// Reads the file every second, regardless of its times: mounted files are replaced in many ways. A change is logged as a warning,
// unless both levels exclude warnings.
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

#endif  // HEADWATER_SERVER_OBSERVABILITY_LOG_LEVEL_FILE_H_
