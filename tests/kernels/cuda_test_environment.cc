#include "tests/kernels/cuda_test_environment.h"

#include <string>

#include "gtest/gtest.h"
#include "tests/kernels/cuda_support.h"

namespace headwater::testing {
namespace {

class GpuEnvironment : public ::testing::Environment {
 public:
  void SetUp() override {
    const std::string reason = ReasonForNoGpu();
    if (!reason.empty()) GTEST_SKIP() << "no GPU: " << reason;
    has_gpu_ = true;
  }
  void TearDown() override {
    if (!has_gpu_) return;
    EXPECT_EQ(RunFigures().Write(), "");
  }

 private:
  bool has_gpu_ = false;
};

}  // namespace

bool SkipTestsWithoutGpu() {
  ::testing::AddGlobalTestEnvironment(new GpuEnvironment);
  return true;
}

FigureFile& RunFigures() {
  static FigureFile figures = FigureFile::FromEnvironment(GpuName());
  return figures;
}

}  // namespace headwater::testing
