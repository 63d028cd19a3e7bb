// Random combinations of options, shapes, types and partitions against fp64, for unforeseen cases. Seeded: a failure names its
// case.
#include <cstdlib>
#include <random>
#include <sstream>

#include "gtest/gtest.h"
#include "tests/kernels/support/comparison.h"

namespace headwater::testing {
namespace {

// HEADWATER_RANDOM_CASES runs another number of cases, HEADWATER_RANDOM_SEED begins at another one.
uint64_t FromEnvironment(const char* name, uint64_t standard) {
  const char* value = std::getenv(name);
  return value == nullptr ? standard : std::strtoull(value, nullptr, 10);
}

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  int64_t Between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
  double Real(double low, double high) { return std::uniform_real_distribution<double>(low, high)(random_); }
  bool Maybe(double probability) { return Real(0, 1) < probability; }
  DataType Type() { return static_cast<DataType>(Maybe(0.5) ? 1 : Between(1, 3)); }

 private:
  std::mt19937_64 random_;
};

ProblemOptions DrawProblem(Draw& draw, uint64_t seed) {
  ProblemOptions options = {.rows = draw.Between(1, 60), .seed = seed};
  // At least two common classes: with one, the exact gradient of the divergence is 0, and there is no relative error.
  options.vocab_size = draw.Maybe(0.2) ? draw.Between(2, 9) : draw.Between(10, 400);
  options.hidden_size = draw.Between(1, 70);
  options.head_type = draw.Type();
  options.hidden_type = draw.Type();
  options.bias = draw.Maybe(0.5);
  options.logit_scale = draw.Maybe(0.3) ? draw.Real(-1.5, 1.5) : 1;
  options.softcap = draw.Maybe(0.3) ? draw.Real(2, 30) : 0;
  options.valid_vocab_size = draw.Maybe(0.3) ? draw.Between(2, options.vocab_size) : 0;
  options.logit_spread = draw.Real(0.1, 8);
  options.ignored_share = draw.Maybe(0.5) ? draw.Real(0, 1) : 0;
  options.ignore_index = draw.Maybe(0.2) ? static_cast<int32_t>(draw.Between(0, 5)) : kDefaultIgnoreIndex;
  options.token_weights = draw.Maybe(0.4);
  options.loss_scale = draw.Maybe(0.5) ? draw.Real(-2, 2) : 1;
  options.grad_hidden_scale = draw.Maybe(0.3) ? draw.Real(-2, 2) : 1;
  options.jsd = draw.Maybe(0.5);
  if (options.jsd) {
    const double betas[] = {0, 0.1, 0.5, 0.9, 1, draw.Real(0, 1)};
    options.beta = betas[draw.Between(0, 5)];
    options.student_temperature = draw.Maybe(0.5) ? draw.Real(0.5, 3) : 1;
    options.teacher_temperature = draw.Maybe(0.5) ? draw.Real(0.5, 3) : 1;
    options.hard_loss_weight = draw.Maybe(0.4) ? draw.Real(0, 1) : 0;
    options.with_targets = options.hard_loss_weight > 0 || draw.Maybe(0.7);
    options.teacher_hidden_size = draw.Maybe(0.5) ? draw.Between(1, 50) : 0;
    options.teacher_vocab_size = draw.Maybe(0.3) ? draw.Between(2, 300) : 0;
  }
  if (!options.jsd || options.hard_loss_weight > 0) {
    options.label_smoothing = draw.Maybe(0.3) ? draw.Real(0, 0.5) : 0;
    options.z_loss = draw.Maybe(0.3) ? draw.Real(0, 0.01) : 0;
    options.class_weights = draw.Maybe(0.3);
  }
  if (!options.jsd && draw.Maybe(0.5)) {
    options.negative_class_weights = draw.Maybe(0.5);
    options.temperature = draw.Maybe(0.6) ? draw.Real(0.3, 4) : 1;
    options.token_scaling = draw.Maybe(0.2);
    options.entropy_factors = draw.Maybe(0.5);
    options.lse_factors = draw.Maybe(0.5);
  }
  return options;
}

TEST(RandomCases, MatchFp64) {
  const uint64_t first_seed = FromEnvironment("HEADWATER_RANDOM_SEED", 1000);
  const uint64_t last_seed = first_seed + FromEnvironment("HEADWATER_RANDOM_CASES", 300);
  for (uint64_t seed = first_seed; seed < last_seed && !HasFailure(); ++seed) {
    Draw draw(seed);
    const ProblemOptions options = DrawProblem(draw, seed);
    EngineOptions engine_options = {.shard_count = static_cast<int32_t>(draw.Between(1, 5))};
    if (draw.Maybe(0.5)) {
      for (int32_t i = 0; i < engine_options.shard_count; ++i) engine_options.shard_weights.push_back(draw.Between(1, 9));
    }
    engine_options.token_chunk_rows = draw.Maybe(0.5) ? draw.Between(1, 30) : 0;
    engine_options.thread_count = static_cast<int32_t>(draw.Between(0, 3));
    std::ostringstream trace;
    trace << "HEADWATER_RANDOM_SEED=" << seed << " HEADWATER_RANDOM_CASES=1: " << (options.jsd ? "JSD, N=" : "cross entropy, N=")
          << options.rows << " V=" << options.vocab_size << " H=" << options.hidden_size << ", " << DataTypeName(options.head_type)
          << " head, " << DataTypeName(options.hidden_type) << " rows, " << engine_options.shard_count << " shards";
    SCOPED_TRACE(trace.str());
    ExpectEngineMatches(MakeProblem(options), engine_options);
  }
}

}  // namespace
}  // namespace headwater::testing
