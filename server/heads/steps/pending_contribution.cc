#include "server/heads/steps/pending_contribution.h"

#include <utility>

#include "server/heads/head.h"
#include "server/scheduler/sequencer.h"

namespace headwater::heads {

PendingContribution::PendingContribution(std::set<const HeadCore*> targets, int64_t attempt, std::optional<SessionId> session,
                                         std::unique_ptr<StagedContribution> staged, std::shared_ptr<const void> until_decided)
    : targets_(std::move(targets)),
      attempt_(attempt),
      session_(session),
      is_held_(false),
      staged_(std::move(staged)),
      until_decided_(std::move(until_decided)) {}

PendingContribution::PendingContribution(std::set<const HeadCore*> targets, int64_t attempt, std::optional<SessionId> session,
                                         HeldRows held, std::shared_ptr<const void> until_decided)
    : targets_(std::move(targets)),
      attempt_(attempt),
      session_(session),
      is_held_(true),
      held_(std::move(held)),
      until_decided_(std::move(until_decided)) {}

bool PendingContribution::Drop() {
  if (std::exchange(dropped_, true)) return false;
  scheduler::Turn::Free(std::move(until_decided_));
  scheduler::Turn::Free(std::shared_ptr<StagedContribution>(std::move(staged_)));
  scheduler::Turn::Free(std::make_shared<HeldRows>(std::exchange(held_, HeldRows())));
  for (const auto& list : std::exchange(wake_at_drop_, {})) list->WakeAll();
  return true;
}

}  // namespace headwater::heads
