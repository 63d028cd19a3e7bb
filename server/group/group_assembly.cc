#include "server/group/group_assembly.h"

#include <sys/random.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/group/local_rank.h"
#include "server/group/rank_codec.h"
#include "server/group/remote_rank.h"

namespace headwater::group {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(50);
constexpr size_t kSecretBytes = 32;
constexpr int32_t kMaxPort = 65535;

absl::StatusOr<std::string> NewSecret() {
  std::string secret(kSecretBytes, '\0');
  if (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size())) {
    return MakeError(ErrorReason::kEngineFailed, "the system gives no random bytes");
  }
  return secret;
}

std::string Port(int32_t port) { return absl::StrCat(":", port); }

absl::Status NotComplete(const std::string& what) {
  return MakeError(ErrorReason::kEngineFailed, "the group cannot be formed: " + what);
}

absl::Status NotAwaited() { return MakeError(ErrorReason::kCancelled, "the workers are awaited no longer"); }

}  // namespace

GroupAssembly::GroupAssembly(AssemblyOptions options, std::unique_ptr<TcpMeeting> meeting)
    : options_(std::move(options)),
      meeting_(std::move(meeting)),
      unowned_engine_(std::make_unique<GroupEngine>("cpu", options_.engine, /*shared_budget=*/false)),
      engine_(*unowned_engine_) {}

absl::StatusOr<std::unique_ptr<GroupAssembly>> GroupAssembly::Create(AssemblyOptions options) {
  absl::StatusOr<std::unique_ptr<TcpMeeting>> meeting = TcpMeeting::Listen(options.listen_host);
  if (!meeting.ok()) return absl::UnavailableError(meeting.status().message());
  return std::unique_ptr<GroupAssembly>(new GroupAssembly(std::move(options), *std::move(meeting)));
}

absl::Status GroupAssembly::Serve(JoinCall& call) {
  HEADWATER_RETURN_IF_ERROR(CheckRoom());  // at once: nobody is listened to who cannot join
  v1::JoinRequest message;
  if (!call.Read(&message) || !message.has_hello()) {
    return MakeError(ErrorReason::kProtocolViolation, "the first message of Join must be hello");
  }
  if (message.hello().version() != options_.version) {
    return MakeError(ErrorReason::kInvalidCombination,
                     absl::StrCat("the worker is of version ", message.hello().version(), ", this server of ", options_.version),
                     {{"field", "hello.version"}, {"expected", options_.version}, {"actual", message.hello().version()}});
  }
  if (message.hello().port() < 1 || message.hello().port() > kMaxPort) {
    return MakeError(ErrorReason::kProtocolViolation, absl::StrCat("hello.port must be from 1 to ", kMaxPort),
                     {{"field", "hello.port"}});
  }
  auto slot = std::make_shared<Slot>();
  slot->address = call.host() + Port(message.hello().port());
  slot->link = std::make_shared<RankLink>([&call](const v1::JoinResponse& response) { return call.Send(response); },
                                          [&call] { call.Cancel(); });
  HEADWATER_RETURN_IF_ERROR(AwaitRank(call, slot));
  v1::JoinResponse welcome;
  {
    absl::MutexLock lock(&mutex_);
    Welcome(*slot, welcome.mutable_welcome());
  }
  if (slot->link->Send(welcome).ok()) {
    while (call.Read(&message)) {
      if (message.has_ready()) {
        absl::MutexLock lock(&mutex_);
        // Form() reads it without the lock from then on.
        if (!slot->is_ready) slot->ready = message.ready();
        slot->is_ready = true;
      }
      slot->link->Deliver(std::move(message));
      message = v1::JoinRequest();
    }
  }
  slot->link->Close(MakeError(ErrorReason::kEngineFailed, "the worker's call has ended"));
  return engine_.dismissed() ? absl::OkStatus() : slot->link->status();
}

absl::Status GroupAssembly::CheckRoom() {
  absl::MutexLock lock(&mutex_);
  return Room();
}

absl::Status GroupAssembly::Room() const {
  if (!complete_ && slots_.size() < static_cast<size_t>(options_.workers)) return absl::OkStatus();
  return MakeError(ErrorReason::kFeatureNotBuilt, absl::StrCat("this server has its ", options_.workers, " workers"),
                   {{"feature", "workers"}});
}

absl::Status GroupAssembly::AwaitRank(JoinCall& call, const std::shared_ptr<Slot>& slot) {
  absl::MutexLock lock(&mutex_);
  HEADWATER_RETURN_IF_ERROR(Room());
  slots_.push_back(slot);
  while (!mutex_.AwaitWithTimeout(absl::Condition(&complete_), kLook)) {
    if (!call.Cancelled()) continue;
    slots_.erase(std::find(slots_.begin(), slots_.end(), slot));
    return MakeError(ErrorReason::kCancelled, "the worker has left before the group was formed");
  }
  return absl::OkStatus();
}

void GroupAssembly::Welcome(const Slot& slot, v1::RankWelcome* welcome) {
  const EngineOptions& engine = options_.engine;
  welcome->set_rank(slot.rank);
  welcome->set_world_size(options_.workers + 1);
  for (const std::string& address : addresses_) welcome->add_addresses(address);
  welcome->set_secret(secret_);
  welcome->set_engine("cpu");
  for (const int64_t weight : engine.shard_weights) welcome->add_shard_weights(weight);
  welcome->set_workspace_bytes(engine.workspace_bytes);
  welcome->set_token_chunk_rows(engine.token_chunk_rows);
  welcome->set_thread_count(engine.thread_count);
  welcome->set_deterministic(engine.deterministic);
  welcome->set_setup_timeout_ms(absl::ToInt64Milliseconds(options_.setup_timeout));
  welcome->set_stall_timeout_ms(absl::ToInt64Milliseconds(options_.stall_timeout));
}

absl::StatusOr<std::unique_ptr<LossEngine>> GroupAssembly::MakeOwnEngine(const std::vector<std::string>& addresses,
                                                                         const std::string& secret,
                                                                         const std::function<bool()>& given_up) {
  auto communicator = meeting_->Meet(0, addresses, secret, absl::ToChronoMilliseconds(options_.setup_timeout),
                                     absl::ToChronoMilliseconds(options_.stall_timeout), given_up);
  if (!communicator.ok()) return communicator.status();
  EngineOptions own = options_.engine;
  own.group.rank = 0;
  own.group.world_size = options_.workers + 1;
  own.group.communicator = *std::move(communicator);
  return CreateCpuEngine(own);
}

absl::Status GroupAssembly::Refusals(const std::vector<std::shared_ptr<Slot>>& slots, const absl::Status& own, bool are_due) {
  std::vector<std::string> reasons;
  const auto note = [&reasons](int32_t rank, const absl::Status& status) {
    if (!status.ok()) reasons.push_back(absl::StrCat("rank ", rank, ": ", std::string(status.message())));
  };
  // The leader gives up for what a worker says, which is the reason then.
  if (!HasReason(own, ErrorReason::kCancelled)) note(0, own);
  absl::MutexLock lock(&mutex_);
  for (const auto& slot : slots) {
    absl::Status status = slot->is_ready ? DecodeStatus(slot->ready.status()) : slot->link->status();
    if (status.ok() && !slot->is_ready && are_due) status = absl::DeadlineExceededError("it has not become ready in time");
    note(slot->rank, status);
  }
  return reasons.empty() ? absl::OkStatus() : NotComplete(absl::StrJoin(reasons, "; "));
}

absl::Status GroupAssembly::AwaitReady(const std::vector<std::shared_ptr<Slot>>& slots, const std::function<bool()>& cancelled) {
  const absl::Time deadline = absl::Now() + options_.setup_timeout;
  absl::MutexLock lock(&mutex_);
  for (const auto& slot : slots) {
    while (!slot->is_ready && slot->link->status().ok()) {
      if (cancelled()) return NotAwaited();
      if (absl::Now() > deadline) return absl::OkStatus();
      mutex_.AwaitWithTimeout(absl::Condition(&slot->is_ready), kLook);
    }
  }
  return absl::OkStatus();
}

absl::Status GroupAssembly::Form(const std::function<bool()>& cancelled) {
  absl::StatusOr<std::string> secret = NewSecret();
  if (!secret.ok()) return secret.status();
  std::vector<std::string> addresses = {Port(meeting_->port())};
  std::vector<std::shared_ptr<Slot>> slots;
  {
    const auto all_here = [this]()
                              ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return slots_.size() == static_cast<size_t>(options_.workers); };
    absl::MutexLock lock(&mutex_);
    while (!mutex_.AwaitWithTimeout(absl::Condition(&all_here), kLook)) {
      if (cancelled()) return NotAwaited();
    }
    slots = slots_;
    for (size_t i = 0; i < slots.size(); ++i) {
      slots[i]->rank = static_cast<int32_t>(i) + 1;
      addresses.push_back(slots[i]->address);
    }
    addresses_ = addresses;
    secret_ = *secret;
    complete_ = true;
  }
  const auto given_up = [&] { return cancelled() || !Refusals(slots, absl::OkStatus(), /*are_due=*/false).ok(); };
  absl::StatusOr<std::unique_ptr<LossEngine>> own = MakeOwnEngine(addresses, *secret, given_up);
  absl::Status status = own.ok() ? AwaitReady(slots, cancelled) : absl::OkStatus();
  if (status.ok()) status = Refusals(slots, own.status(), /*are_due=*/own.ok());
  if (status.ok()) status = own.status();  // given up
  if (!status.ok()) {
    for (const auto& slot : slots) slot->link->Break(status);
    return status;
  }
  std::vector<std::unique_ptr<Rank>> ranks;
  ranks.push_back(std::make_unique<LocalRank>(*std::move(own)));
  for (const auto& slot : slots) {
    const v1::RankReady& ready = slot->ready;
    ranks.push_back(std::make_unique<RemoteRank>(
        slot->rank, EngineDevice{absl::StrCat(ready.device(), "@", slot->rank), ready.model(), ready.memory_budget_bytes()},
        slot->link, options_.silence_timeout));
  }
  engine_.Form(std::move(ranks));
  return absl::OkStatus();
}

}  // namespace headwater::group
