// The engine-agnostic test suite: every program that links it names one engine, and runs every test against it.
//
// A program links the object library headwater_kernel_suite and defines the functions below. Tolerances are those of docs/math.md,
// "Precision", and are applied in comparison.h only.
#ifndef HEADWATER_TESTS_KERNELS_SUPPORT_KERNEL_SUITE_H_
#define HEADWATER_TESTS_KERNELS_SUPPORT_KERNEL_SUITE_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"

namespace headwater::testing {

// Makes an engine as the options say. Tests set shard counts, chunk rows, budgets and thread counts.
using EngineFactory = std::function<absl::StatusOr<std::unique_ptr<LossEngine>>(const EngineOptions&)>;

// The engine under test. Defined by the program. Options that are left at their defaults are the factory's to fill in, as far as
// results do not depend on them.
const EngineFactory& SuiteEngineFactory();

// Two sizes of workspace_bytes that the engine takes, the smaller of which allows fewer rows at once. Defined by the program.
struct SuiteWorkspaces {
  int64_t small_bytes = 0;
  int64_t large_bytes = 0;
};
SuiteWorkspaces SuiteWorkspaceSizes();

// Whether a staging slot of an fp32 head keeps so many rows and computes their product at the commit. The commit then has the bits
// of a direct contribution. Defined by the program.
bool SuiteKeepsStagedRows(int64_t rows, int64_t hidden_size, int32_t shard_count);

// How many times the plain computation's error grad_weight may have. Defined by the program: kPlainFactor, or more for engines that
// round the hidden states again, multiplied by a factor of the row.
double SuiteGradWeightFactor();

// Relative error that the engine's products of 16-bit operands may have for each element of the hidden size besides rounding.
// Tensor cores truncate where they add, and all sums move the same way. A loss may be off by this times hidden_size times its row's
// largest |logit|. Defined by the program; 0 for products that round.
double SuiteAccumulationError();

// The engine's treatment of a gradient_resolution. Defined by the program.
struct SuiteDither {
  bool has_smoothing = true;                   // false: kFeatureNotBuilt with label_smoothing
  bool rounds_entries = false;                 // of 16-bit heads: to the head's type, before they are dithered
  bool rounds_units = false;                   // of bf16 heads: a resolution times all factors, to bf16
  int32_t most_divergence_shards = INT32_MAX;  // kFeatureNotBuilt with more
};
SuiteDither SuiteDithering();

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_SUPPORT_KERNEL_SUITE_H_
