// The engine-agnostic test suite: every program that links it names one engine, and runs every test against it.
//
// A program links the object library headwater_kernel_suite and defines Suite(). Tolerances are those of docs/math.md, "Precision",
// and are applied in comparison.h only.
#ifndef HEADWATER_TESTS_KERNELS_SUPPORT_KERNEL_SUITE_H_
#define HEADWATER_TESTS_KERNELS_SUPPORT_KERNEL_SUITE_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"

namespace headwater::testing {

// The engine's treatment of a gradient_resolution.
struct SuiteDither {
  bool has_smoothing = true;    // false: kFeatureNotBuilt with label_smoothing
  bool rounds_entries = false;  // of 16-bit heads: to the head's type, before they are dithered
  bool rounds_units = false;    // of bf16 heads: a resolution times all factors, to bf16
};

// The engine under test; the defaults are those of engines on the CPU.
struct SuiteEngine {
  // Makes an engine as the options say. Tests set shard counts, chunk rows, budgets and thread counts. Options that are left at
  // their defaults are this function's to fill in, as far as results do not depend on them.
  std::function<absl::StatusOr<std::unique_ptr<LossEngine>>(EngineOptions options)> make;
  // Two sizes of workspace_bytes that the engine takes, the smaller of which allows fewer rows at once.
  int64_t small_workspace_bytes = int64_t{1} << 20;
  int64_t large_workspace_bytes = int64_t{64} << 20;
  // Whether a staging slot of an fp32 head keeps so many rows and computes their product at the commit. The commit then has the
  // bits of a direct contribution.
  std::function<bool(int64_t rows, int64_t hidden_size, int32_t shard_count)> keeps_staged_rows =
      [](int64_t rows, int64_t hidden_size, int32_t) { return rows <= hidden_size; };
  // The error that grad_weight may have, as a multiple of kPlainFactor. It is more than 1 for engines that multiply the hidden
  // states by a factor of the row and round them again.
  double grad_weight_factor = 1;
  // Relative error that the products of 16-bit operands may have for each element of the hidden size besides rounding. Tensor cores
  // truncate where they add, and all sums move the same way. A loss may be off by this times hidden_size times its row's largest
  // |logit|.
  double accumulation_error = 0;
  SuiteDither dither;
  bool has_int8_teacher = false;  // false: HeadSpec::int8_teacher is kFeatureNotBuilt
};
const SuiteEngine& Suite();

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_SUPPORT_KERNEL_SUITE_H_
