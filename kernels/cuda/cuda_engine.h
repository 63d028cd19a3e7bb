// CudaEngine: heads in the memory of one NVIDIA GPU. engine_core.h describes how work is run, term_form.h its forms, computation.h
// its order, weight_contribution.h how gradients are added.
#ifndef HEADWATER_KERNELS_CUDA_CUDA_ENGINE_H_
#define HEADWATER_KERNELS_CUDA_CUDA_ENGINE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"

namespace headwater::cuda {

// CreateCudaEngine() of engine.h, inside the module.
absl::StatusOr<std::unique_ptr<LossEngine>> CreateEngine(const EngineOptions& options);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_CUDA_ENGINE_H_
