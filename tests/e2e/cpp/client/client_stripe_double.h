// StripeDouble: the server's side of a micro-batch that comes on several streams, as a test bends it. It checks the wire: what it
// gets is decoded by protobuf, and every rule of loss_service.proto that a client can break is an error here.
#ifndef HEADWATER_TESTS_E2E_CPP_CLIENT_CLIENT_STRIPE_DOUBLE_H_
#define HEADWATER_TESTS_E2E_CPP_CLIENT_CLIENT_STRIPE_DOUBLE_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/e2e/cpp/support/scripted_server.h"

namespace headwater::e2e {

// Rows are float32. The gradient of a row is the row itself with the sign of every element changed.
class StripeDouble {
 public:
  // Where a stream is when the test is asked what happens to it.
  enum class Phase { kHeader, kChunk, kAllRows, kGradChunk, kEnd };
  struct Moment {
    int stream = 0;  // 0: the primary one
    Phase phase = Phase::kHeader;
    int64_t attempt = 0;
    int chunk = 0;  // of this stream and phase
    grpc::ServerContext* context = nullptr;
  };
  // A run of gradient rows on a stream.
  struct GradRun {
    int stream = 0;
    int64_t row_start = 0;
    int64_t row_count = 0;
  };

  // Takes over the server's ComputeLoss and TransferRows.
  StripeDouble(ScriptedServer& server, int64_t max_stripes);
  // Waits for the streams that it serves; their clients must be gone.
  ~StripeDouble() { SetAt(nullptr); }

  // Not OK: the stream ends so, and the other streams of the attempt with STRIPE_LOST, as far as the server has heard of them. May
  // wait; thread-safe.
  using At = std::function<grpc::Status(const Moment&)>;
  // The gradient's way back; null: chunks of 256 KiB on the streams in turn.
  using Plan = std::function<std::vector<GradRun>(int streams, int64_t row_count)>;
  // For the calls to come. Wait for the streams of those that have ended for their client, which may still use what was set before.
  void SetAt(At at);
  void SetPlan(Plan plan);

  // What was wrong with what came; empty: nothing.
  std::vector<std::string> complaints() const;
  // The attempt that came last.
  struct Attempt {
    int streams = 0;
    std::vector<int64_t> rows_by_stream;
    std::set<std::string> peers;
    v1::MicroBatchHeader header;
  };
  Attempt last() const;
  int attempts() const;

  // Blocks until the call is cancelled; CANCELLED.
  static grpc::Status Stall(grpc::ServerContext* context);

 private:
  struct Transfer;

  grpc::Status Primary(grpc::ServerContext* context, ScriptedServer::LossStream* stream);
  grpc::Status Stripe(grpc::ServerContext* context, ScriptedServer::TransferStream* stream);
  // `message` has a chunk.
  template <typename Request>
  void TakeChunk(Transfer& transfer, int stream, const Request& message);
  // Reads rows, waits for those of the other streams, sends gradients.
  template <typename Request, typename Response, typename Stream>
  grpc::Status Serve(const std::shared_ptr<Transfer>& transfer, int stream, grpc::ServerContext* context, Stream* rpc);
  grpc::Status Ask(Transfer& transfer, const Moment& moment);
  std::shared_ptr<Transfer> TransferOf(const std::string& id);
  void Complain(const std::string& complaint);
  std::vector<GradRun> PlanOf(const Transfer& transfer) const;
  void CountServed(int change);
  // Until no stream is served.
  void AwaitQuiet(std::unique_lock<std::mutex>& lock);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  At at_;      // changes only while no stream is served
  Plan plan_;  // the same
  int served_ = 0;
  std::map<std::string, std::shared_ptr<Transfer>> transfers_;
  std::shared_ptr<Transfer> last_;
  int attempts_ = 0;
  std::vector<std::string> complaints_;
};

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_CLIENT_CLIENT_STRIPE_DOUBLE_H_
