// The common parts of the engine's benchmark programs: a micro-batch of cross entropy at one shape, and interleaved timing.
#ifndef HEADWATER_TESTS_BENCH_ENGINE_BENCH_SUPPORT_H_
#define HEADWATER_TESTS_BENCH_ENGINE_BENCH_SUPPORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"

namespace headwater::bench {

// From the command line: --measure=one of the program's, --type=float32|bfloat16, --rows, --hidden, --vocab, --rounds.
struct Settings {
  std::string measure;
  DataType type = DataType::kFloat32;
  int64_t rows = 512;
  int64_t hidden_size = 1024;
  int64_t vocab_size = 32000;
  int rounds = 9;
};

// `measures` are the values of --measure, the first one the default. Exits with a message for an unknown flag.
Settings ParseFlags(int argc, char** argv, const std::vector<std::string>& measures);

// Prints the message and exits with 1.
[[noreturn]] void Fail(const std::string& message);
void Check(const absl::Status& status);
template <typename T>
T ValueOrFail(absl::StatusOr<T> result) {
  Check(result.status());
  return *std::move(result);
}

// Normally distributed, from a fixed seed.
std::vector<float> RandomFloats(int64_t count, float standard_deviation, uint64_t seed);

// A micro-batch's rows, in the settings' type, with the term over them.
class Rows {
 public:
  Rows(const Settings& settings, DataType type);
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  RowsView hidden() const;
  MutableRowsView grad_hidden();
  // The cross entropy of all rows; valid as long as the object. `head` may be null.
  LossTerm term(EngineHead* head) const;
  // Fails unless the sums can be those of the rows.
  void ExpectPlausible(const LossSums& sums) const;

 private:
  const int64_t row_count_;
  const int64_t hidden_size_;
  const DataType type_;
  std::vector<uint8_t> hidden_;
  std::vector<uint8_t> grad_hidden_;
  std::vector<int32_t> targets_;
};

// A trainable head without optimizer.
HeadSpec SpecOf(const Settings& settings, DataType type, int32_t staging_slots = 0);
// Calls set(first element, count, data) for every row of the weight: no second copy of it is ever resident.
void ForEachWeightRow(const HeadSpec& spec, const std::function<void(int64_t, int64_t, const void*)>& set);
std::unique_ptr<EngineHead> MakeHead(LossEngine& engine, const HeadSpec& spec);
// Forward and backward with grad_hidden and grad_weight.
MicroBatchResult Compute(LossEngine& engine, EngineHead& head, Rows& rows, GradWeightMode mode = GradWeightMode::kAccumulate);

struct Candidate {
  std::string name;
  std::function<void()> body;
  std::vector<double> seconds;  // filled in
};

// Times the candidates in turn, `rounds` times after one that warms up (first touch of buffers, clock), every other round in
// reverse. The preceding candidate and a drift of the clock then affect all of them alike.
void TimeInterleaved(int rounds, std::vector<Candidate>* candidates);
// Prints the rows `name_seconds`, its median, and `name_spread`.
void PrintTimes(const Candidate& candidate);
// Median over the rounds of a's seconds / b's.
double MedianRatio(const Candidate& a, const Candidate& b);
// Prints shape and rounds to standard error.
void PrintSettings(const Settings& settings, int32_t thread_count);

}  // namespace headwater::bench

#endif  // HEADWATER_TESTS_BENCH_ENGINE_BENCH_SUPPORT_H_
