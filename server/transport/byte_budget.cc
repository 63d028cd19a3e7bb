#include "server/transport/byte_budget.h"

namespace headwater::transport {

bool FairBudget::TryReserve(const std::string& client, int64_t bytes, absl::Time now, ByteBudget::Reservation* reservation) {
  absl::MutexLock lock(&mutex_);
  std::erase_if(refused_, [&](const auto& entry) { return entry.second.last < now - kPatience; });
  const auto mine = refused_.find(client);
  const int64_t order = mine != refused_.end() ? mine->second.order : next_order_;
  // No sum of these can wrap: each is at most the capacity, and what is kept is at most that.
  int64_t kept = 0;
  for (const auto& [other, refused] : refused_) {
    if (refused.order < order) kept = std::min(kept + refused.bytes, capacity_bytes());
  }
  if ((bytes == 0 || bytes <= available_bytes() - kept) && ByteBudget::TryReserve(bytes, reservation)) {
    if (mine != refused_.end()) refused_.erase(mine);
    return true;
  }
  refused_[client] = {order, std::min(bytes, capacity_bytes()), now};
  if (order == next_order_) ++next_order_;
  return false;
}

}  // namespace headwater::transport
