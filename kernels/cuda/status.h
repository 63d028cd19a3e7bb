// CUDA's errors as the project's.
#ifndef HEADWATER_KERNELS_CUDA_STATUS_H_
#define HEADWATER_KERNELS_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"

namespace headwater::cuda {

// kEngineFailed with CUDA's name for the error; kMemoryBudgetExceeded for cudaErrorMemoryAllocation. OK for cudaSuccess. `what`:
// what was tried, as the subject of a sentence ("the copy of the hidden states").
absl::Status CudaStatus(cudaError_t error, const char* what);

// Returns from the function if `expression`, a status, is an error. The variable's name is new each time: `expression` may hold a
// lambda that does the same.
#define HEADWATER_STATUS_NAME(line) HEADWATER_STATUS_NAME_OF(line)
#define HEADWATER_STATUS_NAME_OF(line) status_of_step_##line
#define HEADWATER_RETURN_IF_ERROR_AS(status, expression) \
  do {                                                   \
    absl::Status status = (expression);                  \
    if (!status.ok()) return status;                     \
  } while (false)
#define HEADWATER_RETURN_IF_ERROR(expression) HEADWATER_RETURN_IF_ERROR_AS(HEADWATER_STATUS_NAME(__COUNTER__), expression)

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_STATUS_H_
