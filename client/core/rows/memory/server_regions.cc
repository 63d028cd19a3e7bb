#include "client/core/rows/memory/server_regions.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/core/link/error.h"
#include "headwater/client/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

using SteadyClock = std::chrono::steady_clock;

// How long a path that did not work is not tried again.
constexpr std::chrono::seconds kFindingLife{60};
constexpr std::chrono::seconds kDropTimeout{10};
// The least time that a server may take to register memory; a caller that gave up before finds it registered afterwards.
constexpr std::chrono::seconds kRegisterTimeout{30};

// Regions need a session, whatever the options say of contributions.
ClientOptions WithSession(ClientOptions options) {
  if (options.session_lease.count() == 0) options.session_lease = ClientOptions{}.session_lease;
  return options;
}

Deadline DropDeadline() { return std::chrono::system_clock::now() + kDropTimeout; }

// Whether the server cannot be reached or the session has ended. Any other error means that this memory cannot be used there.
bool IsOfTheCall(const absl::Status& status) {
  return status.code() == absl::StatusCode::kUnavailable || status.code() == absl::StatusCode::kCancelled ||
         status.code() == absl::StatusCode::kDeadlineExceeded || ErrorReason(status) == "SESSION_NOT_FOUND";
}

}  // namespace

ServerRegions::ServerRegions(const std::string& target, std::shared_ptr<grpc::Channel> channel, const ClientOptions& options)
    : target_(target),
      channel_(std::move(channel)),
      stub_(v1::SessionService::NewStub(channel_)),
      session_(std::make_shared<Session>(target, WithSession(options))) {}

ServerRegions::~ServerRegions() {
  CloseSession();
  for (Farewell& farewell : farewells_) farewell.context.TryCancel();  // no thread adds or removes any more
  std::unique_lock<std::mutex> lock(farewells_mutex_);
  farewell_over_.wait(lock, [&] {
    return std::all_of(farewells_.begin(), farewells_.end(), [](const Farewell& farewell) { return farewell.over; });
  });
}

void ServerRegions::CloseSession() {
  std::shared_ptr<Session> session;
  std::vector<std::shared_ptr<Registration>> sent;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    session = std::move(session_);
    session_ = nullptr;
    for (const auto& [key, registration] : registrations_) {
      if (registration->sent) sent.push_back(registration);
    }
  }
  for (const auto& registration : sent) registration->context.TryCancel();  // without the lock: gRPC may call back at once
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock,
                [&] { return std::all_of(sent.begin(), sent.end(), [](const auto& registration) { return registration->over; }); });
  // They go with the session: to give them back after its end would be refused.
  if (session != nullptr) {
    const std::string id = session->OpenId();
    std::erase_if(regions_, [&](const auto& region) { return region.first.first == id; });
  }
  lock.unlock();
  session.reset();
}

absl::StatusOr<std::string> ServerRegions::SessionOr(const std::string& session_id, const Wait& wait) {
  if (!session_id.empty()) return session_id;
  std::shared_ptr<Session> session;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    session = session_;
  }
  if (session == nullptr) return absl::CancelledError("the client is being closed");
  return session->Id(wait);
}

ServerRegions::Finding ServerRegions::Unusable(const std::string& why) {
  return {TransportUnavailable(why), SteadyClock::now() + kFindingLife};
}

absl::StatusOr<std::shared_ptr<const v1::ServerInfo>> ServerRegions::Info(const Wait& wait, bool again) {
  if (!again) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (info_ != nullptr) return info_;
    HEADWATER_RETURN_IF_ERROR(wait.Check());
  }
  WaitingContext context(wait);
  const auto info = std::make_shared<v1::ServerInfo>();
  const grpc::Status status = stub_->GetServerInfo(context.get(), {}, info.get());
  if (!status.ok()) return FromGrpcStatus(status, target_);
  std::lock_guard<std::mutex> lock(mutex_);
  return info_ = info;
}

template <typename Problem>
absl::Status ServerRegions::Works(std::optional<Finding>* known, const Wait& wait, Problem problem) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (known->has_value() && SteadyClock::now() < (*known)->end) return (*known)->status;
  }
  HEADWATER_ASSIGN_OR_RETURN(auto info, Info(wait, false));
  const std::string why = problem(*info);
  if (why.empty()) return absl::OkStatus();
  std::lock_guard<std::mutex> lock(mutex_);
  *known = Unusable(why);
  info_.reset();  // another server may be asked then
  return (*known)->status;
}

absl::Status ServerRegions::HostMemoryWorks(const Wait& wait, bool* named) {
  return Works(&host_problem_, wait, [named](const v1::ServerInfo& info) {
    *named = info.descriptor_socket().empty();
    return !*named || info.named_regions() ? "" : "the server takes no shared memory: it was started without --descriptor_socket";
  });
}

absl::Status ServerRegions::DeviceMemoryWorks(const Wait& wait) {
  return Works(&device_problem_, wait, [](const v1::ServerInfo& info) -> std::string {
    if (std::find(info.features().begin(), info.features().end(), "cuda_ipc") != info.features().end()) return "";
    return absl::StrCat("the server's engine (", info.engine(), ") opens no device memory");
  });
}

bool ServerRegions::PassesByName() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return info_ != nullptr && info_->descriptor_socket().empty() && info_->named_regions();
}

absl::StatusOr<std::string> ServerRegions::Token(const SharedRegion& region, const Wait& wait) {
  absl::Status failure;
  for (const bool again : {false, true}) {  // the server may have been started again since it was asked
    HEADWATER_ASSIGN_OR_RETURN(auto info, Info(wait, again));
    auto token = PassDescriptor(info->descriptor_socket(), region.fd(), region.bytes(), info->incarnation(), wait);
    if (token.ok()) return token;
    HEADWATER_RETURN_IF_ERROR(wait.Check());  // which says nothing of the path
    failure = token.status();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  host_problem_ = Unusable(Sentence(failure));
  return host_problem_->status;
}

template <typename Fill>
absl::StatusOr<std::string> ServerRegions::RegisterOnce(const std::string& session_id, const Backing& backing, const Wait& wait,
                                                        Fill&& fill) {
  const Key key(session_id, backing.key());
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (const auto found = regions_.find(key); found != regions_.end()) return found->second;
    const auto refused = refused_.find(backing.key());
    if (refused != refused_.end() && SteadyClock::now() < refused->second.end) return refused->second.status;
    if (closed_) return absl::CancelledError("the client is being closed");
    HEADWATER_RETURN_IF_ERROR(wait.Check());
    std::shared_ptr<Registration> registration;
    if (const auto found = registrations_.find(key); found != registrations_.end()) registration = found->second;
    const bool mine = registration == nullptr || registration->over;
    if (mine) {
      std::erase_if(registrations_, [](const auto& entry) { return entry.second->over; });
      registration = registrations_[key] = std::make_shared<Registration>();
      lock.unlock();
      registration->request.set_session_id(session_id);
      registration->request.set_size_bytes(backing.bytes());
      if (absl::Status status = fill(&registration->request); status.ok()) {
        Send(key, registration.get(), wait.deadline);
      } else {
        const bool alone = !wait.Check().ok();
        End(registration.get(), std::move(status), alone);
      }
      lock.lock();
    }
    if (!changed_.wait_until(lock, wait.cancel, wait.deadline, [&] { return registration->over; })) return wait.Ended();
    if (registration->unwanted || (registration->alone && !mine)) continue;
    if (registration->status.ok()) return registration->response.region_id();
    return registration->status;
  }
}

void ServerRegions::Send(const Key& key, Registration* registration, Deadline deadline) {
  bool closed = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed = closed_;
    registration->sent = !closed;
  }
  if (closed) return End(registration, absl::CancelledError("the client is being closed"), /*alone=*/false);
  registration->context.set_deadline(std::max<Deadline>(deadline, std::chrono::system_clock::now() + kRegisterTimeout));
  stub_->async()->RegisterSharedMemory(
      &registration->context, &registration->request, &registration->response,
      [this, key, registration](const grpc::Status& answer) noexcept { Registered(key, registration, answer); });
}

void ServerRegions::End(Registration* registration, absl::Status status, bool alone) {
  std::lock_guard<std::mutex> lock(mutex_);
  registration->status = std::move(status);
  registration->alone = alone;
  registration->over = true;
  changed_.notify_all();
}

void ServerRegions::Registered(const Key& key, Registration* registration, const grpc::Status& answer) {
  std::vector<Region> unwanted;
  absl::Status status = answer.ok() ? absl::OkStatus() : FromGrpcStatus(answer, target_);
  const bool alone = absl::IsDeadlineExceeded(status);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (answer.ok() && registration->unwanted) {
      unwanted.emplace_back(key.first, registration->response.region_id());
    } else if (answer.ok()) {
      refused_.erase(key.second);
      regions_.insert_or_assign(key, registration->response.region_id());
    } else if (!IsOfTheCall(status)) {
      const Finding finding = Unusable(absl::StrCat("the server cannot use the memory: ", Sentence(status)));
      status = finding.status;
      if (!registration->unwanted) refused_[key.second] = finding;
    }
  }
  GiveBack(unwanted, DropDeadline(), nullptr);
  End(registration, std::move(status), alone);  // the last access to this object
}

absl::StatusOr<std::string> ServerRegions::Register(const std::string& session_id, const SharedRegion& region, const Wait& wait) {
  return RegisterOnce(session_id, region, wait, [&](v1::RegisterSharedMemoryRequest* request) -> absl::Status {
    if (!region.name().empty()) {
      request->set_shared_memory_name(region.name());
      return absl::OkStatus();
    }
    HEADWATER_ASSIGN_OR_RETURN(auto token, Token(region, wait));
    request->set_descriptor_token(std::move(token));
    return absl::OkStatus();
  });
}

absl::StatusOr<std::string> ServerRegions::Register(const std::string& session_id, const DeviceBacking& backing, const Wait& wait) {
  return RegisterOnce(session_id, backing, wait, [&](v1::RegisterSharedMemoryRequest* request) {
    const CuIpcHandle& event = backing.context()->event_handle();
    request->set_cuda_ipc_handle(backing.handle().reserved, sizeof(backing.handle().reserved));
    request->set_cuda_event_handle(event.reserved, sizeof(event.reserved));
    return absl::OkStatus();
  });
}

bool ServerRegions::Drop(Backings backings, std::optional<Deadline> until) {
  std::vector<Region> dropped;
  bool closed = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed = closed_;
    const auto goes = [&](const Key& key) {
      return std::any_of(backings.begin(), backings.end(), [&](const auto& backing) { return backing->key() == key.second; });
    };
    std::erase_if(regions_, [&](auto& region) {
      if (!goes(region.first)) return false;
      dropped.emplace_back(region.first.first, std::move(region.second));
      return true;
    });
    for (const auto& [key, registration] : registrations_) {
      if (goes(key) && !registration->over) registration->unwanted = true;
    }
    for (const auto& backing : backings) {
      refused_.erase(backing->key());
      if (until.has_value()) ++dropping_[backing->key()];
    }
  }
  if (!until.has_value()) {
    if (!closed) GiveBack(dropped, DropDeadline(), nullptr);  // otherwise they go with their sessions, which the client closes now
    return false;
  }
  Answers answers{static_cast<int>(dropped.size())};
  GiveBack(dropped, *until, &answers);
  {
    std::unique_lock<std::mutex> lock(farewells_mutex_);
    farewell_over_.wait(lock, [&] { return answers.missing == 0; });
  }
  // A call that shares a backing may have taken the regions first: its answer is this one's too.
  std::unique_lock<std::mutex> lock(mutex_);
  for (const auto& backing : backings) {
    if (--dropping_[backing->key()] == 0) dropping_.erase(backing->key());
  }
  changed_.notify_all();
  const auto nobody_drops = [&] {
    return std::none_of(backings.begin(), backings.end(), [&](const auto& backing) { return dropping_.contains(backing->key()); });
  };
  return changed_.wait_until(lock, *until, nobody_drops) && answers.unused;
}

// Gives regions back. An answer changes nothing but `answers`: a region that could not be given back ends with its session.
void ServerRegions::GiveBack(const std::vector<Region>& regions, Deadline deadline, Answers* answers) noexcept {
  for (const Region& region : regions) {
    Farewell* farewell = nullptr;
    {
      std::lock_guard<std::mutex> lock(farewells_mutex_);
      farewells_.remove_if([](const Farewell& other) { return other.over; });
      farewell = &farewells_.emplace_back();
    }
    // Without the lock: gRPC may call back at once.
    farewell->answers = answers;
    farewell->context.set_deadline(deadline);
    farewell->request.set_session_id(region.first);
    farewell->request.set_region_id(region.second);
    stub_->async()->UnregisterSharedMemory(&farewell->context, &farewell->request, &farewell->response,
                                           [this, farewell](const grpc::Status& answer) noexcept { Over(farewell, answer); });
  }
}

void ServerRegions::Over(Farewell* farewell, const grpc::Status& answer) {
  // Calls of a session that has ended may still run: only the server's word for the region counts.
  const bool unused = answer.ok() || ErrorReason(FromGrpcStatus(answer, target_)) == "REGION_NOT_FOUND";
  std::lock_guard<std::mutex> lock(farewells_mutex_);
  farewell->over = true;
  if (farewell->answers != nullptr) {
    --farewell->answers->missing;
    farewell->answers->unused = farewell->answers->unused && unused;
  }
  farewell_over_.notify_all();
}

void ServerRegions::Lost(const std::string& session_id, const Backing& backing, const std::string& region_id) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = regions_.find(Key(session_id, backing.key()));
    if (known == regions_.end() || known->second != region_id) return;
    regions_.erase(known);
  }
  GiveBack({{session_id, region_id}}, DropDeadline(), nullptr);  // it may be there: another region of the call was the lost one
}

void ServerRegions::Forget(const std::string& session_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(regions_, [&](const auto& region) { return region.first.first == session_id; });
  for (const auto& [key, registration] : registrations_) {
    if (key.first == session_id && !registration->over) registration->unwanted = true;
  }
  if (session_ != nullptr) session_->Forget(session_id);
  info_.reset();
  host_problem_.reset();
  device_problem_.reset();
}

}  // namespace headwater::client::internal
