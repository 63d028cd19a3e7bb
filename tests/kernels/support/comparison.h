// Comparing an engine's outcome with the fp64 reference; the measure is that of error_measure.h. NaN fails every comparison.
#ifndef HEADWATER_TESTS_KERNELS_SUPPORT_COMPARISON_H_
#define HEADWATER_TESTS_KERNELS_SUPPORT_COMPARISON_H_

#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kernels/reference/loss_reference.h"
#include "tests/kernels/support/engine_run.h"
#include "tests/kernels/support/error_measure.h"
#include "tests/kernels/support/plain_computation.h"
#include "tests/kernels/support/problem.h"

namespace headwater::testing {

// fp32's bounds; rows and columns get ten times the whole tensor's.
inline constexpr double kLossSumBound = 1e-6;
inline constexpr double kGradientBound = 1e-5;
inline constexpr double kTokenBound = 1e-6;  // absolute, times max(1, max|z|)
// bf16 and fp16: this many times the plain computation's error, plus fp32's bound.
inline constexpr double kPlainFactor = 1.05;

inline std::vector<double> ToDoubles(const std::vector<float>& values) { return {values.begin(), values.end()}; }

// Fails the test unless `actual` is within the bounds; `plain` (may be null) is the plain computation's tensor, whose error may be
// exceeded `plain_factor` times.
void ExpectTensorNear(const std::string& what, absl::Span<const double> actual, const reference::Matrix& expected,
                      const std::vector<double>* plain, double plain_factor = kPlainFactor);

// Compares everything that the outcome has. Its gradients, if any, are those of a single computation on a zero accumulator.
void ExpectOutcomeMatches(const Problem& problem, const Expected& expected, const Outcome& outcome);

// Computes the problem on a fresh engine under test and compares with the reference. With a mode other than kAccumulate, the
// accumulators must have stayed 0. Returns the outcome.
Outcome ExpectEngineMatches(const Problem& problem, const EngineOptions& engine_options = {}, const ComputeOptions& options = {});
// As above, on an engine that is there.
Outcome ExpectHeadsMatch(LoadedHeads& heads, const Problem& problem, const Expected& expected, const ComputeOptions& options = {});
// As above, with the reference that several engines are compared with.
Outcome ExpectEngineMatches(const Problem& problem, const Expected& expected, const EngineOptions& engine_options,
                            const ComputeOptions& options = {});

// Fails the test unless every element is 0.
void ExpectGradientZero(const Gradient& gradient);

// Fails the test unless the accumulator is `expected` within the bounds; `plain` (may be null) has the gradient of such a head.
void ExpectGradientNear(const Gradient& actual, const reference::HeadGradient& expected, const PlainResult* plain = nullptr,
                        size_t head = 0, double weight_factor = kPlainFactor);

// factor_a * a + factor_b * b.
reference::HeadGradient Combine(const reference::HeadGradient& a, double factor_a, const reference::HeadGradient& b,
                                double factor_b);

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_SUPPORT_COMPARISON_H_
