// The checks and scalars of an OptimizerStep that all engines share.
#ifndef HEADWATER_KERNELS_CORE_OPTIMIZER_STEP_H_
#define HEADWATER_KERNELS_CORE_OPTIMIZER_STEP_H_

#include "absl/status/status.h"
#include "headwater/kernels/engine.h"
#include "kernels/core/optimizer_scalars.h"

namespace headwater {

// The refusals of EngineHead::ApplyOptimizer().
absl::Status CheckOptimizerStep(const HeadSpec& spec, const OptimizerStep& step);

// Scalars are taken in fp64 and rounded to fp32 once, as PyTorch does.
AdamWScalars MakeAdamWScalars(const OptimizerStep& step, const AdamWSpec& adamw);
SgdScalars MakeSgdScalars(const OptimizerStep& step, const SgdSpec& sgd);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_OPTIMIZER_STEP_H_
