#include "client/core/replay/replay_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/link/error.h"

namespace headwater::client::internal {
namespace {

HeadUses::iterator Find(HeadUses& heads, const HeadState& state) {
  return std::find_if(heads.begin(), heads.end(), [&state](const HeadUse& use) { return use.state.get() == &state; });
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

// Whether `first` can only be repeated before `second`. Steps of a head follow each other, and contributions precede the calls that
// seal and close their step.
bool MustPrecede(const LogEntry& first, const LogEntry& second) {
  for (const HeadUse& use : first.heads) {
    for (const HeadUse& other : second.heads) {
      if (!use.step.has_value() || !other.step.has_value() || use.state != other.state) continue;
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
  for (const HeadUse& use : heads) ++in_flight_[use.state.get()];
  return true;
}

bool ReplayLog::recovering() {
  std::lock_guard<std::mutex> lock(mutex_);
  return recovering_;
}

void ReplayLog::Leave(const HeadUses& heads) {
  if (!enabled()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const HeadUse& use : heads) {
    if (const auto count = in_flight_.find(use.state.get()); --count->second == 0) in_flight_.erase(count);
  }
  changed_.notify_all();
}

bool ReplayLog::MakeWayFor(const LogEntry& entry) {
  const auto is_about_it = [&entry](const LogEntry& other) {
    return other.micro_batch == entry.micro_batch && other.part == entry.part &&
           std::any_of(other.heads.begin(), other.heads.end(), [&entry](const HeadUse& use) {
             return use.step.has_value() && std::any_of(entry.heads.begin(), entry.heads.end(), [&use](const HeadUse& same) {
                      return same.state == use.state && same.step == use.step;
                    });
           });
  };
  const bool is_submitted = entry.record == Record::kLoss || entry.record == Record::kGradient;
  bool has_rows = false;
  const auto is_same = [&entry](const LogEntry& other) { return other.record == entry.record; };
  if (entry.record == Record::kCommit || (is_submitted && entry.is_answered_again)) {
    if (std::any_of(entries_.begin(), entries_.end(), [&](const LogEntry& other) { return is_same(other) && is_about_it(other); }))
      return false;
  }
  EraseIf([&](const LogEntry& other) {
    if (!is_about_it(other)) return false;
    has_rows |= other.record == Record::kLoss;
    return is_same(other) || (entry.record == Record::kDiscard && other.micro_batch >= 0 && other.attempt <= entry.attempt);
  });
  // A decision about another client's submission is repeated by that client.
  return entry.record != Record::kCommit || has_rows;
}

void ReplayLog::Add(LogEntry entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const HeadUse& use : entry.heads) {
    if (use.step.has_value() && *use.step < use.state->first_logged_step()) return;
  }
  if (!MakeWayFor(entry)) return;
  bytes_ += entry.call->bytes;
  Place(std::move(entry));
  while (bytes_ > max_bytes_) {
    auto dropped = std::find_if(entries_.begin(), entries_.end(), IsClosed);
    // Half a step is useless: if the open steps are too large, all entries go, and the room is for the steps to come.
    const bool all = dropped == entries_.end();
    if (all && !has_told_.exchange(true)) {
      on_dropped_(absl::StrCat("it has more than replay_bytes=", max_bytes_, " bytes of micro-batches"));
    }
    if (all) dropped = entries_.begin();
    for (const auto end = all ? entries_.end() : std::next(dropped); dropped != end; ++dropped) {
      RaiseFirstLoggedSteps(dropped->heads);
    }
    Shorten();
  }
}

// Answers may come in an order in which their calls cannot be repeated. A seal that waits for a micro-batch can be answered before
// that micro-batch, whose gradient takes longer.
void ReplayLog::Place(LogEntry entry) {
  const auto with_steps =
      std::count_if(entry.heads.begin(), entry.heads.end(), [](const HeadUse& use) { return use.step.has_value(); });
  auto place = entries_.end();
  for (auto it = entries_.end(); it != entries_.begin();) {
    --it;
    if (MustPrecede(entry, *it)) {
      place = it;
    } else if (with_steps == 1 && MustPrecede(*it, entry)) {
      break;  // so must the head's earlier entries
    }
  }
  for (auto it = place; it != entries_.end();) {
    const auto next = std::next(it);
    if (MustPrecede(*it, entry)) entries_.splice(place, entries_, it);
    it = next;
  }
  entries_.insert(place, std::move(entry));
}

void ReplayLog::Drop(const HeadUses& heads, const std::string& why) {
  BeginAfter(heads);
  if (enabled() && !has_told_.exchange(true)) on_dropped_(why);
}

bool ReplayLog::HasRoomFor(const HeadUses& heads, int64_t bytes) {
  if (bytes <= max_bytes_ && max_steps_ != 0) return true;
  BeginAfter(heads);
  return false;
}

void ReplayLog::Shorten() {
  // A call on several heads stays until each of them lets it leave.
  EraseIf([](const LogEntry& entry) {
    return std::all_of(entry.heads.begin(), entry.heads.end(),
                       [](const HeadUse& use) { return !use.step.has_value() || *use.step < use.state->first_logged_step(); });
  });
}

void ReplayLog::EraseIf(const std::function<bool(const LogEntry&)>& goes) {
  std::erase_if(entries_, [&](const LogEntry& entry) {
    if (!goes(entry)) return false;
    bytes_ -= entry.call->bytes;
    return true;
  });
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
  EraseIf([&head](const LogEntry& entry) {
    const auto is_it = [&head](const HeadUse& use) { return use.state.get() == &head; };
    if (std::none_of(entry.heads.begin(), entry.heads.end(), is_it)) return false;
    for (const HeadUse& use : entry.heads) {
      if (!is_it(use) && use.step.has_value()) use.state->RaiseFirstLoggedStep(*use.step + 1);
    }
    return true;
  });
  Shorten();
}

ReplayLog::Gate ReplayLog::TryClose() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (recovering_) return nullptr;
  recovering_ = true;
  return Gate(this, [](ReplayLog* log) { log->Open(); });
}

void ReplayLog::Open() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    recovering_ = false;
  }
  on_open_();
}

HeadUses ReplayLog::Heads() {
  std::lock_guard<std::mutex> lock(mutex_);
  HeadUses heads;
  for (const LogEntry& entry : entries_) {
    for (const HeadUse& use : entry.heads) {
      if (Find(heads, *use.state) == heads.end()) heads.push_back({.state = use.state, .step = {}, .epoch = use.state->epoch()});
    }
  }
  return heads;
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
