#include "client/core/rows/transfer/rows_call.h"

#include <algorithm>
#include <utility>

#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

constexpr int64_t kOneStreamBytes = int64_t{2} << 20;
constexpr int64_t kBytesPerFurtherStream = int64_t{4} << 20;

}  // namespace

int StripesFor(int64_t bytes_up, int64_t bytes_down, int max_stripes) {
  const int64_t more = std::max<int64_t>(0, std::max(bytes_up, bytes_down) - kOneStreamBytes);
  const int64_t stripes = 1 + (more + kBytesPerFurtherStream - 1) / kBytesPerFurtherStream;
  return static_cast<int>(std::min<int64_t>(stripes, max_stripes));
}

void RowsCall::Cancel() {
  cancel_.request_stop();  // wakes up waits for the server
  std::shared_ptr<TransferCall> call;
  std::function<void()> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    call = call_;
    waiting = transport_.beginnings().Withdraw(this);
  }
  if (call != nullptr) call->Cancel();
  if (waiting) transport_.endings().Run(this, std::move(waiting));  // the beginnings that have begun would keep it waiting
}

void RowsCall::SetAttempt(Deadline deadline, Done done) {
  deadline_ = deadline;
  done_ = std::move(done);
}

void RowsCall::RunBeginning(std::function<absl::Status()> begin) {
  // Under the lock, so that Cancel() either is seen here or finds the task, which takes the lock first. The attempt cannot end
  // before the lock is released.
  std::lock_guard<std::mutex> lock(mutex_);
  DelayedTasks& workers = cancelled() ? transport_.endings() : transport_.beginnings();
  workers.Run(this, [this, begin = std::move(begin)] {
    { std::lock_guard<std::mutex> begun(mutex_); }
    if (absl::Status status = begin(); !status.ok()) Deliver(std::move(status));
  });
}

bool RowsCall::TryConnect(int64_t bytes_up, int64_t bytes_down) {
  std::optional<ServerFacts> facts = transport_.facts();
  if (!facts.has_value()) return false;
  leases_ = transport_.connections().TryAcquire(facts->peer, StripesFor(bytes_up, bytes_down, facts->max_stripes));
  facts_ = *std::move(facts);
  return !leases_.empty();
}

absl::Status RowsCall::Connect(int64_t bytes_up, int64_t bytes_down) {
  HEADWATER_RETURN_IF_ERROR(Until().Check());
  if (TryConnect(bytes_up, bytes_down)) return absl::OkStatus();
  // Connections are missing: the first ones, or they broke, so that another server process may answer now.
  absl::StatusOr<ServerFacts> facts = [&] {
    WaitingContext context(Until());
    return transport_.AskForFacts(*context.get());
  }();
  if (!facts.ok()) return facts.status();
  facts_ = *std::move(facts);
  absl::StatusOr<std::vector<ConnectionLease>> leases =
      transport_.connections().Acquire(facts_.peer, StripesFor(bytes_up, bytes_down, facts_.max_stripes), Until());
  if (!leases.ok()) {
    if (absl::IsUnavailable(leases.status())) transport_.ForgetFacts();
    return leases.status();
  }
  leases_ = *std::move(leases);
  return absl::OkStatus();
}

void RowsCall::Send(TransferRequest request) {
  request.chunk_bytes = transport_.options().chunk_bytes;
  if (facts_.max_chunk_bytes > 0) request.chunk_bytes = std::min(request.chunk_bytes, facts_.max_chunk_bytes);
  request.target = transport_.target();
  request.deadline = deadline_;
  auto call = std::make_shared<TransferCall>(
      std::move(request), std::exchange(leases_, {}), transport_.timers(), transport_.endings(), [this](TransferResult result) {
        {
          std::lock_guard<std::mutex> lock(mutex_);
          call_.reset();
        }
        if (absl::IsUnavailable(result.status)) transport_.ForgetFacts();
        if (result.no_stripes) transport_.UseOneStream(facts_.peer);
        if (!EndBlocks(result)) return Ended(std::move(result));
        transport_.endings().Run(this, [this, result = std::move(result)]() mutable { Ended(std::move(result)); });
      });
  bool cancel = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    call_ = call;
    cancel = cancelled();
  }
  if (cancel) call->Cancel();
  call->Start();
}

absl::StatusOr<RowMemory> RowsCall::Allocate(const void* device_data, int64_t bytes) {
  absl::StatusOr<RowMemory> staging = transport_.memory().AllocateStaging(device_data, bytes);
  return staging.ok() ? staging : AllocateOrdinaryRows(bytes);
}

void RowsCall::Deliver(absl::StatusOr<Answer> answer) {
  std::erase_if(copies_, [](auto& known) {
    const std::unique_ptr<DeviceRead> arrival = std::move(known.arrival);
    return arrival != nullptr && !arrival->AwaitAll().ok();
  });
  const Done done = std::move(done_);
  done(std::move(answer));  // with it this object may go
}

absl::Status RowsCall::BringToHost(const RowsView& rows, void* cuda_stream, OutgoingRows* outgoing) {
  if (rows.memory == Memory::kHost) {
    outgoing->data = static_cast<const unsigned char*>(rows.data);
    return absl::OkStatus();
  }
  const int64_t bytes = rows.bytes();
  auto known = std::find_if(copies_.begin(), copies_.end(),
                            [&](const HostCopy& copy) { return copy.device_data == rows.data && copy.bytes >= bytes; });
  if (known == copies_.end()) {
    HostCopy copy{rows.data, bytes, {}};
    HEADWATER_ASSIGN_OR_RETURN(copy.memory, Allocate(rows.data, bytes));
    HEADWATER_ASSIGN_OR_RETURN(const auto context, transport_.memory().ContextOf(rows.data));
    const auto stream = static_cast<CuStream>(cuda_stream);
    if (copy.memory.page_locked) {
      HEADWATER_ASSIGN_OR_RETURN(copy.arrival, DeviceRead::Begin(context, stream, copy.memory.data, rows.data, bytes));
    } else {
      HEADWATER_RETURN_IF_ERROR(context->CopyNow(stream, copy.memory.data, rows.data, bytes));
    }
    known = copies_.insert(copies_.end(), std::move(copy));
  }
  outgoing->data = known->memory.data;
  outgoing->arrival = known->arrival.get();
  return absl::OkStatus();
}

}  // namespace headwater::client::internal
