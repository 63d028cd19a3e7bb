// The signals that headwaterd's main thread takes when it is ready to: those that end the process, SIGTERM, SIGINT and SIGHUP, one
// of its own, SIGUSR2, and SIGUSR1, which means nothing. All threads have them blocked from the start, so that a signal that nobody
// waits for stays pending. From the start, too, stdin, stdout and stderr are open: /dev/null for each that is closed.
#ifndef HEADWATER_SERVER_MAIN_SIGNALS_H_
#define HEADWATER_SERVER_MAIN_SIGNALS_H_

#include <signal.h>

#include <cstdint>
#include <functional>

#include "absl/status/status.h"

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

}  // namespace headwater

#endif  // HEADWATER_SERVER_MAIN_SIGNALS_H_
