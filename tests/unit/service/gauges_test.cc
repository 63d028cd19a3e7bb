// The gauge of the memory that heads have planned.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "headwater/kernels/engine.h"
#include "server/service/server_core.h"
#include "tests/unit/forwarding_engine.h"

namespace headwater::service {
namespace {

// A CPU engine that counts its heads' memory as the CUDA engine does: the largest workspace once.
class SharedWorkspaceEngine final : public headwater::testing::ForwardingEngine {
 public:
  using ForwardingEngine::ForwardingEngine;
  int64_t planned_bytes() const override { return ForwardingEngine::planned_bytes() - saved_bytes_; }
  absl::StatusOr<std::unique_ptr<EngineHead>> DoCreateHead(const HeadSpec& spec) override {
    auto head = ForwardingEngine::DoCreateHead(spec);
    if (!head.ok()) return head;
    for (const MemoryPlan::Item& item : (*head)->plan().items) {
      if (item.purpose != "workspace") continue;
      if (std::exchange(has_heads_, true)) saved_bytes_ += item.bytes;
      workspace_bytes_ = item.bytes;
    }
    return head;
  }
  int64_t workspace_bytes() const { return workspace_bytes_; }

 private:
  bool has_heads_ = false;
  int64_t saved_bytes_ = 0;
  int64_t workspace_bytes_ = 0;
};

// The gauge's values in a scrape's text, by purpose.
std::map<std::string, int64_t> PlannedBytes(const std::string& text) {
  const std::string name = "headwater_memory_planned_bytes{purpose=\"";
  std::map<std::string, int64_t> planned;
  for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
    const size_t begin = at + name.size(), end = text.find('"', begin);
    planned[text.substr(begin, end - begin)] = std::stoll(text.substr(end + 3));
  }
  return planned;
}

TEST(Gauges, WorkspacesCountAsTheEngineHasThem) {
  EngineOptions engine_options;
  engine_options.thread_count = 1;
  HeadSpec spec;
  spec.vocab_size = 13;
  spec.hidden_size = 5;
  spec.transform.valid_vocab_size = spec.vocab_size;
  for (const bool shared : {false, true}) {
    auto own = std::make_unique<SharedWorkspaceEngine>(*CreateCpuEngine(engine_options));
    const SharedWorkspaceEngine& engine = *own;
    auto core = ServerCore::Create(ServerOptions(), shared ? std::move(own) : *CreateCpuEngine(engine_options));
    ASSERT_TRUE(core.ok()) << core.status();
    for (const char* name : {"a", "b", "c"}) {
      const auto created = (*core)->registry.Create({"default", name}, spec);
      ASSERT_TRUE(created.ok()) << created.status();
    }
    std::map<std::string, int64_t> planned = PlannedBytes((*core)->metrics.Serialize());
    int64_t sum = 0;
    for (const auto& [purpose, bytes] : planned) sum += bytes;
    EXPECT_EQ(sum, (*core)->engine->planned_bytes());
    EXPECT_EQ(planned["weight"], 3 * 13 * 5 * 4);
    EXPECT_GT(planned["workspace"], 0);
    if (shared) {
      EXPECT_EQ(planned["workspace"], engine.workspace_bytes());
    }
  }
}

}  // namespace
}  // namespace headwater::service
