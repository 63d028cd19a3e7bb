#include "tests/bench/transport/worker.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

extern char** environ;

namespace headwater::bench {
namespace {

// Importing PyTorch and compiling a loss take a while.
constexpr int kLongestSilenceMs = 180'000;
constexpr auto kLongestGoodbye = std::chrono::seconds(5);

[[noreturn]] void Fail(const char* what) { throw std::runtime_error(std::string(what) + ": " + std::strerror(errno)); }

}  // namespace

Worker::Worker(const std::vector<std::string>& arguments) {
  signal(SIGPIPE, SIG_IGN);  // the end of a worker shows in its output
  int to_worker[2] = {-1, -1};
  int from_worker[2] = {-1, -1};
  if (pipe2(to_worker, O_CLOEXEC) != 0 || pipe2(from_worker, O_CLOEXEC) != 0) Fail("pipe2");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to_worker[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, from_worker[1], STDOUT_FILENO);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const int error = posix_spawnp(&pid_, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(to_worker[0]);
  close(from_worker[1]);
  input_ = to_worker[1];
  output_ = from_worker[0];
  if (error != 0) {
    pid_ = -1;
    why_not_ = arguments[0] + ": " + std::strerror(error);
    return;
  }
  const std::string line = ReadLine();
  const std::string unavailable = "unavailable: ";
  if (line.rfind(unavailable, 0) == 0) {
    why_not_ = line.substr(unavailable.size());
  } else if (line != "ready") {
    throw std::runtime_error("a worker said: " + line);
  }
}

Worker::~Worker() {
  close(input_);
  if (pid_ > 0) {
    const auto deadline = std::chrono::steady_clock::now() + kLongestGoodbye;
    while (waitpid(pid_, nullptr, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > deadline) {
        kill(pid_, SIGKILL);
        waitpid(pid_, nullptr, 0);
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  close(output_);
}

void Worker::Run(int count) {
  const std::string answer = Ask("run " + std::to_string(count));
  if (answer != "done") throw std::runtime_error("a worker said: " + answer);
}

std::string Worker::Ask(const std::string& line) {
  const std::string text = line + "\n";
  if (write(input_, text.data(), text.size()) != static_cast<ssize_t>(text.size())) Fail("writing to a worker");
  return ReadLine();
}

std::string Worker::ReadLine() {
  while (true) {
    if (const size_t end = read_.find('\n'); end != std::string::npos) {
      const std::string line = read_.substr(0, end);
      read_.erase(0, end + 1);
      return line;
    }
    pollfd waited{output_, POLLIN, 0};
    const int ready = poll(&waited, 1, kLongestSilenceMs);
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) throw std::runtime_error("a worker stays silent");
    char buffer[4096];
    const ssize_t count = read(output_, buffer, sizeof(buffer));
    if (count <= 0) throw std::runtime_error("a worker has ended");
    read_.append(buffer, static_cast<size_t>(count));
  }
}

}  // namespace headwater::bench
