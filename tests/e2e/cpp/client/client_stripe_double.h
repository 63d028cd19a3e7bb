// StripeDouble: the server's side of a micro-batch that comes on several streams, as a test bends it. It checks the wire: what it
// gets is decoded by protobuf, and every rule of loss_service.proto that a client can break fails the test here.
#ifndef HEADWATER_TESTS_E2E_CPP_CLIENT_CLIENT_STRIPE_DOUBLE_H_
#define HEADWATER_TESTS_E2E_CPP_CLIENT_CLIENT_STRIPE_DOUBLE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
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
    grpc::ServerContext* context = nullptr;
  };
  // A run of gradient rows on a stream.
  struct GradRun {
    int stream = 0;
    int64_t row_start = 0;
    int64_t row_count = 0;
  };
  // An attempt to submit the micro-batch.
  struct Attempt {
    int stream_count() const { return std::max(1, header.stripe_count()); }

    v1::MicroBatchHeader header;
    std::set<int> streams;                // that have come
    std::vector<int64_t> rows_by_stream;  // received
    std::set<std::string> peers;
  };

  // Takes over the server's ComputeLoss and TransferRows.
  StripeDouble(ScriptedServer& server, int64_t max_stripes) {
    server.WithState([max_stripes](ScriptedServer::State& state) { state.max_stripes = max_stripes; });
    server.compute_loss = [this](grpc::ServerContext* context, ScriptedServer::LossStream* stream) {
      const Served served(*this);
      return Primary(context, stream);
    };
    server.transfer_rows = [this](grpc::ServerContext* context, ScriptedServer::TransferStream* stream) {
      const Served served(*this);
      return Stripe(context, stream);
    };
  }
  // Waits for the streams that it serves; their clients must be gone.
  ~StripeDouble() { SetAt(nullptr); }

  // Not OK: the stream ends so, and the other streams of the attempt with STRIPE_LOST, as far as the server has heard of them. May
  // wait; thread-safe.
  using At = std::function<grpc::Status(const Moment&)>;
  // The gradient's way back; null: chunks of 256 KiB on the streams in turn.
  using Plan = std::function<std::vector<GradRun>(int streams, int64_t row_count)>;
  // For the calls to come. Wait for the streams of those that have ended for their client, which may still use what was set before.
  void SetAt(At at) {
    std::unique_lock<std::mutex> lock(mutex_);
    AwaitQuiet(lock);
    at_ = std::move(at);
  }
  void SetPlan(Plan plan) {
    std::unique_lock<std::mutex> lock(mutex_);
    AwaitQuiet(lock);
    plan_ = std::move(plan);
  }

  // The attempt that came last.
  Attempt last() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return *last_;
  }
  int attempts() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return attempts_;
  }

  // Blocks until the call is cancelled; CANCELLED.
  static grpc::Status Stall(grpc::ServerContext* context) {
    while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return grpc::Status::CANCELLED;
  }

 private:
  static constexpr int64_t kGradChunkBytes = 256 << 10;
  static constexpr std::chrono::seconds kPatience{60};

  struct Transfer : Attempt {
    bool has_header = false;
    std::string rows;  // hidden, [row_count, hidden_size] float32
    std::vector<bool> taken;
    int64_t missing = 0;
    int ended = 0;  // streams that have sent all their gradients
    bool broken = false;
  };
  // A stream that is served.
  struct Served {
    explicit Served(StripeDouble& of) : of_(of) { Count(1); }
    ~Served() { Count(-1); }
    Served(const Served&) = delete;
    Served& operator=(const Served&) = delete;
    void Count(int change) {
      std::lock_guard<std::mutex> lock(of_.mutex_);
      of_.served_ += change;
      of_.changed_.notify_all();
    }
    StripeDouble& of_;
  };

  void AwaitQuiet(std::unique_lock<std::mutex>& lock) {
    EXPECT_TRUE(changed_.wait_for(lock, kPatience, [&] { return served_ == 0; })) << "streams did not end";
  }
  std::shared_ptr<Transfer> TransferOf(const std::string& id) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<Transfer>& transfer = transfers_[id];
    if (transfer == nullptr) transfer = std::make_shared<Transfer>();
    return transfer;
  }
  grpc::Status Ask(Transfer& transfer, const Moment& moment) {
    grpc::Status status = at_ ? at_(moment) : grpc::Status::OK;
    if (status.ok()) return status;
    std::lock_guard<std::mutex> lock(mutex_);
    transfer.broken = true;
    changed_.notify_all();
    return status;
  }

  grpc::Status Primary(grpc::ServerContext* context, ScriptedServer::LossStream* stream) {
    v1::ComputeLossRequest request;
    if (!stream->Read(&request) || !request.has_header()) {
      ADD_FAILURE() << "no header comes first";
      return grpc::Status::OK;
    }
    const v1::MicroBatchHeader& header = request.header();
    EXPECT_NE(header.stripe_count(), 1);
    EXPECT_GE(header.stripe_count(), 0);
    EXPECT_EQ(header.stripe_count() > 1, header.transfer_id().size() == 16) << header.transfer_id().size();
    const std::shared_ptr<Transfer> transfer =
        header.transfer_id().empty() ? std::make_shared<Transfer>() : TransferOf(header.transfer_id());
    {
      std::lock_guard<std::mutex> lock(mutex_);
      EXPECT_FALSE(transfer->has_header) << "a transfer_id was used twice";
      transfer->header = header;
      transfer->rows.resize(static_cast<size_t>(header.row_count() * header.hidden_size() * 4));
      transfer->taken.resize(static_cast<size_t>(header.row_count()));
      transfer->missing = header.row_count();
      transfer->rows_by_stream.resize(static_cast<size_t>(transfer->stream_count()));
      transfer->has_header = true;
      last_ = transfer;
      ++attempts_;
      changed_.notify_all();
    }
    grpc::Status status = Serve<v1::ComputeLossRequest, v1::ComputeLossResponse>(*transfer, 0, context, stream);
    if (!status.ok()) return status;
    v1::ComputeLossResponse response;
    for (int i = 0; i < header.terms_size(); ++i) response.mutable_summary()->add_terms();
    response.mutable_summary()->set_state(v1::CONTRIBUTION_STATE_COMMITTED);
    response.mutable_summary()->set_transport("grpc");
    stream->Write(response);
    return grpc::Status::OK;
  }

  grpc::Status Stripe(grpc::ServerContext* context, ScriptedServer::TransferStream* stream) {
    v1::TransferRowsRequest request;
    if (!stream->Read(&request)) return grpc::Status::OK;  // cancelled before anything came
    if (!request.has_header() || request.header().transfer_id().size() != 16) {
      ADD_FAILURE() << "no header comes first on a stripe";
      return grpc::Status::OK;
    }
    const int index = request.header().stripe_index();
    const std::shared_ptr<Transfer> transfer = TransferOf(request.header().transfer_id());
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, kPatience, [&] { return transfer->has_header || context->IsCancelled(); });
      if (!transfer->has_header) return ErrorWithReason(grpc::StatusCode::NOT_FOUND, "TRANSFER_NOT_FOUND");
      EXPECT_TRUE(index >= 1 && index < transfer->stream_count()) << index;
    }
    return Serve<v1::TransferRowsRequest, v1::TransferRowsResponse>(*transfer, index, context, stream);
  }

  void TakeChunk(Transfer& transfer, int stream, const v1::RowChunk& chunk) {
    std::lock_guard<std::mutex> lock(mutex_);
    EXPECT_EQ(chunk.role(), v1::CHUNK_ROLE_HIDDEN);
    EXPECT_EQ(chunk.term_index(), 0);
    const int64_t row_bytes = transfer.header.hidden_size() * 4;
    const int64_t row_end = chunk.row_start() + chunk.row_count();
    if (chunk.row_count() < 1 || chunk.row_start() < 0 || row_end > transfer.header.row_count() ||
        static_cast<int64_t>(chunk.data().size()) != chunk.row_count() * row_bytes) {
      ADD_FAILURE() << "rows [" << chunk.row_start() << ", " << row_end << ") in " << chunk.data().size() << " bytes";
      return;
    }
    for (int64_t row = chunk.row_start(); row < row_end; ++row) {
      EXPECT_FALSE(transfer.taken[static_cast<size_t>(row)]) << "row " << row << " came twice";
      transfer.taken[static_cast<size_t>(row)] = true;
    }
    transfer.missing -= chunk.row_count();
    transfer.rows_by_stream[static_cast<size_t>(stream)] += chunk.row_count();
    std::memcpy(transfer.rows.data() + chunk.row_start() * row_bytes, chunk.data().data(), chunk.data().size());
    changed_.notify_all();
  }

  std::vector<GradRun> PlanOf(const Transfer& transfer) const {
    const int streams = transfer.stream_count();
    const int64_t row_count = transfer.header.row_count();
    if (plan_) return plan_(streams, row_count);
    std::vector<GradRun> runs;
    const int64_t rows = std::max<int64_t>(1, kGradChunkBytes / (transfer.header.hidden_size() * 4));
    for (int64_t start = 0; start < row_count; start += rows) {
      runs.push_back({static_cast<int>(runs.size()) % streams, start, std::min(rows, row_count - start)});
    }
    return runs;
  }
  // The gradient of a run's rows; zeros for those that there are not.
  static std::string GradOf(const Transfer& transfer, const GradRun& run) {
    const int64_t row_bytes = transfer.header.hidden_size() * 4;
    const int64_t from = std::min(run.row_start, transfer.header.row_count());
    const int64_t to = std::min(run.row_start + run.row_count, transfer.header.row_count());
    std::string data(static_cast<size_t>(run.row_count * row_bytes), '\0');
    std::memcpy(data.data(), transfer.rows.data() + from * row_bytes, static_cast<size_t>((to - from) * row_bytes));
    for (size_t i = 3; i < data.size(); i += 4) data[i] = static_cast<char>(data[i] ^ 0x80);
    return data;
  }

  // Reads rows, waits for those of the other streams, sends gradients.
  template <typename Request, typename Response, typename Stream>
  grpc::Status Serve(Transfer& transfer, int stream, grpc::ServerContext* context, Stream* rpc) {
    const grpc::Status lost = ErrorWithReason(grpc::StatusCode::ABORTED, "STRIPE_LOST");
    Moment moment{stream, Phase::kHeader, transfer.header.attempt(), context};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      EXPECT_TRUE(transfer.streams.insert(stream).second) << "stream " << stream << " came twice";
      transfer.peers.insert(context->peer());
    }
    if (grpc::Status status = Ask(transfer, moment); !status.ok()) return status;
    Request request;
    moment.phase = Phase::kChunk;
    while (rpc->Read(&request)) {
      EXPECT_TRUE(!request.has_header() && request.has_chunk()) << "a message that is no chunk";
      TakeChunk(transfer, stream, request.chunk());
      if (grpc::Status status = Ask(transfer, moment); !status.ok()) return status;
    }
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto deadline = std::chrono::steady_clock::now() + kPatience;
      while (transfer.missing > 0 && !transfer.broken && !context->IsCancelled()) {
        changed_.wait_for(lock, std::chrono::milliseconds(2));
        if (std::chrono::steady_clock::now() < deadline) continue;
        ADD_FAILURE() << transfer.missing << " rows never came";
        transfer.broken = true;
      }
      if (transfer.missing > 0) {
        transfer.broken = true;
        return lost;
      }
    }
    moment.phase = Phase::kAllRows;
    if (grpc::Status status = Ask(transfer, moment); !status.ok()) return status;
    moment.phase = Phase::kGradChunk;
    for (const GradRun& run : transfer.header.return_grad_hidden() ? PlanOf(transfer) : std::vector<GradRun>()) {
      if (run.stream != stream) continue;
      Response response;
      response.mutable_chunk()->set_role(v1::CHUNK_ROLE_GRAD_HIDDEN);
      response.mutable_chunk()->set_row_start(run.row_start);
      response.mutable_chunk()->set_row_count(run.row_count);
      response.mutable_chunk()->set_data(GradOf(transfer, run));
      if (!rpc->Write(response)) break;
      if (grpc::Status status = Ask(transfer, moment); !status.ok()) return status;
    }
    moment.phase = Phase::kEnd;
    if (grpc::Status status = Ask(transfer, moment); !status.ok()) return status;
    std::unique_lock<std::mutex> lock(mutex_);
    ++transfer.ended;
    changed_.notify_all();
    // The summary comes after the last chunk of any stream, and the streams end with it.
    while (transfer.ended < transfer.stream_count() && !transfer.broken && !context->IsCancelled()) {
      changed_.wait_for(lock, std::chrono::milliseconds(2));
    }
    return transfer.broken ? lost : grpc::Status::OK;
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  At at_;      // changes only while no stream is served
  Plan plan_;  // the same
  int served_ = 0;
  std::map<std::string, std::shared_ptr<Transfer>> transfers_;
  std::shared_ptr<Transfer> last_;
  int attempts_ = 0;
};

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_CLIENT_CLIENT_STRIPE_DOUBLE_H_
