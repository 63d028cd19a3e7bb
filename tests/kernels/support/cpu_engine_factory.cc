// The suite's engine: CpuEngine.
#include "headwater/kernels/product_rate.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/kernel_suite.h"

namespace headwater::testing {

const EngineFactory& SuiteEngineFactory() {
  static const EngineFactory factory = [](const EngineOptions& options) { return CreateCpuEngine(options); };
  return factory;
}

SuiteWorkspaces SuiteWorkspaceSizes() { return {int64_t{1} << 20, int64_t{64} << 20}; }

bool SuiteKeepsStagedRows(int64_t rows, int64_t hidden_size, int32_t) { return rows <= hidden_size; }

double SuiteGradWeightFactor() { return kPlainFactor; }

double SuiteAccumulationError() { return 0; }

SuiteDither SuiteDithering() { return {.rounds_units = ChooseBfloat16Products({}) == Bfloat16Products::kOneDnn}; }

}  // namespace headwater::testing
