// Heads whose weights every rank of a group has in full (Parallelism::kRows), behind the group's engine. Any rank computes one
// engine's results, and several micro-batches are computed at once. There is one gradient, one optimizer step, and the same weights
// everywhere.
//
// The tests are in replica_suite.cc. A program that links it says which groups they are of:
// INSTANTIATE_TEST_SUITE_P(Ranks, Replicas, ...).
#ifndef HEADWATER_TESTS_KERNELS_SUPPORT_REPLICA_SUITE_H_
#define HEADWATER_TESTS_KERNELS_SUPPORT_REPLICA_SUITE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "gtest/gtest.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/engine.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/engine_run.h"
#include "tests/kernels/support/problem.h"

namespace headwater::testing {

// A problem's options and what is asked for.
using ReplicaForm = std::pair<ProblemOptions, ComputeOptions>;

// A head with a bias, many rows of its kind, and one staging slot; `jsd`: with its teacher.
ProblemOptions ReplicaOptions(bool jsd = false, DataType type = DataType::kFloat32);

struct ReplicaCase {
  std::string name;
  std::vector<int64_t> weights;  // of the ranks' shards, as in those that follow
  // State for groups that take a head over.
  std::vector<int64_t> other_weights, last_weights;
  std::function<std::unique_ptr<LossEngine>(const std::vector<int64_t>& weights, bool deterministic)> make_group;
  // An engine that is alone, and must have the same bits.
  std::function<std::unique_ptr<LossEngine>()> make_one;
  // Why it cannot be made here, or an empty string; null: it always can.
  std::function<std::string()> reason_to_skip;
  std::vector<ReplicaForm> forms = {{ReplicaOptions(), {}},
                                    {ReplicaOptions(/*jsd=*/true), {}},
                                    {ReplicaOptions(/*jsd=*/false, DataType::kBFloat16), {}},
                                    {ReplicaOptions(/*jsd=*/true, DataType::kFloat16), {}}};
};
inline void PrintTo(const ReplicaCase& of, std::ostream* out) { *out << of.name; }

class Replicas : public ::testing::TestWithParam<ReplicaCase> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam().reason_to_skip ? GetParam().reason_to_skip() : "";
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  size_t count() const { return GetParam().weights.size(); }
  int32_t ranks() const { return static_cast<int32_t>(count()); }
  std::unique_ptr<LossEngine> Group(bool deterministic = false) const {
    return GetParam().make_group(GetParam().weights, deterministic);
  }
  std::unique_ptr<LossEngine> One() const { return GetParam().make_one(); }
};

// Rows of several micro-batches for the first one's heads, of which each rank has all.
std::vector<Problem> MakeReplicaProblems(size_t count, ProblemOptions options, const OptimizerSpec& optimizer = AdamWSpec());
// The same heads, of which each rank has a shard.
std::vector<TestHead> ByVocabulary(std::vector<TestHead> heads);

// Where as many computations meet as there are ranks: each waits for the others in the middle of its own.
class Meeting {
 public:
  explicit Meeting(size_t count) : count_(count) {}
  // False if the others do not come.
  bool Arrive();

 private:
  const size_t count_;
  absl::Mutex mutex_;
  size_t arrived_ ABSL_GUARDED_BY(mutex_) = 0;
};

class MeetingFlow final : public RowFlow {
 public:
  MeetingFlow(Meeting* meeting, absl::Status decision = absl::OkStatus()) : meeting_(meeting), decision_(std::move(decision)) {}
  absl::Status AwaitRows(int64_t) override { return absl::OkStatus(); }
  absl::Status Decide(const DigestBuilder* rows) override {
    if (rows != nullptr) digest = rows->Finish("test");
    if (meeting_ != nullptr && !meeting_->Arrive()) return absl::DeadlineExceededError("the others are not computed at this time");
    return decision_;
  }
  void GradHiddenReady(int64_t row_end) override {
    EXPECT_GE(row_end, rows_ready);
    rows_ready = row_end;
  }

  Digest digest{};
  int64_t rows_ready = 0;

 private:
  Meeting* const meeting_;
  const absl::Status decision_;
};

// One micro-batch on each rank, all at the same time.
std::vector<Outcome> ComputeAtOnce(LoadedHeads& heads, const std::vector<Problem>& problems, ComputeOptions options = {});

// The gradient must be the sum of factors[i] * that of problems[i].
void ExpectSumOfGradients(const Gradient& gradient, const std::vector<Problem>& problems, const std::vector<double>& factors);

OptimizerStep ReplicaStep(int64_t update_count, const OptimizerSpec& optimizer = AdamWSpec());

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_SUPPORT_REPLICA_SUITE_H_
