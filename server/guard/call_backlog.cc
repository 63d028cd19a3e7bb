#include "server/guard/call_backlog.h"

#include <algorithm>
#include <iterator>

namespace headwater::guard {

int64_t CallBacklog::NewConnection() {
  absl::MutexLock lock(&mutex_);
  return ++last_connection_;
}

bool CallBacklog::OnCall(int64_t connection, absl::Time now) {
  std::string dropped;
  {
    absl::MutexLock lock(&mutex_);
    if (connections_.size() >= sweep_at_) Sweep(now);
    Connection& known = At(connection, now);
    if (!known.is_over) {
      if (known.waiting + 1 <= static_cast<double>(most_)) {
        known.waiting += 1;
        return true;
      }
      known.is_over = true;
    }
    dropped = TakeForDrop(known);
  }
  if (!dropped.empty()) drop_(dropped);
  return false;
}

void CallBacklog::OnTaken(int64_t connection, const std::string& peer, absl::Time now) {
  std::string dropped;
  {
    absl::MutexLock lock(&mutex_);
    Connection& known = At(connection, now);
    known.waiting = std::max(0.0, known.waiting - 1);
    if (known.peer.empty()) known.peer = peer;
    dropped = TakeForDrop(known);
  }
  if (!dropped.empty()) drop_(dropped);
}

size_t CallBacklog::known_connections() const {
  absl::MutexLock lock(&mutex_);
  return connections_.size();
}

CallBacklog::Connection& CallBacklog::At(int64_t connection, absl::Time now) {
  const auto [place, is_new] = connections_.try_emplace(connection);
  Connection& known = place->second;
  if (is_new) known.last = now;
  const double seconds = std::max(0.0, absl::ToDoubleSeconds(now - known.last));
  known.waiting = std::max(0.0, known.waiting - forgotten_a_second_ * seconds);
  known.last = now;
  return known;
}

void CallBacklog::Sweep(absl::Time now) {
  for (auto place = connections_.begin(); place != connections_.end();) {
    const Connection& known = place->second;
    const bool nothing_waits = known.waiting <= forgotten_a_second_ * absl::ToDoubleSeconds(now - known.last);
    place = nothing_waits ? connections_.erase(place) : std::next(place);
  }
  sweep_at_ = std::max(kLeastSweep, 2 * connections_.size());
}

std::string CallBacklog::TakeForDrop(Connection& connection) {
  if (!connection.is_over || connection.is_dropped || connection.peer.empty()) return "";
  connection.is_dropped = true;
  return connection.peer;
}

}  // namespace headwater::guard
