#include "server/service/loss/transfer_registry.h"

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/request/field_check.h"

namespace headwater::service {
namespace {

// How many ids are remembered after their end.
constexpr size_t kMostEnded = 4096;

absl::Status Ended() {
  return MakeError(ErrorReason::kTransferNotFound,
                   "header.transfer_id names a transfer whose primary stream has ended; what became of it is told there",
                   {{"field", "header.transfer_id"}});
}

absl::Status Unheard(absl::Duration waited) {
  return MakeError(ErrorReason::kTransferNotFound,
                   absl::StrCat("header.transfer_id names a transfer whose primary stream has not come within ",
                                absl::FormatDuration(waited), " (max_stripe_wait)"),
                   {{"field", "header.transfer_id"}, {"limit", "max_stripe_wait"}});
}

}  // namespace

TransferRegistry::Entry::~Entry() {
  if (registry_ != nullptr) registry_->Close(id_);
}

void TransferRegistry::Entry::Open(std::shared_ptr<Transfer> transfer) {
  std::vector<Waiting> waiting;
  {
    absl::MutexLock lock(&registry_->mutex_);
    Place& place = registry_->places_.at(id_);
    place.transfer = transfer;
    waiting.swap(place.waiting);
  }
  for (const Waiting& stripe : waiting) stripe.found(transfer);
}

absl::StatusOr<TransferRegistry::Entry> TransferRegistry::Announce(const TransferId& id) {
  absl::MutexLock lock(&mutex_);
  if (!absl::c_linear_search(ended_, id)) {
    Place& place = places_[id];
    if (!place.announced) {
      place.announced = true;
      return Entry(this, id);
    }
  }
  return InvalidField("header.transfer_id", "an id that no other call has, drawn at random", "one in use");
}

void TransferRegistry::Close(const TransferId& id) {
  std::vector<Waiting> waiting;
  {
    absl::MutexLock lock(&mutex_);
    const auto place = places_.find(id);
    waiting.swap(place->second.waiting);
    places_.erase(place);
    ended_.push_back(id);
    if (ended_.size() > kMostEnded) ended_.pop_front();
  }
  for (const Waiting& stripe : waiting) stripe.found(Ended());
}

void TransferRegistry::Find(const TransferId& id, const void* stripe, OnTransfer found) {
  std::shared_ptr<Transfer> transfer;
  absl::Status refused;
  {
    absl::MutexLock lock(&mutex_);
    const auto place = places_.find(id);
    const bool announced = place != places_.end() && place->second.announced;
    if (announced) transfer = place->second.transfer;
    if (absl::c_linear_search(ended_, id)) {
      refused = Ended();
    } else if (draining_ && !announced) {
      refused = Unheard(absl::ZeroDuration());
    } else if (transfer == nullptr) {
      return places_[id].waiting.push_back({stripe, observability::MonotonicNow(), std::move(found)});
    }
  }
  if (refused.ok()) {
    found(std::move(transfer));
  } else {
    found(std::move(refused));
  }
}

void TransferRegistry::Leave(const TransferId& id, const void* stripe) {
  OnTransfer left;  // destroyed without the lock
  absl::MutexLock lock(&mutex_);
  const auto place = places_.find(id);
  if (place == places_.end()) return;
  std::vector<Waiting>& waiting = place->second.waiting;
  const auto found = absl::c_find_if(waiting, [&](const Waiting& one) { return one.stripe == stripe; });
  if (found == waiting.end()) return;
  left = std::move(found->found);
  waiting.erase(found);
  if (!place->second.announced && waiting.empty()) places_.erase(place);
}

std::vector<OnTransfer> TransferRegistry::TakeUnheard(absl::Time since) {
  std::vector<OnTransfer> taken;
  for (auto place = places_.begin(); place != places_.end();) {
    std::vector<Waiting>& waiting = place->second.waiting;
    if (!place->second.announced) {
      for (Waiting& stripe : waiting) {
        if (stripe.since <= since) taken.push_back(std::move(stripe.found));
      }
      std::erase_if(waiting, [](const Waiting& stripe) { return stripe.found == nullptr; });
    }
    place = !place->second.announced && waiting.empty() ? places_.erase(place) : std::next(place);
  }
  return taken;
}

void TransferRegistry::Expire(absl::Time now) {
  std::vector<OnTransfer> expired;
  {
    absl::MutexLock lock(&mutex_);
    expired = TakeUnheard(now - max_wait_);
  }
  for (const OnTransfer& found : expired) found(Unheard(max_wait_));
}

void TransferRegistry::Drain() {
  std::vector<OnTransfer> sent_away;
  {
    absl::MutexLock lock(&mutex_);
    draining_ = true;
    sent_away = TakeUnheard(absl::InfiniteFuture());
  }
  for (const OnTransfer& found : sent_away) found(Unheard(absl::ZeroDuration()));
}

}  // namespace headwater::service
