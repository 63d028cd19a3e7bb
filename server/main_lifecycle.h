// The start and the end of headwaterd: signals, the loss of a device, and the report to the process that started it.
//
// The main thread takes signals when it is ready to. SIGTERM, SIGINT and SIGHUP end the process, SIGUSR2 is the process's own, and
// SIGUSR1 is ignored. All threads block them from the start, so that a signal stays pending until the main thread waits for it. The
// start also opens /dev/null for each of stdin, stdout and stderr that is closed.
#ifndef HEADWATER_SERVER_MAIN_LIFECYCLE_H_
#define HEADWATER_SERVER_MAIN_LIFECYCLE_H_

#include <signal.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/group/restarter.h"
#include "server/service/server.h"

namespace headwater {

// Wakes the main thread: the device is lost, or a worker is leaving.
inline constexpr int kWakeSignal = SIGUSR2;

// All signals of the main thread.
sigset_t MainSignals();

// Ignores signals from broken outputs: SIGPIPE when a reader is gone, SIGXFSZ when a log has reached the limit of a file's size.
// Called once, at the beginning of main().
void OutliveReaders();

// Waits for a signal that ends the process, or for kWakeSignal when `is_due`. Logs other signals: event=signal_ignored.
int AwaitSignal(const sigset_t& signals, const std::function<bool()>& is_due);

bool IsEndSignal(int signal_number);

// Whether a signal that ends the process is pending.
bool IsAskedToEnd();
// Calls `action` on a thread of its own once such a signal is pending, which stays pending. Fails without a descriptor for it.
absl::Status WhenAskedToEnd(std::function<void()> action);

// Any thread.
void WakeMainThread();

// Sends this process SIGTERM when its parent, the process `parent`, ends. InvalidArgument if `parent` is not its parent;
// Unavailable without pidfd_open() (before Linux 5.3). The kernel's own PR_SET_PDEATHSIG follows the thread that has forked.
absl::Status EndWithParent(int32_t parent);

// An operator's signal was taken: the process ends and does not restart, whatever becomes of its engine.
std::atomic<bool>& IsEnding();
// Restarts a leader or a worker.
group::Restarter& Restart();

// Prints to stderr why the process ends. Returns its status, 1.
int Fail(absl::string_view message);

// Reports the server's addresses: on stdout, and in --port_file, which is renamed in so that a reader never sees half of it.
absl::Status Announce(const service::Server& server);

// Ends the process at once, or restarts it if it is a group's leader or worker. Destroys nothing: destructors that use a lost
// device may wait or fail.
[[noreturn]] void EndLost();
// Calls EndLost() after --device_lost_grace, even if a call, or the main thread, never returns from the device. Logs `note` then,
// unless it is empty. Any thread; only the first call has an effect, and returns true.
bool EndLostInTime(const std::string& note);

// A worker is to end, and stays for a while.
std::atomic<bool>& WorkerIsLeaving();

}  // namespace headwater

#endif  // HEADWATER_SERVER_MAIN_LIFECYCLE_H_
