// Products of bf16 operands on the CPU engine: both libraries against fp64, and the requirements of oneDNN's.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/product_rate.h"
#include "kernels/core/loss/dither.h"
#include "kernels/cpu/products/bfloat16_products.h"
#include "kernels/reference/storage.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/kernel_suite.h"

namespace headwater::testing {
namespace {

EngineOptions With(Bfloat16Products products) { return {.bfloat16_products = products}; }

bool HasOneDnn() { return cpu::GetBfloat16Library().is_usable; }

// A panel that is not full, several chunks, parts of a row's columns, a bias, kept rows.
ProblemOptions Shape() {
  return WithType({.rows = 37, .vocab_size = 1400, .hidden_size = 48, .bias = true, .token_weights = true, .staging_slots = 1},
                  DataType::kBFloat16);
}

TEST(CpuProducts, MatchFp64FromEitherLibrary) {
  ProblemOptions jsd = Shape();
  jsd.jsd = true;
  jsd.hard_loss_weight = 0.3;
  ProblemOptions confident = Shape();  // more logits to take again than the narrow form has room for
  confident.logit_spread = 30;
  for (const Bfloat16Products products : {Bfloat16Products::kOpenBlas, Bfloat16Products::kOneDnn}) {
    if (products == Bfloat16Products::kOneDnn && !HasOneDnn()) continue;
    SCOPED_TRACE(DescribeCpuProducts(products, products));
    for (const ProblemOptions& problem_options : {Shape(), jsd, confident}) {
      EngineOptions options = With(products);
      ExpectEngineMatches(MakeProblem(problem_options), options);
      options.shard_count = 2;
      options.token_chunk_rows = 16;
      ExpectEngineMatches(MakeProblem(problem_options), options);
    }
  }
}

// Each library leaves a gradient of its own: fp32 entries are not those that are rounded to bf16.
TEST(CpuProducts, TheOptionDecides) {
  const Problem problem = MakeProblem(Shape());
  const Outcome by_openblas = RunOnce(problem, With(Bfloat16Products::kOpenBlas));
  const auto engine = Suite().make(With(Bfloat16Products::kOneDnn));
  if (!HasOneDnn()) {
    EXPECT_TRUE(HasReason(engine.status(), ErrorReason::kFeatureNotBuilt)) << engine.status();
    EXPECT_TRUE(RunOnce(problem).BitwiseEquals(by_openblas));
    GTEST_SKIP() << cpu::GetBfloat16Library().why_not;
  }
  EXPECT_EQ((*engine)->options().bfloat16_products, Bfloat16Products::kOneDnn);
  const Outcome by_onednn = RunOnce(problem, With(Bfloat16Products::kOneDnn));
  EXPECT_FALSE(by_onednn.BitwiseEquals(by_openblas));
  EXPECT_TRUE(RunOnce(problem, With(Bfloat16Products::kOneDnn)).BitwiseEquals(by_onednn));
  EngineOptions deterministic;
  deterministic.deterministic = true;  // takes no look at the clock
  EXPECT_TRUE(RunOnce(problem, deterministic).BitwiseEquals(by_onednn));
}

// A survivor's bf16 rounding is common to its row. An entry keeps its expected value only if it survives with the probability
// |entry| / survivor, of the survivor that the products take. With the identity for hidden states grad_weight has every entry.
TEST(CpuProducts, EntriesSurviveInProportionToTheRoundedSurvivor) {
  if (!HasOneDnn()) GTEST_SKIP() << cpu::GetBfloat16Library().why_not;
  constexpr int64_t kRows = 128;
  constexpr uint64_t kSeed = 77;
  constexpr int64_t kMostOfFp32 = 4;  // draws between the ratio in fp64 and in fp32; of unrounded survivors more than 20 differ
  for (const bool jsd : {false, true}) {
    const ProblemOptions options =
        WithType({.rows = kRows, .vocab_size = 1100, .hidden_size = kRows, .ignored_share = 0, .token_weights = true, .jsd = jsd},
                 DataType::kBFloat16);
    Problem problem = MakeProblem(options);
    problem.hidden.assign(kRows * kRows, 0);
    for (size_t i = 0; i < kRows; ++i) problem.hidden[i * (kRows + 1)] = 1;
    if (jsd) problem.terms[0].teacher_hidden = problem.hidden;
    const std::vector<float> entries = RunOnce(problem, With(Bfloat16Products::kOpenBlas)).gradients[0].weight;
    problem.terms[0].gradient_resolution = 0x1p-9;
    problem.terms[0].dither_seed = kSeed;
    const std::vector<float> dithered = RunOnce(problem, With(Bfloat16Products::kOneDnn)).gradients[0].weight;
    int64_t small = 0, other_draws = 0;
    for (int64_t row = 0; row < kRows; ++row) {
      float survivor = INFINITY;
      for (size_t i = static_cast<size_t>(row); i < dithered.size(); i += kRows) {
        if (dithered[i] != 0) survivor = std::min(survivor, std::abs(dithered[i]));
      }
      const DitherKey key = MakeDitherKey(kSeed, row);
      for (size_t i = static_cast<size_t>(row); i < dithered.size(); i += kRows) {
        const float ratio = std::abs(entries[i]) / survivor;
        if (!(ratio < 0.999F)) continue;
        ++small;
        if (DitherSurvives(ratio, key, static_cast<uint32_t>(i / kRows)) != (dithered[i] != 0)) ++other_draws;
      }
    }
    EXPECT_GT(small, kRows * options.vocab_size / 2);
    EXPECT_LE(other_draws, kMostOfFp32) << (jsd ? "JSD" : "cross entropy");
  }
}

// The rows of a sum are those of its operands, wherever they lie and whatever lies between them, and on any thread.
TEST(CpuProducts, BitsDoNotDependOnStridesAlignmentOrThread) {
  if (!HasOneDnn()) GTEST_SKIP() << cpu::GetBfloat16Library().why_not;
  constexpr int64_t kM = 37;
  constexpr int64_t kN = 61;
  constexpr int64_t kK = 530;
  std::mt19937_64 random(1);
  const std::vector<uint8_t> values_a =
      reference::Encode(DataType::kBFloat16, RandomValues(random, kM * kK, 1, DataType::kBFloat16));
  const std::vector<uint8_t> values_b =
      reference::Encode(DataType::kBFloat16, RandomValues(random, kN * kK, 1, DataType::kBFloat16));
  const auto product = [&](int64_t padding, int64_t offset) {
    const int64_t stride = kK + padding;
    std::vector<uint16_t> a(static_cast<size_t>(offset + kM * stride));
    std::vector<uint16_t> b(static_cast<size_t>(offset + kN * stride));
    for (int64_t i = 0; i < kM; ++i)
      std::memcpy(&a[static_cast<size_t>(offset + i * stride)], &values_a[static_cast<size_t>(2 * i * kK)], 2 * kK);
    for (int64_t j = 0; j < kN; ++j)
      std::memcpy(&b[static_cast<size_t>(offset + j * stride)], &values_b[static_cast<size_t>(2 * j * kK)], 2 * kK);
    std::vector<float> c(static_cast<size_t>(offset + kM * (kN + padding)));
    cpu::MultiplyTransposed(kM, kN, kK, {a.data() + offset, stride}, {b.data() + offset, stride},
                            {c.data() + offset, kN + padding});
    std::vector<float> packed;
    for (int64_t i = 0; i < kM; ++i) {
      const auto row = c.begin() + offset + i * (kN + padding);
      packed.insert(packed.end(), row, row + kN);
    }
    return packed;
  };
  const std::vector<float> expected = product(0, 0);
  for (const int64_t padding : {1, 14, 494}) {
    for (const int64_t offset : {1, 8}) EXPECT_EQ(product(padding, offset), expected) << padding << " " << offset;
  }
  std::vector<float> on_another_thread;
  std::thread([&] { on_another_thread = product(0, 0); }).join();
  EXPECT_EQ(on_another_thread, expected);
}

TEST(CpuProducts, HaveARateWhereTheyAreSupported) {
  EXPECT_GT(MeasureCpuProductRate(1, Bfloat16Products::kOpenBlas), 1e8);
  EXPECT_EQ(MeasureCpuProductRate(1, Bfloat16Products::kOneDnn) > 1e8, HasOneDnn());
}

}  // namespace
}  // namespace headwater::testing
