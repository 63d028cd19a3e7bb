// Finds, when a head is created, the algorithms of the products that its micro-batches will need.
#ifndef HEADWATER_KERNELS_CUDA_PRODUCTS_ALGORITHM_SEARCH_H_
#define HEADWATER_KERNELS_CUDA_PRODUCTS_ALGORITHM_SEARCH_H_

#include "absl/status/status.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/engine_core.h"

namespace headwater::cuda {

// Times algorithms for a new head of 16-bit weights on operands of its own sizes. The operands are the workspace and the head's
// weights and accumulator, which hold nothing before and nothing afterwards. For the holder of the work lock; blocks, for seconds
// with the largest heads if no cache file has them. Heads of fp32 take the library's proposals.
absl::Status SearchAlgorithms(EngineCore& core, CudaHead& head);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_PRODUCTS_ALGORITHM_SEARCH_H_
