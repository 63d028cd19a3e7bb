#include "kernels/cuda/status.h"

#include <string>

#include "headwater/kernels/error.h"

namespace headwater::cuda {

absl::Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const ErrorReason reason = error == cudaErrorMemoryAllocation ? ErrorReason::kMemoryBudgetExceeded : ErrorReason::kEngineFailed;
  return MakeError(reason,
                   std::string(what) + " failed on the GPU: " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")",
                   {{"cudaError", cudaGetErrorName(error)}});
}

}  // namespace headwater::cuda
