#include "tests/e2e/cpp/support/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace headwater::e2e {
namespace {

void RequireOrExit(bool condition, const char* what) {
  if (condition) return;
  std::perror(what);
  std::abort();
}

int ExitCodeOf(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status); }

}  // namespace

TemporaryDirectory::TemporaryDirectory() {
  // Short, because the path of a Unix socket has at most 107 bytes.
  std::string pattern = std::filesystem::temp_directory_path() / "hw-e2e-XXXXXX";
  RequireOrExit(mkdtemp(pattern.data()) != nullptr, "mkdtemp");
  path_ = pattern;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

ChildProcess::ChildProcess(const std::vector<std::string>& arguments, const std::string& stdout_path,
                           const std::string& stderr_path) {
  // Everything that allocates happens before the fork: the parent has threads.
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const int out = open(stdout_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const int err = open(stderr_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  RequireOrExit(out >= 0 && err >= 0, "open");
  pid_ = fork();
  RequireOrExit(pid_ >= 0, "fork");
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (dup2(out, STDOUT_FILENO) >= 0 && dup2(err, STDERR_FILENO) >= 0) execv(argv[0], argv.data());
    _exit(127);
  }
  close(out);
  close(err);
}

ChildProcess::~ChildProcess() {
  Signal(SIGKILL);
  Wait();
}

void ChildProcess::Signal(int signal) {
  if (exit_code_.has_value() || kill(pid_, signal) != 0 || signal != SIGSTOP) return;
  // One thread takes the signal and stops the others; on a busy machine they go on until it has its turn.
  siginfo_t info;
  waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WEXITED | WNOWAIT);
}

bool ChildProcess::Running() {
  int status = 0;
  if (!exit_code_.has_value() && waitpid(pid_, &status, WNOHANG) == pid_) exit_code_ = ExitCodeOf(status);
  return !exit_code_.has_value();
}

int ChildProcess::Wait() {
  int status = 0;
  if (!exit_code_.has_value()) {
    RequireOrExit(waitpid(pid_, &status, 0) == pid_, "waitpid");
    exit_code_ = ExitCodeOf(status);
  }
  return *exit_code_;
}

EnvironmentVariable::EnvironmentVariable(const char* name, const std::string& value) : name_(name) {
  if (const char* const former = getenv(name); former != nullptr) former_ = former;
  setenv(name, value.c_str(), 1);
}

EnvironmentVariable::~EnvironmentVariable() { former_.has_value() ? setenv(name_, former_->c_str(), 1) : unsetenv(name_); }

ProgramResult RunProgram(const std::vector<std::string>& arguments) {
  TemporaryDirectory directory;
  const std::string out = directory.path() + "/out";
  const std::string err = directory.path() + "/err";
  ChildProcess child(arguments, out, err);
  return {.exit_code = child.Wait(), .out = ReadFile(out), .err = ReadFile(err)};
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

void WriteFile(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file << content;
  RequireOrExit(file.good(), path.c_str());
}

}  // namespace headwater::e2e
