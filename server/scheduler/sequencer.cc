#include "server/scheduler/sequencer.h"

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::scheduler {
namespace {

thread_local Turn* current_turn = nullptr;

bool Exclude(Use one, Use other) {
  return (one == Use::kExclusive && other != Use::kNone) || (other == Use::kExclusive && one != Use::kNone);
}

bool Conflict(const Uses& one, const Uses& other) {
  return Exclude(one.weights, other.weights) || Exclude(one.accumulator, other.accumulator) ||
         Exclude(one.checkpoints, other.checkpoints);
}

}  // namespace

// ---- turns -----------------------------------------------------------------------------------------------------------

Turn::Turn(Sequencer& sequencer) ABSL_NO_THREAD_SAFETY_ANALYSIS
    : sequencer_(current_turn != nullptr && current_turn->sequencer_ == &sequencer ? nullptr : &sequencer),
      outer_(current_turn) {
  if (sequencer_ == nullptr) return;
  sequencer_->mutex_.Lock();
  current_turn = this;
}

Turn::~Turn() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (sequencer_ == nullptr) return;
  current_turn = outer_;
  sequencer_->mutex_.Unlock();
}

void Turn::Free(std::shared_ptr<const void> memory) {
  if (current_turn != nullptr && memory != nullptr) current_turn->freed_.push_back(std::move(memory));
}

// ---- the queue -------------------------------------------------------------------------------------------------------

struct Sequencer::Entry {
  explicit Entry(int64_t entry_age) : age(entry_age) {}
  const int64_t age;
  Needs needs;
  WaitList woken;
};

Sequencer::Sequencer() = default;
Sequencer::~Sequencer() = default;

bool Sequencer::MayEnter(const Needs& needs, int64_t age) {
  return std::all_of(needs.begin(), needs.end(), [age](const Need& need) {
    const Record& record = *need.record;
    return std::none_of(record.users_.begin(), record.users_.end(),
                        [&need](const Uses& uses) { return Conflict(need.uses, uses); }) &&
           std::none_of(record.waiting_.begin(), record.waiting_.lower_bound(age),
                        [&need](const auto& earlier) { return Conflict(need.uses, earlier.second.second); });
  });
}

void Sequencer::Queue(Entry& entry, Needs needs) {
  if (entry.needs == needs) return;
  const Needs before = std::exchange(entry.needs, std::move(needs));
  for (const Need& need : before) need.record->waiting_.erase(entry.age);
  for (const Need& need : entry.needs) need.record->waiting_[entry.age] = {&entry, need.uses};
  for (const Need& need : before) WakeNext(*need.record);
}

void Sequencer::WakeNext(const Record& record) {
  for (const auto& [age, waiting] : record.waiting_) {
    if (MayEnter(waiting.first->needs, age)) waiting.first->woken.WakeAll();
  }
}

void Sequencer::GiveUpPlace(Waiter* waiter) {
  mutex_.AssertHeld();
  if (auto kept = parked_.extract(waiter); !kept.empty()) Queue(*kept.mapped(), {});
}

absl::StatusOr<Admission> Sequencer::Acquire(const std::function<absl::StatusOr<Needs>()>& needs, const WaitLimits& limits,
                                             absl::string_view what) {
  const Turn turn(*this);
  mutex_.AssertHeld();
  auto kept = parked_.extract(limits.waiter);
  std::unique_ptr<Entry> entry = kept.empty() ? std::make_unique<Entry>(++last_age_) : std::move(kept.mapped());
  absl::Cleanup leave = [&entry] { Queue(*entry, {}); };
  bool has_waited = !entry->needs.empty();
  while (true) {
    HEADWATER_ASSIGN_OR_RETURN(Needs wanted, needs());
    if (MayEnter(wanted, entry->age)) {
      HEADWATER_RETURN_IF_ERROR(has_waited ? CheckInTime(limits, what) : absl::OkStatus());
      for (const Need& need : wanted) need.record->users_.push_back(need.uses);
      return Admission(this, std::move(wanted));
    }
    Queue(*entry, std::move(wanted));
    absl::Status status = Wait(entry->woken, mutex_, limits, what);
    if (IsParked(status)) {
      std::move(leave).Cancel();
      parked_[limits.waiter] = std::move(entry);
      limits.waiter->AtEnd([this, waiter = limits.waiter] {
        const Turn end(*this);
        GiveUpPlace(waiter);
      });
    }
    if (!status.ok()) return status;
    has_waited = true;
  }
}

void Sequencer::Reconsider(const Record& record) {
  for (const auto& [age, waiting] : record.waiting_) waiting.first->woken.WakeAll();
}

bool Sequencer::IsWritten(const Record& record) {
  const auto writes = [](const Uses& uses) { return uses.weights == Use::kExclusive; };
  return std::any_of(record.users_.begin(), record.users_.end(), writes) ||
         std::any_of(record.waiting_.begin(), record.waiting_.end(),
                     [&writes](const auto& waiting) { return writes(waiting.second.second); });
}

void Admission::Release() {
  if (sequencer_ == nullptr) return;
  const Turn turn(*std::exchange(sequencer_, nullptr));
  for (const Need& need : needs_) {
    std::vector<Uses>& users = need.record->users_;
    users.erase(std::find(users.begin(), users.end(), need.uses));
  }
  for (const Need& need : needs_) Sequencer::WakeNext(*need.record);
}

}  // namespace headwater::scheduler
