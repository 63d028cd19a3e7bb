// Test programs for a GPU on machines without one, and the figures that they take.
#ifndef HEADWATER_TESTS_KERNELS_CUDA_CUDA_TEST_ENVIRONMENT_H_
#define HEADWATER_TESTS_KERNELS_CUDA_CUDA_TEST_ENVIRONMENT_H_

#include "tests/kernels/support/figure_file.h"

namespace headwater::testing {

// Skips every test of the program, saying why, where ReasonForNoGpu() has a reason. For a static initializer.
bool SkipTestsWithoutGpu();

// Figures of this process, written (FigureFile::FromEnvironment()) when the test program ends.
FigureFile& RunFigures();

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_CUDA_CUDA_TEST_ENVIRONMENT_H_
