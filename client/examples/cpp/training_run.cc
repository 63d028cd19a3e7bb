// A trainer whose body is an embedding table: each token learns to predict the next one.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>
#include <vector>

#include "headwater/client/client.h"

namespace hw = headwater::client;

// Ends the program with the error, or returns the value.
template <typename T>
T Require(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "%s\n", hw::ToString(result.status()).c_str());
  std::exit(1);
}

int main(int argc, char** argv) {
  constexpr int64_t kVocabSize = 200, kHiddenSize = 32;
  std::minstd_rand random(1);
  const auto values = [&random](int64_t count, float range) {
    std::vector<float> result(static_cast<size_t>(count));
    for (float& value : result) value = range * (static_cast<float>(random()) / 1073741824.0F - 1.0F);
    return result;
  };

  hw::Client client = Require(hw::Client::Connect(argc > 1 ? argv[1] : "localhost:50051"));
  hw::HeadSpec spec;
  spec.vocab_size = kVocabSize;
  spec.hidden_size = kHiddenSize;
  spec.trainable = true;
  spec.optimizer = hw::AdamW{};
  hw::Head head = Require(client.CreateHead("cpp-guide", spec));
  Require(head.UploadWeights(hw::HeadTensor::kWeight, hw::TensorView::Float32(values(kVocabSize * kHiddenSize, 0.2F))));

  std::vector<float> body = values(kVocabSize * kHiddenSize, 1.0F);  // row i is the hidden state of token i
  std::vector<int32_t> targets(kVocabSize);
  for (int32_t token = 0; token < kVocabSize; ++token) targets[token] = (token * 7 + 1) % kVocabSize;

  for (int64_t step = 0; step < 40; ++step) {
    hw::MicroBatchOptions options;
    options.step = step;
    options.micro_batch = 0;
    options.loss_scale = 1.0 / kVocabSize;  // both gradients are those of the mean
    const hw::LossResult loss = Require(head.CrossEntropy(hw::RowsView::Float32(body, kHiddenSize), targets, {}, options).Get());
    if (step % 10 == 0) std::printf("step %d: loss %.4f\n", static_cast<int>(step), loss.loss_sum / kVocabSize);

    const absl::Span<const float> gradient = loss.grad_hidden.float32();
    for (size_t i = 0; i < body.size(); ++i) body[i] -= 20.0F * gradient[i];  // the body's own optimizer
    Require(head.Seal(step, 1));
    Require(head.Apply(step, {.learning_rate = 0.03}));
  }
  const absl::Status deleted = head.Delete(/*force=*/true);
  return deleted.ok() ? 0 : 1;
}
