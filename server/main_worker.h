// A headwaterd that joins another one (--join).
#ifndef HEADWATER_SERVER_MAIN_WORKER_H_
#define HEADWATER_SERVER_MAIN_WORKER_H_

#include <signal.h>

#include "absl/status/status.h"

namespace headwater {

// Runs a worker until one of MainSignals() ends the process. Returns only for flags that conflict: InvalidArgument.
absl::Status Join(const sigset_t& signals);

}  // namespace headwater

#endif  // HEADWATER_SERVER_MAIN_WORKER_H_
