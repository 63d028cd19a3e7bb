// The server's memory does not grow with its work: thousands of micro-batches of mixed sizes over each path, and its resident set
// afterwards against the one after the first hundred.
//
// HEADWATER_MEMORY_MICRO_BATCHES says how many (default: 500); the figure in docs/benchmarks/transport.md is of 10,000. From that
// many on the server is left alone for a while before both measurements, until it has given back what its allocator keeps between
// calls, and it may have less beside 2 %.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;

constexpr int64_t kVocabSize = 64;
constexpr int64_t kHiddenSize = 128;
constexpr int64_t kMostRows = 8192;  // 4 MiB: several stripes
constexpr int64_t kFirst = 100;
constexpr double kMostGrowth = 0.02;
// What a server of any size takes in its first thousands of calls, beside 2 %: stacks that threads touch, the allocator's arenas.
// All tensors that these micro-batches bring are a hundred times that.
constexpr int64_t kMostGrowthKiB = 24 << 10;
// As many show the level at rest, where pieces of pages are left over.
constexpr int64_t kMany = 10000;
constexpr int64_t kMostGrowthAtRestKiB = 6 << 10;
// More than the ten seconds after which an idle server gives back what it does not use, and its next look.
constexpr std::chrono::seconds kRest{14};

int64_t MicroBatchCount() {
  const char* const text = std::getenv("HEADWATER_MEMORY_MICRO_BATCHES");
  return text == nullptr ? 500 : std::max<int64_t>(std::atoll(text), 2 * kFirst);
}

// What the server itself has resident. Pages that clients share with it are theirs as well.
int64_t ResidentKiB(ServerProcess& server) {
  const std::string status = ReadFile("/proc/" + std::to_string(server.process().pid()) + "/status");
  const std::string field = "RssAnon:";
  const size_t place = status.find(field);
  return place == std::string::npos ? 0 : std::atoll(status.c_str() + place + field.size());
}

class ServerMemory : public testing::TestWithParam<Transport> {};

TEST_P(ServerMemory, StaysAtItsLevel) {
  ServerProcess server({}, /*shares_memory=*/true);
  Client client = server.Connect({.connect_timeout = std::chrono::seconds(20), .transport = GetParam()});
  Head head = CreateHead(client, "student", {.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .trainable = true});
  RowsBuffer rows = Value(client.AllocateRows(kMostRows, kHiddenSize, DataType::kFloat32));
  std::vector<float> own = RandomFloats(2, kMostRows * kHiddenSize, 1.0F);
  std::memcpy(rows.data(), own.data(), own.size() * 4);
  const std::vector<int32_t> targets = RandomTargets(3, kMostRows, kVocabSize);

  // Sizes from one row to the most, every power of two and a little more, in the same order again and again; every third one from
  // memory that is not shared. Up to three are under way, every fifth waits for its decision. A step is closed every 50.
  int64_t step = 0;
  int64_t first_kib = 0, last_kib = 0;
  const int64_t count = MicroBatchCount();
  std::deque<Future<LossResult>> flights;
  const auto settle = [&](size_t most) {
    for (; flights.size() > most; flights.pop_front()) {
      const LossResult result = Value(flights.front().Get());
      ASSERT_EQ(result.transport, TransportName(GetParam()));
      if (result.contribution.has_value()) Value(result.contribution->Commit({.factor = 0.5}).Get());
    }
  };
  for (int64_t i = 0; i < count; ++i) {
    RowsView view = i % 3 == 0 ? RowsView::Float32(own, kHiddenSize) : rows.view();
    view.row_count = std::min(kMostRows, (int64_t{1} << (i * 5 % 14)) + i % 7);
    MicroBatchOptions options = {.step = step, .micro_batch = i % 50};
    const bool is_explicit = i % 5 == 4;
    if (is_explicit) {
      settle(0);  // there is one slot
      options.commit = CommitMode::kExplicit;
    }
    flights.push_back(
        head.CrossEntropy(view, absl::MakeConstSpan(targets).first(static_cast<size_t>(view.row_count)), {}, options));
    settle(is_explicit ? 0 : 2);
    if (i % 50 == 49) {
      settle(0);
      step = Value(head.DiscardGradient(step)).open_step;
    }
    const int64_t done = i + 1;
    if (done == kFirst || done == 2 * kFirst || done == 5 * kFirst || done % (10 * kFirst) == 0 || done == count) {
      settle(0);
      if (count >= kMany && (done == kFirst || done == count)) std::this_thread::sleep_for(kRest);
      const int64_t kib = ResidentKiB(server);
      last_kib = kib;
      std::printf("%s: %lld KiB after %lld micro-batches\n", TransportName(GetParam()), static_cast<long long>(kib),
                  static_cast<long long>(done));
      std::fflush(stdout);
      if (done == kFirst) first_kib = kib;
    }
  }
  EXPECT_GT(first_kib, 0);
  const auto growth = static_cast<int64_t>(kMostGrowth * static_cast<double>(first_kib));
  EXPECT_LE(last_kib, first_kib + (std::max(growth, count >= kMany ? kMostGrowthAtRestKiB : kMostGrowthKiB)));
}

INSTANTIATE_TEST_SUITE_P(Paths, ServerMemory, testing::Values(Transport::kGrpc, Transport::kSharedMemory),
                         [](const auto& path) { return TransportName(path.param); });

}  // namespace
}  // namespace headwater::e2e
