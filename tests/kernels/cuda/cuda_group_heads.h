// Heads on all ranks of a group of GPUs.
#ifndef HEADWATER_TESTS_KERNELS_CUDA_CUDA_GROUP_HEADS_H_
#define HEADWATER_TESTS_KERNELS_CUDA_CUDA_GROUP_HEADS_H_

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/engine.h"
#include "tests/kernels/cuda/cuda_group.h"
#include "tests/kernels/support/engine_run.h"
#include "tests/kernels/support/problem.h"

namespace headwater::testing {

// A small workspace, and the same algorithms on every start.
EngineOptions PlainOptions();

// The groups that tests are run on: two to eight ranks with even shards and uneven ones.
struct GroupCase {
  std::string name;
  std::vector<int64_t> weights;  // of the ranks' shards
  int32_t world_size() const { return static_cast<int32_t>(weights.size()); }
};
inline void PrintTo(const GroupCase& of, std::ostream* out) { *out << of.name; }
std::vector<GroupCase> GroupCases();

// A test of each group that this machine can have. Ranks work only within CudaGroup::Run(), between whose calls members may change.
class CudaGroupCaseTest : public ::testing::TestWithParam<GroupCase> {
 protected:
  void SetUp() override {
    const std::string reason = ReasonForNoGroup(ranks());
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  int32_t ranks() const { return GetParam().world_size(); }
  std::unique_ptr<CudaGroup> Make(EngineOptions options = PlainOptions()) const {
    options.shard_weights = GetParam().weights;
    return std::make_unique<CudaGroup>(ranks(), std::move(options));
  }
  // The options of a group whose last rank fails in a phase of its work while `fails_` is set.
  EngineOptions FailingOptions(ShardPhase phase) const {
    EngineOptions options = PlainOptions();
    options.shard_probe = [this, phase](ShardPhase of, int32_t rank) {
      return fails_ && of == phase && rank == ranks() - 1 ? absl::InternalError("struck down") : absl::OkStatus();
    };
    return options;
  }
  bool fails_ = false;
};

// A problem's heads on the ranks of a group.
class GroupHeads {
 public:
  GroupHeads(CudaGroup& group, const std::vector<TestHead>& heads);
  LoadedHeads& On(int32_t rank) const { return *ranks_[static_cast<size_t>(rank)]; }

 private:
  std::vector<std::unique_ptr<LoadedHeads>> ranks_;
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_CUDA_CUDA_GROUP_HEADS_H_
