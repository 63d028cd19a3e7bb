#include "server/group/group_assembly.h"

#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "kernels/core/engine_options_check.h"
#include "server/group/ranks/rank.h"
#include "server/group/ranks/rank_codec.h"
#include "server/group/ranks/remote_engine.h"
#include "server/observability/logging.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::group {

using observability::Log;
using observability::LogLevel;

namespace {

constexpr absl::Duration kCancelLook = absl::Milliseconds(50);
constexpr size_t kSecretBytes = 32;
constexpr int32_t kMaxPort = 65535;
constexpr size_t kMaxProcessBytes = 64;
// How long workers may take to report their reason once the leader's own ranks have failed: it may be the cause.
constexpr absl::Duration kLastWords = absl::Seconds(1);

absl::StatusOr<std::string> NewSecret() {
  std::string secret(kSecretBytes, '\0');
  if (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size())) {
    return MakeError(ErrorReason::kEngineFailed, "the system gives no random bytes");
  }
  return secret;
}

std::string Port(int32_t port) { return absl::StrCat(":", port); }

// The host part of the address by which this process reaches a listener at `host`. Empty, the loopback, for wildcard addresses.
std::string OwnHost(const std::string& host) {
  if (host == "0.0.0.0" || host == "::" || host == "[::]") return "";
  return host.find(':') == std::string::npos || host.front() == '[' ? host : absl::StrCat("[", host, "]");
}

absl::Status OutOfRange(const char* field, int64_t low, int64_t high) {
  return MakeError(ErrorReason::kProtocolViolation, absl::StrCat(field, " must be from ", low, " to ", high), {{"field", field}});
}

absl::Status NotComplete(const std::string& what) {
  return MakeError(ErrorReason::kEngineFailed, "the group cannot be formed: " + what);
}

absl::Status NotAwaited() { return MakeError(ErrorReason::kCancelled, "the workers are awaited no longer"); }

}  // namespace

GroupAssembly::GroupAssembly(AssemblyOptions options, std::vector<std::unique_ptr<TcpMeeting>> meetings)
    : options_(std::move(options)),
      meetings_(std::move(meetings)),
      unowned_engine_(std::make_unique<GroupEngine>(options_.engine_name, options_.engine)),
      engine_(*unowned_engine_) {}

absl::StatusOr<std::unique_ptr<GroupAssembly>> GroupAssembly::Create(AssemblyOptions options) {
  std::vector<std::unique_ptr<TcpMeeting>> meetings;
  for (int32_t rank = 0; rank < options.own_ranks; ++rank) {
    absl::StatusOr<std::unique_ptr<TcpMeeting>> meeting = TcpMeeting::Listen(options.listen_host);
    if (!meeting.ok()) return absl::UnavailableError(meeting.status().message());
    meetings.push_back(*std::move(meeting));
  }
  return std::unique_ptr<GroupAssembly>(new GroupAssembly(std::move(options), std::move(meetings)));
}

absl::Status GroupAssembly::CheckHello(const v1::RankHello& hello) const {
  if (hello.version() != options_.version) {
    return MakeError(ErrorReason::kInvalidCombination,
                     absl::StrCat("the worker is of version ", hello.version(), ", this server of ", options_.version),
                     {{"field", "hello.version"}, {"expected", options_.version}, {"actual", hello.version()}});
  }
  if (!hello.engine().empty() && hello.engine() != "auto" && hello.engine() != options_.engine_name) {
    return MakeError(ErrorReason::kInvalidCombination,
                     absl::StrCat("the worker's engine is ", hello.engine(), ", this server's ", options_.engine_name),
                     {{"field", "hello.engine"}, {"expected", options_.engine_name}, {"actual", hello.engine()}});
  }
  if (hello.port() < 1 || hello.port() > kMaxPort) return OutOfRange("hello.port", 1, kMaxPort);
  if (hello.process().size() > kMaxProcessBytes) return OutOfRange("the bytes of hello.process", 0, kMaxProcessBytes);
  if (hello.process_ranks() < 0 || hello.process_ranks() > kMaxShards) return OutOfRange("hello.process_ranks", 0, kMaxShards);
  const int32_t last = std::max(hello.process_ranks(), 1) - 1;
  if (hello.process_index() < 0 || hello.process_index() > last) return OutOfRange("hello.process_index", 0, last);
  return absl::OkStatus();
}

absl::Status GroupAssembly::Serve(JoinCall& call) {
  HEADWATER_RETURN_IF_ERROR(CheckRoom());  // at once: a worker without a place is not read
  v1::JoinRequest message;
  if (!call.Read(&message) || !message.has_hello()) {
    return MakeError(ErrorReason::kProtocolViolation, "the first message of Join must be hello");
  }
  const v1::RankHello& hello = message.hello();
  HEADWATER_RETURN_IF_ERROR(CheckHello(hello));
  auto slot = std::make_shared<Slot>();
  slot->address = call.host() + Port(hello.port());
  slot->process = hello.process();
  slot->process_index = hello.process_index();
  slot->process_ranks = std::max(hello.process_ranks(), 1);
  slot->link = std::make_shared<RankLink>([&call](const v1::JoinResponse& response) { return call.Send(response); },
                                          [&call] { call.Cancel(); });
  const absl::Status ended = MakeError(ErrorReason::kEngineFailed, "the worker's call has ended");
  HEADWATER_RETURN_IF_ERROR(AwaitRank(call, slot));
  // From here on other threads use the link, and through it the call, until it is closed.
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
      if (message.alive().leaving() && options_.on_worker_leaving) options_.on_worker_leaving();
      slot->link->Deliver(std::move(message));
      message = v1::JoinRequest();
    }
  }
  slot->link->Close(ended);
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

absl::Status GroupAssembly::RoomFor(const Slot& slot) const {
  HEADWATER_RETURN_IF_ERROR(Room());
  int32_t taken = 0;  // counts ranks that their processes have yet to bring
  std::set<std::string> processes;
  for (const auto& other : slots_) {
    if (other->process_ranks == 1) {
      ++taken;
    } else if (other->process != slot.process) {
      if (processes.insert(other->process).second) taken += other->process_ranks;
    } else if (other->process_ranks != slot.process_ranks) {
      return MakeError(ErrorReason::kProtocolViolation,
                       absl::StrCat("hello.process_ranks must be ", other->process_ranks, ", as another rank of the process says"),
                       {{"field", "hello.process_ranks"}});
    } else if (other->process_index == slot.process_index) {
      return MakeError(ErrorReason::kInvalidCombination,
                       absl::StrCat("rank ", slot.process_index, " of this process has joined already"),
                       {{"field", "hello.process_index"}, {"actual", absl::StrCat(slot.process_index)}});
    }
  }
  if (taken + slot.process_ranks <= options_.workers) return absl::OkStatus();
  return MakeError(ErrorReason::kFeatureNotBuilt,
                   absl::StrCat("this server waits for ", options_.workers, " ranks of workers, other processes bring ", taken,
                                " of them, and this one ", slot.process_ranks),
                   {{"feature", "workers"}});
}

absl::Status GroupAssembly::AwaitRank(JoinCall& call, const std::shared_ptr<Slot>& slot) {
  absl::MutexLock lock(&mutex_);
  HEADWATER_RETURN_IF_ERROR(RoomFor(*slot));
  slots_.push_back(slot);
  LogPresence("worker_joined", *slot);
  while (!mutex_.AwaitWithTimeout(absl::Condition(&complete_), kCancelLook)) {
    if (!call.Cancelled()) continue;
    slots_.erase(std::find(slots_.begin(), slots_.end(), slot));
    LogPresence("worker_left", *slot);
    return MakeError(ErrorReason::kCancelled, "the worker has left before the group was formed");
  }
  return absl::OkStatus();
}

void GroupAssembly::LogPresence(const char* event, const Slot& slot) const {
  Log(LogLevel::kInfo, event,
      {{"address", slot.address}, {"here", static_cast<int64_t>(slots_.size())}, {"wanted", int64_t{options_.workers}}});
}

std::vector<std::shared_ptr<GroupAssembly::Slot>> GroupAssembly::Numbered() const {
  // A process's place is that of its first rank; a single rank has its own place.
  std::map<std::string, size_t> places;
  std::vector<std::pair<std::pair<size_t, int32_t>, std::shared_ptr<Slot>>> ordered;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const std::shared_ptr<Slot>& slot = slots_[i];
    const size_t place = slot->process_ranks == 1 ? i : places.try_emplace(slot->process, i).first->second;
    ordered.emplace_back(std::pair(place, slot->process_index), slot);
  }
  std::sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::shared_ptr<Slot>> slots;
  for (auto& [place, slot] : ordered) slots.push_back(std::move(slot));
  return slots;
}

void GroupAssembly::Welcome(const Slot& slot, v1::RankWelcome* welcome) {
  const EngineOptions& engine = options_.engine;
  welcome->set_rank(slot.rank);
  welcome->set_world_size(options_.own_ranks + options_.workers);
  for (const std::string& address : addresses_) welcome->add_addresses(address);
  welcome->set_secret(secret_);
  welcome->set_engine(options_.engine_name);
  welcome->set_device_group_id(options_.device_group_id);
  welcome->set_timed_search(engine.timed_search);
  for (const int64_t weight : engine.shard_weights) welcome->add_shard_weights(weight);
  welcome->set_workspace_bytes(engine.workspace_bytes);
  welcome->set_token_chunk_rows(engine.token_chunk_rows);
  welcome->set_thread_count(engine.thread_count);
  welcome->set_deterministic(engine.deterministic);
  welcome->set_setup_timeout_ms(absl::ToInt64Milliseconds(options_.setup_timeout));
}

GroupAssembly::OwnRanks GroupAssembly::MakeOwnRanks(const std::vector<std::string>& addresses, const std::string& secret,
                                                    const std::function<bool()>& given_up) {
  OwnRanks own;
  std::vector<EngineOptions> engines(meetings_.size(), options_.engine);
  std::atomic<bool> has_failed{false};
  own.failure = RunTogether(
      meetings_.size(),
      [&](size_t rank) {
        auto communicator =
            meetings_[rank]->Meet(static_cast<int32_t>(rank), addresses, secret, absl::ToChronoMilliseconds(options_.setup_timeout),
                                  [&] { return has_failed.load(); });
        if (!communicator.ok()) return communicator.status();
        EngineOptions& engine = engines[rank];
        engine.device_index = options_.engine.device_index + static_cast<int32_t>(rank);
        engine.group.rank = static_cast<int32_t>(rank);
        engine.group.world_size = static_cast<int32_t>(addresses.size());
        engine.group.communicator = *std::move(communicator);
        engine.group.device_group_id = options_.device_group_id;
        return absl::OkStatus();
      },
      [&](const absl::Status&) { has_failed = true; }, given_up);
  if (own.failure.status.ok()) own.failure = MakeEnginesTogether(engines, options_.make_engine, given_up, &own.engines);
  return own;
}

absl::Status GroupAssembly::Refusals(const std::vector<std::shared_ptr<Slot>>& slots, const FirstFailure& own, bool are_due) {
  std::vector<std::string> reasons;
  const auto note = [&reasons](int32_t rank, const absl::Status& status) {
    if (!status.ok()) reasons.push_back(absl::StrCat("rank ", rank, ": ", std::string(status.message())));
  };
  // The leader gives up because of a worker, whose reason counts then.
  if (!HasReason(own.status, ErrorReason::kCancelled)) note(static_cast<int32_t>(own.index), own.status);
  absl::MutexLock lock(&mutex_);
  for (const auto& slot : slots) {
    absl::Status status = slot->is_ready ? DecodeStatus(slot->ready.status()) : slot->link->status();
    if (status.ok() && !slot->is_ready && are_due) status = absl::DeadlineExceededError("it has not become ready in time");
    note(slot->rank, status);
  }
  return reasons.empty() ? absl::OkStatus() : NotComplete(absl::StrJoin(reasons, "; "));
}

absl::Status GroupAssembly::AwaitReady(const std::vector<std::shared_ptr<Slot>>& slots, absl::Duration timeout,
                                       const std::function<bool()>& cancelled) {
  const absl::Time deadline = observability::MonotonicNow() + timeout;
  absl::MutexLock lock(&mutex_);
  for (const auto& slot : slots) {
    while (!slot->is_ready && slot->link->status().ok()) {
      if (cancelled()) return NotAwaited();
      if (observability::MonotonicNow() > deadline) return absl::OkStatus();
      mutex_.AwaitWithTimeout(absl::Condition(&slot->is_ready), kCancelLook);
    }
  }
  return absl::OkStatus();
}

absl::Status GroupAssembly::Form(const std::function<bool()>& cancelled) {
  absl::StatusOr<std::string> secret = NewSecret();
  if (!secret.ok()) return secret.status();
  // As workers reach the ranks, and as the leader does.
  std::vector<std::string> addresses, own_addresses;
  for (const auto& meeting : meetings_) {
    addresses.push_back(Port(meeting->port()));
    own_addresses.push_back(OwnHost(options_.listen_host) + addresses.back());
  }
  std::vector<std::shared_ptr<Slot>> slots;
  {
    const auto all_here = [this]()
                              ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return slots_.size() == static_cast<size_t>(options_.workers); };
    absl::MutexLock lock(&mutex_);
    while (!mutex_.AwaitWithTimeout(absl::Condition(&all_here), kCancelLook)) {
      if (cancelled()) return NotAwaited();
    }
    slots = Numbered();
    for (const auto& slot : slots) {
      slot->rank = static_cast<int32_t>(addresses.size());
      addresses.push_back(slot->address);
      own_addresses.push_back(slot->address);
    }
    addresses_ = addresses;
    secret_ = *secret;
    complete_ = true;
  }
  const auto given_up = [&] { return cancelled() || !Refusals(slots, FirstFailure(), /*are_due=*/false).ok(); };
  OwnRanks own = MakeOwnRanks(own_addresses, *secret, given_up);
  const bool is_ready = own.failure.status.ok();
  absl::Status status;
  if (!HasReason(own.failure.status, ErrorReason::kCancelled)) {
    status = AwaitReady(slots, is_ready ? options_.setup_timeout : kLastWords, cancelled);
  }
  if (status.ok()) status = Refusals(slots, own.failure, /*are_due=*/is_ready);
  if (status.ok()) status = own.failure.status;  // given up
  if (!status.ok()) {
    for (const auto& slot : slots) slot->link->Break(status);
    return status;
  }
  std::vector<Rank> ranks;
  for (auto& engine : own.engines) ranks.push_back(MakeLocalRank(std::move(engine)));
  for (const auto& slot : slots) {
    const v1::RankReady& ready = slot->ready;
    // Errors name only ranks, because clients see them.
    Log(LogLevel::kInfo, "rank_ready", {{"rank", int64_t{slot->rank}}, {"address", slot->address}, {"device", ready.device()}});
    EngineOptions options = options_.engine;
    options.group.rank = slot->rank;
    options.group.world_size = static_cast<int32_t>(addresses.size());
    ranks.push_back(MakeRemoteRank(
        options, EngineDevice{absl::StrCat(ready.device(), "@", slot->rank), ready.model(), ready.memory_budget_bytes()},
        slot->link, options_.silence_timeout, /*shares_rows=*/slot->process_index > 0));
  }
  engine_.Form(std::move(ranks));
  return absl::OkStatus();
}

}  // namespace headwater::group
