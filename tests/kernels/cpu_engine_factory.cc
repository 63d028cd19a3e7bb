// The suite's engine: CpuEngine.
#include "tests/kernels/kernel_suite.h"

namespace headwater::testing {

const EngineFactory& SuiteEngineFactory() {
  static const EngineFactory factory = [](const EngineOptions& options) { return CreateCpuEngine(options); };
  return factory;
}

}  // namespace headwater::testing
