// ChildProcess: a program that a test started, and ends.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_CHILD_PROCESS_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_CHILD_PROCESS_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace headwater::e2e {

// A directory that is removed with everything in it.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// A child that is killed when this object goes, and when the test program does.
class ChildProcess {
 public:
  // Starts `arguments[0]`; stdout and stderr go to files. Ends the test program if that is not possible.
  ChildProcess(const std::vector<std::string>& arguments, const std::string& stdout_path, const std::string& stderr_path);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  void Signal(int signal);
  bool Running();
  pid_t pid() const { return pid_; }
  // Waits for the end: the exit code, or minus the signal that ended it.
  int Wait();

 private:
  pid_t pid_ = -1;
  std::optional<int> exit_code_;
};

// A variable of the environment that programs are started with, for as long as this lives.
class EnvironmentVariable {
 public:
  EnvironmentVariable(const char* name, const std::string& value);
  ~EnvironmentVariable();
  EnvironmentVariable(const EnvironmentVariable&) = delete;
  EnvironmentVariable& operator=(const EnvironmentVariable&) = delete;

 private:
  const char* const name_;
  std::optional<std::string> former_;
};

struct ProgramResult {
  int exit_code = 0;
  std::string out;
  std::string err;
};

// Runs a program to its end.
ProgramResult RunProgram(const std::vector<std::string>& arguments);

// The file's content; empty if there is none.
std::string ReadFile(const std::string& path);
void WriteFile(const std::string& path, const std::string& content);

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_CHILD_PROCESS_H_
