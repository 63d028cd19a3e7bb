// The stand-in for the CUDA engine's module (tests/integration/support/fake_cuda_module.cc), which a test can hold in its middle.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_HELD_MODULE_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_HELD_MODULE_H_

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/child_process.h"

namespace headwater::e2e {

class HeldModule : public ::testing::Test {
 protected:
  ~HeldModule() override { Release(); }

  std::string Path(const std::string& name) const { return folder_.path() + "/" + name; }
  void Hold() const { WriteFile(Path("hold"), ""); }
  bool AwaitHeld() const {
    return Await([&] { return std::filesystem::exists(Path("held")); });
  }
  void Release() const { std::filesystem::remove(Path("hold")); }

 private:
  const TemporaryDirectory folder_;
  const EnvironmentVariable module_{"HEADWATER_CUDA_MODULE", FAKE_CUDA_MODULE};
  const EnvironmentVariable hold_{"HEADWATER_FAKE_HOLD", folder_.path()};
};

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_HELD_MODULE_H_
