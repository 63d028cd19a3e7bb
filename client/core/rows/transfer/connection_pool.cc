#include "client/core/rows/transfer/connection_pool.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

// How often connections are made for one call: a server that takes them and ends them at once is no server.
constexpr int kMaxRounds = 3;

}  // namespace

void ConnectionPool::DropUnusable(const std::string& peer) {
  std::erase_if(connections_, [&peer](const std::shared_ptr<DataConnection>& connection) {
    return connection->peer() != peer || !connection->usable();
  });
}

int ConnectionPool::Missing(int count) const {
  const int idle = static_cast<int>(
      std::count_if(connections_.begin(), connections_.end(), [](const auto& connection) { return connection->calls == 0; }));
  return std::max(0, std::min(count - idle, options_.stripes - static_cast<int>(connections_.size())));
}

std::vector<ConnectionLease> ConnectionPool::Choose(int count) {
  std::vector<std::pair<int, size_t>> by_calls;  // as they are now: calls end at any time
  for (size_t i = 0; i < connections_.size(); ++i) by_calls.emplace_back(connections_[i]->calls.load(), i);
  std::sort(by_calls.begin(), by_calls.end());
  std::vector<ConnectionLease> leases;
  for (int i = 0; i < count; ++i) leases.push_back(Lease(connections_[by_calls[static_cast<size_t>(i)].second]));
  return leases;
}

std::vector<ConnectionLease> ConnectionPool::TryAcquire(const std::string& peer, int count) {
  std::lock_guard<std::mutex> lock(mutex_);
  DropUnusable(peer);
  if (Missing(count) > 0) return {};
  return Choose(count);
}

absl::StatusOr<std::vector<ConnectionLease>> ConnectionPool::Acquire(const std::string& peer, int count, const Wait& wait) {
  for (int round = 0; round < kMaxRounds; ++round) {
    int missing = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      DropUnusable(peer);
      missing = Missing(count);
      if (missing == 0) return Choose(count);
    }
    std::vector<std::shared_ptr<DataConnection>> fresh;
    for (; missing > 0; --missing) {
      HEADWATER_ASSIGN_OR_RETURN(std::shared_ptr<DataConnection> connection, DataConnection::Open(peer, options_, wait));
      fresh.push_back(std::move(connection));
    }
    std::lock_guard<std::mutex> lock(mutex_);
    DropUnusable(peer);
    // Another call may have made some meanwhile; surplus connections are closed.
    for (auto& connection : fresh) {
      if (Missing(count) > 0) connections_.push_back(std::move(connection));
    }
    if (Missing(count) == 0) return Choose(count);
  }
  return absl::UnavailableError(absl::StrCat("connections to ", peer, " end as soon as they are made"));
}

}  // namespace headwater::client::internal
