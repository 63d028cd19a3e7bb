#include "client/core/rows/transfer/transfer_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/link/error.h"
#include "client/core/rows/bytes.h"
#include "client/core/rows/transfer/chunk_wire.h"
#include "headwater/kernels/return_if_error.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::client::internal {
namespace {

using std::chrono::milliseconds;

// A cancelled stream ends, and gRPC releases its pending data, within microseconds. If the other side hangs, both wait for the end
// of a pending write.
constexpr milliseconds kReleaseGrace{1000};
// When a stripe has failed, the primary stream's own end is awaited, because it says why. The wait is short where the stripe's
// connection broke, since the server may not know of it, and longer where the server ended the stripe.
constexpr milliseconds kCutStripeGrace{50};
constexpr milliseconds kRefusedStripeGrace{2000};
// When the micro-batch is answered, its other streams end by themselves. Rows may still be on their way on slower connections: so
// long without any.
constexpr milliseconds kLateStripeGrace{2000};

constexpr char kTransferRows[] = "/headwater.v1.LossService/TransferRows";

grpc::ByteBuffer BufferOf(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

// gRPC calls OnWriteDone and OnReadDone one at a time each, but the two concurrently; OnDone comes last.
class TransferCall::Stream : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  Stream(TransferCall& call, int index, ConnectionLease connection)
      : call_(call), index_(index), connection_(std::move(connection)) {
    context_->set_deadline(call.request_.deadline);
  }

  void Prepare(const std::string& method, const std::string& first_message) {
    connection_->stub().PrepareBidiStreamingCall(context_.get(), method, grpc::StubOptions(), this);
    request_ = BufferOf(first_message);
    StartRead(&response_);
    // Held back until the first rows follow: they leave together.
    StartWrite(&request_, grpc::WriteOptions().set_buffer_hint());
  }

  // Until it has ended. Under the call's lock.
  const std::shared_ptr<grpc::ClientContext>& context() const { return context_; }
  void BreakConnection() { connection_->Break(); }
  void RetireConnection() { connection_->Retire(); }

  void OnWriteDone(bool ok) noexcept override { Written(ok); }
  void OnReadDone(bool ok) noexcept override { TakeMessage(ok); }

  void OnDone(const grpc::Status& status) noexcept override {
    request_.Clear();
    std::shared_ptr<grpc::ClientContext> context;
    {
      std::lock_guard<std::mutex> lock(call_.mutex_);
      context = std::move(context_);
    }
    // With it goes gRPC's call, which keeps the slices of a message that came too late to be sent.
    context.reset();
    call_.StreamEnded(index_, status);  // which may destroy this object
  }

 private:
  void Written(bool ok) {
    request_.Clear();
    // Not ok: the server answered before it had read everything, or the connection broke. OnDone finds out which.
    if (!ok || half_closed_) return;
    const std::optional<RowQueue::Chunk> chunk = call_.queue_.Next(call_.request_.chunk_bytes);
    if (!chunk.has_value()) {
      half_closed_ = true;
      StartWritesDone();
      return;
    }
    // For a fraction of a millisecond at most: copies from a device have begun to come.
    if (absl::Status status = chunk->Await(); !status.ok()) return call_.Fail(std::move(status));
    call_.Refer();
    const grpc::Slice slices[] = {grpc::Slice(v1::ChunkMessagePrefix(v1::ChunkField::kOfRequest, chunk->header)),
                                  grpc::Slice(const_cast<unsigned char*>(chunk->data),
                                              static_cast<size_t>(chunk->header.data_bytes), &TransferCall::ReleaseSlice, &call_)};
    request_ = grpc::ByteBuffer(slices, 2);
    half_closed_ = chunk->last;
    if (half_closed_) {
      StartWriteLast(&request_, grpc::WriteOptions());
    } else {
      StartWrite(&request_);
    }
  }

  void TakeMessage(bool ok) {
    if (!ok) return;
    absl::Status status = WithMemoryFor(static_cast<int64_t>(response_.Length()), "an answer",
                                        [this] { return call_.TakeResponse(index_, response_); });
    response_.Clear();
    if (!status.ok()) return call_.Fail(std::move(status));
    StartRead(&response_);
  }

  TransferCall& call_;
  const int index_;
  ConnectionLease connection_;

  std::shared_ptr<grpc::ClientContext> context_ = std::make_shared<grpc::ClientContext>();

  grpc::ByteBuffer request_;
  bool half_closed_ = false;

  grpc::ByteBuffer response_;
};

TransferCall::TransferCall(TransferRequest request, std::vector<ConnectionLease> connections, DelayedTasks& timers,
                           DelayedTasks& workers, Done done)
    : request_(std::move(request)),
      timers_(timers),
      workers_(workers),
      done_(std::move(done)),
      queue_(request_.rows),
      received_(request_.grad_row_count) {
  for (ConnectionLease& connection : connections) {
    streams_.push_back(std::make_unique<Stream>(*this, static_cast<int>(streams_.size()), std::move(connection)));
  }
}

TransferCall::~TransferCall() = default;

void TransferCall::Start() {
  references_ = static_cast<int64_t>(streams_.size());
  streams_[0]->Prepare(request_.method, request_.first_message);
  for (size_t i = 1; i < streams_.size(); ++i) {
    v1::TransferRowsRequest first;
    first.mutable_header()->set_transfer_id(request_.transfer_id);
    first.mutable_header()->set_stripe_index(static_cast<int32_t>(i));
    streams_[i]->Prepare(kTransferRows, first.SerializeAsString());
  }
  BreakAfter(request_.deadline - std::chrono::system_clock::now() + kReleaseGrace);
  std::vector<Stream*> streams;
  for (const std::unique_ptr<Stream>& stream : streams_) streams.push_back(stream.get());
  // Once all streams have started this object may be gone.
  const std::shared_ptr<TransferCall> kept = self_ = shared_from_this();
  for (Stream* const stream : streams) stream->StartCall();
}

void TransferCall::Cancel() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = true;
  }
  CancelStreams();
}

void TransferCall::CancelStreams() {
  std::vector<std::shared_ptr<grpc::ClientContext>> contexts;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const std::unique_ptr<Stream>& stream : streams_) {
      if (stream->context() != nullptr) contexts.push_back(stream->context());
    }
  }
  for (const std::shared_ptr<grpc::ClientContext>& context : contexts) context->TryCancel();
  BreakAfter(kReleaseGrace);
}

void TransferCall::After(std::chrono::nanoseconds grace, std::function<void(TransferCall& call)> task) {
  timers_.Run(this, grace, [weak = weak_from_this(), task = std::move(task)] {
    if (const std::shared_ptr<TransferCall> call = weak.lock(); call != nullptr) task(*call);
  });
}

void TransferCall::BreakAfter(std::chrono::nanoseconds grace) {
  After(grace, [](TransferCall& call) {
    std::lock_guard<std::mutex> lock(call.mutex_);
    for (const std::unique_ptr<Stream>& stream : call.streams_) stream->BreakConnection();
  });
}

absl::Status TransferCall::TakeResponse(int stream, const grpc::ByteBuffer& message) {
  if (request_.answer_is_message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (answer_.has_value()) return MakeAnswerError("a message after the answer");
    answer_ = StringOf(message);
    return absl::OkStatus();
  }
  HEADWATER_ASSIGN_OR_RETURN(DecodedResponse response, DecodeResponse(message));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stream == 0 && answer_.has_value()) return MakeAnswerError("a message after the summary");
    if (stream == 0 && response.summary.has_value()) {
      answer_ = std::move(response.summary);
      return absl::OkStatus();
    }
  }
  if (!response.has_chunk) return MakeAnswerError("a message without chunk or summary");
  const v1::ChunkView& chunk = response.chunk;
  if (request_.grad_hidden == nullptr || chunk.role != v1::CHUNK_ROLE_GRAD_HIDDEN) {
    return MakeAnswerError(absl::StrCat("a chunk of role ", chunk.role, " that was not asked for"));
  }
  const bool sized = chunk.row_count >= 1 && chunk.row_count <= request_.grad_row_count &&
                     chunk.data_bytes == chunk.row_count * request_.grad_row_bytes;
  if (!sized || !received_.Take(chunk.row_start, chunk.row_count)) {
    return MakeAnswerError(absl::StrCat("grad_hidden rows [", chunk.row_start, ", +", chunk.row_count, ") with ", chunk.data_bytes,
                                        " bytes, expected rows of ", request_.grad_row_bytes, " bytes in [0, ",
                                        request_.grad_row_count, "), each once"));
  }
  const int64_t first = chunk.row_start * request_.grad_row_bytes;
  v1::CopySpans(chunk.data, request_.grad_hidden + first);
  return request_.on_grad_rows ? request_.on_grad_rows(first, chunk.data_bytes) : absl::OkStatus();
}

void TransferCall::Fail(absl::Status status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (answer_error_.ok()) answer_error_ = std::move(status);
  }
  CancelStreams();
}

void TransferCall::CutWhenRowsStop() {
  After(kLateStripeGrace, [taken_before = received_.taken()](TransferCall& call) {
    call.received_.taken() == taken_before ? call.Cut() : call.CutWhenRowsStop();
  });
}

void TransferCall::Cut() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    cut_ = true;
  }
  CancelStreams();
}

void TransferCall::StreamEnded(int index, const grpc::Status& status) {
  bool all_ended = false;
  bool cancel = false;
  bool answered = false;
  std::optional<milliseconds> cut_after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // A connection that was cut, or a server that goes: later calls take another one.
    if (status.error_code() == grpc::StatusCode::UNAVAILABLE) streams_[static_cast<size_t>(index)]->RetireConnection();
    ++ended_;
    all_ended = ended_ == streams_.size();
    if (index == 0) {
      primary_ = status;
      cancel = !status.ok();
      answered = status.ok();
    } else if (!status.ok() && !stripe_.has_value()) {
      stripe_ = status;
      if (!primary_.has_value()) cut_after = status.error_details().empty() ? kCutStripeGrace : kRefusedStripeGrace;
    }
  }
  if (!all_ended) {
    if (cancel) CancelStreams();
    if (answered) CutWhenRowsStop();
    if (cut_after.has_value()) After(*cut_after, [](TransferCall& call) { call.Cut(); });
  } else if (references_ > 1) {
    BreakAfter(kReleaseGrace);
  }
  Release(/*by_stream=*/true);  // the last access to this object
}

void TransferCall::Release(bool by_stream) {
  if (--references_ > 0) return;
  if (by_stream) {
    Finish();
  } else {
    // gRPC releases slices deep inside its own work, where nothing else may be done.
    workers_.Run(this, [this] { Finish(); });
  }
}

void TransferCall::Finish() {
  const std::shared_ptr<TransferCall> kept = std::move(self_);
  const Done done = std::move(done_);
  timers_.Forget(this);
  TransferResult result = MakeResult();
  // Before the result is delivered: the caller's next call must find the connections idle. If the caller drops everything, this
  // thread, which may be gRPC's, must not hold the last channel, whose end waits for gRPC's threads.
  std::vector<std::unique_ptr<Stream>> streams;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    streams.swap(streams_);
  }
  streams.clear();
  done(std::move(result));
}

TransferResult TransferCall::MakeResult() {
  std::lock_guard<std::mutex> lock(mutex_);
  TransferResult result;
  const grpc::Status& primary = *primary_;
  // A status with details was made by the server's code, one without them by either side's gRPC.
  result.answered = primary.ok() || !primary.error_details().empty();
  if (!answer_error_.ok()) {
    result.status = answer_error_;
    result.answered = false;
    return result;
  }
  const bool stripe_failed = stripe_.has_value();
  const bool primary_was_cut = cut_ && primary.error_code() == grpc::StatusCode::CANCELLED;
  const bool rows_missing = request_.grad_hidden != nullptr && !received_.complete();
  if (cancelled_ && primary.ok() && rows_missing) {
    result.status = MakeLocalError(v1::ERROR_REASON_CANCELLED, absl::StatusCode::kCancelled, "the call was cancelled");
  } else if (stripe_failed && !cancelled_ && (primary_was_cut || (primary.ok() && rows_missing))) {
    result.status = cut_ && stripe_->error_code() == grpc::StatusCode::CANCELLED
                        ? absl::UnavailableError(absl::StrCat("a stripe of the call to ", request_.target, " did not end"))
                        : FromGrpcStatus(*stripe_, request_.target);
  } else if (!cancelled_ && !cut_ && primary.error_code() == grpc::StatusCode::CANCELLED && !result.answered) {
    // A server that shuts down ends calls in this way that reach it in that moment.
    result.status = absl::UnavailableError(absl::StrCat(request_.target, " cut the call off: ", primary.error_message()));
  } else if (!primary.ok()) {
    result.status = FromGrpcStatus(primary, request_.target);
  } else if (!answer_.has_value()) {
    result.status = MakeAnswerError("the stream ended without a summary");
  } else if (rows_missing) {
    result.status =
        MakeAnswerError(absl::StrCat("grad_hidden ended after ", received_.taken(), " of ", request_.grad_row_count, " rows"));
  } else {
    result.answer = *std::move(answer_);
  }
  result.no_stripes = !result.status.ok() && stripe_failed && stripe_->error_code() == grpc::StatusCode::UNIMPLEMENTED;
  return result;
}

}  // namespace headwater::client::internal
