// Rows on several streams, against a server whose double checks the wire: what is lost, late, doubled, cut, cancelled or refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/core/rows/transfer/transfer_call.h"
#include "headwater/client/client.h"
#include "headwater/client/error.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/scripted_server.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace client;
using namespace client::internal;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::SizeIs;

// The server's side of a micro-batch that comes on several streams, as a test bends it. It checks the wire: what it gets is decoded
// by protobuf, and every rule of loss_service.proto that a client can break fails the test here. Rows are float32. The gradient of
// a row is the row itself with the sign of every element changed.
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
      const std::shared_lock<std::shared_timed_mutex> served(serving_);
      return Primary(context, stream);
    };
    server.transfer_rows = [this](grpc::ServerContext* context, ScriptedServer::TransferStream* stream) {
      const std::shared_lock<std::shared_timed_mutex> served(serving_);
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
    const std::unique_lock<std::shared_timed_mutex> lock(serving_, std::chrono::seconds(60));
    EXPECT_TRUE(lock.owns_lock()) << "streams did not end";
    at_ = std::move(at);
  }
  void SetPlan(Plan plan) {
    const std::unique_lock<std::shared_timed_mutex> lock(serving_, std::chrono::seconds(60));
    EXPECT_TRUE(lock.owns_lock()) << "streams did not end";
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

  std::shared_timed_mutex serving_;  // held by each stream that is served; what it may read changes only while none is
  At at_;
  Plan plan_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::shared_ptr<Transfer>> transfers_;
  std::shared_ptr<Transfer> last_;
  int attempts_ = 0;
};

using Phase = StripeDouble::Phase;
using Moment = StripeDouble::Moment;

constexpr int64_t kHiddenSize = 1024;
constexpr int64_t kRowBytes = kHiddenSize * 4;
constexpr int64_t kRows = 3584;  // 14 MiB: four streams
constexpr int kStreams = 4;
// Gradients of a stripe that outlasts the primary stream: at half a second each they take longer than it may be silent.
constexpr int64_t kLateRows = 10;
// Late by more than this is a defect, not a busy machine.
constexpr seconds kSlack{15};

// Memory that can be taken away.
class Pages {
 public:
  explicit Pages(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Pages() { munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  float* floats() { return static_cast<float*>(data_); }
  absl::Span<unsigned char> span() { return {static_cast<unsigned char*>(data_), bytes_}; }
  // Whoever touches them now ends the test program, or breaks its connection.
  void TakeAway() { ASSERT_EQ(mprotect(data_, bytes_, PROT_NONE), 0); }
  void GiveBack() { ASSERT_EQ(mprotect(data_, bytes_, PROT_READ | PROT_WRITE), 0); }

 private:
  size_t bytes_;
  void* data_;
};

class ClientTransfer : public testing::Test {
 protected:
  ClientTransfer() : rows_(kRows * kRowBytes), grad_(kRows * kRowBytes) {
    for (int64_t i = 0; i < kRows * kHiddenSize; ++i) rows_.floats()[i] = static_cast<float>(i % 8191) + 0.5F;
  }

  void Connect(int max_attempts = 1, int stripes = 8) {
    Connect({.retry = {.max_attempts = max_attempts, .initial_backoff = milliseconds(1), .max_backoff = milliseconds(2)},
             .transport = Transport::kGrpc,
             .stripes = stripes});
  }
  void Connect(const ClientOptions& options) {
    client_.emplace(Value(Client::Connect(server_.target(), options)));
    head_.emplace(Value(client_->OpenHead("h")));
  }

  Future<LossResult> Submit(int64_t row_count = kRows, const CallOptions& call = {}) { return SubmitTo(grad_, row_count, call); }
  Future<LossResult> SubmitTo(Pages& grad, int64_t row_count = kRows, const CallOptions& call = {}) {
    const std::vector<int32_t> targets(static_cast<size_t>(row_count), 1);
    RowsView view = {.data = rows_.floats(), .row_count = row_count, .hidden_size = kHiddenSize};
    MicroBatchOptions options = {.step = 0};
    options.micro_batch = next_micro_batch_++;  // one that is known begins with the attempt that it has come to
    options.grad_hidden = grad.span().subspan(0, static_cast<size_t>(row_count * kRowBytes));
    std::fill(options.grad_hidden.begin(), options.grad_hidden.end(), static_cast<unsigned char>(0xee));
    return head_->CrossEntropy(view, targets, {}, options, call);
  }

  void ExpectGradients(int64_t row_count = kRows) { ExpectGradientsIn(grad_, row_count); }
  void ExpectGradientsIn(Pages& grad, int64_t row_count = kRows) {
    for (int64_t i = 0; i < row_count * kHiddenSize; ++i) {
      if (grad.floats()[i] != -rows_.floats()[i]) {
        FAIL() << "row " << i / kHiddenSize << " of the gradient is wrong";
      }
    }
  }

  int64_t next_micro_batch_ = 0;
  ScriptedServer server_;
  StripeDouble double_{server_, 8};
  Pages rows_;
  Pages grad_;
  std::optional<Client> client_;
  std::optional<Head> head_;
};

TEST_F(ClientTransfer, RowsTakeAsManyConnectionsAsTheyAreWorth) {
  Connect();
  const LossResult result = Value(Submit().Get());
  ExpectGradients();
  EXPECT_EQ(result.transport, "grpc");
  EXPECT_THAT(double_.last().streams, SizeIs(kStreams));
  EXPECT_EQ(double_.last().header.stripe_count(), kStreams);
  EXPECT_THAT(double_.last().peers, SizeIs(kStreams)) << "streams shared a connection";
  const TransportStats stats = client_->stats();
  EXPECT_EQ(stats.stripes, kStreams);
  EXPECT_EQ(stats.grpc.micro_batches, 1);
  EXPECT_EQ(stats.grpc.bytes, 2 * kRows * kRowBytes);
  EXPECT_EQ(stats.host_transport, "grpc");

  Value(Submit(256).Get());  // 1 MiB
  ExpectGradients(256);
  EXPECT_THAT(double_.last().streams, SizeIs(1));
  EXPECT_EQ(double_.last().header.stripe_count(), 0);
  EXPECT_EQ(client_->stats().stripes, 1);

  const std::set<std::string> first_peers = double_.last().peers;
  Value(Submit().Get());
  ExpectGradients();
  EXPECT_THAT(double_.last().peers, testing::IsSupersetOf(first_peers)) << "connections were not used again";
}

TEST_F(ClientTransfer, OptionAndServerLimitTheStreams) {
  Connect(1, /*stripes=*/2);
  Value(Submit().Get());
  EXPECT_THAT(double_.last().streams, SizeIs(2));
  server_.WithState([](ScriptedServer::State& state) { state.max_stripes = 0; });
  Connect();
  Value(Submit().Get());
  ExpectGradients();
  EXPECT_THAT(double_.last().streams, SizeIs(1));
  EXPECT_TRUE(double_.last().header.transfer_id().empty());
}

TEST_F(ClientTransfer, SlowStreamGetsFewerRows) {
  Connect(1, /*stripes=*/2);
  double_.SetAt([](const Moment& moment) {
    if (moment.stream == 1 && moment.phase == Phase::kChunk) std::this_thread::sleep_for(milliseconds(50));
    return grpc::Status::OK;
  });
  // Several times what gRPC takes in before it is read.
  const std::vector<float> rows(size_t{64} << 18, 0.5F);
  const std::vector<int32_t> targets(rows.size() / kHiddenSize, 1);
  MicroBatchOptions options = {.step = 0, .micro_batch = 0, .return_grad_hidden = false};
  Value(head_->CrossEntropy(RowsView::Float32(rows, kHiddenSize), targets, {}, options).Get());
  const std::vector<int64_t> by_stream = double_.last().rows_by_stream;
  ASSERT_THAT(by_stream, SizeIs(2));
  EXPECT_LT(by_stream[1], by_stream[0]);
}

TEST_F(ClientTransfer, GradientsMayComeOnAnyStreamInAnyOrder) {
  Connect();
  double_.SetPlan([](int streams, int64_t row_count) {
    std::vector<StripeDouble::GradRun> runs;
    for (int64_t start = row_count - 7; start > -7; start -= 7) {
      runs.push_back({static_cast<int>(start + 7) % streams, std::max<int64_t>(0, start), std::min<int64_t>(7, start + 7)});
    }
    return runs;
  });
  Value(Submit().Get());
  ExpectGradients();
  double_.SetPlan([](int streams, int64_t row_count) {
    return std::vector<StripeDouble::GradRun>{{streams - 1, 0, row_count / 8},
                                              {0, row_count / 8, row_count / 8},
                                              {streams - 1, row_count / 4, row_count / 4},
                                              {streams - 1, row_count / 2, row_count / 4},
                                              {1, 3 * (row_count / 4), row_count / 4}};
  });
  server_.WithState([](ScriptedServer::State& state) { state.max_stripes = 8; });
  EXPECT_TRUE(Submit().Get().ok());
  ExpectGradients();
}

TEST_F(ClientTransfer, WrongGradientsAreErrorsAndNeverWrittenTwiceOrOutside) {
  Connect();
  using Runs = std::vector<StripeDouble::GradRun>;
  const auto whole = [](int64_t row_count) {
    Runs runs;
    for (int64_t i = 0; i < 16; ++i) runs.push_back({static_cast<int>(i % 4), i * row_count / 16, row_count / 16});
    return runs;
  };
  for (const StripeDouble::GradRun& extra : Runs{{2, 0, 1}, {0, kRows - 1, 1}, {1, kRows, 1}, {3, kRows - 1, 2}, {2, 100, 300}}) {
    double_.SetPlan([whole, extra](int, int64_t row_count) {
      Runs runs = whole(row_count);
      runs.push_back(extra);
      return runs;
    });
    const absl::Status status = Submit().Get().status();
    EXPECT_EQ(ErrorReason(status), "INTERNAL") << status;
  }
  double_.SetPlan([whole](int, int64_t row_count) {
    Runs runs = whole(row_count);
    runs.erase(runs.begin() + 5);
    return runs;
  });
  const absl::Status missing = Submit().Get().status();
  EXPECT_EQ(ErrorReason(missing), "INTERNAL") << missing;
  double_.SetPlan(nullptr);
  Value(Submit().Get());
  ExpectGradients();
}

TEST_F(ClientTransfer, LostStreamIsRepeatedUnderTheNextAttempt) {
  Connect(/*max_attempts=*/2);
  for (const int stream : {0, 1, 3}) {
    for (const Phase phase : {Phase::kHeader, Phase::kChunk, Phase::kAllRows, Phase::kGradChunk, Phase::kEnd}) {
      SCOPED_TRACE(testing::Message() << "stream " << stream << ", phase " << static_cast<int>(phase));
      std::atomic<int> losses = 0;
      double_.SetAt([&](const Moment& moment) {
        if (moment.stream != stream || moment.phase != phase || moment.attempt != 0) return grpc::Status::OK;
        ++losses;
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "cut");
      });
      const LossResult result = Value(Submit().Get());
      EXPECT_EQ(result.attempt, losses == 0 ? 0 : 1);  // a stream that got no rows has no phase of them
      ExpectGradients();
      double_.SetAt(nullptr);  // nobody looks at `losses` any more
    }
  }
}

TEST_F(ClientTransfer, StripeOfWhichTheServerNeverHeardEndsTheAttempt) {
  Connect(/*max_attempts=*/2);
  std::atomic<int> refused = 0;
  const auto serve = server_.transfer_rows;
  server_.transfer_rows = [&refused, serve](grpc::ServerContext* context, ScriptedServer::TransferStream* stream) {
    if (refused.exchange(1) == 0) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "cut");
    return serve(context, stream);
  };
  const auto start = steady_clock::now();
  EXPECT_EQ(Value(Submit().Get()).attempt, 1);
  ExpectGradients();
  EXPECT_LT(steady_clock::now() - start, kSlack);
}

TEST_F(ClientTransfer, PrimaryStreamSaysWhy) {
  Connect(/*max_attempts=*/3);
  double_.SetAt([](const Moment& moment) {
    if (moment.phase != Phase::kHeader) return grpc::Status::OK;
    if (moment.stream != 0) return ErrorWithReason(grpc::StatusCode::ABORTED, "STRIPE_LOST");
    std::this_thread::sleep_for(milliseconds(100));
    return ErrorWithReason(grpc::StatusCode::FAILED_PRECONDITION, "STEP_SEALED");
  });
  EXPECT_EQ(ErrorReason(Submit().Get().status()), "STEP_SEALED");
  EXPECT_EQ(double_.attempts(), 1);
}

TEST_F(ClientTransfer, ServerThatRefusesStripesGetsOneStream) {
  Connect();
  server_.transfer_rows = nullptr;
  Value(Submit().Get());
  ExpectGradients();
  EXPECT_THAT(double_.last().streams, SizeIs(1));
  const size_t refusals = server_.PeersOf("TransferRows").size();
  EXPECT_GT(refusals, 0u);
  Value(Submit().Get());
  EXPECT_EQ(server_.PeersOf("TransferRows").size(), refusals) << "it was asked again";
}

// Calls that get to where `stream` is at `phase`, and the server stands still.
class ClientTransferStalled : public ClientTransfer, public testing::WithParamInterface<std::tuple<int, Phase>> {
 protected:
  void StallThere() {
    double_.SetAt([this](const Moment& moment) {
      if (moment.stream != std::get<0>(GetParam()) || moment.phase != std::get<1>(GetParam())) return grpc::Status::OK;
      there_ = true;
      return StripeDouble::Stall(moment.context);
    });
  }
  // The memory of a call that has ended is the caller's alone.
  void ExpectMemoryIsLeftAlone() {
    rows_.TakeAway();
    grad_.TakeAway();
    std::this_thread::sleep_for(milliseconds(50));
    rows_.GiveBack();
    grad_.GiveBack();
    double_.SetAt(nullptr);
    Value(Submit().Get());
    ExpectGradients();
  }

  std::atomic<bool> there_ = false;
};

TEST_P(ClientTransferStalled, CancelLeavesTheCallersMemoryAlone) {
  Connect();
  StallThere();
  Future<LossResult> future = Submit();
  ASSERT_TRUE(Await([&] {
    if (future.Ready()) future = Submit();  // that stream got no rows
    return there_.load();
  }));
  const auto start = steady_clock::now();
  future.Cancel();
  const absl::Status status = future.Get().status();
  EXPECT_EQ(ErrorReason(status), "CANCELLED") << status;
  EXPECT_LT(steady_clock::now() - start, kSlack);
  ExpectMemoryIsLeftAlone();
}

TEST_P(ClientTransferStalled, DeadlineLeavesTheCallersMemoryAlone) {
  Connect();
  Value(Submit().Get());  // so that the deadline is not spent on connections
  StallThere();
  // A deadline that passes before the call is there shows nothing, and neither does a call that needs no rows of that stream.
  for (milliseconds timeout{200}; !there_ && timeout < 4 * kSlack; timeout *= 2) {
    const absl::Status status = Submit(kRows, {.timeout = timeout}).Get().status();
    EXPECT_TRUE(ErrorReason(status) == "DEADLINE_EXCEEDED" || (status.ok() && !there_)) << status;
  }
  EXPECT_TRUE(there_);
  ExpectMemoryIsLeftAlone();
}

INSTANTIATE_TEST_SUITE_P(Phases, ClientTransferStalled,
                         testing::Combine(testing::Values(0, 2), testing::Values(Phase::kHeader, Phase::kChunk, Phase::kAllRows,
                                                                                 Phase::kGradChunk, Phase::kEnd)));

TEST_F(ClientTransfer, SeveralMicroBatchesShareTheConnections) {
  Connect();
  std::deque<Pages> gradients;
  std::vector<Future<LossResult>> futures;
  for (int i = 0; i < 6; ++i) futures.push_back(SubmitTo(gradients.emplace_back(kRows * kRowBytes)));
  for (size_t i = 0; i < futures.size(); ++i) {
    Value(futures[i].Get());
    ExpectGradientsIn(gradients[i]);
  }
  std::set<std::string> peers;
  for (const char* method : {"ComputeLoss", "TransferRows"}) {
    for (const std::string& peer : server_.PeersOf(method)) peers.insert(peer);
  }
  EXPECT_LE(peers.size(), 8u);
}

TEST_F(ClientTransfer, WorsePathIsExplainedOnce) {
  std::mutex mutex;
  std::vector<std::string> notices;
  ClientOptions options;
  options.on_notice = [&](const std::string& sentence) {
    std::lock_guard<std::mutex> lock(mutex);
    notices.push_back(sentence);
  };
  Connect(options);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Value(Submit().Get()).transport, "grpc");
  EXPECT_THAT(notices, SizeIs(1));
  EXPECT_EQ(client_->stats().why_not_better, notices[0]);
}

// A transfer of one row over `stream_count` connections, whose gradient has rows of four bytes; how it ends.
struct OneRow {
  OneRow(const ScriptedServer& server, int stream_count, int64_t grad_rows) : grad(static_cast<size_t>(grad_rows * 4)) {
    const auto deadline = std::chrono::system_clock::now() + std::chrono::minutes(5);
    for (int i = 0; i < stream_count; ++i) {
      kept.push_back(Value(DataConnection::Open("ipv4:" + server.target(), {}, deadline)));
      connections.push_back(Lease(kept.back()));
    }
    request.method = "/headwater.v1.LossService/ComputeLoss";
    if (stream_count > 1) request.transfer_id = std::string(16, 't');
    request.grad_hidden = grad.data();
    request.grad_row_count = grad_rows;
    request.grad_row_bytes = 4;
    request.target = server.target();
    request.deadline = deadline;
    request.rows = {OutgoingRows{v1::CHUNK_ROLE_HIDDEN, 0, hidden.data(), 1, 4, 0}};
  }
  std::future<TransferResult> Start() {
    const auto result = std::make_shared<std::promise<TransferResult>>();
    std::future<TransferResult> ended = result->get_future();
    std::make_shared<TransferCall>(std::move(request), std::move(connections), timers, workers, [result](TransferResult end) {
      result->set_value(std::move(end));
    })->Start();
    return ended;
  }

  std::vector<unsigned char> hidden = std::vector<unsigned char>(4);
  std::vector<unsigned char> grad;
  // Kept here, as by the pool: gRPC's threads must not end them.
  std::vector<std::shared_ptr<DataConnection>> kept;
  std::vector<ConnectionLease> connections;
  DelayedTasks timers;
  DelayedTasks workers;
  TransferRequest request;
};

// Two streams of which the primary one ends at once, and the other brings all gradients: a row every `pace`, `sent_rows` of them.
TransferResult TransferWithLateStripe(int64_t sent_rows, milliseconds pace, std::vector<unsigned char>& grad) {
  ScriptedServer server;
  server.transfer_rows = [sent_rows, pace](grpc::ServerContext* context, ScriptedServer::TransferStream* stream) {
    v1::TransferRowsRequest request;
    while (stream->Read(&request)) {
    }
    for (int64_t row = 0; row < sent_rows; ++row) {
      std::this_thread::sleep_for(pace);
      v1::TransferRowsResponse response;
      response.mutable_chunk()->set_role(v1::CHUNK_ROLE_GRAD_HIDDEN);
      response.mutable_chunk()->set_row_start(row);
      response.mutable_chunk()->set_row_count(1);
      response.mutable_chunk()->set_data("four");
      if (!stream->Write(response)) return grpc::Status::CANCELLED;
    }
    return sent_rows == kLateRows ? grpc::Status::OK : StripeDouble::Stall(context);
  };
  OneRow transfer(server, 2, kLateRows);
  const TransferResult result = transfer.Start().get();
  grad = transfer.grad;
  return result;
}

TEST(TransferCall, LateStripeIsWaitedForAsLongAsItBringsRows) {
  std::vector<unsigned char> grad;
  const TransferResult result = TransferWithLateStripe(kLateRows, milliseconds(500), grad);
  EXPECT_TRUE(result.status.ok()) << result.status;
  std::string expected;
  for (int64_t row = 0; row < kLateRows; ++row) expected += "four";
  EXPECT_EQ(std::string(grad.begin(), grad.end()), expected);
}

TEST(TransferCall, LateStripeThatBringsNoMoreRowsIsCut) {
  std::vector<unsigned char> grad;
  const auto start = steady_clock::now();
  const absl::Status status = TransferWithLateStripe(kLateRows - 1, milliseconds(0), grad).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_LT(steady_clock::now() - start, kSlack);
}

// gRPC forgets what is thrown on its threads.
TEST(TransferCall, EndsWhereThereIsNoMemoryForAnAnswer) {
  ScriptedServer server;
  server.compute_loss = [](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
    v1::ComputeLossResponse response;
    response.mutable_chunk()->set_role(v1::CHUNK_ROLE_GRAD_HIDDEN);
    response.mutable_chunk()->set_row_count(1);
    response.mutable_chunk()->set_data("four");
    stream->Write(response);
    ScriptedServer::ReadAll(stream);
    return grpc::Status::OK;
  };
  OneRow transfer(server, 1, 1);
  transfer.request.on_grad_rows = [](int64_t, int64_t) -> absl::Status { throw std::bad_alloc(); };
  std::future<TransferResult> ended = transfer.Start();
  ASSERT_EQ(ended.wait_for(kSlack), std::future_status::ready);
  const absl::Status status = ended.get().status;
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(status), "MEMORY_BUDGET_EXCEEDED");
}

}  // namespace
}  // namespace headwater::e2e
