// Checks of a micro-batch that do not depend on the engine.
#ifndef HEADWATER_KERNELS_CORE_MICRO_BATCH_CHECK_H_
#define HEADWATER_KERNELS_CORE_MICRO_BATCH_CHECK_H_

#include "absl/status/status.h"
#include "headwater/kernels/engine.h"

namespace headwater {

// Everything that could make an engine read or write out of bounds, and every option without a meaning. Reads each target and
// weight once; changes nothing.
absl::Status CheckMicroBatch(const MicroBatch& micro_batch);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_MICRO_BATCH_CHECK_H_
