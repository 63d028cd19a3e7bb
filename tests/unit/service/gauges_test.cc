// The gauge of the memory that heads have planned.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/engine.h"
#include "server/service/server_core.h"
#include "tests/unit/forwarding_engine.h"

namespace headwater::service {
namespace {

using ::testing::HasSubstr;

// Has the workspace of one of three heads, as the CUDA engine has the largest alone.
class SharedWorkspaceEngine final : public headwater::testing::ForwardingEngine {
 public:
  using ForwardingEngine::ForwardingEngine;
  int64_t planned_bytes() const override { return ForwardingEngine::planned_bytes() - saved_bytes; }
  int64_t saved_bytes = 0;
};

TEST(Gauges, WorkspacesCountAsTheEngineHasThem) {
  EngineOptions engine_options;
  engine_options.thread_count = 1;
  auto own = std::make_unique<SharedWorkspaceEngine>(*CreateCpuEngine(engine_options));
  SharedWorkspaceEngine& engine = *own;
  auto core = ServerCore::Create(ServerOptions(), std::move(own));
  ASSERT_TRUE(core.ok()) << core.status();
  HeadSpec spec;
  spec.vocab_size = 13;
  spec.hidden_size = 5;
  spec.transform.valid_vocab_size = spec.vocab_size;
  for (const char* name : {"a", "b", "c"}) EXPECT_TRUE((*core)->registry.Create({"default", name}, spec).ok());
  const MemoryPlan plan = *engine.PlanHead(spec);
  for (const int64_t workspaces : {3, 1}) {
    for (const MemoryPlan::Item& item : plan.items) {
      const bool is_workspace = item.purpose == "workspace";
      if (is_workspace) engine.saved_bytes = (3 - workspaces) * item.bytes;
      EXPECT_THAT((*core)->metrics.Serialize(),
                  HasSubstr(absl::StrCat("headwater_memory_planned_bytes{purpose=\"", item.purpose, "\"} ",
                                         (is_workspace ? workspaces : 3) * item.bytes, "\n")));
    }
  }
  EXPECT_GT(engine.saved_bytes, 0);
}

}  // namespace
}  // namespace headwater::service
