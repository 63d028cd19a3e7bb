// PendingContribution: a computed micro-batch that waits for its decision, shared by all heads that it would add to.
#ifndef HEADWATER_SERVER_HEADS_STEPS_PENDING_CONTRIBUTION_H_
#define HEADWATER_SERVER_HEADS_STEPS_PENDING_CONTRIBUTION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "server/heads/session_registry.h"
#include "server/heads/steps/step_ledger.h"
#include "server/scheduler/sequencer.h"
#include "server/scheduler/waiting.h"

namespace headwater::heads {

class Head;

// A micro-batch's rows, kept for the computation at commit. The engine's heads and the teachers are fixed by `terms`.
struct HeldRows {
  RowsView hidden;
  std::vector<LossTerm> terms;          // without outputs; they and `hidden` point into `storage`
  std::shared_ptr<const void> storage;  // keeps the memory, and its place in the budget
  struct Teacher {
    std::weak_ptr<Head> head;     // it may be deleted before the decision
    const EngineHead* on_engine;  // to compare, never to use
    int64_t weight_version;
  };
  std::vector<Teacher> teachers;  // each once
};

// The factors by which a commit multiplies the contribution.
struct CommitArguments {
  double factor = 1;                 // finite in fp32
  std::vector<float> token_factors;  // finite, one for each row of the micro-batch; empty: none. Only for a HELD contribution
};

// For turns. Its memory is freed at the end of the turn in which one of its heads drops it. Dropping needs an admission to at least
// one of the heads, and committing exclusive admission to all, so the two exclude each other. Only the end of its session drops it
// without an admission, unless a commit has called BeginCommit().
class PendingContribution {
 public:
  // STAGED in the engine, or HELD.
  using Content = std::variant<std::unique_ptr<StagedContribution>, HeldRows>;
  // `until_decided` is released with the memory; may be null.
  PendingContribution(std::set<const Head*> targets, int64_t attempt, std::optional<SessionId> session, Content content,
                      std::shared_ptr<const void> until_decided)
      : targets_(std::move(targets)),
        attempt_(attempt),
        session_(session),
        content_(std::move(content)),
        until_decided_(std::move(until_decided)) {}

  const std::set<const Head*>& targets() const { return targets_; }  // to compare, never to use
  int64_t attempt() const { return attempt_; }
  const std::optional<SessionId>& session() const { return session_; }
  bool is_held() const { return std::holds_alternative<HeldRows>(content_); }

  // Lists that are woken when it is dropped: those of all its heads, which may not be the ones that drop it.
  void WakeAtDrop(std::vector<std::shared_ptr<scheduler::WaitList>> lists) { wake_at_drop_ = std::move(lists); }
  // False if it has been dropped before.
  bool Drop() {
    if (std::exchange(dropped_, true)) return false;
    scheduler::Turn::Free(std::move(until_decided_));
    scheduler::Turn::Free(std::make_shared<Content>(std::move(content_)));  // keeps its alternative
    for (const auto& list : std::exchange(wake_at_drop_, {})) list->WakeAll();
    return true;
  }
  bool dropped() const { return dropped_; }
  // Drops it because its session has ended; true if this call did. A contribution that is being committed stays. The committing
  // call is one of the session's, and when it has ended the session ends once more (SessionRegistry).
  bool DropWithSession() { return !in_commit_ && Drop() && (session_has_ended_ = true); }
  bool session_has_ended() const { return session_has_ended_; }  // and dropped it
  // Around a commit: the contribution cannot be dropped meanwhile, and the commit may use it outside its turns.
  void BeginCommit() { in_commit_ = true; }
  void EndCommit() { in_commit_ = false; }

  StagedContribution& staged() const { return *std::get<0>(content_); }  // of a STAGED one that has not been dropped
  // Without terms if it is STAGED, or dropped.
  const HeldRows& held() const {
    static const HeldRows none;
    return is_held() ? std::get<HeldRows>(content_) : none;
  }

 private:
  const std::set<const Head*> targets_;
  const int64_t attempt_;
  const std::optional<SessionId> session_;
  bool dropped_ = false;
  bool session_has_ended_ = false;
  bool in_commit_ = false;
  Content content_;
  std::shared_ptr<const void> until_decided_;
  std::vector<std::shared_ptr<scheduler::WaitList>> wake_at_drop_;
};

// Whether an engine will take held rows times these: kShapeMismatch, kInvalidField, kInvalidCombination.
absl::Status CheckCommit(const CommitArguments& arguments, const HeldRows& held);

// Computes held rows once more, after `after` (MicroBatch::after), and adds them to the accumulators. By an operation that is
// admitted to all heads concerned.
absl::Status AddHeld(HeldRows held, const CommitArguments& arguments, LossEngine& engine, const DeviceEvent* after = nullptr);

// The teachers of held rows, which are computed again: each teacher must still exist, unchanged.
class HeldTeachers {
 public:
  HeldTeachers() = default;
  HeldTeachers(const HeldTeachers&) = delete;
  HeldTeachers& operator=(const HeldTeachers&) = delete;
  // Takes the teachers of `held` that still exist, and adds their uses to `needs`. In a turn.
  void Find(const HeldRows& held, scheduler::Needs& needs);
  // kHeadNotFound, kWeightVersionMismatch, and the errors of HeadCore::Check(). In a turn.
  absl::Status Check() const;

 private:
  std::vector<std::pair<std::shared_ptr<Head>, int64_t>> heads_;  // with the versions of their weights; null: deleted
};

// Adds the contributions whose turn has come, one after the other, each as an operation of its own. Does nothing outside
// deterministic mode. An engine failure, or a teacher that has changed or gone, makes the head LOST. After any other error the
// waiting contributions stay as they are. `yields`: stops at a head whose weights another operation writes, or is to write first.
absl::Status AddInOrder(Head& head, const scheduler::WaitLimits& limits, bool yields = false);
// AddInOrder() for several heads, except those whose weights are written. Returns only errors that made a head LOST. After other
// errors the next submission, decision, gradient or seal adds the rest. `limits` without a deadline: does not wait for a head.
absl::Status AddInOrder(const std::vector<Head*>& heads, const scheduler::WaitLimits& limits = scheduler::AsLongAsItTakes());

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_STEPS_PENDING_CONTRIBUTION_H_
