#include "tests/kernels/cuda/cuda_test_environment.h"

#include <string>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/cuda_support.h"

namespace headwater::testing {
namespace {

const std::string& Reason() {
  static const std::string reason = ReasonForNoGpu();
  return reason;
}

// Skips a test; its fixture is constructed, but not set up. An environment's GTEST_SKIP would let the tests count as passed.
class SkipWithoutGpu : public ::testing::EmptyTestEventListener {
 public:
  void OnTestStart(const ::testing::TestInfo&) override {
    if (!Reason().empty()) GTEST_SKIP() << "no GPU: " << Reason();
  }
};

class KeepFigures : public ::testing::Environment {
 public:
  void TearDown() override {
    if (!Reason().empty()) return;
    EXPECT_EQ(RunFigures().Write(), "");
  }
};

}  // namespace

bool SkipTestsWithoutGpu() {
  ::testing::UnitTest::GetInstance()->listeners().Append(new SkipWithoutGpu);
  ::testing::AddGlobalTestEnvironment(new KeepFigures);
  return true;
}

FigureFile& RunFigures() {
  static FigureFile figures = FigureFile::FromEnvironment(GpuName());
  return figures;
}

}  // namespace headwater::testing
