// Checks of a micro-batch that do not depend on the engine.
#ifndef HEADWATER_KERNELS_CORE_MICRO_BATCH_CHECK_H_
#define HEADWATER_KERNELS_CORE_MICRO_BATCH_CHECK_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/each_name.h"
#include "headwater/kernels/engine.h"

namespace headwater {

// Refuses heads that `is_own` does not know; to be called before CheckMicroBatch(), which asks the heads.
absl::Status CheckHeads(const MicroBatch& micro_batch, absl::FunctionRef<bool(const EngineHead&)> is_own);

// Everything that could make an engine read or write out of bounds, and every option without a meaning. Reads each target and
// weight once; changes nothing. `has_device`: whether tensors may lie in MemorySpace::kDevice.
absl::Status CheckMicroBatch(const MicroBatch& micro_batch, bool has_device);

// Whether a term asks for a per-token output other than token_loss.
inline bool WantsLogitOutputs(const LossTerm& term) {
#define HEADWATER_IS_WANTED(name) || term.name != nullptr
  return false HEADWATER_EACH(HEADWATER_IS_WANTED, HEADWATER_LOGIT_OUTPUTS);
#undef HEADWATER_IS_WANTED
}

// kFeatureNotBuilt if a term has a top-k teacher: for engines that have none; `engine` names it.
absl::Status RefuseTopK(const MicroBatch& micro_batch, const std::string& engine);

// kFeatureNotBuilt if a term has a gradient_resolution that GPUs do not have: with label_smoothing, or where `refused` names the
// term's kind; null: it is taken. After CheckMicroBatch().
absl::Status RefuseResolution(const MicroBatch& micro_batch, absl::FunctionRef<const char*(const LossTerm&)> refused);

// In a group: kInvalidCombination unless all heads of a call, teachers too, have the same Parallelism. Which one. After
// CheckMicroBatch().
absl::StatusOr<Parallelism> ParallelismOf(const MicroBatch& micro_batch);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_MICRO_BATCH_CHECK_H_
