// LogLevelFile: the level of the log as a file says it, which may change while the process runs.
#ifndef HEADWATER_SERVER_OBSERVABILITY_LOG_LEVEL_FILE_H_
#define HEADWATER_SERVER_OBSERVABILITY_LOG_LEVEL_FILE_H_

#include <string>
#include <thread>

#include "server/observability/pause.h"

namespace headwater::observability {

// Reads the file every second, whatever its times say: mounted files are replaced in many ways. A change is told in the log, as a
// warning, unless both levels leave warnings out.
class LogLevelFile {
 public:
  // The file's only word is the level (ConfigureLogging()). While it is not there, or empty, `usual_level` holds, which must be
  // one; for anything else the level stays as it was, and the log says so once.
  LogLevelFile(std::string path, std::string usual_level);
  ~LogLevelFile();
  LogLevelFile(const LogLevelFile&) = delete;
  LogLevelFile& operator=(const LogLevelFile&) = delete;

 private:
  void Look();
  void Run();

  const std::string path_;
  const std::string usual_level_;
  std::string seen_;   // the word that the file had, of the thread once it runs, like the next
  std::string level_;  // that holds
  Pause pause_;
  std::thread thread_;  // last: it uses the members above
};

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_LOG_LEVEL_FILE_H_
