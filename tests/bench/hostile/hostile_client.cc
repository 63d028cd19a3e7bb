// The well-behaved client of tests/bench/hostile/run: one training step after the other over gRPC, for times that the script gives.
//
//   hostile_client address=ADDRESS rows=N width=N vocab=N
//
// The request (serve.h) `measure seconds=S` submits micro-batches, one at a time, for so long. The answer: how many succeeded, how
// many failed, and the first ones' median and 90th percentile latency in ms. The client's repetitions are part of a latency.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "headwater/client/client.h"
#include "tests/bench/common/serve.h"

namespace headwater::bench {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<float> RandomValues(int64_t count, float deviation) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal(0.0F, deviation);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

double Quantile(const std::vector<double>& sorted, double quantile) {
  return sorted.empty() ? 0 : sorted[static_cast<size_t>(quantile * static_cast<double>(sorted.size() - 1))];
}

Answer Open(Request& arguments) {
  const auto rows = arguments.Take<int64_t>("rows", 0), width = arguments.Take<int64_t>("width", 0);
  const auto vocab = arguments.Take<int64_t>("vocab", 0);
  const client::ClientOptions options = {.client_name = "well-behaved", .transport = client::Transport::kGrpc};
  client::Client connection = Require(client::Client::Connect(arguments.Take<std::string>("address", ""), options));
  const client::HeadSpec spec = {.vocab_size = vocab, .hidden_size = width, .trainable = true};
  client::Head head = Require(connection.CreateHead("measured", spec));
  const std::vector<float> weight = RandomValues(vocab * width, 0.02F), hidden = RandomValues(rows * width, 1.0F);
  Require(head.UploadWeights(client::HeadTensor::kWeight, client::TensorView::Float32(weight)));
  std::vector<int32_t> targets;
  for (int64_t i = 0; i < rows; ++i) targets.push_back(static_cast<int32_t>(i % vocab));
  int64_t next = 0;
  auto submit = [=]() mutable {
    client::MicroBatchOptions micro_batch = {.step = 0, .micro_batch = next++};
    return head.CrossEntropy(client::RowsView::Float32(hidden, width), targets, {}, micro_batch).Get().ok();
  };
  submit();  // connections are made
  return [=](Request& request) mutable {
    const std::chrono::duration<double> length(request.Take("seconds", 0.0));
    std::vector<double> latencies;
    double failed = 0;
    for (const auto start = Clock::now(); Clock::now() - start < length;) {
      const auto begin = Clock::now();
      const bool succeeded = submit();
      const double ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
      if (succeeded) {
        latencies.push_back(ms);
      } else {
        ++failed;
      }
    }
    std::sort(latencies.begin(), latencies.end());
    return Words({static_cast<double>(latencies.size()), failed, Quantile(latencies, 0.5), Quantile(latencies, 0.9)});
  };
}

}  // namespace
}  // namespace headwater::bench

int main(int argc, char** argv) { return headwater::bench::Serve(argc, argv, headwater::bench::Open); }
