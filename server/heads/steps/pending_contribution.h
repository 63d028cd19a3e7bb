// PendingContribution: a computed micro-batch that waits for its decision, shared by all heads that it would add to.
#ifndef HEADWATER_SERVER_HEADS_STEPS_PENDING_CONTRIBUTION_H_
#define HEADWATER_SERVER_HEADS_STEPS_PENDING_CONTRIBUTION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "headwater/kernels/engine.h"
#include "server/heads/session_registry.h"
#include "server/scheduler/waiting.h"

namespace headwater::heads {

class Head;
struct HeadCore;

// A micro-batch's rows, kept for the computation at commit. The engine's heads and the teachers are fixed by `terms`.
struct HeldRows {
  RowsView hidden;
  std::vector<LossTerm> terms;                   // without outputs; they and `hidden` point into `storage`
  std::shared_ptr<const void> storage;           // keeps the memory, and its place in the budget
  std::vector<std::weak_ptr<Head>> teachers;     // distinct teachers' heads; they may be deleted before the decision
  std::vector<const EngineHead*> teacher_heads;  // of each of `teachers`; to compare, never to use
  std::vector<int64_t> teacher_weight_versions;  // of each of `teachers`
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
  // `until_decided` is released with the memory; may be null.
  PendingContribution(std::set<const HeadCore*> targets, int64_t attempt, std::optional<SessionId> session,
                      std::unique_ptr<StagedContribution> staged, std::shared_ptr<const void> until_decided);
  PendingContribution(std::set<const HeadCore*> targets, int64_t attempt, std::optional<SessionId> session, HeldRows held,
                      std::shared_ptr<const void> until_decided);

  const std::set<const HeadCore*>& targets() const { return targets_; }  // to compare, never to use
  int64_t attempt() const { return attempt_; }
  const std::optional<SessionId>& session() const { return session_; }
  bool is_held() const { return is_held_; }

  // Lists that are woken when it is dropped: those of all its heads, which may not be the ones that drop it.
  void WakeAtDrop(std::vector<std::shared_ptr<scheduler::WaitList>> lists) { wake_at_drop_ = std::move(lists); }
  // False if it has been dropped before.
  bool Drop();
  bool dropped() const { return dropped_; }
  // Drops it because its session has ended; true if this call did. A contribution that is being committed stays. The committing
  // call is one of the session's, and when it has ended the session ends once more (SessionRegistry).
  bool DropWithSession() { return !in_commit_ && Drop(); }
  // Around a commit: the contribution cannot be dropped meanwhile, and the commit may use it outside its turns.
  void BeginCommit() { in_commit_ = true; }
  void EndCommit() { in_commit_ = false; }

  StagedContribution* staged() const { return staged_.get(); }  // null if it is HELD, or dropped
  const HeldRows& held() const { return held_; }                // without terms if it is STAGED, or dropped

 private:
  const std::set<const HeadCore*> targets_;
  const int64_t attempt_;
  const std::optional<SessionId> session_;
  const bool is_held_;
  bool dropped_ = false;
  bool in_commit_ = false;
  std::unique_ptr<StagedContribution> staged_;
  HeldRows held_;
  std::shared_ptr<const void> until_decided_;
  std::vector<std::shared_ptr<scheduler::WaitList>> wake_at_drop_;
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_STEPS_PENDING_CONTRIBUTION_H_
