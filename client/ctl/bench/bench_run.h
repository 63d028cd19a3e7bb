// The measurements of `bench`: micro-batches over one path, so many at once, for a while.
#ifndef HEADWATER_CLIENT_CTL_BENCH_BENCH_RUN_H_
#define HEADWATER_CLIENT_CTL_BENCH_BENCH_RUN_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core/rows/memory/device_memory.h"
#include "client/ctl/bench/bench_report.h"
#include "headwater/client/client.h"

namespace headwater::ctl {

// Makes a head with random weights, to be deleted by the caller; its name. Halves spec->vocab_size until the head fits the server's
// memory; `spec` is that of the head made. After an error there is no head.
absl::StatusOr<std::string> MakeBenchHead(client::Client& client, client::HeadSpec* spec);

// A trainer that has its rows where its path wants them.
class BenchTrainer {
 public:
  // Connects and submits one micro-batch. FAILED_PRECONDITION / TRANSPORT_UNAVAILABLE and other errors say why the path cannot be
  // taken. `max_in_flight` micro-batches of up to `max_rows` rows will be under way at once.
  static absl::StatusOr<std::unique_ptr<BenchTrainer>> Make(client::Transport transport, const std::string& head, int64_t max_rows,
                                                            int max_in_flight);

  // Submits micro-batches of `rows` rows, `in_flight` at once, for `duration` after a quarter of it to warm up. At least three
  // after the warm-up, at most `max_micro_batches` in all. Ends early with CANCELLED when BenchInterrupted().
  absl::StatusOr<BenchRow> Measure(int64_t rows, int in_flight, std::chrono::nanoseconds duration, int64_t max_micro_batches);

 private:
  BenchTrainer(client::Transport transport, client::Client client, client::Head head)
      : transport_(transport), client_(std::move(client)), head_(std::move(head)) {}
  absl::Status PlaceRows(int64_t max_rows, int max_in_flight);
  client::Future<client::LossResult> Submit(int64_t rows, int slot);

  const client::Transport transport_;
  client::Client client_;
  client::Head head_;
  int64_t max_rows_ = 0;
  std::vector<int32_t> targets_;
  unsigned char* rows_ = nullptr;  // hidden states, then a gradient for each micro-batch in flight; in one of these, by the path:
  std::vector<unsigned char> own_rows_;
  client::RowsBuffer shared_rows_;
  std::shared_ptr<const client::internal::DeviceBacking> device_rows_;
  int64_t step_ = 0;
  int64_t next_id_ = 0;
};

// From now on SIGINT and SIGTERM end measurements instead of the program, so that the head is deleted.
void CatchInterruptions();
bool BenchInterrupted();

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_BENCH_BENCH_RUN_H_
