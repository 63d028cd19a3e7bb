// The signals that headwaterd's main thread takes when it is ready to: an operator's, SIGTERM, SIGINT and SIGHUP, and one of its
// own. All threads have them blocked from the start, so that one which comes while nobody waits for it stays where it is.
#ifndef HEADWATER_SERVER_MAIN_SIGNALS_H_
#define HEADWATER_SERVER_MAIN_SIGNALS_H_

#include <signal.h>

namespace headwater {

// What wakes the main thread: the device is lost, or a worker is leaving. Without effect if sent from outside.
inline constexpr int kWakeSignal = SIGUSR2;

// All of them.
sigset_t MainSignals();

// Whether an operator's signal waits to be taken.
bool IsAskedToEnd();

// Any thread.
void WakeMainThread();

}  // namespace headwater

#endif  // HEADWATER_SERVER_MAIN_SIGNALS_H_
