// The engine-agnostic test suite: every program that links it names one engine, and runs every test against it.
//
// A program links the object library headwater_kernel_suite and defines SuiteEngineFactory(). Tolerances are those of docs/math.md,
// "Precision", and are applied in comparison.h only.
#ifndef HEADWATER_TESTS_KERNELS_KERNEL_SUITE_H_
#define HEADWATER_TESTS_KERNELS_KERNEL_SUITE_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"

namespace headwater::testing {

// Makes an engine as the options say. Tests set shard counts, chunk rows, budgets and thread counts.
using EngineFactory = std::function<absl::StatusOr<std::unique_ptr<LossEngine>>(const EngineOptions&)>;

// The engine under test. Defined by the program.
const EngineFactory& SuiteEngineFactory();

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_KERNEL_SUITE_H_
