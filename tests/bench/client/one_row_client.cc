// The C++ client as tests/bench/client/run drives it: calls with one row, each timed.
//
//   one_row_client ADDRESS HEAD HIDDEN_SIZE VOCAB_SIZE
//
// Creates the head and says `ready`. Reads lines `STEP COUNT`, submits that many micro-batches of the step, closes it, and answers
// with the microseconds of each call in one line. Ends with 1 and the error on standard error if a call fails.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "headwater/client/client.h"

namespace {

namespace client = headwater::client;

template <typename T>
T Require(absl::StatusOr<T> value) {
  if (!value.ok()) {
    std::cerr << client::ToString(value.status()) << "\n";
    std::exit(1);
  }
  return *std::move(value);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 1;
  const int64_t hidden_size = std::stoll(argv[3]), vocab_size = std::stoll(argv[4]);
  client::Client connection = Require(client::Client::Connect(argv[1]));
  client::HeadSpec spec = {.vocab_size = vocab_size, .hidden_size = hidden_size, .trainable = true, .optimizer = client::AdamW{}};
  client::Head head = Require(connection.CreateHead(argv[2], spec));
  const std::vector<float> weight(static_cast<size_t>(vocab_size * hidden_size), 0.01F);
  Require(head.UploadWeights(client::HeadTensor::kWeight, client::TensorView::Float32(weight)));

  const std::vector<float> hidden(static_cast<size_t>(hidden_size), 0.5F);
  const std::vector<int32_t> targets(1, 3);
  const client::RowsView rows = client::RowsView::Float32(hidden, hidden_size);
  std::cout << "ready" << std::endl;
  for (int64_t step = 0, count = 0; std::cin >> step >> count;) {
    std::vector<double> microseconds;
    for (int64_t micro_batch = 0; micro_batch < count; ++micro_batch) {
      const auto begin = std::chrono::steady_clock::now();
      client::MicroBatchOptions options = {.step = step, .micro_batch = micro_batch};
      const client::LossResult result = Require(head.CrossEntropy(rows, targets, {}, options).Get());
      microseconds.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
      if (result.valid_token_count != 1) return 1;
    }
    Require(head.Seal(step, count));
    Require(head.Apply(step, {.learning_rate = 0.0}));
    for (const double value : microseconds) std::cout << value << ' ';
    std::cout << std::endl;
  }
  return 0;
}
