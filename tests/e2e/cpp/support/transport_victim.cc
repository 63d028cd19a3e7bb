// A trainer that a test kills. Prints `ready` when it is worth killing.
// Usage: transport_victim ADDRESS grpc|shared_memory submitting|undecided
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace {

using namespace headwater::client;
using headwater::e2e::Value;

constexpr int64_t kRows = 1 << 14;

int Main(const std::string& address, const std::string& transport, const std::string& moment) {
  ClientOptions options = {.session_lease = std::chrono::seconds(1),
                           .transport = transport == "grpc" ? Transport::kGrpc : Transport::kSharedMemory};
  Client client = Value(Client::Connect(address, options));
  Head head = Value(client.OpenHead("student"));
  const int64_t hidden_size = head.spec().hidden_size;
  RowsBuffer rows = Value(client.AllocateRows(kRows, hidden_size, DataType::kFloat32));
  RowsBuffer grad_hidden = Value(client.AllocateRows(kRows, hidden_size, DataType::kFloat32));
  const std::vector<int32_t> targets(kRows, 1);
  // Explicit: nothing is ever added. Attempts of one micro-batch after the other, until it is killed or a minute has passed.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (int64_t id = 1; std::chrono::steady_clock::now() < deadline; ++id) {
    MicroBatchOptions micro_batch = {
        .step = 0, .micro_batch = id, .commit = CommitMode::kExplicit, .grad_hidden = grad_hidden.span()};
    const LossResult result = Value(head.CrossEntropy(rows.view(), targets, {}, micro_batch).Get());
    if (result.transport != transport) return 1;
    if (id == 1) {
      std::puts("ready");
      std::fflush(stdout);
    }
    if (moment == "undecided") {
      sleep(60);
      return 1;
    }
    Value(result.contribution->Discard().Get());
  }
  return 1;
}

}  // namespace

int main(int argc, char** argv) { return argc == 4 ? Main(argv[1], argv[2], argv[3]) : 2; }
