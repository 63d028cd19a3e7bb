#include "server/heads/steps/ordered_window.h"

#include <algorithm>
#include <utility>

#include "server/scheduler/sequencer.h"

namespace headwater::heads {

int64_t OrderedWindow::FirstMissing() const {
  int64_t id = floor_;
  while (closed_.contains(id) || waiting_.contains(id)) ++id;
  return id;
}

void OrderedWindow::Wait(std::shared_ptr<const WaitingAddition> addition) {
  const int64_t micro_batch = addition->micro_batch;
  waiting_[micro_batch] = std::move(addition);
}

std::shared_ptr<const WaitingAddition> OrderedWindow::Next(bool sealed) const {
  if (waiting_.empty()) return nullptr;
  const auto& [micro_batch, addition] = *waiting_.begin();
  return sealed || IsFront(micro_batch) ? addition : nullptr;
}

void OrderedWindow::MarkAdded(int64_t micro_batch) {
  waiting_.erase(micro_batch);
  floor_ = std::max(floor_, micro_batch + 1);
  closed_.erase(closed_.begin(), closed_.lower_bound(floor_));
}

void OrderedWindow::Clear() {
  floor_ = 0;
  closed_.clear();
  for (auto& [micro_batch, addition] : waiting_) scheduler::Turn::Free(std::move(addition));
  waiting_.clear();
}

}  // namespace headwater::heads
