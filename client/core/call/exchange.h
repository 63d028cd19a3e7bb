// Exchange: how an attempt of a call is made, by the call's shape.
#ifndef HEADWATER_CLIENT_CORE_CALL_EXCHANGE_H_
#define HEADWATER_CLIENT_CORE_CALL_EXCHANGE_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/core/call/method_table.h"
#include "client/core/link/channel.h"
#include "client/core/rows/bytes.h"
#include "headwater/client/tensor.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::client::internal {

class Core;

// Whether the view has rows, and not only a shape or a place.
inline bool HasRows(const RowsView& rows) { return rows.row_count > 0 && rows.hidden_size > 0 && rows.data != nullptr; }

// The caller's memory, checked against overflow (CheckRows). It stays the caller's until the call has ended.
struct CallMemory {
  RowsView rows{};                   // rows to send: hidden states, teacher rows, a tensor, rows of a gradient
  std::vector<RowsView> teachers{};  // of ComputeLoss: one for each term, or none at all
  RowsView result{};                 // where gradients or a downloaded tensor go; without data: into memory of the library's
  void* cuda_stream = nullptr;       // CUstream on whose work so far device memory depends; null: the legacy default stream

  // Whether any of it is device memory.
  bool on_device() const;
};

// The result of a call that succeeded.
struct Answer {
  // The method's answer, in one of the two forms where an exchange ends, and parsed at the call's end.
  std::string bytes{};
  std::unique_ptr<google::protobuf::Message> message{};
  Bytes data{};                     // of a result in the library's memory
  int64_t attempt = 0;              // of the micro-batch that it is about; 0: none
  const char* transport = nullptr;  // the path that a micro-batch took; null: no micro-batch
};

// One attempt at a time. Must live until an attempt that has begun has ended.
class Exchange {
 public:
  using Done = std::function<void(absl::StatusOr<Answer>)>;

  virtual ~Exchange() = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Starts an attempt, after the end of the one before. `done` is called once, after the last access to the caller's memory, by any
  // thread; with it this object may go.
  virtual void Start(const google::protobuf::Message& request, Deadline deadline, Done done) = 0;
  // Ends the attempt that is under way, and every later one.
  virtual void Cancel() = 0;
  // Bytes sent so far.
  virtual int64_t sent_bytes() const { return 0; }
  virtual int64_t total_bytes() const { return 0; }

 protected:
  Exchange() = default;
};

// A copy; RESOURCE_EXHAUSTED.
absl::StatusOr<std::unique_ptr<google::protobuf::Message>> CopyOf(const google::protobuf::Message& message);

// Whether a header asks for grad_hidden, and the type of grad_hidden.
bool WantsGradHidden(const v1::MicroBatchHeader& header);
v1::DataType GradHiddenType(const v1::MicroBatchHeader& header);
// Clears the fields that an attempt fills in for the path of its rows.
void ClearTransfer(v1::MicroBatchHeader& header);

// Bytes that a result takes in memory of this side are RESOURCE_EXHAUSTED when the attempt starts, or comes to know of them.
std::unique_ptr<Exchange> MakeExchange(Core& core, const Method& method, const google::protobuf::Message& request,
                                       const CallMemory& memory);

// The context of an attempt, which may be cancelled at any time. Thread-safe.
class AttemptContext {
 public:
  // For another attempt.
  grpc::ClientContext* Renew(Deadline deadline) {
    std::lock_guard<std::mutex> lock(mutex_);
    context_ = std::make_unique<grpc::ClientContext>();
    context_->set_deadline(deadline);
    if (cancelled_) context_->TryCancel();
    return context_.get();
  }
  // Cancels this attempt and every later one.
  void Cancel() {
    std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = true;
    if (context_ != nullptr) context_->TryCancel();
  }
  // Cancels this attempt alone.
  void End() { context_->TryCancel(); }

 private:
  std::mutex mutex_;
  bool cancelled_ = false;
  std::unique_ptr<grpc::ClientContext> context_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_CALL_EXCHANGE_H_
