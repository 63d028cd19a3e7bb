// The end of a process that has no memory left (docs/adr/0025-host-memory.md).
#ifndef HEADWATER_SERVER_OBSERVABILITY_MEMORY_END_H_
#define HEADWATER_SERVER_OBSERVABILITY_MEMORY_END_H_

#include "server/observability/logging.h"

namespace headwater::observability {

// EX_OSERR of sysexits.h.
inline constexpr int kNoMemoryStatus = 71;

// From now on a failing `new` ends the process with kNoMemoryStatus, after one line in the log: event=out_of_memory. Memory whose
// absence is an error uses headwater/kernels/planned_bytes.h.
void EndWithoutMemory(LogFormat format);

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_MEMORY_END_H_
