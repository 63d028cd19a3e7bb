// Functions of the driver by their names, so that nothing links libcuda. For host code (C++20) and .cu files (C++17).
#ifndef HEADWATER_KERNELS_CUDA_DRIVER_ENTRY_H_
#define HEADWATER_KERNELS_CUDA_DRIVER_ENTRY_H_

#include <cuda_runtime_api.h>

namespace headwater::cuda {

// `name` without a version's suffix: the function as of CUDA 12.0. Any thread.
inline cudaError_t FindDriverEntry(const char* name, void** entry) {
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, entry, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, entry, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) return error;
  return result == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorCallRequiresNewerDriver;
}

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_DRIVER_ENTRY_H_
