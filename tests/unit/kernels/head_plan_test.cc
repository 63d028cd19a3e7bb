#include "kernels/cpu/head_plan.h"

#include <cstdint>
#include <limits>

#include "gtest/gtest.h"

namespace headwater::cpu {
namespace {

HeadSpec Spec(int64_t vocab_size, int64_t hidden_size) {
  return {.vocab_size = vocab_size, .hidden_size = hidden_size, .transform = {.valid_vocab_size = vocab_size}};
}

int64_t WorkspaceBytes(const HeadPlan& plan) {
  for (const MemoryPlan::Item& item : plan.memory.items) {
    if (item.purpose == "workspace") return item.bytes;
  }
  return -1;
}

TEST(HeadPlan, WorkspaceStaysWithinItsBudget) {
  EngineOptions options;
  for (const int64_t budget : {int64_t{8} << 20, int64_t{48} << 20, int64_t{512} << 20}) {
    options.workspace_bytes = budget;
    for (const int32_t shard_count : {1, 3}) {
      options.shard_count = shard_count;
      const HeadPlan plan = PlanHeadOnCpu(Spec(32000, 1024), options, 2);
      EXPECT_GE(plan.narrow_rows, kMinNarrowRows);
      EXPECT_GE(plan.wide_rows, kMinWideRows);
      EXPECT_LE(plan.wide_rows, plan.narrow_rows);
      if (plan.narrow_rows > kMinNarrowRows && plan.wide_rows > kMinWideRows) {
        EXPECT_LE(WorkspaceBytes(plan), budget);
      }
      if (budget == int64_t{48} << 20) {
        EXPECT_GE(plan.narrow_rows, 200) << "the default must feed the products";
      }
    }
  }
}

// Each thread's own memory must not cut the rows: every chunk reads the weight and adds to its gradient.
TEST(HeadPlan, ManyThreadsLeaveTheDefaultToTheLogits) {
  for (const int32_t threads : {1, 2, 8, 16}) {
    EXPECT_GE(PlanHeadOnCpu(Spec(32000, 1024), EngineOptions(), threads).narrow_rows, 256) << threads << " threads";
  }
}

// A head whose rows do not fit the budget still gets the fewest rows that work.
TEST(HeadPlan, HugeVocabulariesKeepTheFloor) {
  EngineOptions options;
  options.workspace_bytes = 1 << 20;
  const HeadPlan plan = PlanHeadOnCpu(Spec(2000000, 64), options, 1);
  EXPECT_EQ(plan.narrow_rows, kMinNarrowRows);
  EXPECT_EQ(plan.wide_rows, kMinWideRows);
  EXPECT_GE(WorkspaceBytes(plan), 2000000 * 4 * kMinNarrowRows);
}

TEST(HeadPlan, RegionsDoNotOverlap) {
  EngineOptions options;
  options.shard_count = 2;
  const HeadPlan plan = PlanHeadOnCpu(Spec(1001, 77), options, 3);
  for (size_t i = 0; i < plan.shards.size(); ++i) {
    const WorkspaceLayout& layout = plan.layouts[i];
    const int64_t rows = plan.shards[i].size();
    const int64_t ends[][2] = {
        {layout.hidden + plan.narrow_rows * 77 * 4, layout.grad_hidden},
        {layout.grad_hidden + plan.narrow_rows * 77 * 4, layout.grad_hidden_term},
        {layout.grad_hidden_term + plan.narrow_rows * 77 * 4, layout.converted},
        {layout.converted + 3 * plan.converted_bytes, layout.logits},
        {layout.logits + plan.narrow_rows * rows * 4, layout.mapped_bytes},
        {layout.student_logits + plan.wide_rows * rows * 8, layout.teacher_logits},
        {layout.teacher_logits + plan.wide_rows * rows * 8, layout.wide_gradient},
        {layout.wide_gradient + plan.wide_rows * rows * 4, layout.wide_hidden},
        {layout.wide_hidden + plan.wide_rows * 77 * 8, layout.teacher_hidden},
        {layout.teacher_hidden + plan.wide_rows * 77 * 8, layout.exchange},
        {layout.exchange + 1001 * 8, layout.mapped_bytes},
    };
    for (const auto& [end, next] : ends) EXPECT_LE(end, next);
    EXPECT_EQ(layout.student_logits, layout.logits);
    EXPECT_GE(layout.total_bytes, layout.mapped_bytes);
    for (const int64_t offset : {layout.grad_hidden, layout.converted, layout.logits, layout.teacher_logits, layout.exchange}) {
      EXPECT_EQ(offset % 64, 0);
    }
  }
}

TEST(HeadPlan, SaturatesInsteadOfWrapping) {
  const int64_t most = (int64_t{1} << 31) - 1;
  HeadSpec spec = Spec(most, most);
  spec.trainable = true;
  spec.optimizer = AdamWSpec();
  spec.staging_slots = 1 << 30;
  const HeadPlan plan = PlanHeadOnCpu(spec, EngineOptions(), 64);
  EXPECT_EQ(plan.memory.total_bytes, std::numeric_limits<int64_t>::max());
  for (const MemoryPlan::Item& item : plan.memory.items) EXPECT_GE(item.bytes, 0) << item.purpose;
}

}  // namespace
}  // namespace headwater::cpu
