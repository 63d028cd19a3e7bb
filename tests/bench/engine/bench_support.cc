#include "tests/bench/engine/bench_support.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "kernels/reference/storage.h"
#include "tests/bench/common/flags.h"
#include "tests/bench/common/statistics.h"

namespace headwater::bench {
namespace {

double Seconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

void Fail(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(1);
}

void Check(const absl::Status& status) {
  if (!status.ok()) Fail(status.ToString());
}

Settings ParseFlags(int argc, char** argv, const std::vector<std::string>& measures) {
  Settings settings;
  settings.measure = measures.front();
  std::string type = "float32";
  Flags flags;
  flags.Choice("--measure", measures, &settings.measure);
  flags.Choice("--type", {"float32", "bfloat16"}, &type);
  flags.Number("--rounds", 1, 1000, &settings.rounds);
  flags.Number("--rows", 1, 1 << 20, &settings.rows);
  flags.Number("--hidden", 1, 1 << 16, &settings.hidden_size);
  flags.Number("--vocab", 1, 1 << 20, &settings.vocab_size);
  flags.Parse(argc, argv);
  settings.type = type == "float32" ? DataType::kFloat32 : DataType::kBFloat16;
  return settings;
}

std::vector<float> RandomFloats(int64_t count, float standard_deviation, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, standard_deviation);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

Rows::Rows(const Settings& settings, DataType type) : row_count_(settings.rows), hidden_size_(settings.hidden_size), type_(type) {
  const std::vector<float> hidden = RandomFloats(row_count_ * hidden_size_, 1, 2);
  hidden_ = reference::Encode(type, std::vector<double>(hidden.begin(), hidden.end()));
  grad_hidden_.resize(hidden_.size());
  for (int64_t i = 0; i < row_count_; ++i) targets_.push_back(static_cast<int32_t>((i * 7919) % settings.vocab_size));
}

RowsView Rows::hidden() const { return {hidden_.data(), row_count_, hidden_size_, type_}; }

MutableRowsView Rows::grad_hidden() { return {grad_hidden_.data(), row_count_, hidden_size_, type_}; }

LossTerm Rows::term(EngineHead* head) const {
  LossTerm term;
  term.head = head;
  term.row_count = row_count_;
  term.targets = targets_;
  return term;
}

void Rows::ExpectPlausible(const LossSums& sums) const {
  if (sums.valid_token_count != row_count_ || !(sums.loss_sum > 0)) Fail("the engine computed nonsense");
}

HeadSpec SpecOf(const Settings& settings, DataType type, int32_t staging_slots) {
  HeadSpec spec;
  spec.vocab_size = settings.vocab_size;
  spec.hidden_size = settings.hidden_size;
  spec.data_type = type;
  spec.transform.valid_vocab_size = settings.vocab_size;
  spec.trainable = true;
  spec.staging_slots = staging_slots;
  return spec;
}

void ForEachWeightRow(const HeadSpec& spec, const std::function<void(int64_t, int64_t, const void*)>& set) {
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal(0, 0.05);
  std::vector<double> row(static_cast<size_t>(spec.hidden_size));
  for (int64_t v = 0; v < spec.vocab_size; ++v) {
    for (double& value : row) value = normal(random);
    set(v * spec.hidden_size, spec.hidden_size, reference::Encode(spec.data_type, row).data());
  }
}

std::unique_ptr<EngineHead> MakeHead(LossEngine& engine, const HeadSpec& spec) {
  std::unique_ptr<EngineHead> head = ValueOrFail(engine.CreateHead(spec));
  ForEachWeightRow(spec, [&head](int64_t start, int64_t count, const void* data) {
    Check(head->WriteTensor(HeadTensor::kWeight, start, count, data));
  });
  Check(head->ZeroGradient());
  return head;
}

MicroBatchResult Compute(LossEngine& engine, EngineHead& head, Rows& rows, GradWeightMode mode) {
  const LossTerm term = rows.term(&head);
  MicroBatch micro_batch = {.hidden = rows.hidden(),
                            .terms = absl::MakeConstSpan(&term, 1),
                            .backward = true,
                            .grad_hidden = rows.grad_hidden(),
                            .grad_weight = mode};
  MicroBatchResult result = ValueOrFail(engine.Compute(micro_batch));
  rows.ExpectPlausible(result.terms[0]);
  return result;
}

void TimeInterleaved(int rounds, std::vector<Candidate>* candidates) {
  for (int round = 0; round <= rounds; ++round) {
    for (size_t i = 0; i < candidates->size(); ++i) {
      Candidate& candidate = (*candidates)[round % 2 == 0 ? i : candidates->size() - 1 - i];
      const double seconds = Seconds(candidate.body);
      if (round > 0) candidate.seconds.push_back(seconds);
    }
  }
}

void PrintTimes(const Candidate& candidate) {
  std::printf("%s_seconds,%.4f,s\n", candidate.name.c_str(), Median(candidate.seconds));
  std::printf("%s_spread,%.3f,(max-min)/median\n", candidate.name.c_str(), Spread(candidate.seconds));
}

double MedianRatio(const Candidate& a, const Candidate& b) {
  std::vector<double> ratios;
  for (size_t round = 0; round < a.seconds.size(); ++round) ratios.push_back(a.seconds[round] / b.seconds[round]);
  return Median(ratios);
}

void PrintSettings(const Settings& settings, int32_t thread_count) {
  std::fprintf(stderr, "N=%lld H=%lld V=%lld, %d rounds, %d threads\n", static_cast<long long>(settings.rows),
               static_cast<long long>(settings.hidden_size), static_cast<long long>(settings.vocab_size), settings.rounds,
               thread_count);
}

}  // namespace headwater::bench
