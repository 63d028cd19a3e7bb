// The suite's engine: CpuEngine.
#include "headwater/kernels/product_rate.h"
#include "tests/kernels/support/kernel_suite.h"

namespace headwater::testing {

const SuiteEngine& Suite() {
  static const SuiteEngine engine = {.make = CreateCpuEngine,
                                     .dither = {.rounds_units = ChooseBfloat16Products({}) == Bfloat16Products::kOneDnn}};
  return engine;
}

}  // namespace headwater::testing
