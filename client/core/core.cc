#include "client/core/core.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "client/core/link/channel.h"
#include "client/core/link/notice.h"
#include "client/core/replay/recovery.h"
#include "client/core/rows/tensor_exchanges.h"
#include "headwater/client/future.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

// Micro-batches that are under way at once.
constexpr int kMaxLosses = 16;
// Notices that are kept until they are asked for.
constexpr size_t kMaxNotices = 16;
// Bound of a recovery that no call waits for, and the time between its tries.
constexpr std::chrono::seconds kIdleRecoveryTimeout{60};
constexpr std::chrono::seconds kIdleRecoveryPause{1};
// How long the end of a connection may wait for a server that does not answer. The lease ends by itself.
constexpr std::chrono::seconds kCloseTimeout{1};

}  // namespace

absl::StatusOr<std::shared_ptr<Core>> Core::Open(const std::string& target, const ClientOptions& options) {
  ClientOptions prepared = options;
  HEADWATER_ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel, Connect(target, &prepared));
  std::shared_ptr<Core> core(new Core(target, prepared, std::move(channel)));
  // A lost session reveals a restart of the server, also where no call would.
  if (core->replay_log().enabled()) core->session().Id(DeadlineIn(prepared.connect_timeout)).IgnoreError();
  return core;
}

Core::Core(std::string target, const ClientOptions& options, std::shared_ptr<grpc::Channel> channel)
    : target_(std::move(target)),
      options_(options),
      channel_(std::move(channel)),
      heads_(v1::HeadService::NewStub(channel_)),
      turns_(kMaxLosses),
      replay_log_(
          options_.replay_bytes, options_.replay_steps, /*on_open=*/[this] { waiting_.HurryAll(); },
          /*on_dropped=*/
          [this](const std::string& why) {
            AddNotice(absl::StrCat("the open step is not kept for replay: ", why,
                                   ". A restart of the server in it will lose it (STEP_LOST)"));
          }),
      row_transport_(target_, options_, channel_),
      abandoned_(*this),
      session_(target_, options_, [this] {
        if (replay_log_.enabled()) {
          recoveries_.Run(this, std::chrono::nanoseconds(0), [this] { RecoverIdle(DeadlineIn(kIdleRecoveryTimeout)); });
        }
      }) {}

Core::~Core() {
  Close(DeadlineIn(kCloseTimeout));
  abandoned_.Stop();
}

Request Core::MakeRequest(std::unique_ptr<google::protobuf::Message> message, CallMemory memory, Deadline deadline) {
  const Method& method = MethodOf(*message);
  if (auto* header = dynamic_cast<v1::MicroBatchHeader*>(message.get())) {
    header->clear_session_id();
    ClearTransfer(*header);
  }
  if (auto* upload = dynamic_cast<v1::UploadWeightsHeader*>(message.get())) Describe(memory.rows, upload);
  return Request{.method = &method, .message = std::move(message), .memory = std::move(memory), .deadline = deadline};
}

std::shared_ptr<Call> Core::NewCall(Request request, Call::Done done) {
  return std::make_shared<Call>(shared_from_this(), std::move(request), CallMode::kNormal, std::move(done));
}

absl::StatusOr<Answer> Core::Run(Request request) {
  const auto state = std::make_shared<FutureState<Answer>>();
  const std::shared_ptr<Call> call =
      NewCall(std::move(request), [state](absl::StatusOr<Answer> answer) { state->Set(std::move(answer)); });
  call->Start();
  return state->Take();
}

absl::StatusOr<Answer> Core::RunInner(const google::protobuf::Message& message, const CallMemory& memory, const Wait& wait) {
  Request request{.method = &MethodOf(message), .message = nullptr, .memory = memory, .deadline = wait.deadline};
  HEADWATER_ASSIGN_OR_RETURN(request.message, CopyOf(message));
  request.is_background = wait.is_background;
  const auto state = std::make_shared<FutureState<Answer>>();
  const auto call = std::make_shared<Call>(borrowed(), std::move(request), CallMode::kInner,
                                           [state](absl::StatusOr<Answer> answer) { state->Set(std::move(answer)); });
  const std::stop_callback on_cancel(wait.cancel, [&call] { call->Cancel(); });
  call->Start();
  return state->Take();
}

absl::StatusOr<RowMemory> Core::AllocateRows(int64_t bytes) {
  if (options_.transport != Transport::kGrpc && bytes > 0) {
    absl::StatusOr<RowMemory> memory = row_transport_.memory().AllocateRows(bytes);
    if (memory.ok()) {
      using Owner = std::pair<std::shared_ptr<Core>, std::shared_ptr<void>>;  // the core goes last
      memory->owner = std::make_shared<Owner>(shared_from_this(), std::move(memory->owner));
    }
    // Where there is no room, other memory is as scarce.
    if (memory.ok() || absl::IsResourceExhausted(memory.status())) return memory;
  }
  return AllocateOrdinaryRows(bytes);
}

std::string Core::CurrentEpoch(const std::string& head, const std::string& epoch) const {
  const std::shared_ptr<HeadState> state = head_states_.FindKnown(head, epoch);
  return state == nullptr ? epoch : state->epoch();
}

absl::Status Core::Enlist(const std::shared_ptr<Call>& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return absl::FailedPreconditionError("the client is closed");
  calls_[call.get()] = call;
  return absl::OkStatus();
}

void Core::Discharge(Call* call) {
  std::lock_guard<std::mutex> lock(mutex_);
  calls_.erase(call);
  if (calls_.empty()) all_ended_.notify_all();
}

void Core::EndTurn(Call* call, bool had_turn) {
  if (const void* next = turns_.End(call, had_turn); next != nullptr) waiting_.Hurry(next);
}

void Core::ForgetSession(const std::string& id) {
  session_.Forget(id);
  row_transport_.memory().Forget(id);
}

void Core::AddNotice(std::string sentence) {
  GiveNotice(options_, sentence);
  std::lock_guard<std::mutex> lock(mutex_);
  if (notices_.size() == kMaxNotices) notices_.pop_front();
  notices_.push_back(std::move(sentence));
  next_notice_bytes_ = notices_.front().size();
}

std::string Core::TakeNotice(size_t most) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (notices_.empty() || notices_.front().size() > most) return "";
  std::string notice = std::move(notices_.front());
  notices_.pop_front();
  next_notice_bytes_ = notices_.empty() ? 0 : notices_.front().size();
  return notice;
}

void Core::StopWaiting() {
  has_stopped_waiting_ = true;
  timers_.HurryAll();  // those who wait now look once more
}

void Core::Close(Deadline deadline) {
  std::vector<std::shared_ptr<Call>> calls;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
    for (const auto& [_, weak] : calls_) {
      if (std::shared_ptr<Call> call = weak.lock(); call != nullptr) calls.push_back(std::move(call));
    }
  }
  closing_.request_stop();
  for (const std::shared_ptr<Call>& call : calls) call->Cancel();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    all_ended_.wait_until(lock, deadline, [this] { return calls_.empty(); });
  }
  session_.Close(deadline);
  row_transport_.memory().Close();
}

void Core::RecoverIdle(Deadline deadline) {
  const Wait wait(deadline, closing_.get_token());
  if (!wait.Check().ok()) return;
  const HeadUses heads = replay_log_.Heads();
  // The holder of the gate does it.
  if (ReplayLog::Gate gate = replay_log_.TryClose(); gate != nullptr && !heads.empty()) {
    const absl::Status recovered = Recover(*this, std::move(gate), heads, absl::AbortedError("the session was lost"), wait);
    if (absl::IsUnavailable(recovered)) {
      return recoveries_.Run(this, kIdleRecoveryPause, [this, deadline] { RecoverIdle(deadline); });
    }
  }
  session_.Id(wait).IgnoreError();  // which is watched in turn; the next call meets the same failure, and reports it
}

}  // namespace headwater::client::internal
