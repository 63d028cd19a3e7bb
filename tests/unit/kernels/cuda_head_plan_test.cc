// The CUDA engine's memory plan. Needs no GPU, and nothing of CUDA.
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "kernels/cuda/head_plan.h"

namespace headwater::cuda {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

HeadSpec Spec(int64_t vocab_size, int64_t hidden_size, DataType data_type = DataType::kBFloat16) {
  return {
      .vocab_size = vocab_size, .hidden_size = hidden_size, .data_type = data_type, .transform = {.valid_vocab_size = vocab_size}};
}

EngineOptions Options(int64_t workspace_bytes) { return {.workspace_bytes = workspace_bytes}; }

// A trainable head with every tensor.
HeadSpec FullSpec(int64_t vocab_size, int64_t hidden_size, DataType data_type, int32_t staging_slots) {
  HeadSpec spec = Spec(vocab_size, hidden_size, data_type);
  spec.has_bias = true;
  spec.trainable = true;
  spec.optimizer = AdamWSpec();
  spec.staging_slots = staging_slots;
  return spec;
}

int64_t Planned(const HeadPlan& plan, const std::string& purpose) {
  for (const MemoryPlan::Item& item : plan.memory.items) {
    if (item.purpose == purpose) return item.bytes;
  }
  return -1;
}

TEST(CudaHeadPlan, TensorsHavePaddedRows) {
  const HeadPlan plan = PlanHeadOnCuda(FullSpec(1001, 77, DataType::kBFloat16, 3), Options(kGiB));
  constexpr int64_t kWeights = 1001 * 80;
  EXPECT_EQ(Planned(plan, "weight"), kWeights * 2);
  EXPECT_EQ(Planned(plan, "bias"), 1001 * 2);
  EXPECT_EQ(Planned(plan, "grad_weight"), kWeights * 4);
  EXPECT_EQ(Planned(plan, "grad_bias"), 1001 * 4);
  EXPECT_EQ(Planned(plan, "master_weight"), (kWeights + 1001) * 4);
  EXPECT_EQ(Planned(plan, "optimizer_state"), 2 * (kWeights + 1001) * 4);
  EXPECT_EQ(Planned(plan, "staging"), 3 * (kWeights + 1001) * 4);
  EXPECT_EQ(Planned(plan, "workspace"), plan.workspace_bytes);
  EXPECT_EQ(plan.memory.total_bytes, plan.own_bytes + plan.workspace_bytes);
  int64_t total = 0;
  for (const MemoryPlan::Item& item : plan.memory.items) total += item.bytes;
  EXPECT_EQ(plan.memory.total_bytes, total);
}

TEST(CudaHeadPlan, LargeHeadsTakeTheBudgetAndNoMore) {
  for (const int64_t workspace_bytes : {2 * kGiB, 4 * kGiB}) {
    for (const auto& [vocab, width] : {std::pair<int64_t, int64_t>{128256, 4096}, {256000, 2304}, {256000, 8192}}) {
      for (const DataType type : {DataType::kBFloat16, DataType::kFloat16, DataType::kFloat32}) {
        EXPECT_EQ(PlanHeadOnCuda(Spec(vocab, width, type), Options(workspace_bytes)).workspace_bytes, workspace_bytes)
            << vocab << " x " << width << " " << DataTypeName(type);
      }
    }
  }
}

// The default workspace must feed the products: 4096 logits' rows at 128256, half of that at 256000.
TEST(CudaHeadPlan, TheDefaultWorkspaceFeedsTheProducts) {
  EXPECT_EQ(PlanHeadOnCuda(Spec(128256, 4096), Options(4 * kGiB)).memory.token_chunk_rows, kMaxRows);
  EXPECT_GE(PlanHeadOnCuda(Spec(256000, 4096), Options(4 * kGiB)).memory.token_chunk_rows, kMaxRows / 2);
  EXPECT_GE(PlanHeadOnCuda(Spec(128256, 4096, DataType::kFloat32), Options(4 * kGiB)).memory.token_chunk_rows, kMaxRows / 2);
  // 8192 rows of exponentials: kernels that keep no logits take twice the rows in the same memory.
  EXPECT_LE(CostOfChunk(Spec(128256, 4096), 1, 2, false).Bytes(kMaxExponentialRows), 4 * kGiB - kLibraryBytes);
}

TEST(CudaHeadPlan, SmallHeadsTakeWhatIsOfUse) {
  const HeadPlan plan = PlanHeadOnCuda(Spec(1000, 64), Options(4 * kGiB));
  EXPECT_LT(plan.workspace_bytes, 256 * kMiB);
  EXPECT_EQ(plan.memory.token_chunk_rows, kMaxRows);
  EXPECT_EQ(PlanHeadOnCuda(Spec(1000, 64), Options(8 * kGiB)).workspace_bytes, plan.workspace_bytes);
}

// However small the budget, 128 rows of every loss can be computed.
TEST(CudaHeadPlan, TheLeastIsGuaranteed) {
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat32}) {
    for (const int32_t shard_count : {1, 3}) {
      EngineOptions options = Options(1);
      options.shard_count = shard_count;
      const HeadSpec spec = Spec(300000, 512, type);
      const HeadPlan plan = PlanHeadOnCuda(spec, options);
      EXPECT_EQ(plan.workspace_bytes, kLibraryBytes + CostOfChunk(spec, shard_count, 8, true).Bytes(kRowGrain));
      // fp64 logits of both sides.
      EXPECT_GE(plan.workspace_bytes - kLibraryBytes, kPanelBytes + kRowGrain * 2 * 8 * 300000);
      EXPECT_GE(plan.memory.token_chunk_rows, 1);
      EXPECT_LE(plan.memory.token_chunk_rows, kMaxRows);
    }
  }
}

// On a rank also with a teacher all of whose logits travel, in as many rows as were asked for.
TEST(CudaHeadPlan, TheLeastOfARankHasRoomForOtherTeachers) {
  EngineOptions options = Options(1);
  options.shard_count = options.group.world_size = 8;
  for (const int64_t rows : {int64_t{0}, int64_t{1000}}) {
    options.token_chunk_rows = rows;
    const HeadPlan plan = PlanHeadOnCuda(Spec(300000, 512), options);
    // fp64 logits of a shard of the student, and of the teacher as computed and as cut; and of the ranks' exchange.
    const int64_t row_bytes = (3 * 300000 / 8 + 300000) * 8;
    EXPECT_GE(plan.workspace_bytes - kLibraryBytes, kPanelBytes + (rows == 0 ? kRowGrain : rows) * row_bytes);
  }
}

TEST(CudaHeadPlan, ChunkRowsFollowTheWorkspace) {
  int64_t before = 0;
  for (const int64_t workspace_bytes : {kGiB, 2 * kGiB, 4 * kGiB}) {
    const int64_t rows = PlanHeadOnCuda(Spec(256000, 4096), Options(workspace_bytes)).memory.token_chunk_rows;
    EXPECT_GT(rows, before);
    EXPECT_TRUE(rows <= kRowGrain || rows % kRowGrain == 0) << rows;
    EXPECT_LE(CostOfChunk(Spec(256000, 4096), 1, 4, false).Bytes(rows), workspace_bytes - kLibraryBytes);
    before = rows;
  }
}

TEST(CudaHeadPlan, ExactChunkRowsAreKept) {
  EngineOptions options = Options(kGiB);
  const HeadSpec spec = Spec(100000, 256);
  for (const int64_t rows : {1, 17, 5000}) {
    options.token_chunk_rows = rows;
    const HeadPlan plan = PlanHeadOnCuda(spec, options);
    EXPECT_EQ(plan.memory.token_chunk_rows, rows);
    EXPECT_GE(plan.workspace_bytes, kLibraryBytes + CostOfChunk(spec, 1, 8, true).Bytes(rows));
  }
}

// The formulas' leading terms, at a size where they are all that counts.
TEST(CudaHeadPlan, BytesOfALogit) {
  constexpr int64_t kColumns = 1 << 20;
  const auto logit_bytes = [](int32_t shard_count, int64_t bytes, bool divergence) {
    const int64_t per_row = CostOfChunk(Spec(kColumns, 8), shard_count, bytes, divergence).per_row;
    return static_cast<double>(per_row) / kColumns;
  };
  EXPECT_NEAR(logit_bytes(1, 2, false), 2, 0.05);
  EXPECT_NEAR(logit_bytes(1, 4, false), 4, 0.01);
  EXPECT_NEAR(logit_bytes(1, 8, false), 8, 0.01);
  EXPECT_NEAR(logit_bytes(1, 4, true), 8, 0.01);
  EXPECT_NEAR(logit_bytes(1, 8, true), 16, 0.01);
  EXPECT_NEAR(logit_bytes(2, 4, true), 12, 0.01);
}

// A rank of a group plans its own shard, and the workspace that the widest one needs.
TEST(CudaHeadPlan, RanksPlanTheirShards) {
  HeadSpec spec = Spec(256000, 16384);
  spec.trainable = true;
  spec.optimizer = AdamWSpec();
  const HeadPlan alone = PlanHeadOnCuda(spec, Options(4 * kGiB));
  EngineOptions options = Options(4 * kGiB);
  options.shard_count = options.group.world_size = 3;
  options.shard_weights = {1, 2, 1};
  int64_t own_bytes = 0;
  for (int32_t rank = 0; rank < 3; ++rank) {
    options.group.rank = rank;
    const HeadPlan plan = PlanHeadOnCuda(spec, options);
    ASSERT_EQ(plan.shards.size(), 3u);
    EXPECT_EQ(Planned(plan, "weight"), plan.shards[static_cast<size_t>(rank)].size() * 16384 * 2);
    EXPECT_EQ(plan.memory.total_bytes, plan.own_bytes + plan.workspace_bytes);
    own_bytes += plan.own_bytes;
    options.group.rank = 1;
    const HeadPlan widest = PlanHeadOnCuda(spec, options);
    EXPECT_EQ(plan.workspace_bytes, widest.workspace_bytes);
    EXPECT_EQ(plan.memory.token_chunk_rows, widest.memory.token_chunk_rows);
    EXPECT_GE(plan.memory.token_chunk_rows, alone.memory.token_chunk_rows);
  }
  EXPECT_EQ(own_bytes, alone.own_bytes + 3 * ReferenceBytes(16384));
  // A rank has the logits of its columns, and every rank's statistics.
  EXPECT_LT(CostOfRankChunk(spec, 4, 64000, 4, true).per_row, CostOfChunk(spec, 1, 4, true).per_row / 2);
  EXPECT_GT(CostOfRankChunk(spec, 8, 64000, 4, true).per_row, CostOfRankChunk(spec, 4, 64000, 4, true).per_row);
}

// A part of the columns is small: there is room for more rows.
TEST(CudaHeadPlan, RanksHaveRoomForMoreRows) {
  for (const DataType type : {DataType::kFloat16, DataType::kBFloat16}) {
    const HeadSpec spec = Spec(128256, 4096, type);
    EngineOptions options = Options(4 * kGiB);
    options.shard_count = options.group.world_size = 8;
    const int64_t divergence = CostOfRankChunk(spec, 8, 128256 / 8, 4, /*divergence=*/true).Bytes(kMaxRankRows);
    const int64_t exponentials = CostOfRankChunk(spec, 8, 128256 / 8, 2, /*divergence=*/false).Bytes(kMaxRankExponentialRows);
    EXPECT_LT(divergence, exponentials);
    EXPECT_LT(exponentials, 4 * kGiB - kLibraryBytes);
    // fp16 has no exponentials.
    const int64_t needed = type == DataType::kBFloat16 ? exponentials : divergence;
    EXPECT_EQ(PlanHeadOnCuda(spec, options).workspace_bytes, kLibraryBytes + needed);
    // Alone it has as much as it may take.
    EXPECT_EQ(PlanHeadOnCuda(spec, Options(4 * kGiB)).workspace_bytes, 4 * kGiB);
  }
}

// By rows a rank plans like a single engine, except for masters and optimizer state.
TEST(CudaHeadPlan, ReplicasHaveAllButTheStateOfOtherShards) {
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat32}) {
    HeadSpec spec = FullSpec(1001, 77, type, 3);
    const HeadPlan alone = PlanHeadOnCuda(spec, Options(kGiB));
    spec.parallelism = Parallelism::kRows;
    EXPECT_EQ(PlanHeadOnCuda(spec, Options(kGiB)).memory.total_bytes, alone.memory.total_bytes);
    EngineOptions options = Options(kGiB);
    options.shard_count = options.group.world_size = 3;
    options.shard_weights = {1, 2, 1};
    for (int32_t rank = 0; rank < 3; ++rank) {
      options.group.rank = rank;
      const HeadPlan plan = PlanHeadOnCuda(spec, options);
      ASSERT_EQ(plan.shards.size(), 3u);
      EXPECT_EQ(plan.shards[1].size(), 500);
      const int64_t state_bytes = plan.shards[static_cast<size_t>(rank)].size() * (80 + 1) * 4;
      for (const MemoryPlan::Item& item : alone.memory.items) {
        const int64_t expected = item.purpose == "master_weight"     ? (type == DataType::kFloat32 ? 0 : state_bytes)
                                 : item.purpose == "optimizer_state" ? 2 * state_bytes
                                                                     : item.bytes;
        EXPECT_EQ(Planned(plan, item.purpose), expected) << item.purpose;
      }
      EXPECT_EQ(plan.memory.total_bytes, plan.own_bytes + plan.workspace_bytes);
      EXPECT_EQ(plan.memory.token_chunk_rows, alone.memory.token_chunk_rows);
    }
  }
}

TEST(CudaHeadPlan, SaturatesInsteadOfWrapping) {
  const int64_t most = (int64_t{1} << 31) - 1;
  const HeadSpec spec = FullSpec(most, most, DataType::kFloat32, 1 << 30);
  EngineOptions options = Options(kGiB);
  options.token_chunk_rows = most;
  const HeadPlan plan = PlanHeadOnCuda(spec, options);
  EXPECT_EQ(plan.memory.total_bytes, std::numeric_limits<int64_t>::max());
  EXPECT_EQ(plan.own_bytes, std::numeric_limits<int64_t>::max());
  EXPECT_EQ(plan.workspace_bytes, std::numeric_limits<int64_t>::max());
  for (const MemoryPlan::Item& item : plan.memory.items) EXPECT_GE(item.bytes, 0) << item.purpose;
}

}  // namespace
}  // namespace headwater::cuda
