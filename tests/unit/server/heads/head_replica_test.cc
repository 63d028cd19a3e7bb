// Heads that every rank of a group has all of (Parallelism::kRows): the whole transaction model on them, several micro-batches at
// once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "head_test_util.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/head.h"
#include "tests/unit/group/local_cpu_group.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater::heads {
namespace {

using headwater::testing::TemporaryDirectory;

constexpr int64_t kVocab = 37;
constexpr int64_t kWidth = 11;
constexpr int64_t kRows = 13;
constexpr int32_t kRanks = 3;
// Longer than anything takes that is not stuck.
constexpr absl::Duration kPatience = absl::Seconds(60);

std::unique_ptr<LossEngine> NewGroup(int32_t ranks) {
  EngineOptions options;
  options.shard_count = ranks;
  options.thread_count = ranks;
  absl::StatusOr<std::unique_ptr<LossEngine>> engine = headwater::testing::CreateLocalCpuGroup(options);
  EXPECT_OK(engine);
  return *std::move(engine);
}

HeadSpec Spec(Parallelism parallelism) {
  HeadSpec spec = SmallSpec(kVocab, kWidth);
  spec.has_bias = true;
  spec.data_type = DataType::kBFloat16;
  spec.optimizer = AdamWSpec();
  spec.staging_slots = 1;
  spec.parallelism = parallelism;
  return spec;
}

std::shared_ptr<Head> NewHead(LossEngine& engine, Parallelism parallelism) { return MakeRandomHead(engine, Spec(parallelism)); }

Payload RandomPayload(int64_t id) { return headwater::heads::RandomPayload(static_cast<uint64_t>(id) + 1, kRows, kVocab, kWidth); }

// ||a - b|| / ||b||.
double Difference(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    norm += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(difference / norm);
}

// Where submissions meet in the middle of their computations.
class Meeting {
 public:
  explicit Meeting(int64_t count) : count_(count) {}
  absl::Status Arrive() {
    const auto all_here = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return arrived_ >= count_; };
    absl::MutexLock lock(&mutex_);
    ++arrived_;
    if (mutex_.AwaitWithTimeout(absl::Condition(&all_here), kPatience)) return absl::OkStatus();
    return absl::DeadlineExceededError("the others are not computed at this time");
  }

 private:
  const int64_t count_;
  absl::Mutex mutex_;
  int64_t arrived_ ABSL_GUARDED_BY(mutex_) = 0;
};

enum class Commit { kEager, kEagerUnlessNonFinite, kExplicit, kLateFactors };

void Configure(MicroBatchCall& call, Commit commit) {
  if (commit == Commit::kEager) return;
  if (commit == Commit::kEagerUnlessNonFinite) {
    call.Refuse();
    return;
  }
  call.Held().submission().late_token_factors = commit == Commit::kLateFactors;
}

CommitArguments Decision(Commit commit) {
  CommitArguments arguments;
  arguments.factor = 0.5;
  if (commit == Commit::kLateFactors) arguments.token_factors.assign(static_cast<size_t>(kRows), -2.0F);
  return arguments;
}

class HeadReplicaTest : public ::testing::TestWithParam<Commit> {
 protected:
  // What a head alone has after the same contributions.
  std::vector<float> Expected(int64_t count) {
    const auto engine = NewGroup(1);
    const auto head = NewHead(*engine, Parallelism::kVocabulary);
    for (int64_t id = 0; id < count; ++id) {
      MicroBatchCall call(head, 0, id, RandomPayload(id));
      Configure(call, GetParam());
      EXPECT_OK(call.Run(*engine));
      Decide(head, id);
    }
    return ReadGradWeight(*head);
  }
  void Decide(const std::shared_ptr<Head>& head, int64_t id) {
    if (GetParam() == Commit::kEager || GetParam() == Commit::kEagerUnlessNonFinite) return;
    ASSERT_OK_AND_ASSIGN(const auto committed, heads::Commit({{head, KeyOf(*head)}}, id, 0, Decision(GetParam()), std::nullopt));
    EXPECT_TRUE(committed);
  }
};

// In every commit mode as many micro-batches as there are ranks are computed at the same time, and each counts once.
TEST_P(HeadReplicaTest, SeveralMicroBatchesAreComputedAtOnceAndAddedOnce) {
  const auto engine = NewGroup(kRanks);
  const auto head = NewHead(*engine, Parallelism::kRows);
  Meeting meeting(kRanks);
  std::deque<MicroBatchCall> calls;  // with the rows of those that are held
  std::vector<std::thread> threads;
  for (int64_t id = 0; id < kRanks; ++id) {
    MicroBatchCall& call = calls.emplace_back(head, 0, id, RandomPayload(id));
    threads.emplace_back([&, id] {
      TestRows rows(RandomPayload(id));
      rows.on_finish = [&] { return meeting.Arrive(); };
      Configure(call, GetParam());
      call.submission().incoming = &rows;
      ASSERT_OK_AND_ASSIGN(const auto outcome, call.Run(*engine));
      EXPECT_EQ(rows.finishes, 1);
      EXPECT_EQ(rows.ready.back(), kRows);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int64_t id = 0; id < kRanks; ++id) {
    Decide(head, id);
    MicroBatchCall again(head, 0, id, RandomPayload(id));
    Configure(again, GetParam());
    ASSERT_OK_AND_ASSIGN(const auto replayed, again.Run(*engine));
    EXPECT_TRUE(replayed.replayed);
  }
  EXPECT_LE(Difference(ReadGradWeight(*head), Expected(kRanks)), 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Commits, HeadReplicaTest,
                         ::testing::Values(Commit::kEager, Commit::kEagerUnlessNonFinite, Commit::kExplicit, Commit::kLateFactors));

// More explicit micro-batches than slots, all at once: those that find none are held, none is refused, none is lost.
TEST(HeadReplica, WhoFindsNoSlotIsHeld) {
  constexpr int64_t kCount = 4 * kRanks;
  const auto engine = NewGroup(kRanks);
  const auto head = NewHead(*engine, Parallelism::kRows);
  std::vector<ContributionForm> forms(kCount);
  std::deque<MicroBatchCall> calls;  // with the rows of those that are held
  std::vector<std::thread> threads;
  for (int64_t id = 0; id < kCount; ++id) {
    MicroBatchCall& call = calls.emplace_back(head, 0, id, RandomPayload(id));
    threads.emplace_back([&, id] {
      Configure(call, Commit::kExplicit);
      ASSERT_OK_AND_ASSIGN(const auto outcome, call.Run(*engine));
      EXPECT_EQ(outcome.state, ContributionState::kStaged);
      forms[static_cast<size_t>(id)] = outcome.form;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::count(forms.begin(), forms.end(), ContributionForm::kStaged), kRanks);
  EXPECT_EQ(std::count(forms.begin(), forms.end(), ContributionForm::kHeld), kCount - kRanks);
  const auto one_engine = NewGroup(1);
  const auto one = NewHead(*one_engine, Parallelism::kVocabulary);
  for (int64_t id = 0; id < kCount; ++id) {
    if (id % 3 == 0) {
      EXPECT_TRUE(*DiscardFrom(head, KeyOf(*head), id, 0));
      continue;
    }
    EXPECT_TRUE(*CommitTo(head, KeyOf(*head), id, 0, 1.0));
    ASSERT_OK(MicroBatchCall(one, 0, id, RandomPayload(id)).Run(*one_engine));
  }
  EXPECT_LE(Difference(ReadGradWeight(*head), ReadGradWeight(*one)), 1e-6);
}

absl::Status TrainStep(const std::shared_ptr<Head>& head, LossEngine& engine) {
  const StepKey key = KeyOf(*head);
  std::vector<absl::Status> statuses(kRanks);
  RunThreads(kRanks, [&](int64_t id) {
    statuses[static_cast<size_t>(id)] = MicroBatchCall(head, key.step, id, RandomPayload(100 * key.step + id)).Run(engine).status();
  });
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return head->Apply(key, int64_t{kRanks}, Rate(0.01, 1)).status();
}

// A checkpoint goes from either kind of head to the other, and to any number of ranks.
TEST(HeadReplica, CheckpointsAreThoseOfAnyOtherHead) {
  const TemporaryDirectory directory;
  const std::unique_ptr<checkpoint::CheckpointStore> store = *checkpoint::CheckpointStore::Open(directory.path());
  struct Kind {
    int32_t ranks;
    Parallelism parallelism;
  };
  const Kind kinds[] = {{1, Parallelism::kVocabulary}, {3, Parallelism::kRows}, {2, Parallelism::kVocabulary},
                        {2, Parallelism::kRows},       {4, Parallelism::kRows}, {1, Parallelism::kRows}};
  const auto first_engine = NewGroup(1);
  const auto first = NewHead(*first_engine, Parallelism::kVocabulary);
  std::vector<float> saved;
  for (int64_t step = 0; step < static_cast<int64_t>(std::size(kinds)); ++step) {
    const Kind& kind = kinds[step];
    const auto engine = NewGroup(kind.ranks);
    const auto head = NewHead(*engine, kind.parallelism);
    if (step > 0) {
      ASSERT_OK(head->Restore(head->Describe().epoch, *store, "step-" + std::to_string(step)));
      EXPECT_EQ(ReadWeight(*head), saved);
      EXPECT_EQ(head->Describe().spec.parallelism, kind.parallelism);
    }
    EXPECT_EQ(head->Describe().open_step, step);
    ASSERT_OK(TrainStep(head, *engine));
    ASSERT_OK(TrainStep(first, *first_engine));
    EXPECT_LE(Difference(ReadWeight(*head), ReadWeight(*first)), 1e-5) << step;
    saved = ReadWeight(*head);
    ASSERT_OK(head->Save(head->Describe().epoch, *store, "step-" + std::to_string(step + 1), false));
    ASSERT_OK_AND_ASSIGN(const auto info, store->Read(kDefaultTenant, "student", "step-" + std::to_string(step + 1)));
    EXPECT_EQ(info.spec.parallelism, kind.parallelism);
  }
}

}  // namespace
}  // namespace headwater::heads
