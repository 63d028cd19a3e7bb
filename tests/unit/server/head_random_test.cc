// Random sequences of calls on a head, compared after every call with a model that is written on its own.
//
// The model is sequential and obvious: it keeps micro-batches in a map, the gradient and the weights as whole numbers, and says for
// every call which reason it must end with. A failing seed is run again by
//
//   HEADWATER_RANDOM_SEED=<seed> head_random_test --gtest_filter='*AgreesWithTheModel*'
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <random>

#include "head_test_util.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/head.h"
#include "temporary_directory.h"

namespace headwater::heads {
namespace {

using checkpoint::CheckpointStore;
using headwater::testing::FakeEngine;
using headwater::testing::MicroBatchCall;
using headwater::testing::Payload;
using headwater::testing::ReasonOf;
using headwater::testing::SmallSpec;
using headwater::testing::TemporaryDirectory;

constexpr int kOperationsPerSeed = 6000;
constexpr int64_t kVocab = 4;
constexpr int64_t kWidth = 2;
constexpr int kSlots = 2;
constexpr int64_t kIds = 6;         // micro-batch ids in use
constexpr int64_t kMaxRecords = 5;  // fewer than ids, so that the limit is met
using Matrix = std::vector<double>;

// What one micro-batch brings.
struct ModelPayload {
  int number = 0;  // identifies it
  std::vector<int> hidden;
  std::vector<int> targets;
};

struct ModelBatch {
  char state = ' ';  // 'S' staged, 'C' committed, 'D' discarded
  ModelPayload payload;
  double factor = 1;
};

struct ModelStep {
  int64_t number = 0;
  char state = 'O';  // 'O' open, 'S' sealed, 'A' applied, 'D' discarded
  std::map<int64_t, ModelBatch> batches;
};

struct ModelCheckpoint {
  Matrix weight;
  int64_t step = 0;
};

class Sequence {
 public:
  explicit Sequence(uint64_t seed) : random_(seed), store_(*CheckpointStore::Open(directory_.path())) {
    HeadSpec spec = SmallSpec(kVocab, kWidth);
    spec.staging_slots = kSlots;
    HeadLimits limits;
    limits.max_step_micro_batches = kMaxRecords;
    head_ = *Head::Create({kDefaultTenant, "random"}, spec, engine_, limits);
    epoch_ = head_->Describe().epoch;
    EXPECT_OK(Set(std::vector<float>(kVocab * kWidth)));
    weight_.assign(kVocab * kWidth, 0);
    gradient_.assign(kVocab * kWidth, 0);
    version_ = 1;
    for (int i = 0; i < 12; ++i) payloads_.push_back(RandomPayload(i));
  }

  // One random call and the comparison after it.
  void Step(int number) {
    const int operation = Pick(100);
    if (operation < 42) {
      DoSubmit();
    } else if (operation < 56) {
      DoCommit();
    } else if (operation < 64) {
      DoDiscard();
    } else if (operation < 75) {
      DoSeal();
    } else if (operation < 86) {
      DoApply();
    } else if (operation < 90) {
      DoDiscardGradient();
    } else if (operation < 93) {
      DoSetWeights();
    } else if (operation < 96) {
      DoSave();
    } else if (operation < 98) {
      DoRestore();
    } else {
      DoForward();
    }
    Compare(number);
  }
  const std::string& last() const { return last_; }
  const std::map<std::string, int>& outcomes() const { return outcomes_; }

 private:
  int Pick(int count) { return static_cast<int>(random_() % static_cast<uint64_t>(count)); }
  bool OneIn(int count) { return Pick(count) == 0; }

  ModelPayload RandomPayload(int number) {
    ModelPayload payload;
    payload.number = number;
    const int rows = Pick(4);  // 0 rows too
    for (int row = 0; row < rows; ++row) {
      payload.targets.push_back(OneIn(6) ? -100 : Pick(kVocab));
      for (int64_t i = 0; i < kWidth; ++i) payload.hidden.push_back(Pick(7) - 3);
    }
    // Otherwise empty payloads would be equal to each other.
    if (rows == 0) {
      payload.targets.push_back(-100);
      for (int64_t i = 0; i < kWidth; ++i) payload.hidden.push_back(100 + number);
    }
    return payload;
  }
  static Payload ToPayload(const ModelPayload& payload) {
    Payload rows;
    rows.hidden.assign(payload.hidden.begin(), payload.hidden.end());
    rows.targets.assign(payload.targets.begin(), payload.targets.end());
    return rows;
  }
  static Matrix GradientOf(const ModelPayload& payload) {
    Matrix gradient(kVocab * kWidth);
    for (size_t row = 0; row < payload.targets.size(); ++row) {
      if (payload.targets[row] < 0) continue;
      for (int64_t i = 0; i < kWidth; ++i) {
        gradient[static_cast<size_t>(payload.targets[row] * kWidth + i)] += payload.hidden[row * kWidth + static_cast<size_t>(i)];
      }
    }
    return gradient;
  }
  void AddToGradient(const ModelPayload& payload, double factor) {
    const Matrix gradient = GradientOf(payload);
    for (size_t i = 0; i < gradient.size(); ++i) gradient_[i] += factor * gradient[i];
  }

  // Mostly the right ones, sometimes not.
  StepKey RandomKey() {
    StepKey key{epoch_, open_.number};
    if (OneIn(25))
      key.epoch = OneIn(2) || old_epochs_.empty() ? NewEpoch()
                                                  : old_epochs_[static_cast<size_t>(Pick(static_cast<int>(old_epochs_.size())))];
    if (OneIn(15)) key.step += Pick(3) - 1;
    return key;
  }
  // The reason that a call with this key ends with whatever else it says; empty if none.
  std::string KeyProblem(const StepKey& key) const {
    if (key.epoch != epoch_) return "EPOCH_FENCED";
    if (key.step != open_.number) return "STEP_MISMATCH";
    return "";
  }
  void Expect(const std::string& what, const std::string& expected, const std::string& actual) {
    last_ = what + " -> " + actual;
    ++outcomes_[what.substr(0, what.find(' ')) + ":" + actual];
    EXPECT_EQ(actual, expected) << what;
  }
  int StagedCount() const {
    int count = 0;
    for (const auto& [id, batch] : open_.batches) count += batch.state == 'S';
    return count;
  }

  void DoSubmit() {
    const int64_t id = Pick(kIds);
    ModelPayload payload = payloads_[static_cast<size_t>(Pick(12))];
    const auto known = open_.batches.find(id);
    // A repeat, as a client sends it.
    if (known != open_.batches.end() && known->second.state != 'D' && !OneIn(3)) payload = known->second.payload;
    const bool is_explicit = OneIn(2);
    const bool refuse = OneIn(5);
    const bool first_wins = OneIn(4);
    const bool cancel = OneIn(12);
    StepKey key = RandomKey();
    MicroBatchCall call(head_, key.step, id, ToPayload(payload));
    call.term().head_epoch = key.epoch;
    if (is_explicit) call.Explicit();
    if (refuse) call.Refuse();
    if (first_wins) call.FirstWins();
    const absl::StatusOr<SubmissionOutcome> outcome = call.Run(engine_, [cancel] { return cancel; });

    std::string expected = KeyProblem(key);
    bool adds = false;
    if (expected.empty() && known != open_.batches.end()) {
      if (known->second.state == 'D') {
        expected = "MICRO_BATCH_DISCARDED";
      } else if (known->second.payload.number != payload.number && !first_wins) {
        expected = "MICRO_BATCH_CONFLICT";
      }
    } else if (expected.empty()) {
      adds = true;
      if (open_.state != 'O') {
        expected = "STEP_SEALED";
      } else if (static_cast<int64_t>(open_.batches.size()) >= kMaxRecords) {
        expected = "LIMIT_EXCEEDED";
      }
    }
    if (expected.empty() && cancel) expected = "CANCELLED";
    if (expected.empty() && adds && (is_explicit || refuse) && StagedCount() >= kSlots) expected = "STAGING_FULL";
    if (expected.empty()) expected = "OK";
    Expect("submit " + std::to_string(id), expected, ReasonOf(outcome));
    if (!outcome.ok()) return;
    if (adds) {
      open_.batches[id] = {is_explicit ? 'S' : 'C', payload, 1};
      if (!is_explicit) AddToGradient(payload, 1);
    }
    const ModelBatch& batch = open_.batches.at(id);
    EXPECT_EQ(outcome->state, batch.state == 'S' ? ContributionState::kStaged : ContributionState::kCommitted);
    EXPECT_EQ(outcome->replayed, !adds && batch.payload.number == payload.number);
    EXPECT_EQ(outcome->payload_differs, !adds && batch.payload.number != payload.number);
    EXPECT_EQ(outcome->weight_versions, std::vector<int64_t>{version_});
    std::vector<float> grad_hidden;
    for (size_t row = 0; row < payload.targets.size(); ++row) {
      for (size_t i = 0; i < kWidth; ++i) {
        grad_hidden.push_back(payload.targets[row] < 0 ? 0.0f : static_cast<float>(payload.hidden[row * kWidth + i]));
      }
    }
    EXPECT_EQ(call.grad_hidden(), grad_hidden);
  }

  void DoCommit() {
    const int64_t id = Pick(kIds);
    constexpr double kFactors[] = {1, 1, 2, -1, 0.5, 0};
    double factor = kFactors[Pick(6)];
    const auto known = open_.batches.find(id);
    if (known != open_.batches.end() && known->second.state == 'C' && OneIn(2)) factor = known->second.factor;
    if (OneIn(30)) factor = std::nan("");
    const StepKey key = RandomKey();
    const absl::StatusOr<bool> committed = head_->Commit(key, id, 0, factor);
    std::string expected = KeyProblem(key);
    bool now = false;
    if (expected.empty() && std::isnan(factor)) expected = "INVALID_FIELD";
    if (expected.empty()) {
      if (known == open_.batches.end()) {
        expected = "MICRO_BATCH_NOT_FOUND";
      } else if (known->second.state == 'D') {
        expected = "MICRO_BATCH_DISCARDED";
      } else if (known->second.state == 'C') {
        expected = known->second.factor == factor ? "OK" : "MICRO_BATCH_CONFLICT";
      } else {
        expected = "OK";
        now = true;
      }
    }
    Expect("commit " + std::to_string(id), expected, ReasonOf(committed));
    if (!committed.ok()) return;
    EXPECT_EQ(*committed, now);
    if (!now) return;
    AddToGradient(known->second.payload, factor);
    known->second.state = 'C';
    known->second.factor = factor;
  }

  void DoDiscard() {
    const int64_t id = Pick(kIds);
    const StepKey key = RandomKey();
    const absl::StatusOr<bool> discarded = head_->Discard(key, id, 0);
    std::string expected = KeyProblem(key);
    const auto known = open_.batches.find(id);
    const bool is_new = known == open_.batches.end();
    bool dropped = false;
    if (expected.empty()) {
      expected = "OK";
      if (!is_new && known->second.state == 'C') expected = "MICRO_BATCH_CONFLICT";
      if (is_new && open_.state == 'O' && static_cast<int64_t>(open_.batches.size()) >= kMaxRecords) expected = "LIMIT_EXCEEDED";
      dropped = !is_new && known->second.state == 'S';
    }
    Expect("discard " + std::to_string(id), expected, ReasonOf(discarded));
    if (!discarded.ok()) return;
    EXPECT_EQ(*discarded, dropped);
    if (!is_new || open_.state == 'O') open_.batches[id].state = 'D';
  }

  // Which ids a trainer expects: often those that are there, as a list or a number.
  ExpectedMicroBatches RandomExpectation() {
    if (OneIn(3)) return int64_t{Pick(4)};
    std::vector<int64_t> ids;
    for (const auto& [id, batch] : open_.batches) {
      if (batch.state == 'C' || OneIn(10)) ids.push_back(id);
    }
    if (OneIn(10)) ids.push_back(Pick(kIds));
    std::shuffle(ids.begin(), ids.end(), random_);
    return ids;
  }
  std::string SealProblem(const ExpectedMicroBatches& expected) const {
    std::vector<int64_t> ids;
    if (const int64_t* count = std::get_if<int64_t>(&expected)) {
      for (int64_t id = 0; id < *count; ++id) ids.push_back(id);
    } else {
      ids = std::get<std::vector<int64_t>>(expected);
    }
    const auto count_of = [&ids](int64_t wanted) { return std::count(ids.begin(), ids.end(), wanted); };
    for (const int64_t id : ids) {
      if (count_of(id) > 1) return "INVALID_FIELD";
    }
    for (const int64_t id : ids) {
      if (!open_.batches.contains(id) || open_.batches.at(id).state == 'D') return "MICRO_BATCH_MISSING";
    }
    for (const auto& [id, batch] : open_.batches) {
      if (batch.state == 'S') return "MICRO_BATCH_UNCOMMITTED";
    }
    for (const auto& [id, batch] : open_.batches) {
      if (batch.state == 'C' && count_of(id) == 0) return "MICRO_BATCH_UNEXPECTED";
    }
    return "";
  }
  double NormSquared() const {
    double sum = 0;
    for (const double value : gradient_) sum += value * value;
    return sum;
  }

  void DoSeal() {
    const StepKey key = RandomKey();
    const ExpectedMicroBatches wanted = RandomExpectation();
    const absl::StatusOr<SealReply> reply = head_->Seal(key, wanted);
    std::string expected = KeyProblem(key);
    if (expected.empty()) expected = SealProblem(wanted);
    Expect("seal", expected.empty() ? "OK" : expected, ReasonOf(reply));
    if (!reply.ok()) return;
    EXPECT_EQ(reply->replayed, open_.state == 'S');
    EXPECT_EQ(reply->stats.norm_squared, NormSquared());
    EXPECT_EQ(reply->totals, TotalsOf(open_));
    open_.state = 'S';
  }

  void DoApply() {
    StepKey key = RandomKey();
    ApplyArguments arguments;
    arguments.learning_rate = Pick(2);
    arguments.gradient_factor = OneIn(4) ? -1 : 1;
    std::optional<ExpectedMicroBatches> wanted;
    if (!OneIn(3)) wanted = RandomExpectation();
    if (closed_.has_value() && OneIn(4)) {  // a trainer that did not get the answer
      key.step = closed_->number;
      if (!OneIn(3)) arguments = applied_arguments_;
      if (!OneIn(3)) wanted = applied_expectation_;
    }
    const absl::StatusOr<ApplyReply> reply = head_->Apply(key, wanted, arguments);
    if (key.epoch == epoch_ && closed_.has_value() && key.step == closed_->number) {
      const bool same = closed_->state == 'A' && arguments == applied_arguments_ &&
                        (!wanted.has_value() || !applied_expectation_.has_value() || *wanted == *applied_expectation_);
      Expect("apply-again", same ? "OK" : "STEP_CONFLICT", ReasonOf(reply));
      if (!reply.ok()) return;
      EXPECT_TRUE(reply->replayed);
      EXPECT_EQ(reply->weight_version, applied_version_);
      EXPECT_EQ(reply->open_step, open_.number);
      EXPECT_EQ(reply->totals, TotalsOf(*closed_));
      return;
    }
    std::string expected = KeyProblem(key);
    if (expected.empty() && !wanted.has_value() && open_.state == 'O') expected = "MISSING_FIELD";
    if (expected.empty() && wanted.has_value()) expected = SealProblem(*wanted);
    Expect("apply", expected.empty() ? "OK" : expected, ReasonOf(reply));
    if (!reply.ok()) return;
    EXPECT_EQ(reply->gradient_norm_squared, NormSquared());
    EXPECT_EQ(reply->totals, TotalsOf(open_));
    EXPECT_FALSE(reply->replayed);
    for (size_t i = 0; i < weight_.size(); ++i) weight_[i] -= arguments.learning_rate * arguments.gradient_factor * gradient_[i];
    applied_arguments_ = arguments;
    applied_expectation_ = wanted;
    applied_version_ = ++version_;
    EXPECT_EQ(reply->weight_version, version_);
    CloseStep('A');
    EXPECT_EQ(reply->open_step, open_.number);
  }

  void DoDiscardGradient() {
    StepKey key = RandomKey();
    if (closed_.has_value() && OneIn(4)) key.step = closed_->number;
    const absl::StatusOr<std::pair<int64_t, bool>> reply = head_->DiscardGradient(key);
    const bool again = key.epoch == epoch_ && closed_.has_value() && key.step == closed_->number;
    std::string expected = again ? (closed_->state == 'D' ? "" : "STEP_CONFLICT") : KeyProblem(key);
    Expect("discard-gradient", expected.empty() ? "OK" : expected, ReasonOf(reply));
    if (!reply.ok()) return;
    EXPECT_EQ(reply->second, again);
    if (!again) CloseStep('D');
    EXPECT_EQ(reply->first, open_.number);
  }

  void CloseStep(char how) {
    for (auto& [id, batch] : open_.batches) {
      if (batch.state == 'S') batch.state = 'D';
    }
    open_.state = how;
    closed_ = open_;
    open_ = ModelStep();
    open_.number = closed_->number + 1;
    gradient_.assign(gradient_.size(), 0);
  }

  absl::Status Set(const std::vector<float>& weight) {
    return head_->SetTensor(epoch_, HeadTensor::kWeight, DataType::kFloat32, weight.data(),
                            static_cast<int64_t>(weight.size() * 4));
  }
  // After the head has been set from outside.
  void StartAgain(int64_t step) {
    old_epochs_.push_back(epoch_);
    epoch_ = head_->Describe().epoch;
    EXPECT_NE(epoch_, old_epochs_.back());
    ++version_;
    open_ = ModelStep();
    open_.number = step;
    closed_.reset();
    gradient_.assign(gradient_.size(), 0);
  }

  void DoSetWeights() {
    std::vector<float> weight(weight_.size());
    for (float& value : weight) value = static_cast<float>(Pick(100));
    if (OneIn(4)) {
      const absl::Status refused =
          head_->SetTensor(NewEpoch(), HeadTensor::kWeight, DataType::kFloat32, weight.data(), kVocab * kWidth * 4);
      return Expect("set", "EPOCH_FENCED", ReasonOf(refused));
    }
    Expect("set", "OK", ReasonOf(Set(weight)));
    weight_.assign(weight.begin(), weight.end());
    StartAgain(open_.number);
  }

  void DoSave() {
    const std::string name = "c" + std::to_string(Pick(3));
    const bool overwrite = OneIn(2);
    const bool exists = checkpoints_.contains(name);
    const absl::StatusOr<Head::SavedCheckpoint> saved = head_->Save(epoch_, *store_, name, overwrite);
    Expect("save", exists && !overwrite ? "CHECKPOINT_ALREADY_EXISTS" : "OK", ReasonOf(saved));
    if (!saved.ok()) return;
    EXPECT_EQ(saved->step, open_.number);
    checkpoints_[name] = {weight_, open_.number};
  }

  void DoRestore() {
    const std::string name = "c" + std::to_string(Pick(4));
    const bool stale = OneIn(6);
    const absl::Status restored = head_->Restore(stale ? NewEpoch() : epoch_, *store_, name);
    Expect("restore", stale ? "EPOCH_FENCED" : checkpoints_.contains(name) ? "OK" : "CHECKPOINT_NOT_FOUND", ReasonOf(restored));
    if (!restored.ok()) return;
    weight_ = checkpoints_[name].weight;
    StartAgain(checkpoints_[name].step);
  }

  void DoForward() {
    const ModelPayload& payload = payloads_[static_cast<size_t>(Pick(12))];
    const absl::StatusOr<SubmissionOutcome> outcome = MicroBatchCall(head_, 0, 0, ToPayload(payload)).ForwardOnly().Run(engine_);
    Expect("forward", "OK", ReasonOf(outcome));
  }

  static StepTotals TotalsOf(const ModelStep& step) {
    StepTotals totals;
    for (const auto& [id, batch] : step.batches) {
      if (batch.state != 'C') continue;
      ++totals.micro_batch_count;
      for (size_t row = 0; row < batch.payload.targets.size(); ++row) {
        if (batch.payload.targets[row] < 0) continue;
        ++totals.valid_token_count;
        totals.loss_sum += batch.payload.hidden[row * kWidth];
        totals.token_weight_sum += 1;
      }
    }
    return totals;
  }

  static void CompareStep(const StepRecord& actual, const ModelStep& expected) {
    EXPECT_EQ(actual.step, expected.number);
    const std::map<char, StepState> states = {
        {'O', StepState::kOpen}, {'S', StepState::kSealed}, {'A', StepState::kApplied}, {'D', StepState::kDiscarded}};
    EXPECT_EQ(actual.state, states.at(expected.state));
    EXPECT_EQ(actual.Totals(), TotalsOf(expected));
    ASSERT_EQ(actual.micro_batches.size(), expected.batches.size());
    for (const auto& [id, batch] : expected.batches) {
      const auto found = actual.micro_batches.find(id);
      ASSERT_NE(found, actual.micro_batches.end()) << id;
      const std::map<char, ContributionState> batch_states = {
          {'S', ContributionState::kStaged}, {'C', ContributionState::kCommitted}, {'D', ContributionState::kDiscarded}};
      EXPECT_EQ(found->second.state, batch_states.at(batch.state)) << id;
      if (batch.state == 'C') {
        EXPECT_EQ(found->second.factor, batch.factor) << id;
      }
      if (batch.state != 'D') {
        EXPECT_EQ(found->second.digest, headwater::testing::DigestOf(ToPayload(batch.payload))) << id;
      }
    }
  }

  void Compare(int number) {
    SCOPED_TRACE("operation " + std::to_string(number) + ": " + last_);
    const HeadInfo info = head_->Describe();
    EXPECT_EQ(info.epoch, epoch_);
    EXPECT_EQ(info.state, HeadState::kReady);
    EXPECT_EQ(info.weight_version, version_);
    EXPECT_EQ(info.open_step, open_.number);
    const auto steps = head_->GetSteps(epoch_);
    ASSERT_OK(steps);
    CompareStep(steps->first, open_);
    ASSERT_EQ(steps->second.has_value(), closed_.has_value());
    if (closed_.has_value()) CompareStep(*steps->second, *closed_);
    const std::vector<float> gradient = headwater::testing::ReadGradWeight(*head_);
    EXPECT_EQ(Matrix(gradient.begin(), gradient.end()), gradient_);
    const std::vector<float> weight = headwater::testing::ReadWeight(*head_);
    EXPECT_EQ(Matrix(weight.begin(), weight.end()), weight_);
    bool in_use = open_.state == 'S';
    for (const auto& [id, batch] : open_.batches) in_use = in_use || batch.state != 'D';
    EXPECT_EQ(head_->InUse(), in_use);
  }

  std::mt19937_64 random_;
  TemporaryDirectory directory_;
  FakeEngine engine_{3};
  std::unique_ptr<CheckpointStore> store_;
  std::shared_ptr<Head> head_;
  std::vector<ModelPayload> payloads_;

  // The model.
  Epoch epoch_;
  std::vector<Epoch> old_epochs_;
  int64_t version_ = 0;
  Matrix weight_, gradient_;
  ModelStep open_;
  std::optional<ModelStep> closed_;
  ApplyArguments applied_arguments_;
  std::optional<ExpectedMicroBatches> applied_expectation_;
  int64_t applied_version_ = 0;
  std::map<std::string, ModelCheckpoint> checkpoints_;

  std::string last_;
  std::map<std::string, int> outcomes_;
};

TEST(HeadRandomTest, AgreesWithTheModel) {
  std::vector<uint64_t> seeds = {1, 2, 3, 4, 5, 6};
  if (const char* seed = std::getenv("HEADWATER_RANDOM_SEED")) seeds = {std::strtoull(seed, nullptr, 10)};
  std::map<std::string, int> outcomes;
  for (const uint64_t seed : seeds) {
    Sequence sequence(seed);
    for (int number = 0; number < kOperationsPerSeed; ++number) {
      sequence.Step(number);
      ASSERT_FALSE(::testing::Test::HasFailure())
          << "at operation " << number << " (" << sequence.last() << "); to run it again: HEADWATER_RANDOM_SEED=" << seed
          << " head_random_test --gtest_filter='*AgreesWithTheModel*'";
    }
    for (const auto& [outcome, count] : sequence.outcomes()) outcomes[outcome] += count;
  }
  if (seeds.size() == 1) return;
  // The sequences went where they were meant to go.
  for (const char* outcome : {"submit:OK",
                              "submit:MICRO_BATCH_CONFLICT",
                              "submit:MICRO_BATCH_DISCARDED",
                              "submit:STEP_SEALED",
                              "submit:STAGING_FULL",
                              "submit:LIMIT_EXCEEDED",
                              "submit:CANCELLED",
                              "submit:EPOCH_FENCED",
                              "submit:STEP_MISMATCH",
                              "commit:OK",
                              "commit:MICRO_BATCH_CONFLICT",
                              "commit:MICRO_BATCH_NOT_FOUND",
                              "commit:MICRO_BATCH_DISCARDED",
                              "commit:INVALID_FIELD",
                              "discard:OK",
                              "discard:MICRO_BATCH_CONFLICT",
                              "discard:LIMIT_EXCEEDED",
                              "seal:OK",
                              "seal:MICRO_BATCH_MISSING",
                              "seal:MICRO_BATCH_UNCOMMITTED",
                              "seal:MICRO_BATCH_UNEXPECTED",
                              "seal:INVALID_FIELD",
                              "apply:OK",
                              "apply:MISSING_FIELD",
                              "apply-again:OK",
                              "apply-again:STEP_CONFLICT",
                              "discard-gradient:OK",
                              "discard-gradient:STEP_CONFLICT",
                              "set:OK",
                              "set:EPOCH_FENCED",
                              "save:OK",
                              "save:CHECKPOINT_ALREADY_EXISTS",
                              "restore:OK",
                              "restore:CHECKPOINT_NOT_FOUND",
                              "forward:OK"}) {
    EXPECT_GT(outcomes[outcome], 20) << outcome;
  }
}

}  // namespace
}  // namespace headwater::heads
