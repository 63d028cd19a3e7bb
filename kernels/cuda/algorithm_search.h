// Finds, when a head is created, the algorithms of the products that its micro-batches will need.
#ifndef HEADWATER_KERNELS_CUDA_ALGORITHM_SEARCH_H_
#define HEADWATER_KERNELS_CUDA_ALGORITHM_SEARCH_H_

#include "absl/status/status.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/engine_core.h"

namespace headwater::cuda {

// Times algorithms for a new head of 16-bit weights on operands of its own sizes: its weights and accumulator, which hold nothing
// yet and hold nothing afterwards, and the workspace. For the holder of the work lock; blocks, seconds for the largest heads where
// no cache file knows them. Heads of fp32 take what the library proposes.
absl::Status SearchAlgorithms(EngineCore& core, CudaHead& head);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_ALGORITHM_SEARCH_H_
