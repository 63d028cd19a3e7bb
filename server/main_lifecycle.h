// How headwaterd begins and ends: signals, the loss of a device, and the word to whoever has started it.
//
// The main thread takes signals when it is ready to: those that end the process, SIGTERM, SIGINT and SIGHUP, one of its own,
// SIGUSR2, and SIGUSR1, which means nothing. All threads have them blocked from the start, so that a signal that nobody waits for
// stays pending. From the start, too, stdin, stdout and stderr are open: /dev/null for each that is closed.
#ifndef HEADWATER_SERVER_MAIN_LIFECYCLE_H_
#define HEADWATER_SERVER_MAIN_LIFECYCLE_H_

#include <signal.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "server/group/restarter.h"
#include "server/service/server.h"

namespace headwater {

// What wakes the main thread: the device is lost, or a worker is leaving.
inline constexpr int kWakeSignal = SIGUSR2;

// All of them.
sigset_t MainSignals();

// Ignores what the readers of this process's output send it: SIGPIPE when one is gone, SIGXFSZ when a log has reached the limit of
// a file's size. Once, at the begin of main().
void OutliveReaders();

// Waits for a signal that ends the process, or for kWakeSignal when `is_due`. Others get a line in the log: event=signal_ignored.
int AwaitSignal(const sigset_t& signals, const std::function<bool()>& is_due);

// Whether the signal ends the process.
bool IsEndSignal(int signal_number);

// Whether a signal that ends the process is pending.
bool IsAskedToEnd();

// Any thread.
void WakeMainThread();

// Sends this process SIGTERM when its parent, the process `parent`, ends. InvalidArgument if that is not its parent; Unavailable
// where pidfd_open() is not (before Linux 5.3). The kernel's own way, PR_SET_PDEATHSIG, is about the thread that has forked.
absl::Status EndWithParent(int32_t parent);

// An operator's signal was taken: the process ends, and does not begin anew, whatever becomes of its engine.
std::atomic<bool>& IsEnding();
// How a leader or a worker begins anew.
group::Restarter& Restart();

// Says on stderr why the process ends. 1, its status.
int Fail(const std::string& message);

// Tells where the server is: on stdout, and in --port_file, which is renamed in so that a reader never sees half of it.
absl::Status Announce(const service::Server& server);

// Ends the process as it is; or lets it begin anew, if it is a group's leader or worker, which comes back by itself. Nothing is
// destroyed: what holds a lost device may wait for it, or fail, in its destructor.
[[noreturn]] void EndLost();
// Ends so after --device_lost_grace, even if a call, or the main thread, never comes back from the device; `note`, if it is not
// empty, is logged then. Any thread; calls after the first do nothing. True: this was the first.
bool EndLostInTime(const std::string& note);

// A worker is to end, and stays for a while.
std::atomic<bool>& WorkerIsLeaving();

}  // namespace headwater

#endif  // HEADWATER_SERVER_MAIN_LIFECYCLE_H_
