#include "client/cpp/src/memory/server_regions.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/src/error.h"
#include "headwater/client/error.h"

namespace headwater::client::internal {
namespace {

using SteadyClock = std::chrono::steady_clock;

// How long a path that did not work is not tried again.
constexpr std::chrono::seconds kFindingLife{60};
constexpr std::chrono::seconds kDropTimeout{10};

// Regions need a session, whatever the options say of contributions.
ClientOptions WithSession(ClientOptions options) {
  if (options.session_lease.count() == 0) options.session_lease = ClientOptions{}.session_lease;
  return options;
}

// The answer of a server that cannot be reached, or of a session that is no more; everything else says that this memory cannot be
// used there.
bool IsOfTheCall(const absl::Status& status) {
  return status.code() == absl::StatusCode::kUnavailable || status.code() == absl::StatusCode::kCancelled ||
         status.code() == absl::StatusCode::kDeadlineExceeded || ErrorReason(status) == "SESSION_NOT_FOUND";
}

std::string Sentence(const absl::Status& status) { return std::string(status.message()); }

}  // namespace

absl::Status TransportUnavailable(const std::string& why) {
  return MakeLocalError(v1::ERROR_REASON_TRANSPORT_UNAVAILABLE, absl::StatusCode::kFailedPrecondition, why);
}

ServerRegions::ServerRegions(const std::string& target, std::shared_ptr<grpc::Channel> channel, const ClientOptions& options)
    : target_(target),
      channel_(std::move(channel)),
      stub_(v1::SessionService::NewStub(channel_)),
      session_(std::make_shared<Session>(target, WithSession(options))) {}

ServerRegions::~ServerRegions() {
  for (Farewell& farewell : farewells_) farewell.context.TryCancel();  // nobody adds or removes any more
  std::unique_lock<std::mutex> lock(farewells_mutex_);
  farewell_over_.wait(lock, [&] {
    return std::all_of(farewells_.begin(), farewells_.end(), [](const Farewell& farewell) { return farewell.over; });
  });
}

void ServerRegions::CloseSession() {
  std::shared_ptr<Session> closed;
  std::lock_guard<std::mutex> one_at_a_time(registering_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed = std::move(session_);
    session_ = nullptr;
  }
}

absl::StatusOr<std::string> ServerRegions::SessionOr(const std::string& session_id, Deadline deadline) {
  if (!session_id.empty()) return session_id;
  std::shared_ptr<Session> session;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    session = session_;
  }
  if (session == nullptr) return absl::CancelledError("the client is being closed");
  return session->Id(deadline);
}

ServerRegions::Finding ServerRegions::Unusable(const std::string& why) {
  return {TransportUnavailable(why), SteadyClock::now() + kFindingLife};
}

absl::StatusOr<v1::ServerInfo> ServerRegions::Info(Deadline deadline, bool again) {
  if (!again) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (info_.has_value()) return *info_;
  }
  grpc::ClientContext context;
  context.set_deadline(deadline);
  v1::ServerInfo info;
  if (const grpc::Status status = stub_->GetServerInfo(&context, {}, &info); !status.ok()) return FromGrpcStatus(status, target_);
  std::lock_guard<std::mutex> lock(mutex_);
  info_ = info;
  return info;
}

absl::Status ServerRegions::HostMemoryWorks(Deadline deadline, bool* named) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (host_problem_.has_value() && SteadyClock::now() < host_problem_->end) return host_problem_->status;
  }
  auto info = Info(deadline, false);
  if (!info.ok()) return info.status();
  *named = info->descriptor_socket().empty();
  if (!*named || info->named_regions()) return absl::OkStatus();
  std::lock_guard<std::mutex> lock(mutex_);
  host_problem_ = Unusable("the server takes no shared memory: it was started without --descriptor_socket");
  info_.reset();  // another one may be asked then
  return host_problem_->status;
}

absl::Status ServerRegions::DeviceMemoryWorks(Deadline deadline) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (device_problem_.has_value() && SteadyClock::now() < device_problem_->end) return device_problem_->status;
  }
  auto info = Info(deadline, false);
  if (!info.ok()) return info.status();
  const auto& features = info->features();
  if (std::find(features.begin(), features.end(), "cuda_ipc") != features.end()) return absl::OkStatus();
  std::lock_guard<std::mutex> lock(mutex_);
  device_problem_ = Unusable(absl::StrCat("the server's engine (", info->engine(), ") opens no device memory"));
  info_.reset();
  return device_problem_->status;
}

bool ServerRegions::PassesByName() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return info_.has_value() && info_->descriptor_socket().empty() && info_->named_regions();
}

absl::StatusOr<std::string> ServerRegions::Token(const SharedRegion& region, Deadline deadline) {
  absl::Status failure;
  for (const bool again : {false, true}) {  // the server may have been started again since it was asked
    auto info = Info(deadline, again);
    if (!info.ok()) return info.status();
    auto token = PassDescriptor(info->descriptor_socket(), region.fd(), region.bytes(), info->incarnation());
    if (token.ok()) return token;
    failure = token.status();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  host_problem_ = Unusable(Sentence(failure));
  return host_problem_->status;
}

template <typename Fill>
absl::StatusOr<std::string> ServerRegions::RegisterOnce(const std::string& session_id, const Backing& backing, Deadline deadline,
                                                        Fill&& fill) {
  const Key key(session_id, backing.key());
  const auto known = [&]() -> std::optional<absl::StatusOr<std::string>> {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = regions_.find(key); found != regions_.end()) return found->second;
    const auto refused = refused_.find(backing.key());
    if (refused != refused_.end() && SteadyClock::now() < refused->second.end) return refused->second.status;
    return std::nullopt;
  };
  if (const auto answer = known(); answer.has_value()) return *answer;
  std::lock_guard<std::mutex> one_at_a_time(registering_);
  if (const auto answer = known(); answer.has_value()) return *answer;
  v1::RegisterSharedMemoryRequest request;
  request.set_session_id(session_id);
  request.set_size_bytes(backing.bytes());
  if (absl::Status status = fill(&request); !status.ok()) return status;
  grpc::ClientContext context;
  context.set_deadline(deadline);
  v1::RegisterSharedMemoryResponse response;
  const grpc::Status answer = stub_->RegisterSharedMemory(&context, request, &response);
  std::lock_guard<std::mutex> lock(mutex_);
  if (answer.ok()) {
    refused_.erase(backing.key());
    return regions_[key] = response.region_id();
  }
  const absl::Status status = FromGrpcStatus(answer, target_);
  if (IsOfTheCall(status)) return status;
  const Finding finding = Unusable(absl::StrCat("the server cannot use the memory: ", Sentence(status)));
  refused_[backing.key()] = finding;
  return finding.status;
}

absl::StatusOr<std::string> ServerRegions::Register(const std::string& session_id, const SharedRegion& region, Deadline deadline) {
  return RegisterOnce(session_id, region, deadline, [&](v1::RegisterSharedMemoryRequest* request) -> absl::Status {
    if (!region.name().empty()) {
      request->set_shared_memory_name(region.name());
      return absl::OkStatus();
    }
    auto token = Token(region, deadline);
    if (!token.ok()) return token.status();
    request->set_descriptor_token(*std::move(token));
    return absl::OkStatus();
  });
}

absl::StatusOr<std::string> ServerRegions::Register(const std::string& session_id, const DeviceBacking& backing,
                                                    Deadline deadline) {
  return RegisterOnce(session_id, backing, deadline, [&](v1::RegisterSharedMemoryRequest* request) {
    const CuIpcHandle& event = backing.context()->event_handle();
    request->set_cuda_ipc_handle(backing.handle().reserved, sizeof(backing.handle().reserved));
    request->set_cuda_event_handle(event.reserved, sizeof(event.reserved));
    return absl::OkStatus();
  });
}

bool ServerRegions::Drop(const Backing& backing, std::optional<Deadline> wait) {
  std::vector<Region> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    refused_.erase(backing.key());
    for (auto entry = regions_.begin(); entry != regions_.end();) {
      if (entry->first.second != backing.key()) {
        ++entry;
        continue;
      }
      dropped.emplace_back(entry->first.first, std::move(entry->second));
      entry = regions_.erase(entry);
    }
  }
  if (!wait.has_value()) {
    GiveBack(dropped);
    return false;
  }
  bool unused = true;
  for (const auto& [session, region] : dropped) {
    grpc::ClientContext context;
    context.set_deadline(*wait);
    v1::UnregisterSharedMemoryRequest request;
    request.set_session_id(session);
    request.set_region_id(region);
    v1::UnregisterSharedMemoryResponse response;
    const grpc::Status answer = stub_->UnregisterSharedMemory(&context, request, &response);
    const std::string reason = answer.ok() ? "" : ErrorReason(FromGrpcStatus(answer, target_));
    // Calls of a session that has ended may still run: only the server's word for the region counts.
    unused = unused && (answer.ok() || reason == "REGION_NOT_FOUND");
  }
  return unused;
}

// The answers change nothing: a region that could not be given back goes with its session.
void ServerRegions::GiveBack(const std::vector<Region>& regions) {
  std::vector<Farewell*> begun;
  {
    std::lock_guard<std::mutex> lock(farewells_mutex_);
    farewells_.remove_if([](const Farewell& farewell) { return farewell.over; });
    for (size_t i = 0; i < regions.size(); ++i) begun.push_back(&farewells_.emplace_back());
  }
  // Without the lock: gRPC may call back at once.
  for (size_t i = 0; i < regions.size(); ++i) {
    Farewell* const farewell = begun[i];
    farewell->context.set_deadline(std::chrono::system_clock::now() + kDropTimeout);
    farewell->request.set_session_id(regions[i].first);
    farewell->request.set_region_id(regions[i].second);
    stub_->async()->UnregisterSharedMemory(&farewell->context, &farewell->request, &farewell->response,
                                           [this, farewell](const grpc::Status&) {
                                             std::lock_guard<std::mutex> lock(farewells_mutex_);
                                             farewell->over = true;
                                             farewell_over_.notify_all();
                                           });
  }
}

void ServerRegions::Lost(const std::string& session_id, const Backing& backing, const std::string& region_id) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = regions_.find(Key(session_id, backing.key()));
    if (known == regions_.end() || known->second != region_id) return;
    regions_.erase(known);
  }
  GiveBack({{session_id, region_id}});  // it may be there: another region of the call was the lost one
}

void ServerRegions::Forget(const std::string& session_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto entry = regions_.begin(); entry != regions_.end();) {
    entry = entry->first.first == session_id ? regions_.erase(entry) : std::next(entry);
  }
  if (session_ != nullptr) session_->Forget(session_id);
  info_.reset();
  host_problem_.reset();
  device_problem_.reset();
}

}  // namespace headwater::client::internal
