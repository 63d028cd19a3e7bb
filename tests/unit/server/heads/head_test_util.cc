#include "head_test_util.h"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace headwater::heads {

Payload RandomPayload(uint64_t seed, int64_t row_count, int64_t vocab_size, int64_t hidden_size) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Payload payload;
  for (int64_t row = 0; row < row_count; ++row) {
    payload.targets.push_back(row % 5 == 4 ? kDefaultIgnoreIndex
                                           : static_cast<int32_t>(random() % static_cast<uint64_t>(vocab_size)));
    for (int64_t i = 0; i < hidden_size; ++i) payload.hidden.push_back(normal(random));
  }
  return payload;
}

Digest DigestOf(const Payload& payload) {
  const auto hash = [](const void* data, size_t bytes) {
    return std::hash<std::string_view>()(std::string_view(static_cast<const char*>(data), bytes));
  };
  const size_t parts[2] = {hash(payload.hidden.data(), payload.hidden.size() * sizeof(float)),
                           hash(payload.targets.data(), payload.targets.size() * sizeof(int32_t))};
  Digest digest;
  static_assert(sizeof(parts) == sizeof(digest));
  std::memcpy(digest.data(), parts, sizeof(parts));
  return digest;
}

std::shared_ptr<scheduler::Sequencer> TestSequencer() {
  static auto* const sequencer = new std::shared_ptr<scheduler::Sequencer>(std::make_shared<scheduler::Sequencer>());
  return *sequencer;
}

MicroBatchCall::MicroBatchCall(const std::shared_ptr<Head>& head, int64_t step, int64_t micro_batch, Payload payload)
    : payload_(std::move(payload)), grad_hidden_(payload_.hidden.size()) {
  const int64_t row_count = static_cast<int64_t>(payload_.targets.size());
  const int64_t width = head->spec().hidden_size;
  submission_.backward = true;
  submission_.digest = DigestOf(payload_);
  submission_.hidden = {payload_.hidden.data(), row_count, width, DataType::kFloat32};
  submission_.grad_hidden = {grad_hidden_.data(), row_count, width, DataType::kFloat32};
  SubmittedTerm& term = submission_.terms.emplace_back();
  term.head = head;
  term.term.row_count = row_count;
  term.term.targets = payload_.targets;
  if (!head->spec().trainable) return;
  submission_.micro_batch = micro_batch;
  term.head_epoch = head->Describe().epoch;
  term.step = step;
}

MicroBatchCall& MicroBatchCall::Explicit() {
  submission_.explicit_commit = true;
  return *this;
}

MicroBatchCall& MicroBatchCall::Refuse() {
  submission_.refuse_non_finite = true;
  return *this;
}

MicroBatchCall& MicroBatchCall::FirstWins() {
  submission_.first_wins = true;
  return *this;
}

MicroBatchCall& MicroBatchCall::ForwardOnly() {
  submission_.backward = false;
  submission_.micro_batch.reset();
  submission_.grad_hidden.data = nullptr;
  term().step.reset();
  return *this;
}

MicroBatchCall& MicroBatchCall::Attempt(int64_t attempt) {
  submission_.attempt = attempt;
  return *this;
}

MicroBatchCall& MicroBatchCall::Session(const std::optional<SessionId>& session) {
  submission_.session = session;
  return *this;
}

MicroBatchCall& MicroBatchCall::Held(Hold hold) {
  submission_.explicit_commit = submission_.late_token_factors = true;
  submission_.hold = std::move(hold);
  return *this;
}

MicroBatchCall& MicroBatchCall::Teacher(const std::shared_ptr<Head>& teacher) {
  term().teacher_head = teacher;
  term().term.loss = JsdSpec();
  term().term.teacher_hidden = submission_.hidden;
  return *this;
}

absl::StatusOr<SubmissionOutcome> MicroBatchCall::Run(LossEngine& engine, const std::function<bool()>& cancelled) {
  return Submit(submission_, engine, cancelled);
}

ApplyArguments Rate(double learning_rate, std::optional<double> max_grad_norm) {
  ApplyArguments arguments;
  arguments.learning_rate = learning_rate;
  arguments.max_grad_norm = max_grad_norm;
  return arguments;
}

HeadSpec FrozenSpec() {
  HeadSpec spec = SpecWith(&HeadSpec::staging_slots, 0);
  spec.trainable = false;
  spec.optimizer = std::monostate();
  return spec;
}

std::shared_ptr<Head> MakeReadyHead(LossEngine& engine, const HeadSpec& spec, const std::string& id, const HeadLimits& limits) {
  absl::StatusOr<std::shared_ptr<Head>> head = Head::Create({kDefaultTenant, id}, spec, engine, limits, TestSequencer());
  EXPECT_OK(head);
  std::vector<float> weight(static_cast<size_t>(spec.vocab_size * spec.hidden_size));
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(i % 7);
  const std::vector<float> bias(spec.has_bias ? static_cast<size_t>(spec.vocab_size) : 0, 1.0f);
  EXPECT_OK(SetWeights(**head, weight, bias));
  return *head;
}

std::shared_ptr<Head> MakeRandomHead(LossEngine& engine, const HeadSpec& spec, const std::string& id, const HeadLimits& limits) {
  const std::shared_ptr<Head> head = MakeReadyHead(engine, spec, id, limits);
  SetRandomWeights(*head, 7);
  return head;
}

void SetRandomWeights(Head& head, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, 0.3F);
  const HeadSpec& spec = head.spec();
  std::vector<float> weight(static_cast<size_t>(spec.vocab_size * spec.hidden_size));
  std::vector<float> bias(spec.has_bias ? static_cast<size_t>(spec.vocab_size) : 0);
  for (std::vector<float>* values : {&weight, &bias}) std::generate(values->begin(), values->end(), [&] { return normal(random); });
  EXPECT_OK(SetWeights(head, weight, bias));
}

absl::Status SetWeights(Head& head, const std::vector<float>& weight, const std::vector<float>& bias) {
  const absl::StatusOr<HeadInfo> set = head.SetTensor(head.Describe().epoch, HeadTensor::kWeight, DataType::kFloat32, weight.data(),
                                                      static_cast<int64_t>(weight.size() * sizeof(float)));
  if (!set.ok() || bias.empty()) return set.status();
  return head
      .SetTensor(set->epoch, HeadTensor::kBias, DataType::kFloat32, bias.data(), static_cast<int64_t>(bias.size() * sizeof(float)))
      .status();
}

std::vector<float> ReadGradWeight(const Head& head) {
  const int64_t count = head.spec().vocab_size * head.spec().hidden_size;
  std::vector<float> values(static_cast<size_t>(count));
  EXPECT_OK(head.ReadGradient(KeyOf(head), HeadTensor::kGradWeight, 0, count, values.data()));
  return values;
}

std::vector<float> ReadWeight(const Head& head) {
  const int64_t count = head.spec().vocab_size * head.spec().hidden_size;
  std::vector<float> values(static_cast<size_t>(count));
  EXPECT_OK(head.ReadWeights(HeadTensor::kMasterWeight, 0, count, values.data(), std::nullopt));
  return values;
}

std::thread RunUntilItSleeps(std::function<void()> call) {
  std::atomic<pid_t> id = 0;
  std::thread thread([&id, call = std::move(call)] {
    id = gettid();
    call();
  });
  // Several looks in a row: memory may have to be waited for as well, but not for long.
  int asleep = 0;
  for (const absl::Time end = absl::Now() + absl::Seconds(20); asleep < 3 && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(1));
    if (id == 0) continue;
    std::ifstream file(absl::StrCat("/proc/self/task/", id.load(), "/stat"));
    const std::string stat(std::istreambuf_iterator<char>(file), {});
    const size_t name_end = stat.rfind(") ");  // then comes the state
    asleep = name_end != std::string::npos && stat[name_end + 2] == 'S' ? asleep + 1 : 0;
  }
  EXPECT_EQ(asleep, 3) << "the call has not waited";
  return thread;
}

ContributionState StateOf(const Head& head, int64_t micro_batch) {
  const auto steps = head.GetSteps(head.Describe().epoch);
  EXPECT_OK(steps);
  const auto found = steps->first.micro_batches.find(micro_batch);
  return found == steps->first.micro_batches.end() ? ContributionState::kNone : found->second.state;
}

void AddSecondTerm(MicroBatchCall& call, const std::shared_ptr<Head>& other) {
  SubmittedTerm term = call.term();
  term.head = other;
  term.head_epoch = other->Describe().epoch;
  term.step = KeyOf(*other).step;
  call.submission().terms.push_back(term);
}

TensorUpdate Filled(HeadTensor tensor, float value, const std::function<absl::Status(int64_t start)>& before) {
  return {tensor, DataType::kFloat32, [value, before](int64_t start, int64_t element_count, void* out) {
            std::fill_n(static_cast<float*>(out), element_count, value);
            return before != nullptr ? before(start) : absl::OkStatus();
          }};
}

void SetSlowly(Head& head, ThreadGate& gate) {
  TensorUpdate update = Filled(HeadTensor::kWeight, 1, [&gate](int64_t) {
    gate.Stop();
    return absl::OkStatus();
  });
  update.in_memory = true;
  EXPECT_OK(head.SetTensors(head.Describe().epoch, {update}));
}

StepKey KeyOf(const Head& head) {
  const HeadInfo info = head.Describe();
  return {info.epoch, info.open_step.value_or(0)};
}

}  // namespace headwater::heads
