// Head: calls that find no memory, wherever that is. Each is made with 0, 1, 2, ... allocations that succeed, after which none
// does, until they are enough. However it ends, a head is LOST, or the call has done all of its work or nothing, and may be
// repeated.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "head_test_util.h"
#include "memory_file_system.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/head.h"
#include "server/heads/head_registry.h"
#include "tests/unit/ending_memory.h"

namespace headwater::heads {
namespace {

using headwater::testing::allocations_left;
using headwater::testing::FakeEngine;
using headwater::testing::KeyOf;
using headwater::testing::MakeReadyHead;
using headwater::testing::MemoryFileSystem;
using headwater::testing::MicroBatchCall;
using headwater::testing::Payload;
using headwater::testing::ReadGradWeight;
using headwater::testing::ReadWeight;
using headwater::testing::SetWeights;
using headwater::testing::SmallSpec;
using headwater::testing::TestRows;

// With so many allocations; false if they were not enough.
template <typename Call>
bool Succeeds(int allocations, const Call& call) {
  bool succeeds = false;
  allocations_left = allocations;
  try {
    succeeds = call().ok();
  } catch (const std::bad_alloc&) {
  }
  allocations_left = -1;
  return succeeds;
}

// The same where no memory is left for one call of the engine, after so many that find it.
template <typename Call>
bool SucceedsWithCalls(FakeEngine& engine, int engine_calls, const Call& call) {
  bool succeeds = false;
  engine.control().on_call = [&engine_calls] {
    if (engine_calls-- == 0) throw std::bad_alloc();
  };
  try {
    succeeds = call().ok();
  } catch (const std::bad_alloc&) {
  }
  engine.control().on_call = nullptr;
  return succeeds;
}

// Calls `attempt` until it returns true.
void WhereverMemoryEnds(const std::function<bool(int allocations)>& attempt) {
  int allocations = 0;
  while (!attempt(allocations)) {
    ASSERT_LT(++allocations, 10000) << "no number of allocations is enough";
    if (::testing::Test::HasFailure()) FAIL() << "with " << allocations - 1 << " allocations";
  }
  EXPECT_GT(allocations, 0);
}

// How a micro-batch is kept until it is in the accumulator.
struct Way {
  const char* name;
  bool in_order = false, is_explicit = false, refuses = false, late = false, flows = false;
  int32_t staging_slots = 2;
};

const Way kWays[] = {
    {.name = "at once"},
    {.name = "at once, while rows come", .flows = true},
    {.name = "staged for a moment", .refuses = true},
    {.name = "computed twice", .refuses = true, .staging_slots = 0},
    {.name = "staged", .is_explicit = true},
    {.name = "held", .is_explicit = true, .late = true},
    {.name = "in order", .in_order = true},
    {.name = "in order, explicit", .in_order = true, .is_explicit = true},
};

// A micro-batch of two heads, before one that waits for it in deterministic mode.
class World {
 public:
  explicit World(const Way& way) : way_(way), rows_(kPayload) {
    HeadSpec spec = SmallSpec();
    spec.staging_slots = way.staging_slots;
    HeadLimits limits;
    limits.deterministic = way.in_order;
    for (const char* id : {"a", "b"}) heads_.push_back(MakeReadyHead(engine_, spec, id, limits));
    call_ = NewCall(0, kPayload);
    call_->submission().explicit_commit = way.is_explicit;
    call_->submission().refuse_non_finite = way.refuses;
    call_->submission().late_token_factors = way.late;
    if (way.flows) call_->submission().incoming = &rows_;
    if (!way.in_order) return;
    later_ = NewCall(1, {{3, 1, 4}, {1}});
    EXPECT_OK(later_->Run(engine_));
  }

  absl::Status Submit() { return call_->Run(engine_).status(); }
  absl::Status Commit() {
    if (!way_.is_explicit) return absl::OkStatus();
    return Head::Commit({{heads_[0], KeyOf(*heads_[0])}, {heads_[1], KeyOf(*heads_[1])}}, 0, 0, {0.5, {}}, std::nullopt).status();
  }
  // Repeats all, unless a head is lost. Both are, then, or one of which the other does not depend any more: in deterministic mode,
  // where each adds by itself.
  void Finish() {
    call_->submission().incoming = nullptr;
    if (!IsLost(0) && !IsLost(1)) {
      ASSERT_OK(Submit());
      ASSERT_OK(Commit());
    } else {
      EXPECT_TRUE(way_.in_order || (IsLost(0) && IsLost(1)));
    }
    for (size_t i = 0; i < 2; ++i) {
      if (IsLost(i)) continue;
      ASSERT_OK(heads_[i]->Seal(KeyOf(*heads_[i]), way_.in_order ? int64_t{2} : int64_t{1}));
      EXPECT_EQ(heads_[i]->Describe().waiting_count, 0);
      EXPECT_EQ(GetErrorMetadata(heads_[i]->TryRetire(std::nullopt, /*force=*/false)).at("runningCalls"), "0");
    }
  }
  bool IsLost(size_t index) const { return heads_[index]->Describe().state == HeadState::kLost; }
  // A head that is lost has its expected gradient.
  std::vector<std::vector<float>> Gradients(std::vector<std::vector<float>> expected) const {
    for (size_t i = 0; i < 2; ++i) {
      if (!IsLost(i)) expected[i] = ReadGradWeight(*heads_[i]);
    }
    return expected;
  }

  static std::vector<std::vector<float>> Expected(const Way& way) {
    World world(way);
    world.Finish();
    return world.Gradients(std::vector<std::vector<float>>(2));
  }

 private:
  static const Payload kPayload;

  std::unique_ptr<MicroBatchCall> NewCall(int64_t id, const Payload& payload) {
    auto call = std::make_unique<MicroBatchCall>(heads_[0], KeyOf(*heads_[0]).step, id, payload);
    SubmittedTerm second = call->term();
    second.head = heads_[1];
    second.head_epoch = heads_[1]->Describe().epoch;
    call->submission().terms.push_back(second);
    call->submission().hold = [] { return std::make_shared<const int>(0); };
    return call;
  }

  const Way way_;
  FakeEngine engine_;
  std::vector<std::shared_ptr<Head>> heads_;
  TestRows rows_;
  std::unique_ptr<MicroBatchCall> call_, later_;
};

const Payload World::kPayload = {{1, 2, 3, 4, 5, 6}, {0, 4}};

TEST(HeadMemoryTest, ASubmissionCountsOnceOrIsLost) {
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    const auto expected = World::Expected(way);
    WhereverMemoryEnds([&](int allocations) {
      World world(way);
      const bool enough = Succeeds(allocations, [&] { return world.Submit(); });
      world.Finish();
      EXPECT_FALSE(enough && (world.IsLost(0) || world.IsLost(1)));
      EXPECT_EQ(world.Gradients(expected), expected);
      return enough;
    });
  }
}

TEST(HeadMemoryTest, ACommitCountsOnceOrIsLost) {
  for (const Way& way : kWays) {
    if (!way.is_explicit) continue;
    SCOPED_TRACE(way.name);
    const auto expected = World::Expected(way);
    WhereverMemoryEnds([&](int allocations) {
      World world(way);
      EXPECT_OK(world.Submit());
      const bool enough = Succeeds(allocations, [&] { return world.Commit(); });
      world.Finish();
      EXPECT_FALSE(enough && (world.IsLost(0) || world.IsLost(1)));
      EXPECT_EQ(world.Gradients(expected), expected);
      return enough;
    });
  }
}

TEST(HeadMemoryTest, ATrainersOwnPartCountsOnceOrIsLost) {
  const std::vector<float> own = {1, 2, 3};
  GradientPart part;
  part.row_count = 1;
  part.data = own.data();
  for (const bool in_order : {false, true}) {
    for (const bool in_engine : {false, true}) {
      WhereverMemoryEnds([&](int count) {
        FakeEngine engine;
        HeadLimits limits;
        limits.deterministic = in_order;
        const std::shared_ptr<Head> head = MakeReadyHead(engine, SmallSpec(), "a", limits);
        const StepKey key = KeyOf(*head);
        const auto add = [&] { return head->AddGradient(key, 0, 0, Digest{7}, part, nullptr); };
        const bool enough = in_engine ? SucceedsWithCalls(engine, count, add) : Succeeds(count, add);
        if (head->Describe().state == HeadState::kLost) return enough;
        EXPECT_OK(add());
        EXPECT_OK(head->Seal(key, int64_t{1}));
        std::vector<float> expected(15);
        std::copy(own.begin(), own.end(), expected.begin());
        EXPECT_EQ(ReadGradWeight(*head), expected);
        return enough;
      });
    }
  }
}

TEST(HeadMemoryTest, AnAnnouncementFencesNoOtherStep) {
  WhereverMemoryEnds([&](int allocations) {
    FakeEngine engine;
    const std::shared_ptr<Head> head = MakeReadyHead(engine, SmallSpec());
    MicroBatchCall higher(head, 0, 0, {{1, 2, 3}, {4}});
    higher.submission().attempt = 1;
    const bool enough = Succeeds(allocations, [&] { return Head::Announce(higher.submission()); });
    EXPECT_OK(head->DiscardGradient(KeyOf(*head)));
    EXPECT_OK(MicroBatchCall(head, 1, 0, {{1, 2, 3}, {4}}).Run(engine));
    return enough;
  });
}

// ---- weights ---------------------------------------------------------------------------------------------------------

// What a head has.
struct Held {
  explicit Held(const Head& head)
      : info(head.Describe()), weight(ReadWeight(head)), gradient(ReadGradWeight(head)), steps(*head.GetSteps(info.epoch)) {}
  bool operator==(const Held& other) const {
    return info.open_step == other.info.open_step && info.weight_version == other.info.weight_version && weight == other.weight &&
           gradient == other.gradient && steps.first.micro_batches == other.steps.first.micro_batches;
  }

  HeadInfo info;
  std::vector<float> weight, gradient;
  std::pair<StepRecord, std::optional<StepRecord>> steps;
};

// A head with a step that is not empty, and something that changes its weights.
class Change {
 public:
  // Takes memory before the engine is asked to change anything.
  static constexpr bool kBeginsWithMemory = true;

  virtual ~Change() = default;
  virtual absl::Status Run() = 0;
  virtual bool SucceedsWith(int allocations) {
    return Succeeds(allocations, [this] { return Run(); });
  }

  Change() {
    HeadSpec spec = SmallSpec();
    spec.optimizer = AdamWSpec();
    head_ = MakeReadyHead(engine_, spec);
    EXPECT_OK(head_->Save(KeyOf(*head_).epoch, *store_, "saved", /*overwrite=*/false));
    const std::vector<float> others(15, 3);
    EXPECT_OK(SetWeights(*head_, others));
    EXPECT_OK(MicroBatchCall(head_, 0, 0, {{1, 2, 3}, {4}}).Run(engine_));
    key_ = KeyOf(*head_);
  }
  Head& head() { return *head_; }

 protected:
  void Seal() { EXPECT_OK(head_->Seal(key_, int64_t{1})); }

  FakeEngine engine_;
  MemoryFileSystem files_;
  std::unique_ptr<checkpoint::CheckpointStore> store_ = *checkpoint::CheckpointStore::Open("/x", files_);
  std::shared_ptr<Head> head_;
  StepKey key_;
  const std::vector<float> weights_ = std::vector<float>(15, 5);
};

class Setting : public Change {
 public:
  absl::Status Run() override {
    return head_->SetTensor(key_.epoch, HeadTensor::kWeight, DataType::kFloat32, weights_.data(), 60).status();
  }
};
// One whose memory ends in a call of the engine.
class ChangeByEngine : public Change {
 public:
  static constexpr bool kBeginsWithMemory = false;
  bool SucceedsWith(int engine_calls) override {
    return SucceedsWithCalls(engine_, engine_calls, [this] { return Run(); });
  }
};
// The destructor of nlohmann::json, by which manifests are read, takes memory, and ends the process where there is none.
class Restoring : public ChangeByEngine {
 public:
  absl::Status Run() override { return head_->Restore(key_.epoch, *store_, "saved").status(); }
};
class Replacing : public Change {
 public:
  Replacing() { Seal(); }
  absl::Status Run() override {
    ShadowTensor tensor;
    tensor.data = {std::shared_ptr<const void>(), weights_.data()};
    tensor.byte_count = 60;
    return head_->Replace(key_, tensor).status();
  }
};
class Applying : public Change {
 public:
  Applying() { Seal(); }
  absl::Status Run() override {
    ApplyArguments arguments;
    arguments.learning_rate = 1;
    return head_->Apply(key_, std::vector<int64_t>{0}, arguments).status();
  }
};
class Discarding : public ChangeByEngine {
 public:
  absl::Status Run() override { return head_->DiscardGradient(key_).status(); }
};
class Taking : public ChangeByEngine {
 public:
  absl::Status Run() override { return head_->Take(key_.epoch).status(); }
};

template <typename What>
class HeadMemoryChangeTest : public ::testing::Test {};
using Changes = ::testing::Types<Setting, Restoring, Replacing, Applying, Discarding, Taking>;
TYPED_TEST_SUITE(HeadMemoryChangeTest, Changes);

TYPED_TEST(HeadMemoryChangeTest, ChangesAllOrNothingOrIsLost) {
  TypeParam done;
  ASSERT_OK(done.Run());
  const Held after(done.head());
  int kept = 0;
  WhereverMemoryEnds([&](int allocations) {
    TypeParam change;
    const Held before(change.head());
    EXPECT_FALSE(before == after);
    const bool enough = change.SucceedsWith(allocations);
    if (change.head().Describe().state == HeadState::kLost) {
      EXPECT_FALSE(enough);
      return enough;
    }
    const Held now(change.head());
    EXPECT_TRUE(now == after || (!enough && now == before));
    // Once more: unless it is done already, and the epoch another one.
    if (now.info.epoch == before.info.epoch) {
      EXPECT_OK(change.Run());
      EXPECT_TRUE(Held(change.head()) == after);
    }
    if (now == before) ++kept;
    return enough;
  });
  EXPECT_EQ(kept > 0, TypeParam::kBeginsWithMemory);
}

TEST(HeadMemoryTest, AHeadWithoutWeightsStaysSo) {
  const std::vector<float> weights(15, 5);
  WhereverMemoryEnds([&](int allocations) {
    FakeEngine engine;
    const auto head = *Head::Create({kDefaultTenant, "a"}, SmallSpec(), engine, {});
    const Epoch epoch = head->Describe().epoch;
    const auto set = [&] { return head->SetTensor(epoch, HeadTensor::kWeight, DataType::kFloat32, weights.data(), 60); };
    const bool enough = Succeeds(allocations, set);
    EXPECT_NE(head->Describe().state, HeadState::kLost);
    EXPECT_OK(set());
    EXPECT_EQ(ReadWeight(*head), weights);
    return enough;
  });
}

TEST(HeadMemoryTest, ASaveLetsOthersGoOn) {
  WhereverMemoryEnds([&](int engine_calls) {
    FakeEngine engine;
    MemoryFileSystem files;
    const auto store = *checkpoint::CheckpointStore::Open("/x", files);
    const std::shared_ptr<Head> head = MakeReadyHead(engine, SmallSpec());
    const auto save = [&] { return *head->TrySaveIfChanged(*store, "last", absl::InfiniteFuture()); };
    const bool enough = SucceedsWithCalls(engine, engine_calls, save);
    EXPECT_OK(save());
    EXPECT_OK(head->Take(std::nullopt));
    return enough;
  });
}

// ---- names -----------------------------------------------------------------------------------------------------------

TEST(HeadMemoryTest, ANameIsNotTakenForEver) {
  const HeadName name = {kDefaultTenant, "a"};
  WhereverMemoryEnds([&](int allocations) {
    FakeEngine engine;
    HeadRegistry registry(engine, RegistryLimits(), HeadLimits());
    const auto create = [&] { return registry.Create(name, SmallSpec(), IfExists::kAttachIfSameSpec); };
    const bool enough = Succeeds(allocations, create);
    EXPECT_OK(create());
    return enough;
  });
  WhereverMemoryEnds([&](int allocations) {
    FakeEngine engine;
    MemoryFileSystem files;
    const auto store = *checkpoint::CheckpointStore::Open("/x", files);
    HeadRegistry registry(engine, RegistryLimits(), HeadLimits());
    EXPECT_OK(registry.Create(name, SmallSpec()));
    const bool enough = Succeeds(allocations, [&] { return registry.Delete(name, std::nullopt, /*force=*/false, store.get()); });
    EXPECT_OK(registry.Create(name, SmallSpec(), IfExists::kAttachIfSameSpec));
    return enough;
  });
  WhereverMemoryEnds([&](int allocations) {
    FakeEngine engine;
    HeadRegistry registry(engine, RegistryLimits(), HeadLimits());
    EXPECT_OK(registry.Create(name, SmallSpec()));
    bool enough = false;
    Succeeds(allocations, [&] {
      enough = registry.ExpireIdle(-absl::Hours(1), nullptr, /*save_first=*/false).size() == 1;
      return absl::OkStatus();
    });
    EXPECT_OK(registry.Create(name, SmallSpec(), IfExists::kAttachIfSameSpec));
    return enough;
  });
}

}  // namespace
}  // namespace headwater::heads
