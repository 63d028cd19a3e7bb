#include "server/scheduler/start_order.h"

#include <utility>

namespace headwater::scheduler {

StartOrder::Place::Place(Place&& other) noexcept
    : order_(std::exchange(other.order_, nullptr)), number_(std::exchange(other.number_, 0)) {}

StartOrder::Place& StartOrder::Place::operator=(Place&& other) noexcept {
  if (this != &other) {
    Release();
    order_ = std::exchange(other.order_, nullptr);
    number_ = std::exchange(other.number_, 0);
  }
  return *this;
}

void StartOrder::Place::Release() {
  if (order_ == nullptr) return;
  absl::MutexLock lock(&order_->mutex_);
  order_->places_.erase(number_);
  order_ = nullptr;
}

StartOrder::Place StartOrder::Join(absl::Time now) {
  absl::MutexLock lock(&mutex_);
  places_.emplace(next_number_, now);
  return Place(this, next_number_++);
}

bool StartOrder::IsFirst(const Place& place, absl::Time now) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [number, since] : places_) {
    if (number >= place.number_) return true;
    if (now - since <= kPrecedence) return false;
  }
  return true;
}

}  // namespace headwater::scheduler
