#include <fcntl.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/main.h"
#include "server/observability/logging.h"

namespace headwater {
namespace {

// The engine's device was lost; EX_TEMPFAIL of sysexits.h: a restart may work.
constexpr int kDeviceLostStatus = 75;

constexpr uint64_t Bit(int signal_number) { return uint64_t{1} << (signal_number - 1); }

// Runs before any library's constructor. BLAS starts threads in its constructor; one could take a signal meant for the main thread
// and end the process. Other libraries open files there, which could get the number of a closed stderr and receive the log. No
// sanitizer works so early.
ABSL_ATTRIBUTE_NO_SANITIZE_ADDRESS ABSL_ATTRIBUTE_NO_SANITIZE_THREAD ABSL_ATTRIBUTE_NO_SANITIZE_UNDEFINED void PrepareProcess() {
  // Opens the lowest free number: that of the closed one, as those below it are taken.
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (syscall(SYS_fcntl, fd, F_GETFD) < 0) syscall(SYS_openat, AT_FDCWD, "/dev/null", O_RDWR);
  }
  const uint64_t mask = Bit(SIGTERM) | Bit(SIGINT) | Bit(SIGHUP) | Bit(SIGUSR1) | Bit(kWakeSignal);
  syscall(SYS_rt_sigprocmask, SIG_BLOCK, &mask, nullptr, sizeof(mask));
}
__attribute__((section(".preinit_array"), used)) void (*const kBeforeConstructors)() = PrepareProcess;

// The signals of the main thread that end the process.
sigset_t EndSignals() {
  sigset_t signals = MainSignals();
  for (const int signal_number : {SIGUSR1, kWakeSignal}) sigdelset(&signals, signal_number);
  return signals;
}

// Calls `action` on a thread of its own once `descriptor` is readable.
void WhenReadable(int descriptor, std::function<void()> action) {
  std::thread([descriptor, action = std::move(action)] {
    pollfd polled = {.fd = descriptor, .events = POLLIN, .revents = 0};
    while (poll(&polled, 1, -1) < 0 && errno == EINTR) {
    }
    action();
  }).detach();
}

}  // namespace

sigset_t MainSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal_number : {SIGTERM, SIGINT, SIGUSR1, kWakeSignal}) sigaddset(&signals, signal_number);
  // Unless nohup has it ignored.
  struct sigaction hangup = {};
  if (sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN) sigaddset(&signals, SIGHUP);
  return signals;
}

void OutliveReaders() {
  for (const int signal_number : {SIGPIPE, SIGXFSZ}) signal(signal_number, SIG_IGN);
}

int AwaitSignal(const sigset_t& signals, const std::function<bool()>& is_due) {
  while (true) {
    int signal_number = 0;
    if (sigwait(&signals, &signal_number) != 0) continue;
    if (IsEndSignal(signal_number) || (signal_number == kWakeSignal && is_due())) return signal_number;
    observability::Log(observability::LogLevel::kInfo, "signal_ignored", {{"signal", int64_t{signal_number}}});
  }
}

bool IsEndSignal(int signal_number) { return signal_number == SIGTERM || signal_number == SIGINT || signal_number == SIGHUP; }

bool IsAskedToEnd() {
  sigset_t pending;
  if (sigpending(&pending) != 0) return false;
  sigset_t asked;
  const sigset_t signals = EndSignals();
  return sigandset(&asked, &pending, &signals) == 0 && sigisemptyset(&asked) == 0;
}

absl::Status WhenAskedToEnd(std::function<void()> action) {
  const sigset_t signals = EndSignals();
  const int descriptor = signalfd(-1, &signals, SFD_CLOEXEC);
  if (descriptor < 0) return absl::UnavailableError(absl::StrCat("signalfd() failed: ", std::strerror(errno)));
  WhenReadable(descriptor, std::move(action));
  return absl::OkStatus();
}

void WakeMainThread() { kill(getpid(), kWakeSignal); }

absl::Status EndWithParent(int32_t parent) {
  const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, parent, 0));
  if (descriptor < 0 && errno != ESRCH) {
    return absl::UnavailableError(absl::StrCat("--parent_pid: pidfd_open() failed: ", std::strerror(errno)));
  }
  // Checked after the opening: detects a parent that ended before it, whose number may be another process's by now.
  if (descriptor < 0 || getppid() != parent) {
    return absl::InvalidArgumentError(
        absl::StrCat("--parent_pid: expected the parent of this process, ", getppid(), ", got ", parent));
  }
  WhenReadable(descriptor, [] {
    observability::Log(observability::LogLevel::kInfo, "parent_ended", {});
    kill(getpid(), SIGTERM);
  });
  return absl::OkStatus();
}

group::Restarter& Restart() {
  static group::Restarter* const restarter = new group::Restarter();
  return *restarter;
}

int Fail(absl::string_view message) {
  observability::LineWriter(STDERR_FILENO).Write(absl::StrCat("headwaterd: ", message, "\n"));
  return 1;
}

absl::Status Announce(const service::Server& server) {
  std::vector<std::string> all = server.addresses();
  std::string lines;
  for (const std::string& address : all) absl::StrAppend(&lines, "listening on ", address, "\n");
  for (const std::string& address : server.admin_addresses()) {
    absl::StrAppend(&lines, "admin on ", address, "\n");
    all.push_back(address);
  }
  const std::string addresses = absl::StrJoin(all, "\n");
  if (server.metrics_port() != 0) absl::StrAppend(&lines, "metrics on port ", server.metrics_port(), "\n");
  observability::LineWriter(STDOUT_FILENO).Write(lines);
  const std::string path = absl::GetFlag(FLAGS_port_file);
  if (path.empty()) return absl::OkStatus();
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary);
  file << addresses << "\n";
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError("--port_file: cannot write " + path + ": " + std::strerror(errno));
  }
  return absl::OkStatus();
}

void EndLost() {
  static absl::Mutex* const first_comer = new absl::Mutex();
  first_comer->Lock();  // held for good: later callers wait until the process is gone
  const bool is_worker = !absl::GetFlag(FLAGS_join).empty();
  if (!g_is_ending && (is_worker || absl::GetFlag(FLAGS_workers) > 0)) Restart().BeginAnew();
  _exit(g_is_ending && is_worker ? 0 : kDeviceLostStatus);
}

bool EndLostInTime(const std::string& note) {
  static std::atomic<bool> has_begun{false};
  if (has_begun.exchange(true)) return false;
  std::thread([note, grace = absl::GetFlag(FLAGS_device_lost_grace)] {
    absl::SleepFor(grace);
    if (!note.empty()) observability::Log(observability::LogLevel::kError, "ended", {{"note", note}});
    EndLost();
  }).detach();
  return true;
}

}  // namespace headwater
