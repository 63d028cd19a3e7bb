#include "server/heads/head_registry.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "head_test_util.h"
#include "server/heads/head_name.h"

namespace headwater::heads {
namespace {

const HeadName kName = {"default", "a"};

// An engine that stops at its gate while it creates a head.
class SlowEngine : public FakeEngine {
 public:
  absl::StatusOr<std::unique_ptr<EngineHead>> DoCreateHead(const HeadSpec& spec) override {
    ++creations_;
    if (stops_) gate_.Stop();
    return FakeEngine::DoCreateHead(spec);
  }
  void StopNext() { stops_ = true; }
  ThreadGate& gate() { return gate_; }
  int creations() const { return creations_; }

 private:
  std::atomic<bool> stops_ = false;
  std::atomic<int> creations_ = 0;
  ThreadGate gate_;
};

TEST(HeadNameTest, ParsesFullNamesOnly) {
  ASSERT_OK_AND_ASSIGN(const HeadName name, ParseHeadName("tenants/a-b.c_d/heads/7", "name"));
  EXPECT_EQ(name.tenant, "a-b.c_d");
  EXPECT_EQ(name.head, "7");
  EXPECT_EQ(name.ToString(), "tenants/a-b.c_d/heads/7");
  const std::string longest(64, 'a');
  for (const std::string& id : {std::string("a"), std::string("z"), std::string("0"), std::string("9"), std::string("a9z0"),
                                std::string("z-a"), std::string("9.0"), longest}) {
    EXPECT_OK(ParseHeadName("tenants/" + id + "/heads/" + id, "name"));
  }
  const auto expect_refused = [](const std::string& text) {
    EXPECT_ERROR(ParseHeadName(text, "terms[0].head.name"), kInvalidName, {"field", "terms[0].head.name"}) << text;
  };
  for (const char* id : {"", "A", "..", ".a", "-a", "a-", "a/b", "a\n", "`", "{", "/", ":", "a`", "9:"}) {
    expect_refused(std::string("tenants/default/heads/") + id);
  }
  expect_refused("tenants/default/heads/" + longest + "a");
  expect_refused(std::string("tenants/default/heads/a\0b", 25));
  for (const char* wrong : {"", "student", "tenants//heads/a", "tenants/default/head/a", "/tenants/default/heads/a", "tenants/abc",
                            "tenantz/a/heads/b", "tenants/a/headz/b", "tenants/a"}) {
    expect_refused(wrong);
  }
}

TEST(HeadNameTest, QuotesAWrongNameSafely) {
  const std::string longest(160, 'x');
  EXPECT_ERROR(ParseHeadName("a\nb\x1f\x7f\x80 ~", "name"), kInvalidName, {"actual", "a?b??? ~"});
  EXPECT_ERROR(ParseHeadName(longest, "name"), kInvalidName, {"actual", longest});
  EXPECT_ERROR(ParseHeadName(longest + "y", "name"), kInvalidName, {"actual", longest + "..."});
}

TEST(HeadNameTest, ParsesTenants) {
  EXPECT_EQ(*ParseTenantName("", "parent"), "default");
  EXPECT_EQ(*ParseTenantName("tenants/abc", "parent"), "abc");
  for (const std::string text : {"abc", "tenants/", "tenants/a/heads", "tenants/A"}) {
    EXPECT_REASON(ParseTenantName(text, "parent"), kInvalidName) << text;
  }
}

TEST(HeadRegistryTest, CreatesFindsListsAndDeletes) {
  FakeEngine engine;
  HeadRegistry registry(engine, RegistryLimits(), HeadLimits());
  for (const char* id : {"c", "a", "b"}) EXPECT_OK(registry.Create({"default", id}, SmallSpec()));
  EXPECT_OK(registry.Create({"other", "a"}, SmallSpec()));
  EXPECT_EQ(registry.size(), 4);
  EXPECT_REASON(registry.Create({"default", "a"}, SmallSpec()), kHeadAlreadyExists);
  EXPECT_REASON(registry.Find({"default", "x"}), kHeadNotFound);

  const std::vector<std::shared_ptr<Head>> first = registry.List("default", "", 2);
  ASSERT_EQ(first.size(), 2u);
  EXPECT_EQ(first[0]->name().head, "a");
  EXPECT_EQ(first[1]->name().head, "b");
  const std::vector<std::shared_ptr<Head>> rest = registry.List("default", first[1]->name().ToString(), 10);
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_EQ(rest[0]->name().head, "c");
  EXPECT_TRUE(registry.List("nobody", "", 10).empty());
  EXPECT_TRUE(registry.List("default", rest[0]->name().ToString(), 10).empty());

  EXPECT_REASON(registry.Delete({"default", "a"}, NewEpoch(), true, nullptr), kEpochFenced);
  EXPECT_OK(registry.Delete({"default", "a"}, first[0]->Describe().epoch, false, nullptr));
  EXPECT_REASON(registry.Find({"default", "a"}), kHeadNotFound);
  EXPECT_REASON(registry.Delete({"default", "a"}, std::nullopt, false, nullptr), kHeadNotFound);
  // A call by an old pointer is refused.
  EXPECT_REASON(first[0]->CheckEpoch(first[0]->Describe().epoch), kHeadNotFound);
  EXPECT_OK(registry.Create({"default", "a"}, SmallSpec()));
}

TEST(HeadRegistryTest, ARunningCallCountsAsUse) {
  FakeEngine engine;
  HeadRegistry registry(engine, RegistryLimits(), HeadLimits());
  const std::shared_ptr<Head> head = registry.Create({"default", "a"}, SmallSpec())->head;
  EXPECT_OK(SetWeights(*head, std::vector<float>(15, 1.0f)));
  ThreadGate gate;
  engine.control().during_compute = [&] { gate.Stop(); };
  std::thread submitter([&] {
    MicroBatchCall call(head, 0, 0, {{1, 2, 3}, {2}});
    EXPECT_OK(call.ForwardOnly().Run(engine));
  });
  gate.AwaitStopped();
  EXPECT_TRUE(head->InUse());
  EXPECT_REASON(registry.Delete({"default", "a"}, std::nullopt, false, nullptr), kHeadInUse);
  gate.Open();
  submitter.join();
  EXPECT_FALSE(head->InUse());
  EXPECT_OK(registry.Delete({"default", "a"}, std::nullopt, false, nullptr));
}

TEST(HeadRegistryTest, AUseCountsAsARunningCall) {
  FakeEngine engine;
  HeadRegistry registry(engine, RegistryLimits(), HeadLimits());
  const std::shared_ptr<Head> head = registry.Create(kName, SmallSpec())->head;
  HeadUse first(head);
  HeadUse second = HeadUse(head);
  EXPECT_EQ(head->CountUses(0), 2);
  EXPECT_ERROR(registry.Delete(kName, std::nullopt, false, nullptr), kHeadInUse, {"runningCalls", "2"});
  first = std::move(second);
  EXPECT_EQ(first.head(), head);
  EXPECT_EQ(GetErrorMetadata(registry.Delete(kName, std::nullopt, false, nullptr)).at("runningCalls"), "1");
  first = HeadUse();
  EXPECT_EQ(head->CountUses(0), 0);
  EXPECT_OK(registry.Delete(kName, std::nullopt, false, nullptr));
}

// ---- attaching -------------------------------------------------------------------------------------------------------

TEST(HeadRegistryAttachTest, EveryOtherFieldMustBeTheSame) {
  FakeEngine engine;
  HeadRegistry registry(engine, RegistryLimits(), HeadLimits());
  HeadSpec spec = SpecWith(&HeadSpec::optimizer, AdamWSpec());
  ASSERT_OK(registry.Create(kName, spec));
  const std::pair<const char*, std::function<void(HeadSpec&)>> changes[] = {
      {"vocab_size", [](HeadSpec& s) { s.vocab_size = 6; }},
      {"hidden_size", [](HeadSpec& s) { s.hidden_size = 4; }},
      {"data_type", [](HeadSpec& s) { s.data_type = DataType::kBFloat16; }},
      {"has_bias", [](HeadSpec& s) { s.has_bias = true; }},
      {"logit_scale", [](HeadSpec& s) { s.transform.logit_scale = 0.5; }},
      {"softcap", [](HeadSpec& s) { s.transform.softcap = 30; }},
      {"valid_vocab_size", [](HeadSpec& s) { s.transform.valid_vocab_size = 4; }},
      {"trainable", [](HeadSpec& s) { s.trainable = false; }},
      {"optimizer", [](HeadSpec& s) { s.optimizer = AdamWSpec{.beta1 = 0.91}; }},
      {"optimizer", [](HeadSpec& s) { s.optimizer = SgdSpec(); }},
      {"optimizer", [](HeadSpec& s) { s.optimizer = std::monostate(); }},
      {"staging_slots", [](HeadSpec& s) { s.staging_slots = 3; }},
      {"parallelism", [](HeadSpec& s) { s.parallelism = Parallelism::kRows; }},
      {"int8_teacher", [](HeadSpec& s) { s.int8_teacher = true; }},
  };
  for (const auto& [field, change] : changes) {
    HeadSpec other = spec;
    change(other);
    other.initial_step = 5;
    const absl::Status refused = registry.Create(kName, other, IfExists::kAttachIfSameSpec).status();
    EXPECT_ERROR(refused, kHeadSpecMismatch, {"field", field}) << field;
    EXPECT_NE(std::string(refused.message()).find(field), std::string::npos) << refused;
    EXPECT_NE(GetErrorMetadata(refused).at("expected"), GetErrorMetadata(refused).at("actual"));
  }
  HeadSpec other = spec;
  other.transform.logit_scale = 0.5;
  other.has_bias = true;
  other.staging_slots = 3;
  EXPECT_ERROR(registry.Create(kName, other, IfExists::kAttachIfSameSpec), kHeadSpecMismatch,
               {"field", "has_bias, logit_scale, staging_slots"}, {"expected", "has_bias false, logit_scale 1.0, staging_slots 2"},
               {"actual", "has_bias true, logit_scale 0.5, staging_slots 3"});
}

TEST(HeadRegistryAttachTest, WaitsForAHeadThatIsBeingCreated) {
  SlowEngine engine;
  HeadRegistry registry(engine, RegistryLimits(), HeadLimits());
  engine.StopNext();
  std::shared_ptr<Head> first;
  std::thread creator([&] {
    const absl::StatusOr<HeadRegistry::Created> created = registry.Create(kName, SmallSpec(), IfExists::kAttachIfSameSpec);
    EXPECT_OK(created);
    EXPECT_TRUE(created->created);
    first = created->head;
  });
  engine.gate().AwaitStopped();
  EXPECT_REASON(registry.Create(kName, SmallSpec()), kHeadAlreadyExists);  // at once
  const auto attach = [&](const WaitLimits& limits) {
    return registry.Create(kName, SmallSpec(), IfExists::kAttachIfSameSpec, nullptr, limits);
  };
  EXPECT_REASON(attach({observability::MonotonicNow() + absl::Milliseconds(1), nullptr}), kDeadlineExceeded);
  EXPECT_REASON(attach(CancelledWait()), kCancelled);
  EXPECT_REASON(registry.Find(kName), kHeadNotFound);
  EXPECT_REASON(registry.Delete(kName, std::nullopt, true, nullptr), kHeadNotFound);
  EXPECT_TRUE(registry.ListAll().empty());
  EXPECT_EQ(registry.size(), 1);
  std::atomic<int> attached = 0;
  std::vector<std::shared_ptr<Head>> heads(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < heads.size(); ++i) {
    threads.emplace_back([&, i] {
      const absl::StatusOr<HeadRegistry::Created> created = registry.Create(kName, SmallSpec(), IfExists::kAttachIfSameSpec);
      EXPECT_OK(created);
      EXPECT_FALSE(created->created);
      heads[i] = created->head;
      ++attached;
    });
  }
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(attached, 0);
  EXPECT_OK(registry.Create({"default", "b"}, SmallSpec()));  // others go on
  engine.gate().Open();
  creator.join();
  for (std::thread& thread : threads) thread.join();
  for (const std::shared_ptr<Head>& head : heads) EXPECT_EQ(head, first);
  EXPECT_EQ(engine.creations(), 2);
}

TEST(HeadRegistryAttachTest, CreatesTheHeadItselfIfTheOtherCreationFails) {
  SlowEngine engine;
  HeadRegistry registry(engine, {.max_heads = 1}, HeadLimits());
  engine.StopNext();
  engine.control().FailNext("CreateHead", MakeError(ErrorReason::kMemoryBudgetExceeded, "too large"));
  std::thread creator([&] { EXPECT_REASON(registry.Create(kName, SmallSpec()), kMemoryBudgetExceeded); });
  engine.gate().AwaitStopped();
  std::atomic<int> created = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      const absl::StatusOr<HeadRegistry::Created> attached = registry.Create(kName, SmallSpec(), IfExists::kAttachIfSameSpec);
      EXPECT_OK(attached);
      if (attached.ok() && attached->created) ++created;
    });
  }
  absl::SleepFor(absl::Milliseconds(20));
  engine.gate().Open();
  creator.join();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(created, 1);
  EXPECT_EQ(engine.creations(), 2);
}

// ---- quotas ----------------------------------------------------------------------------------------------------------

TEST(HeadRegistryQuotaTest, ATenantsHeadsAreBounded) {
  FakeEngine engine;
  HeadRegistry registry(engine, {.max_heads = 4, .max_heads_per_tenant = 2}, HeadLimits());
  for (const char* tenant : {"a", "a-b"}) {
    EXPECT_OK(registry.Create({tenant, "x"}, SmallSpec()));
    EXPECT_OK(registry.Create({tenant, "y"}, SmallSpec()));
    EXPECT_ERROR(registry.Create({tenant, "z"}, SmallSpec()), kQuotaExceeded, {"limit", "max_heads_per_tenant"}, {"maximum", "2"},
                 {"actual", "3"});
    // Attaching needs no place.
    EXPECT_OK(registry.Create({tenant, "x"}, SmallSpec(), IfExists::kAttachIfSameSpec));
  }
  EXPECT_ERROR(registry.Create({"c", "x"}, SmallSpec()), kQuotaExceeded, {"limit", "max_heads"}, {"maximum", "4"}, {"actual", "5"});
  EXPECT_OK(registry.Delete({"a", "x"}, std::nullopt, false, nullptr));
  EXPECT_OK(registry.Create({"a", "z"}, SmallSpec()));
}

TEST(HeadRegistryQuotaTest, ATenantsMemoryIsBounded) {
  FakeEngine engine;
  const int64_t head_bytes = engine.PlanHead(SmallSpec())->total_bytes;
  HeadRegistry registry(engine, {.max_tenant_memory_bytes = 3 * head_bytes - 1}, HeadLimits());
  EXPECT_OK(registry.Create({"a", "x"}, SmallSpec()));
  EXPECT_OK(registry.Create({"a", "y"}, SmallSpec()));
  EXPECT_ERROR(registry.Create({"a", "z"}, SmallSpec()), kQuotaExceeded, {"limit", "max_tenant_memory_bytes"},
               {"actual", std::to_string(3 * head_bytes)});
  EXPECT_OK(registry.Create({"b", "x"}, SmallSpec()));
  // What fails to be created takes nothing.
  EXPECT_OK(registry.Delete({"a", "x"}, std::nullopt, false, nullptr));
  engine.control().FailNext("CreateHead", MakeError(ErrorReason::kMemoryBudgetExceeded, "too large"));
  EXPECT_REASON(registry.Create({"a", "z"}, SmallSpec()), kMemoryBudgetExceeded);
  EXPECT_OK(registry.Create({"a", "z"}, SmallSpec()));
  EXPECT_REASON(registry.Create({"a", "x"}, SmallSpec()), kQuotaExceeded);
}

TEST(HeadRegistryQuotaTest, ADeletedHeadCountsUntilItsCallsHaveEnded) {
  FakeEngine engine;
  const int64_t head_bytes = engine.PlanHead(SmallSpec())->total_bytes;
  const RegistryLimits limits[] = {{.max_heads = 1}, {.max_heads_per_tenant = 1}, {.max_tenant_memory_bytes = 2 * head_bytes - 1}};
  const std::string names[] = {"max_heads", "max_heads_per_tenant", "max_tenant_memory_bytes"};
  for (size_t i = 0; i < 3; ++i) {
    HeadRegistry registry(engine, limits[i], HeadLimits());
    HeadUse use(registry.Create({"a", "x"}, SmallSpec())->head);
    const std::weak_ptr<Head> head = use.head();
    EXPECT_OK(registry.Delete({"a", "x"}, std::nullopt, /*force=*/true, nullptr));
    EXPECT_EQ(registry.size(), 0);
    EXPECT_ERROR(registry.Create({"a", "x"}, SmallSpec()), kQuotaExceeded, {"limit", names[i]});
    EXPECT_FALSE(head.expired());
    if (i > 0) EXPECT_OK(registry.Create({"b", "x"}, SmallSpec()));  // another tenant's
    use = HeadUse();
    EXPECT_TRUE(head.expired());
    EXPECT_OK(registry.Create({"a", "x"}, SmallSpec()));
  }
}

TEST(HeadRegistryQuotaTest, AHeadThatExpiresCountsAsLong) {
  FakeEngine engine;
  absl::Time now = absl::UnixEpoch();
  HeadRegistry registry(engine, {.max_heads = 1}, HeadLimits(), [&now] { return now; });
  HeadUse use(registry.Create(kName, SmallSpec())->head);
  now += absl::Hours(1);
  EXPECT_EQ(registry.ExpireIdle(absl::Hours(1), nullptr, /*save_first=*/false).size(), 1u);
  EXPECT_REASON(registry.Create(kName, SmallSpec()), kQuotaExceeded);
  use = HeadUse();
  EXPECT_OK(registry.Create(kName, SmallSpec()));
}

// An engine for which no head is small enough to plan.
class PlanlessEngine : public FakeEngine {
 public:
  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec&) const override {
    return MakeError(ErrorReason::kMemoryBudgetExceeded, "too large to plan");
  }
};

TEST(HeadRegistryQuotaTest, WhatCannotBePlannedIsRefusedBeforeItTakesAnything) {
  PlanlessEngine engine;
  HeadRegistry registry(engine, {.max_tenant_memory_bytes = 1 << 20}, HeadLimits());
  EXPECT_REASON(registry.Create(kName, SmallSpec()), kMemoryBudgetExceeded);
  EXPECT_EQ(registry.size(), 0);
}

TEST(HeadRegistryQuotaTest, TheQuotaOfAHeadOfExactlyTheRestIsEnough) {
  FakeEngine engine;
  HeadRegistry registry(engine, {.max_tenant_memory_bytes = engine.PlanHead(SmallSpec())->total_bytes}, HeadLimits());
  EXPECT_OK(registry.Create(kName, SmallSpec()));
}

// ---- sessions, and many threads --------------------------------------------------------------------------------------

TEST(HeadRegistryTest, TheEndOfASessionDoesNotWaitForHeadsThatItLeftNothingOn) {
  FakeEngine engine;
  HeadRegistry registry(engine, RegistryLimits(), HeadLimits());
  const std::shared_ptr<Head> idle = registry.Create({"default", "idle"}, SmallSpec())->head;
  const std::shared_ptr<Head> busy = registry.Create({"default", "busy"}, SmallSpec())->head;
  EXPECT_OK(SetWeights(*idle, std::vector<float>(15, 1.0f)));
  const SessionId session{1};
  EXPECT_OK(MicroBatchCall(idle, 0, 0, kRowOfToken2).Explicit().Session(session).Run(engine));

  ThreadGate gate;
  std::thread load([&] { SetSlowly(*busy, gate); });
  gate.AwaitStopped();
  absl::Notification dropped;
  std::thread drop([&] {
    EXPECT_EQ(registry.DropSession(session), 1);
    dropped.Notify();
  });
  EXPECT_TRUE(dropped.WaitForNotificationWithTimeout(absl::Seconds(60))) << "it waits for the head that is being loaded";
  gate.Open();
  drop.join();
  load.join();
  EXPECT_EQ(idle->GetSteps(idle->Describe().epoch)->first.micro_batches.at(0).state, ContributionState::kDiscarded);
}

TEST(HeadRegistryTest, ManyThreadsCreateFindAttachAndDelete) {
  FakeEngine engine;
  HeadRegistry registry(engine, {.max_heads = 3}, HeadLimits());
  std::atomic<int> created = 0;
  std::atomic<int> deleted = 0;
  RunThreads(6, [&](int64_t thread) {
    for (int i = 0; i < 200; ++i) {
      const HeadName name = {"default", std::string(1, static_cast<char>('a' + (i + thread) % 4))};
      const IfExists if_exists = i % 2 == 0 ? IfExists::kFail : IfExists::kAttachIfSameSpec;
      const absl::StatusOr<HeadRegistry::Created> head = registry.Create(name, SmallSpec(), if_exists);
      if (head.ok() && head->created) ++created;
      if (const auto found = registry.Find(name); found.ok()) {
        EXPECT_EQ((*found)->name().head, name.head);
      }
      registry.DropSession(SessionId{});
      if (i % 3 == 0 && registry.Delete(name, std::nullopt, true, nullptr).ok()) ++deleted;
      EXPECT_LE(registry.size(), 3);
    }
  });
  EXPECT_EQ(registry.size(), created - deleted);
  EXPECT_EQ(static_cast<int64_t>(registry.ListAll().size()), registry.size());
}

}  // namespace
}  // namespace headwater::heads
