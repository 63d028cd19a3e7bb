// Checks of the options that every engine takes.
#ifndef HEADWATER_KERNELS_CORE_ENGINE_OPTIONS_CHECK_H_
#define HEADWATER_KERNELS_CORE_ENGINE_OPTIONS_CHECK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "headwater/kernels/engine.h"

namespace headwater {

// More executors than this are a mistake, not a plan.
inline constexpr int32_t kMaxShards = 256;
inline constexpr int32_t kMaxThreads = 1024;

// kInvalidField. Options that only one engine looks at are its own to check.
absl::Status CheckEngineOptions(const EngineOptions& options);

// ValidateHeadSpec(), and what an engine refuses: in a group Parallelism::kRows in deterministic mode (kInvalidCombination), and
// int8_teacher unless it `has_int8` (kFeatureNotBuilt).
absl::Status CheckHeadSpec(const HeadSpec& spec, const EngineOptions& options, bool has_int8);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_ENGINE_OPTIONS_CHECK_H_
