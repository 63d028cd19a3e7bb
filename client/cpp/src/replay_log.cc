#include "client/cpp/src/replay_log.h"

#include <algorithm>
#include <new>
#include <utility>

#include "client/cpp/src/error.h"

namespace headwater::client::internal {
namespace {

HeadUses::iterator Find(HeadUses& heads, const HeadState& state) {
  return std::find_if(heads.begin(), heads.end(), [&state](const HeadUse& use) { return use.state->SharesEpochWith(state); });
}

bool Share(const HeadUses& heads, HeadUses& others) {
  return std::any_of(heads.begin(), heads.end(),
                     [&others](const HeadUse& use) { return Find(others, *use.state) != others.end(); });
}

void RaiseFirstLoggedSteps(const HeadUses& heads) {
  for (const HeadUse& use : heads) {
    if (use.step.has_value()) use.state->RaiseFirstLoggedStep(*use.step + 1);
  }
}

bool IsClosed(const LogEntry& entry) {
  return std::all_of(entry.heads.begin(), entry.heads.end(),
                     [](const HeadUse& use) { return !use.step.has_value() || *use.step < use.state->known_open_step(); });
}

// Whether `first` can only be repeated before `second`: steps of a head follow each other, and what a step consists of comes before
// what seals and closes it.
bool MustPrecede(const LogEntry& first, const LogEntry& second) {
  for (const HeadUse& use : first.heads) {
    for (const HeadUse& other : second.heads) {
      if (!use.step.has_value() || !other.step.has_value() || !use.state->SharesEpochWith(*other.state)) continue;
      if (*use.step < *other.step) return true;
      if (*use.step == *other.step && first.micro_batch >= 0 && second.micro_batch < 0) return true;
    }
  }
  return false;
}

}  // namespace

absl::Status EndedInRecovery(const Wait& wait) {
  if (wait.cancel.stop_requested()) return wait.Ended();
  return MakeLocalError(v1::ERROR_REASON_DEADLINE_EXCEEDED, absl::StatusCode::kDeadlineExceeded,
                        "the deadline passed while the lost step was repeated");
}

bool ReplayLog::TryEnter(const HeadUses& heads) {
  if (!enabled()) return true;
  std::lock_guard<std::mutex> lock(mutex_);
  if (recovering_) return false;
  size_t entered = 0;
  try {
    for (; entered < heads.size(); ++entered) ++in_flight_[heads[entered].state.get()];
  } catch (const std::bad_alloc&) {
    LeaveLocked(absl::MakeSpan(heads).first(entered));
    throw;
  }
  return true;
}

absl::Status ReplayLog::WaitForRecovery(const Wait& wait) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (changed_.wait_until(lock, wait.cancel, wait.deadline, [this] { return !recovering_; })) return absl::OkStatus();
  return EndedInRecovery(wait);
}

bool ReplayLog::recovering() {
  std::lock_guard<std::mutex> lock(mutex_);
  return recovering_;
}

void ReplayLog::Leave(const HeadUses& heads) {
  if (!enabled()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  LeaveLocked(heads);
}

void ReplayLog::LeaveLocked(absl::Span<const HeadUse> heads) {
  for (const HeadUse& use : heads) {
    if (const auto count = in_flight_.find(use.state.get()); --count->second == 0) in_flight_.erase(count);
  }
  changed_.notify_all();
}

void ReplayLog::Add(LogEntry entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  AddLocked(std::move(entry));
}

void ReplayLog::AddDiscard(LogEntry entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = entries_.begin(); it != entries_.end();) {
    const auto next = std::next(it);
    const bool same_step = std::any_of(it->heads.begin(), it->heads.end(), [&entry](const HeadUse& use) {
      const auto other = Find(entry.heads, *use.state);
      return use.step.has_value() && other != entry.heads.end() && other->step == use.step;
    });
    if (it->is_loss && it->micro_batch == entry.micro_batch && it->attempt <= entry.attempt && same_step) Erase(it);
    it = next;
  }
  AddLocked(std::move(entry));
}

void ReplayLog::AddLocked(LogEntry entry) {
  for (const HeadUse& use : entry.heads) {
    if (use.step.has_value() && *use.step < use.state->first_logged_step()) return;
  }
  bytes_ += entry.bytes;
  Place(std::move(entry));
  while (bytes_ > max_bytes_) {
    auto dropped = std::find_if(entries_.begin(), entries_.end(), IsClosed);
    // Half a step is of no use: if the open ones are too large, what is here goes, and the room is for the steps to come.
    const bool all = dropped == entries_.end();
    if (all) dropped = entries_.begin();
    for (const auto end = all ? entries_.end() : std::next(dropped); dropped != end; ++dropped) {
      RaiseFirstLoggedSteps(dropped->heads);
    }
    Shorten();
  }
}

// Answers come in an order in which their calls cannot be repeated: that of a seal that waits for a micro-batch before that
// micro-batch's own, whose gradient takes its time.
void ReplayLog::Place(LogEntry entry) {
  const auto with_steps =
      std::count_if(entry.heads.begin(), entry.heads.end(), [](const HeadUse& use) { return use.step.has_value(); });
  auto place = entries_.end();
  for (auto it = entries_.end(); it != entries_.begin();) {
    --it;
    if (MustPrecede(entry, *it)) {
      place = it;
    } else if (with_steps == 1 && MustPrecede(*it, entry)) {
      break;  // and so must all of this head that is before it
    }
  }
  for (auto it = place; it != entries_.end();) {
    const auto next = std::next(it);
    if (MustPrecede(*it, entry)) entries_.splice(place, entries_, it);
    it = next;
  }
  entries_.insert(place, std::move(entry));
}

bool ReplayLog::HasRoomFor(HeadState& head, int64_t step, int64_t bytes) {
  if (bytes <= max_bytes_ && max_steps_ != 0) return true;
  std::lock_guard<std::mutex> lock(mutex_);
  head.RaiseFirstLoggedStep(step + 1);
  Shorten();
  return false;
}

void ReplayLog::Shorten() {
  for (auto it = entries_.begin(); it != entries_.end();) {
    const auto next = std::next(it);
    // A call on several heads stays until it may go on each of them.
    const bool superfluous = std::all_of(it->heads.begin(), it->heads.end(), [](const HeadUse& use) {
      return !use.step.has_value() || *use.step < use.state->first_logged_step();
    });
    if (superfluous) Erase(it);
    it = next;
  }
}

void ReplayLog::Erase(std::list<LogEntry>::iterator entry) {
  bytes_ -= entry->bytes;
  entries_.erase(entry);
}

void ReplayLog::StepIsOpen(const std::shared_ptr<HeadState>& head, int64_t step) {
  head->SawStep(step);
  if (!enabled()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!max_steps_.has_value() || head->first_logged_step() >= step - *max_steps_) return;
  head->RaiseFirstLoggedStep(step - *max_steps_);
  Shorten();
}

void ReplayLog::BeginAfter(const HeadUses& heads) {
  std::lock_guard<std::mutex> lock(mutex_);
  RaiseFirstLoggedSteps(heads);
  Shorten();
}

void ReplayLog::Forget(const HeadState& head) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = entries_.begin(); it != entries_.end();) {
    const auto next = std::next(it);
    if (Find(it->heads, head) != it->heads.end()) {
      for (const HeadUse& use : it->heads) {
        if (!use.state->SharesEpochWith(head) && use.step.has_value()) use.state->RaiseFirstLoggedStep(*use.step + 1);
      }
      Erase(it);
    }
    it = next;
  }
  Shorten();
}

std::optional<ReplayLog::Gate> ReplayLog::TryClose() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (recovering_) return std::nullopt;
  recovering_ = true;
  return Gate(this);
}

absl::StatusOr<ReplayLog::Gate> ReplayLog::Close(const Wait& wait) {
  for (;;) {
    if (std::optional<Gate> gate = TryClose(); gate.has_value()) return *std::move(gate);
    if (absl::Status ended = WaitForRecovery(wait); !ended.ok()) return ended;
  }
}

ReplayLog::Gate::~Gate() {
  if (log_ == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(log_->mutex_);
    log_->recovering_ = false;
    log_->changed_.notify_all();
  }
  log_->on_open_();
}

HeadUses ReplayLog::Closure(const HeadUses& heads) {
  std::lock_guard<std::mutex> lock(mutex_);
  HeadUses closure = heads;
  for (bool grown = true; grown;) {
    grown = false;
    for (const LogEntry& entry : entries_) {
      if (!Share(entry.heads, closure)) continue;
      for (const HeadUse& use : entry.heads) {
        if (Find(closure, *use.state) != closure.end()) continue;
        closure.push_back(use);
        grown = true;
      }
    }
  }
  return closure;
}

bool ReplayLog::WaitUntilIdle(const HeadUses& heads, const Wait& wait) {
  HeadUses searched = heads;
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_until(lock, wait.cancel, wait.deadline, [&] {
    return std::none_of(in_flight_.begin(), in_flight_.end(),
                        [&searched](const auto& attempts) { return Find(searched, *attempts.first) != searched.end(); });
  });
}

std::vector<LogEntry> ReplayLog::EntriesOf(const HeadUses& heads) {
  HeadUses searched = heads;
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<LogEntry> result;
  for (const LogEntry& entry : entries_) {
    if (Share(entry.heads, searched)) result.push_back(entry);
  }
  return result;
}

}  // namespace headwater::client::internal
