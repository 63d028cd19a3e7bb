#include "server/heads/head_registry.h"

#include <gtest/gtest.h>

#include <thread>

#include "absl/synchronization/notification.h"
#include "head_test_util.h"
#include "server/heads/head_name.h"

namespace headwater::heads {
namespace {

using headwater::testing::FakeEngine;
using headwater::testing::KeyOf;
using headwater::testing::MicroBatchCall;
using headwater::testing::SetWeights;
using headwater::testing::SmallSpec;

TEST(HeadNameTest, ParsesFullNamesOnly) {
  const absl::StatusOr<HeadName> name = ParseHeadName("tenants/a-b.c_d/heads/7", "name");
  ASSERT_TRUE(name.ok()) << name.status();
  EXPECT_EQ(name->tenant, "a-b.c_d");
  EXPECT_EQ(name->head, "7");
  EXPECT_EQ(name->ToString(), "tenants/a-b.c_d/heads/7");
  const std::string longest(64, 'a');
  EXPECT_TRUE(ParseHeadName("tenants/" + longest + "/heads/" + longest, "name").ok());
  const std::string wrong[] = {"",
                               "student",
                               "tenants/default/heads/",
                               "tenants//heads/a",
                               "tenants/default/heads/A",
                               "tenants/default/heads/..",
                               "tenants/default/heads/.a",
                               "tenants/default/heads/a-",
                               "tenants/default/heads/a/b",
                               "tenants/default/head/a",
                               "/tenants/default/heads/a",
                               "tenants/default/heads/a\n",
                               "tenants/default/heads/" + longest + "a",
                               std::string("tenants/default/heads/a\0b", 25)};
  for (const std::string& text : wrong) {
    const absl::StatusOr<HeadName> refused = ParseHeadName(text, "terms[0].head.name");
    EXPECT_REASON(refused, kInvalidName) << text;
    EXPECT_EQ(GetErrorMetadata(refused.status()).at("field"), "terms[0].head.name");
  }
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
  HeadRegistry registry(engine, 10, HeadLimits());
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

  EXPECT_REASON(registry.Delete({"default", "a"}, NewEpoch(), true), kEpochFenced);
  EXPECT_OK(registry.Delete({"default", "a"}, first[0]->Describe().epoch, false));
  EXPECT_REASON(registry.Find({"default", "a"}), kHeadNotFound);
  EXPECT_REASON(registry.Delete({"default", "a"}, std::nullopt, false), kHeadNotFound);
  // Who still holds it is told.
  EXPECT_REASON(first[0]->CheckEpoch(first[0]->Describe().epoch), kHeadNotFound);
  EXPECT_OK(registry.Create({"default", "a"}, SmallSpec()));
}

TEST(HeadRegistryTest, TheNumberOfHeadsIsBounded) {
  FakeEngine engine;
  HeadRegistry registry(engine, 2, HeadLimits());
  EXPECT_OK(registry.Create({"default", "a"}, SmallSpec()));
  EXPECT_OK(registry.Create({"default", "b"}, SmallSpec()));
  const absl::Status refused = registry.Create({"default", "c"}, SmallSpec()).status();
  EXPECT_REASON(refused, kQuotaExceeded);
  EXPECT_EQ(GetErrorMetadata(refused).at("maximum"), "2");
  EXPECT_OK(registry.Delete({"default", "a"}, std::nullopt, false));
  EXPECT_OK(registry.Create({"default", "c"}, SmallSpec()));
}

TEST(HeadRegistryTest, AFailedCreationFreesTheName) {
  FakeEngine engine;
  HeadRegistry registry(engine, 1, HeadLimits());
  engine.control().FailNext("CreateHead", MakeError(ErrorReason::kMemoryBudgetExceeded, "too large"));
  EXPECT_REASON(registry.Create({"default", "a"}, SmallSpec()), kMemoryBudgetExceeded);
  EXPECT_EQ(registry.size(), 0);
  EXPECT_OK(registry.Create({"default", "a"}, SmallSpec()));
}

TEST(HeadRegistryTest, AHeadInUseNeedsForce) {
  FakeEngine engine;
  HeadRegistry registry(engine, 10, HeadLimits());
  const std::shared_ptr<Head> head = *registry.Create({"default", "a"}, SmallSpec());
  EXPECT_OK(SetWeights(*head, std::vector<float>(15, 1.0f)));
  EXPECT_FALSE(head->InUse());
  MicroBatchCall call(head, 0, 0, {{1, 2, 3}, {2}});
  EXPECT_OK(call.Explicit().Run(engine));
  EXPECT_TRUE(head->InUse());
  EXPECT_REASON(registry.Delete({"default", "a"}, std::nullopt, false), kHeadInUse);
  EXPECT_OK(head->Commit(KeyOf(*head), 0, 0, 1));
  EXPECT_TRUE(head->InUse());
  EXPECT_REASON(registry.Delete({"default", "a"}, std::nullopt, false), kHeadInUse);
  EXPECT_OK(registry.Delete({"default", "a"}, std::nullopt, true));
  EXPECT_REASON(call.Run(engine), kHeadNotFound);
}

TEST(HeadRegistryTest, ARunningCallCountsAsUse) {
  FakeEngine engine;
  HeadRegistry registry(engine, 10, HeadLimits());
  const std::shared_ptr<Head> head = *registry.Create({"default", "a"}, SmallSpec());
  EXPECT_OK(SetWeights(*head, std::vector<float>(15, 1.0f)));
  absl::Notification computing, go_on;
  engine.control().during_compute = [&] {
    computing.Notify();
    go_on.WaitForNotification();
  };
  std::thread submitter([&] {
    MicroBatchCall call(head, 0, 0, {{1, 2, 3}, {2}});
    EXPECT_OK(call.ForwardOnly().Run(engine));
  });
  computing.WaitForNotification();
  EXPECT_TRUE(head->InUse());
  EXPECT_REASON(registry.Delete({"default", "a"}, std::nullopt, false), kHeadInUse);
  go_on.Notify();
  submitter.join();
  EXPECT_FALSE(head->InUse());
  EXPECT_OK(registry.Delete({"default", "a"}, std::nullopt, false));
}

}  // namespace
}  // namespace headwater::heads
