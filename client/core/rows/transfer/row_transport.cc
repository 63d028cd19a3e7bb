#include "client/core/rows/transfer/row_transport.h"

#include <algorithm>
#include <utility>

#include "client/core/link/error.h"
#include "client/core/link/notice.h"
#include "headwater/v1/session_service.grpc.pb.h"

namespace headwater::client::internal {
namespace {

// Beginnings, and endings, of that many calls at once; more wait their turn.
constexpr int kMaxWorkers = 16;

}  // namespace

RowTransport::RowTransport(std::string target, const ClientOptions& options, std::shared_ptr<grpc::Channel> channel)
    : target_(std::move(target)),
      options_(options),
      channel_(std::move(channel)),
      connections_(options_),
      memory_(MemoryPaths::Create(target_, channel_, options_, {})),
      endings_(kMaxWorkers),
      beginnings_(kMaxWorkers) {}

std::optional<ServerFacts> RowTransport::facts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return facts_;
}

absl::StatusOr<ServerFacts> RowTransport::AskForFacts(grpc::ClientContext& context) {
  v1::ServerInfo info;
  const grpc::Status status = v1::SessionService::NewStub(channel_)->GetServerInfo(&context, v1::GetServerInfoRequest(), &info);
  ServerFacts facts;
  if (status.ok()) {
    facts.max_stripes = static_cast<int>(std::clamp<int64_t>(info.limits().max_stripes(), 1, options_.stripes));
    facts.max_chunk_bytes = info.limits().max_chunk_bytes();
  } else if (status.error_code() != grpc::StatusCode::UNIMPLEMENTED) {
    // Where the service stands on another port, one stream always works.
    return FromGrpcStatus(status, target_);
  }
  facts.peer = context.peer();
  std::lock_guard<std::mutex> lock(mutex_);
  if (facts.peer == one_stream_peer_) facts.max_stripes = 1;
  facts_ = facts;
  return facts;
}

void RowTransport::ForgetFacts() {
  std::lock_guard<std::mutex> lock(mutex_);
  facts_.reset();
}

void RowTransport::UseOneStream(const std::string& peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  one_stream_peer_ = peer;
  if (facts_.has_value() && facts_->peer == peer) facts_->max_stripes = 1;
}

void RowTransport::Count(const std::string& path, bool on_device, int64_t bytes, int stripes) {
  std::lock_guard<std::mutex> lock(mutex_);
  TransportCounts* counts = &stats_.grpc;
  if (path == "shared_memory") counts = &stats_.shared_memory;
  if (path == "cuda_ipc") counts = &stats_.cuda_ipc;
  ++counts->micro_batches;
  counts->bytes += bytes;
  (on_device ? stats_.cuda_transport : stats_.host_transport) = path;
  if (counts == &stats_.grpc) stats_.stripes = stripes;
}

void RowTransport::SetWhyNotBetter(const std::string& sentence) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.why_not_better = sentence;
    if (sentence.empty() || std::exchange(notice_given_, true)) return;
  }
  GiveNotice(options_, sentence);
}

TransportStats RowTransport::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

}  // namespace headwater::client::internal
