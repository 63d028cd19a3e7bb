// The well-behaved client of the benchmark: one training step after the other over gRPC, for times given on stdin.
//
//   hostile_client TARGET ROWS HIDDEN VOCAB
//
// Prints `ready`. Each line `SECONDS` then makes it submit micro-batches, one at a time, for so long. It answers with a line `COUNT
// FAILED MEDIAN_MS P90_MS`: the latencies of those that succeeded, repetitions by the client included. Ends at the end of stdin.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "headwater/client/client.h"

namespace headwater::client {
namespace {

using Clock = std::chrono::steady_clock;

template <typename T>
T Require(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::cerr << value.status() << "\n";
  std::exit(1);
}

std::vector<float> RandomValues(int64_t count, float deviation) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal(0.0F, deviation);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

double Quantile(std::vector<double> values, double quantile) {
  if (values.empty()) return 0;
  const size_t index = static_cast<size_t>(quantile * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(index), values.end());
  return values[index];
}

class Trainer {
 public:
  Trainer(const std::string& target, int64_t rows, int64_t hidden_size, int64_t vocab_size)
      : client_(Require(Client::Connect(target, Options()))),
        head_(Require(client_.CreateHead("measured", Spec(hidden_size, vocab_size)))),
        hidden_(RandomValues(rows * hidden_size, 1.0F)),
        hidden_size_(hidden_size),
        targets_(static_cast<size_t>(rows)) {
    const std::vector<float> weight = RandomValues(vocab_size * hidden_size, 0.02F);
    Require(head_.UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight)));
    for (size_t i = 0; i < targets_.size(); ++i) targets_[i] = static_cast<int32_t>(i % static_cast<size_t>(vocab_size));
    Submit();  // connections are made
  }

  // Submits one micro-batch; whether it succeeded.
  bool Submit() {
    MicroBatchOptions options = {.step = 0, .micro_batch = next_++};
    return head_.CrossEntropy(RowsView::Float32(hidden_, hidden_size_), targets_, {}, options).Get().ok();
  }

 private:
  static ClientOptions Options() { return {.client_name = "well-behaved", .transport = Transport::kGrpc}; }
  static HeadSpec Spec(int64_t hidden_size, int64_t vocab_size) {
    return {.vocab_size = vocab_size, .hidden_size = hidden_size, .trainable = true};
  }

  Client client_;
  Head head_;
  const std::vector<float> hidden_;
  const int64_t hidden_size_;
  std::vector<int32_t> targets_;
  int64_t next_ = 0;
};

void Serve(Trainer& trainer) {
  std::cout << "ready" << std::endl;
  for (double seconds = 0; std::cin >> seconds;) {
    const Clock::time_point end =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    std::vector<double> latencies;
    int64_t failed = 0;
    while (Clock::now() < end) {
      const Clock::time_point begin = Clock::now();
      if (trainer.Submit()) {
        latencies.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
      } else {
        ++failed;
      }
    }
    std::cout << latencies.size() << " " << failed << " " << Quantile(latencies, 0.5) << " " << Quantile(latencies, 0.9)
              << std::endl;
  }
}

}  // namespace
}  // namespace headwater::client

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: hostile_client TARGET ROWS HIDDEN VOCAB\n";
    return 2;
  }
  headwater::client::Trainer trainer(argv[1], std::stoll(argv[2]), std::stoll(argv[3]), std::stoll(argv[4]));
  headwater::client::Serve(trainer);
  return 0;
}
