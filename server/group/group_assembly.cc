#include "server/group/group_assembly.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "kernels/core/engine_options_check.h"
#include "server/group/ranks/rank_codec.h"
#include "server/observability/logging.h"

namespace headwater::group {

using observability::Log;
using observability::LogLevel;

namespace {

constexpr size_t kSecretBytes = 32;
constexpr int32_t kMaxPort = 65535;
constexpr size_t kMaxProcessBytes = 64;
// How long workers may take to report their reason once the leader's own ranks have failed: it may be the cause.
constexpr absl::Duration kLastWords = absl::Seconds(1);

std::string Port(int32_t port) { return absl::StrCat(":", port); }

// The host part of the address by which this process reaches a listener at `host`. Empty, the loopback, for wildcard addresses.
std::string OwnHost(const std::string& host) {
  if (host == "0.0.0.0" || host == "::" || host == "[::]") return "";
  return host.find(':') == std::string::npos || host.front() == '[' ? host : absl::StrCat("[", host, "]");
}

absl::Status OutOfRange(const char* field, int64_t low, int64_t high) {
  return MakeError(ErrorReason::kProtocolViolation, absl::StrCat(field, " must be from ", low, " to ", high), {{"field", field}});
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
  HEADWATER_RETURN_IF_ERROR(Room());  // at once: a worker without a place is not read
  v1::JoinRequest message;
  if (!call.Read(&message) || !message.has_hello()) {
    return MakeError(ErrorReason::kProtocolViolation, "the first message of Join must be hello");
  }
  HEADWATER_RETURN_IF_ERROR(CheckHello(message.hello()));
  auto slot = std::make_shared<Slot>();
  slot->hello = message.hello();
  slot->hello.set_process_ranks(std::max(slot->hello.process_ranks(), 1));
  slot->address = call.host() + Port(slot->hello.port());
  slot->link = std::make_shared<RankLink>([&call](const v1::JoinResponse& response) { return call.Send(response); },
                                          [&call] { call.Cancel(); });
  HEADWATER_RETURN_IF_ERROR(TakePlace(slot));
  // From here on other threads use the link, and through it the call, until it is broken.
  std::thread sender([link = slot->link] { link->SendAll(); });
  while (call.Read(&message)) {
    {
      absl::MutexLock lock(&mutex_);
      if (slot->rank == 0) continue;  // a heartbeat: the others are not all there
      // Form() reads it without the lock from then on.
      if (message.has_ready() && !slot->ready.has_value()) slot->ready = message.ready();
    }
    if (message.alive().leaving() && options_.on_worker_leaving) options_.on_worker_leaving();
    slot->link->Deliver(std::move(message));
  }
  slot->link->Break(MakeError(ErrorReason::kEngineFailed, "the worker's call has ended"));
  sender.join();
  absl::MutexLock lock(&mutex_);
  if (slot->rank == 0) {
    slots_.erase(std::find(slots_.begin(), slots_.end(), slot));
    LogPresence("worker_left", *slot);
    return MakeError(ErrorReason::kCancelled, "the worker has left before the group was formed");
  }
  return engine_.dismissed() ? absl::OkStatus() : slot->link->status();
}

absl::Status GroupAssembly::Room() {
  absl::MutexLock lock(&mutex_);
  if (slots_.size() < static_cast<size_t>(options_.workers)) return absl::OkStatus();
  return MakeError(ErrorReason::kFeatureNotBuilt, absl::StrCat("this server has its ", options_.workers, " workers"),
                   {{"feature", "workers"}});
}

absl::Status GroupAssembly::TakePlace(const std::shared_ptr<Slot>& slot) {
  const v1::RankHello& hello = slot->hello;
  absl::MutexLock lock(&mutex_);
  int32_t taken = 0;  // counts ranks that their processes have yet to bring
  std::set<std::string> processes;
  for (const auto& other_slot : slots_) {
    const v1::RankHello& other = other_slot->hello;
    if (other.process_ranks() == 1) {
      ++taken;
    } else if (other.process() != hello.process()) {
      if (processes.insert(other.process()).second) taken += other.process_ranks();
    } else if (other.process_ranks() != hello.process_ranks()) {
      return MakeError(ErrorReason::kProtocolViolation,
                       absl::StrCat("hello.process_ranks must be ", other.process_ranks(), ", as another rank of the process says"),
                       {{"field", "hello.process_ranks"}});
    } else if (other.process_index() == hello.process_index()) {
      return MakeError(ErrorReason::kInvalidCombination,
                       absl::StrCat("rank ", hello.process_index(), " of this process has joined already"),
                       {{"field", "hello.process_index"}, {"actual", absl::StrCat(hello.process_index())}});
    }
  }
  if (taken + hello.process_ranks() > options_.workers) {
    return MakeError(ErrorReason::kFeatureNotBuilt,
                     absl::StrCat("this server waits for ", options_.workers, " ranks of workers, other processes bring ", taken,
                                  " of them, and this one ", hello.process_ranks()),
                     {{"feature", "workers"}});
  }
  slots_.push_back(slot);
  LogPresence("worker_joined", *slot);
  return absl::OkStatus();
}

void GroupAssembly::LogPresence(const char* event, const Slot& slot) const {
  Log(LogLevel::kInfo, event,
      {{"address", slot.address}, {"here", static_cast<int64_t>(slots_.size())}, {"wanted", int64_t{options_.workers}}});
}

GroupAssembly::Slots GroupAssembly::Numbered() const {
  // A process's place is that of its first rank; a single rank has its own place.
  const auto place_of = [this](const std::shared_ptr<Slot>& slot) ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    const auto first = std::find_if(slots_.begin(), slots_.end(), [&slot](const std::shared_ptr<Slot>& other) {
      return other == slot || (slot->hello.process_ranks() > 1 && other->hello.process_ranks() > 1 &&
                               other->hello.process() == slot->hello.process());
    });
    return std::pair(first - slots_.begin(), slot->hello.process_index());
  };
  Slots slots = slots_;
  std::sort(slots.begin(), slots.end(),
            [&](const auto& a, const auto& b) ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return place_of(a) < place_of(b); });
  return slots;
}

void GroupAssembly::Welcome(const Slot& slot, const std::vector<std::string>& addresses, const std::string& secret) const {
  const EngineOptions engine = OptionsOf(slot.rank);
  v1::JoinResponse response;
  v1::RankWelcome& welcome = *response.mutable_welcome();
  WriteFields(engine, welcome);
  WriteFields(engine.group, welcome);
  welcome.mutable_addresses()->Assign(addresses.begin(), addresses.end());
  welcome.mutable_shard_weights()->Assign(engine.shard_weights.begin(), engine.shard_weights.end());
  welcome.set_secret(secret);
  welcome.set_engine(options_.engine_name);
  welcome.set_setup_timeout_ms(absl::ToInt64Milliseconds(options_.setup_timeout));
  slot.link->Send(std::move(response)).IgnoreError();  // the link keeps the error
}

EnginesTogether GroupAssembly::MakeOwnRanks(const std::vector<std::string>& addresses, const std::string& secret,
                                            const Slots& slots) {
  std::vector<EngineOptions> engines;
  for (int32_t rank = 0; rank < options_.own_ranks; ++rank) engines.push_back(OptionsOf(rank));
  const auto connect = [&](size_t rank, const std::function<bool()>& aborted) {
    return meetings_[rank]->Meet(static_cast<int32_t>(rank), addresses, secret, absl::ToChronoMilliseconds(options_.setup_timeout),
                                 aborted);
  };
  const auto given_up = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return given_up_ || !Refusals(slots, FirstFailure(), /*are_due=*/false).ok();
  };
  // Making an engine waits for silent workers: it has a time of its own.
  return MakeEnginesTogether(std::move(engines), connect, options_.make_engine, {mutex_, given_up, 2 * options_.setup_timeout});
}

absl::Status GroupAssembly::Refusals(const Slots& slots, const FirstFailure& own, bool are_due) {
  std::vector<std::string> reasons;
  const auto note = [&reasons](int32_t rank, const absl::Status& status) {
    if (!status.ok()) reasons.push_back(absl::StrCat("rank ", rank, ": ", std::string(status.message())));
  };
  // The leader gives up because of a worker, whose reason counts then.
  if (!HasReason(own.status, ErrorReason::kCancelled)) note(static_cast<int32_t>(own.index), own.status);
  for (const auto& slot : slots) {
    const bool is_late = are_due && !slot->is_settled();
    note(slot->rank, slot->ready.has_value() ? DecodeStatus(slot->ready->status())
                     : is_late               ? absl::DeadlineExceededError("it has not become ready in time")
                                             : slot->link->status());
  }
  if (reasons.empty()) return absl::OkStatus();
  return MakeError(ErrorReason::kEngineFailed, "the group cannot be formed: " + absl::StrJoin(reasons, "; "));
}

void GroupAssembly::GiveUp() {
  absl::MutexLock lock(&mutex_);
  given_up_ = true;
}

absl::Status GroupAssembly::Form() {
  std::string secret(kSecretBytes, '\0');
  if (getentropy(secret.data(), secret.size()) != 0) std::abort();  // the kernel always gives so few bytes
  // As workers reach the ranks, and as the leader does.
  std::vector<std::string> addresses, own_addresses;
  for (const auto& meeting : meetings_) {
    addresses.push_back(Port(meeting->port()));
    own_addresses.push_back(OwnHost(options_.listen_host) + addresses.back());
  }
  Slots slots;
  {
    const auto all_here = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return given_up_ || slots_.size() == static_cast<size_t>(options_.workers);
    };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&all_here));
    if (given_up_) return NotAwaited();
    slots = Numbered();
    for (const auto& slot : slots) {
      slot->rank = static_cast<int32_t>(addresses.size());
      addresses.push_back(slot->address);
      own_addresses.push_back(slot->address);
    }
  }
  for (const auto& slot : slots) Welcome(*slot, addresses, secret);
  EnginesTogether own = MakeOwnRanks(own_addresses, secret, slots);
  const absl::Status& own_status = own.failure.status;
  absl::Status status;
  {
    const auto all_settled = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return given_up_ || std::all_of(slots.begin(), slots.end(), [](const auto& slot) { return slot->is_settled(); });
    };
    absl::MutexLock lock(&mutex_);
    if (!HasReason(own_status, ErrorReason::kCancelled)) {
      AwaitFor(mutex_, absl::Condition(&all_settled), own_status.ok() ? options_.setup_timeout : kLastWords);
    }
    status = given_up_ ? NotAwaited() : Refusals(slots, own.failure, own_status.ok() || absl::IsDeadlineExceeded(own_status));
  }
  if (!status.ok()) {
    for (const auto& slot : slots) slot->link->Break(status);
    return status;
  }
  std::vector<Rank> ranks;
  for (auto& engine : own.engines) ranks.push_back(MakeLocalRank(std::move(engine)));
  for (const auto& slot : slots) {
    const v1::RankReady& ready = *slot->ready;
    // Errors name only ranks, because clients see them.
    Log(LogLevel::kInfo, "rank_ready", {{"rank", int64_t{slot->rank}}, {"address", slot->address}, {"device", ready.device()}});
    ranks.push_back(
        MakeRemoteRank(OptionsOf(slot->rank),
                       EngineDevice{absl::StrCat(ready.device(), "@", slot->rank), ready.model(), ready.memory_budget_bytes()},
                       slot->link, options_.silence_timeout, /*shares_rows=*/slot->hello.process_index() > 0));
  }
  engine_.Form(std::move(ranks));
  return absl::OkStatus();
}

}  // namespace headwater::group
