// One training step over a remote head: upload, loss, seal, optimizer step.
//
//   headwaterd &
//   example_train_step localhost:50051
//
// Prints the mean loss of the same micro-batch before and after the step; it falls.
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "headwater/client/client.h"

namespace {

using headwater::client::AdamW;
using headwater::client::ApplyResult;
using headwater::client::Client;
using headwater::client::Head;
using headwater::client::HeadSpec;
using headwater::client::HeadTensor;
using headwater::client::LossResult;
using headwater::client::MicroBatchOptions;
using headwater::client::RowsView;
using headwater::client::SealResult;
using headwater::client::TensorView;

constexpr int64_t kVocabSize = 1000;
constexpr int64_t kHiddenSize = 64;
constexpr int64_t kTokens = 128;

// Ends the program with the error, or hands out the value.
template <typename T>
T Require(absl::StatusOr<T> value) {
  if (!value.ok()) {
    std::cerr << headwater::client::ToString(value.status()) << "\n";
    std::exit(1);
  }
  return *std::move(value);
}

std::vector<float> RandomValues(std::mt19937& generator, int64_t count, float deviation) {
  std::normal_distribution<float> normal(0.0F, deviation);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

void TrainOneStep(const std::string& server) {
  Client client = Require(Client::Connect(server));

  HeadSpec spec;
  spec.vocab_size = kVocabSize;
  spec.hidden_size = kHiddenSize;
  spec.trainable = true;
  spec.optimizer = AdamW{.weight_decay = 0.0};
  Head head = Require(client.CreateHead("train-step-example", spec));

  std::mt19937 generator(1);
  const std::vector<float> weight = RandomValues(generator, kVocabSize * kHiddenSize, 0.02F);
  Require(head.UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight)));

  // What a trainer's body would produce.
  const std::vector<float> hidden = RandomValues(generator, kTokens * kHiddenSize, 1.0F);
  std::vector<int32_t> targets(kTokens);
  for (int32_t& target : targets) target = static_cast<int32_t>(generator() % kVocabSize);
  const RowsView rows = RowsView::Float32(hidden, kHiddenSize);

  // loss_scale = 1 / tokens: the gradients are those of the mean. EAGER: added to the step by the call itself.
  MicroBatchOptions micro_batch;
  micro_batch.step = 0;
  micro_batch.micro_batch = 0;
  micro_batch.loss_scale = 1.0 / kTokens;
  LossResult before = Require(head.CrossEntropy(rows, targets, {}, micro_batch).Get());
  std::cout << "loss before the step: " << before.loss_sum / static_cast<double>(before.valid_token_count) << "\n";
  // before.grad_hidden, [kTokens, kHiddenSize], is what the body's backward pass would go on with.

  const SealResult sealed = Require(head.Seal(0, 1));
  std::cout << "micro-batches in the step: " << sealed.totals.micro_batch_count << "\n";
  const ApplyResult applied = Require(head.Apply(0, {.learning_rate = 0.01}));
  std::cout << "gradient norm: " << applied.global_grad_norm << ", open step: " << applied.open_step << "\n";

  MicroBatchOptions evaluation;
  evaluation.forward_only = true;
  const LossResult after = Require(head.CrossEntropy(rows, targets, {}, evaluation).Get());
  std::cout << "loss after the step: " << after.loss_sum / static_cast<double>(after.valid_token_count) << "\n";

  if (const absl::Status deleted = head.Delete(/*force=*/true); !deleted.ok())
    std::cerr << headwater::client::ToString(deleted) << "\n";
  if (!(after.loss_sum < before.loss_sum)) {
    std::cerr << "the loss did not fall\n";
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  TrainOneStep(argc > 1 ? argv[1] : "localhost:50051");
  return 0;
}
