// CUDA's errors as the project's.
#ifndef HEADWATER_KERNELS_CUDA_STATUS_H_
#define HEADWATER_KERNELS_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "headwater/kernels/return_if_error.h"  // IWYU pragma: export

namespace headwater::cuda {

// kEngineFailed with CUDA's name for the error; kMemoryBudgetExceeded for cudaErrorMemoryAllocation. OK for cudaSuccess. `what`:
// the attempted operation, as the subject of a sentence ("the copy of the hidden states").
absl::Status CudaStatus(cudaError_t error, const char* what);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_STATUS_H_
