// A headwaterd that joins another one (--join).
#ifndef HEADWATER_SERVER_MAIN_WORKER_H_
#define HEADWATER_SERVER_MAIN_WORKER_H_

#include <signal.h>

namespace headwater {

// The process is a worker until it is asked to end by one of MainSignals(). The process's status, for flags that do not fit
// together; else it does not return.
int Join(const sigset_t& signals);

}  // namespace headwater

#endif  // HEADWATER_SERVER_MAIN_WORKER_H_
