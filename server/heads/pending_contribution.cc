#include "server/heads/pending_contribution.h"

#include <utility>

#include "server/heads/head.h"

namespace headwater::heads {

PendingContribution::PendingContribution(std::set<const Head*> targets, int64_t attempt, std::optional<SessionId> session,
                                         std::unique_ptr<StagedContribution> staged, std::shared_ptr<const void> until_decided)
    : targets_(std::move(targets)),
      attempt_(attempt),
      session_(session),
      is_held_(false),
      staged_(std::move(staged)),
      until_decided_(std::move(until_decided)) {}

PendingContribution::PendingContribution(std::set<const Head*> targets, int64_t attempt, std::optional<SessionId> session,
                                         HeldRows held, std::shared_ptr<const void> until_decided)
    : targets_(std::move(targets)),
      attempt_(attempt),
      session_(session),
      is_held_(true),
      held_(std::move(held)),
      until_decided_(std::move(until_decided)) {}

void PendingContribution::Drop() { DropUnlessKept(/*even_in_commit=*/true); }

bool PendingContribution::DropWithSession() { return DropUnlessKept(/*even_in_commit=*/false); }

bool PendingContribution::DropUnlessKept(bool even_in_commit) {
  // Freed after the lock is released: it may be much, and the last reference to a head may be among it.
  std::unique_ptr<StagedContribution> staged;
  HeldRows held;
  std::shared_ptr<const void> until_decided;
  absl::MutexLock lock(&mutex_);
  if (dropped_ || (in_commit_ && !even_in_commit)) return false;
  dropped_ = true;
  until_decided = std::move(until_decided_);
  staged = std::move(staged_);
  held = std::exchange(held_, HeldRows());
  return true;
}

bool PendingContribution::BeginCommit() {
  absl::MutexLock lock(&mutex_);
  in_commit_ = !dropped_;
  return in_commit_;
}

void PendingContribution::EndCommit() {
  absl::MutexLock lock(&mutex_);
  in_commit_ = false;
}

bool PendingContribution::dropped() const {
  absl::MutexLock lock(&mutex_);
  return dropped_;
}

StagedContribution* PendingContribution::staged() const {
  absl::MutexLock lock(&mutex_);
  return staged_.get();
}

HeldRows PendingContribution::held() const {
  absl::MutexLock lock(&mutex_);
  return held_;
}

}  // namespace headwater::heads
