// OrderedWindow: the order in which contributions go into one head's accumulator, in deterministic mode.
//
// Contributions are added in ascending id, whatever the order in which they come. One whose predecessors are not all there yet
// waits, committed, as rows. An id is missing until its contribution is there or its trainer has discarded it. A contribution
// dropped with its session stays missing, because a higher attempt of it may come. Once the step is sealed nothing is missing any
// more, and all that wait are added, lowest first.
//
// Only additions move the place in the order: a discarded id may come back with a higher attempt until a higher id has been added.
//
// Pure bookkeeping: no tensors, no locks, no clock. For turns.
#ifndef HEADWATER_SERVER_HEADS_STEPS_ORDERED_WINDOW_H_
#define HEADWATER_SERVER_HEADS_STEPS_ORDERED_WINDOW_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "server/heads/steps/pending_contribution.h"
#include "server/scheduler/sequencer.h"

namespace headwater::heads {

// A committed contribution to one head: its terms against that head, and what they are multiplied by.
struct WaitingAddition {
  int64_t micro_batch = 0;
  HeldRows rows;
  CommitArguments arguments;
};

class OrderedWindow {
 public:
  // At most `capacity` (>= 1) contributions, decided or not, may be there whose predecessors are not.
  explicit OrderedWindow(int64_t capacity) : capacity_(capacity) {}

  // A higher one has been added: it is too late for this one.
  bool HasPassed(int64_t micro_batch) const { return micro_batch < floor_; }
  // No predecessor is missing, or undecided; some may wait to be added first.
  bool IsFront(int64_t micro_batch) const { return micro_batch >= floor_ && micro_batch <= FirstMissing(); }
  // Room for one that is not the front. `undecided`: contributions that are there without a decision.
  bool HasRoom(int64_t undecided) const { return undecided + waiting_count() < capacity_; }
  // The lowest id whose contribution is not there.
  int64_t FirstMissing() const {
    int64_t id = floor_;
    while (closed_.contains(id) || waiting_.contains(id)) ++id;
    return id;
  }

  // The trainer has discarded the micro-batch: the next one need not wait for it.
  void Close(int64_t micro_batch) { closed_.insert(micro_batch); }
  // Another attempt of it has begun.
  void Reopen(int64_t micro_batch) { closed_.erase(micro_batch); }
  void Wait(std::shared_ptr<const WaitingAddition> addition) {
    const int64_t micro_batch = addition->micro_batch;
    waiting_[micro_batch] = std::move(addition);
  }
  // The one whose turn it is, or null. `sealed`: nothing that is missing will come.
  std::shared_ptr<const WaitingAddition> Next(bool sealed) const {
    if (waiting_.empty()) return nullptr;
    const auto& [micro_batch, addition] = *waiting_.begin();
    return sealed || IsFront(micro_batch) ? addition : nullptr;
  }
  // The contribution is in the accumulator, whether it had to wait or not.
  void MarkAdded(int64_t micro_batch) {
    waiting_.erase(micro_batch);
    floor_ = std::max(floor_, micro_batch + 1);
    closed_.erase(closed_.begin(), closed_.lower_bound(floor_));
  }
  // The step is closed, or lost.
  void Clear() {
    floor_ = 0;
    closed_.clear();
    for (auto& [micro_batch, addition] : waiting_) scheduler::Turn::Free(std::move(addition));
    waiting_.clear();
  }

  int64_t capacity() const { return capacity_; }
  int64_t waiting_count() const { return static_cast<int64_t>(waiting_.size()); }

 private:
  const int64_t capacity_;
  int64_t floor_ = 0;  // above all that have been added
  std::set<int64_t> closed_;
  std::map<int64_t, std::shared_ptr<const WaitingAddition>> waiting_;
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_STEPS_ORDERED_WINDOW_H_
