// Head's decisions: contributions committed, discarded, added by the trainer, dropped with their session.
#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/heads/commit_arguments.h"
#include "server/heads/compute_locks.h"
#include "server/heads/head.h"
#include "server/observability/busy_clock.h"

namespace headwater::heads {
namespace {

// Begins the reason why a held micro-batch cannot be committed.
constexpr char kNeedsTeacher[] =
    "a held micro-batch is computed at its commit, and needs its teacher's head until then; discard it, or keep the head: ";

ErrorMetadata MicroBatchMetadata(int64_t micro_batch) { return {{"microBatch", absl::StrCat(micro_batch)}}; }

// Decisions name each head once, and at least one.
absl::Status CheckTargets(const std::vector<DecisionTarget>& targets) {
  std::set<const Head*> heads;
  for (const DecisionTarget& target : targets) {
    if (heads.insert(target.head.get()).second) continue;
    return MakeError(ErrorReason::kInvalidCombination,
                     absl::StrCat("heads must name each head once, ", target.head->name().ToString(), " is there twice"),
                     {{"field", "heads"}, {"actual", target.head->name().ToString()}});
  }
  if (!targets.empty()) return absl::OkStatus();
  return MakeError(ErrorReason::kMissingField, "heads must name every trainable head of the micro-batch", {{"field", "heads"}});
}

bool IsOfExactly(const PendingContribution& pending, const std::vector<DecisionTarget>& targets) {
  return pending.targets().size() == targets.size() &&
         std::all_of(targets.begin(), targets.end(),
                     [&](const DecisionTarget& target) { return pending.targets().contains(target.head.get()); });
}

absl::Status OtherHeadsError(const PendingContribution& pending, size_t named, int64_t micro_batch) {
  ErrorMetadata metadata = MicroBatchMetadata(micro_batch);
  metadata["field"] = "heads";
  metadata["expected"] = absl::StrCat(pending.targets().size());
  metadata["actual"] = absl::StrCat(named);
  return MakeError(ErrorReason::kInvalidCombination,
                   absl::StrCat("micro-batch ", micro_batch, " adds to ", pending.targets().size(),
                                " heads, and its decision must name exactly those; the call names ", named),
                   std::move(metadata));
}

absl::Status CheckOwner(const PendingContribution& pending, const std::optional<SessionId>& session, int64_t micro_batch) {
  if (!pending.session().has_value() || pending.session() == session) return absl::OkStatus();
  return MakeError(ErrorReason::kNotSessionOwner,
                   absl::StrCat("micro-batch ", micro_batch, " belongs to ", session.has_value() ? "another" : "a",
                                " session, and only that one decides this attempt of it"),
                   MicroBatchMetadata(micro_batch));
}

std::set<Head*, std::less<>> HeadsOf(const std::vector<DecisionTarget>& targets) {
  std::set<Head*, std::less<>> heads;
  for (const DecisionTarget& target : targets) heads.insert(target.head.get());
  return heads;
}

std::vector<Head*> PointersOf(const std::vector<DecisionTarget>& targets) {
  std::vector<Head*> heads;
  for (const DecisionTarget& target : targets) heads.push_back(target.head.get());
  return heads;
}

}  // namespace

// ---- commit ----------------------------------------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<PendingContribution>> Head::FindPending(
    const std::vector<DecisionTarget>& targets, int64_t micro_batch, int64_t attempt, const CommitFactor& factor,
    const std::optional<SessionId>& session) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  const StateLocks state_locks(PointersOf(targets));  // a commit beside this one is seen in all heads, or in none
  std::shared_ptr<PendingContribution> found;
  size_t committed_count = 0;
  for (const DecisionTarget& target : targets) {
    Head& head = *target.head;
    if (absl::Status status = head.Check(&target.key.epoch, Need::kReady, true); !status.ok()) return status;
    absl::StatusOr<bool> to_do = head.steps_.ledger().CheckCommit(target.key.step, micro_batch, attempt, factor);
    if (!to_do.ok()) return to_do.status();
    if (!*to_do) {
      ++committed_count;
      continue;
    }
    const std::shared_ptr<PendingContribution> pending = head.steps_.FindPending(micro_batch);
    if (pending == nullptr) {
      return MakeError(ErrorReason::kInternal, absl::StrCat("the contribution of micro-batch ", micro_batch, " is not there"),
                       MicroBatchMetadata(micro_batch));
    }
    if (!IsOfExactly(*pending, targets) || (found != nullptr && found != pending)) {
      return OtherHeadsError(*pending, targets.size(), micro_batch);
    }
    found = pending;
  }
  if (committed_count == targets.size()) return std::shared_ptr<PendingContribution>();
  if (committed_count > 0) return OtherHeadsError(*found, targets.size() - committed_count, micro_batch);
  if (absl::Status status = CheckOwner(*found, session, micro_batch); !status.ok()) return status;
  if (factor.token_factors.has_value() && !found->is_held()) {
    ErrorMetadata metadata = MicroBatchMetadata(micro_batch);
    metadata["field"] = "token_factors";
    return MakeError(ErrorReason::kInvalidCombination,
                     absl::StrCat("micro-batch ", micro_batch,
                                  " is staged, not held, and takes no token_factors; submit it with late_token_factors"),
                     std::move(metadata));
  }
  return found;
}

absl::StatusOr<bool> Head::Commit(const std::vector<DecisionTarget>& targets, int64_t micro_batch, int64_t attempt,
                                  const CommitArguments& arguments, const std::optional<SessionId>& session,
                                  observability::BusyClock* busy, const WaitLimits& limits) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (absl::Status status = CheckTargets(targets); !status.ok()) return status;
  absl::StatusOr<CommitFactor> factor = ToCommitFactor(arguments);
  if (!factor.ok()) return factor.status();
  while (true) {
    // Refusals and replays need not wait for a running computation.
    absl::StatusOr<std::shared_ptr<PendingContribution>> before = FindPending(targets, micro_batch, attempt, *factor, session);
    if (!before.ok()) return before.status();
    if (*before == nullptr) return false;
    // What is held is computed with the teachers' weights, so their heads are locked too.
    const HeldRows held = (*before)->held();
    std::vector<std::shared_ptr<Head>> teachers;
    std::set<Head*, std::less<>> heads = HeadsOf(targets);
    for (size_t i = 0; i < held.teachers.size(); ++i) {
      teachers.push_back(held.teachers[i].lock());
      if (teachers.back() != nullptr) heads.insert(teachers.back().get());
    }
    std::optional<observability::BusyClock::Work> work;  // begins when the locks are had
    {
      const HeadGate::Entry entry(GatesOf(heads), limits);
      if (!entry.status().ok()) return entry.status();
      const ComputeLocks locks(heads);
      if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
      absl::StatusOr<std::shared_ptr<PendingContribution>> pending = FindPending(targets, micro_batch, attempt, *factor, session);
      if (!pending.ok()) return pending.status();
      if (*pending == nullptr) return false;
      // Another attempt has come meanwhile, or its session has ended.
      if (*pending != *before || !(*pending)->BeginCommit()) continue;
      const absl::Cleanup is_over = [&pending] { (*pending)->EndCommit(); };
      for (size_t i = 0; i < teachers.size(); ++i) {
        if (absl::Status status = CheckHeldTeacher(teachers[i].get(), held.teacher_weight_versions[i]); !status.ok()) return status;
      }
      if (busy != nullptr) work.emplace(*busy);
      if (absl::Status status = CarryOut(targets, micro_batch, **pending, arguments, *factor); !status.ok()) return status;
    }
    // In deterministic mode it has taken its place only.
    if (absl::Status status = AddInOrder(PointersOf(targets)); !status.ok()) return status;
    return true;
  }
}

absl::Status Head::CarryOut(const std::vector<DecisionTarget>& targets, int64_t micro_batch, PendingContribution& pending,
                            const CommitArguments& arguments, const CommitFactor& factor) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  const bool in_order = targets.front().head->in_order();
  const HeldRows held = pending.held();
  const std::vector<Head*> pointers = PointersOf(targets);
  if (in_order) {
    // Once it has its place nobody can refuse it any more.
    if (absl::Status status = CheckCommit(arguments, held); !status.ok()) return status;
  } else if (absl::Status status = AddPending(pending, arguments, targets.front().head->engine_); !status.ok()) {
    if (IsEngineFailure(status)) {
      for (const DecisionTarget& target : targets) target.head->MarkLost(status);
    }
    return status;
  }
  {
    // All at once, and let go of after that: whoever looks at a head meanwhile takes what is dropped for discarded.
    const StateLocks state_locks(pointers);
    if (in_order) WaitInOrder(pointers, micro_batch, held, arguments);
    for (const DecisionTarget& target : targets) {
      Head& head = *target.head;
      // Cannot fail: FindPending() has found it staged, and the compute lock is held since.
      head.steps_.FinishCommit(micro_batch, factor);
      head.changed_.WakeAll();
    }
  }
  pending.Drop();
  return absl::OkStatus();
}

absl::Status Head::CheckHeldTeacher(Head* teacher, int64_t weight_version) {
  if (teacher == nullptr) {
    return MakeError(ErrorReason::kHeadNotFound, absl::StrCat(kNeedsTeacher, "it has been deleted"));
  }
  absl::MutexLock state_lock(&teacher->state_mutex_);
  if (absl::Status status = teacher->Check(nullptr, Need::kReady, false); !status.ok()) {
    return MakeError(GetErrorReason(status), absl::StrCat(kNeedsTeacher, std::string(status.message())), GetErrorMetadata(status));
  }
  if (teacher->weights_.version() == weight_version) return absl::OkStatus();
  return MakeError(ErrorReason::kWeightVersionMismatch,
                   absl::StrCat("the micro-batch is held, and was computed with version ", weight_version, " of the weights of ",
                                teacher->name_.ToString(), ", they are of version ", teacher->weights_.version(),
                                " now; discard it and submit it again"),
                   {{"head", teacher->name_.ToString()},
                    {"expected", absl::StrCat(weight_version)},
                    {"actual", absl::StrCat(teacher->weights_.version())}});
}

absl::StatusOr<bool> Head::Commit(const StepKey& key, int64_t micro_batch, int64_t attempt, double factor) {
  return Commit({{shared_from_this(), key}}, micro_batch, attempt, {factor, {}}, std::nullopt);
}

// ---- discard ---------------------------------------------------------------------------------------------------------

absl::Status Head::CheckDiscard(const std::vector<DecisionTarget>& targets, int64_t micro_batch, int64_t attempt,
                                const std::optional<SessionId>& session) {
  for (const DecisionTarget& target : targets) {
    Head& head = *target.head;
    absl::MutexLock state_lock(&head.state_mutex_);
    if (absl::Status status = head.Check(&target.key.epoch, Need::kReady, true); !status.ok()) return status;
    absl::Status status = head.steps_.CheckDiscard(target.key.step, micro_batch, attempt);
    if (!status.ok()) return status;
    const std::shared_ptr<PendingContribution> pending = head.steps_.FindPending(micro_batch);
    if (pending == nullptr) continue;
    if (!IsOfExactly(*pending, targets)) return OtherHeadsError(*pending, targets.size(), micro_batch);
    if (attempt > pending->attempt()) continue;
    if (absl::Status owned = CheckOwner(*pending, session, micro_batch); !owned.ok()) return owned;
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> Head::Discard(const std::vector<DecisionTarget>& targets, int64_t micro_batch, int64_t attempt,
                                   const std::optional<SessionId>& session,
                                   const WaitLimits& limits) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (absl::Status status = CheckTargets(targets); !status.ok()) return status;
  // One that is being computed is answered at once.
  if (absl::Status status = CheckDiscard(targets, micro_batch, attempt, session); !status.ok()) return status;
  bool dropped = false;
  {
    const std::set<Head*, std::less<>> heads = HeadsOf(targets);
    const HeadGate::Entry entry(GatesOf(heads), limits);
    if (!entry.status().ok()) return entry.status();
    const ComputeLocks locks(heads);
    if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
    if (absl::Status status = CheckDiscard(targets, micro_batch, attempt, session); !status.ok()) return status;
    for (const DecisionTarget& target : targets) {
      Head& head = *target.head;
      absl::MutexLock state_lock(&head.state_mutex_);
      absl::StatusOr<bool> here = head.steps_.Discard(target.key.step, micro_batch, attempt);
      if (!here.ok()) return here.status();
      dropped = dropped || *here;
      head.changed_.WakeAll();
    }
  }
  // Others may have waited for it.
  if (absl::Status status = AddInOrder(PointersOf(targets)); !status.ok()) return status;
  return dropped;
}

absl::StatusOr<bool> Head::Discard(const StepKey& key, int64_t micro_batch, int64_t attempt) {
  return Discard({{shared_from_this(), key}}, micro_batch, attempt, std::nullopt);
}

int64_t Head::DropSession(const SessionId& session) {
  // Without the compute lock: the end of any session looks at all heads, and one of them may be computing, or be saved or loaded
  // for minutes. Nobody else decides what is dropped here, and engines free it while other calls work.
  absl::MutexLock state_lock(&state_mutex_);
  const int64_t dropped = steps_.DropSession(session);
  changed_.WakeAll();
  return dropped;
}

// ---- the trainer's own part ------------------------------------------------------------------------------------------

absl::Status Head::CheckAddGradient(const StepKey& key, int64_t micro_batch, int64_t attempt, int64_t row_start,
                                    int64_t row_count) const {
  absl::MutexLock state_lock(&state_mutex_);
  if (absl::Status status = Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
  if (row_start < 0 || row_count < 1 || row_count > spec_.vocab_size || row_start > spec_.vocab_size - row_count) {
    return MakeError(
        ErrorReason::kChunkOutOfRange,
        absl::StrCat(row_count, " rows from ", row_start, " on do not lie in the weight, which has ", spec_.vocab_size),
        {{"rowStart", absl::StrCat(row_start)},
         {"rowCount", absl::StrCat(row_count)},
         {"expected", absl::StrCat(spec_.vocab_size)}});
  }
  if (absl::Status status = steps_.CheckBegin(key.step, micro_batch, attempt); !status.ok()) return status;
  if (!in_order() || IsItsTurn(key, micro_batch)) return absl::OkStatus();
  return steps_.WindowFull(micro_batch, "and a trainer's own gradient is not kept meanwhile");
}

absl::StatusOr<bool> Head::AddGradient(const StepKey& key, int64_t micro_batch, int64_t attempt, const Digest& digest,
                                       const GradientPart& part, const std::function<bool()>& cancelled, const WaitLimits& limits) {
  if (!std::isfinite(static_cast<float>(part.factor))) {
    const std::string actual = absl::StrCat(part.factor);
    return MakeError(ErrorReason::kInvalidField, absl::StrCat("factor must be finite in fp32, it is ", actual),
                     {{"field", "factor"}, {"expected", "finite in fp32"}, {"actual", actual}});
  }
  absl::Status check = CheckAddGradient(key, micro_batch, attempt, part.row_start, part.row_count);
  if (!check.ok()) return check;
  while (true) {
    absl::StatusOr<std::optional<bool>> added = AddOwnPart(key, micro_batch, attempt, digest, part, cancelled, limits);
    if (!added.ok()) return added.status();
    if (added->has_value()) {
      // Others may have waited for it.
      if (absl::Status status = AddInOrder({this}); !status.ok()) return status;
      return **added;
    }
    // A shard was not ready, say, when the predecessors were to be added. If it still is not, neither is this one added.
    if (absl::Status status = AddInOrder(limits); !status.ok()) return status;
  }
}

absl::StatusOr<std::optional<bool>> Head::AddOwnPart(const StepKey& key, int64_t micro_batch, int64_t attempt, const Digest& digest,
                                                     const GradientPart& part, const std::function<bool()>& cancelled,
                                                     const WaitLimits& limits) {
  const HeadGate::Entry entry(gate_, limits);
  if (!entry.status().ok()) return entry.status();
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
  absl::Status check = CheckAddGradient(key, micro_batch, attempt, part.row_start, part.row_count);
  if (!check.ok()) return check;
  if (cancelled != nullptr && cancelled()) {
    return MakeError(ErrorReason::kCancelled, "the call was cancelled before its gradient was added; nothing was added");
  }
  {
    absl::MutexLock state_lock(&state_mutex_);
    if (in_order()) {
      const std::shared_ptr<const WaitingAddition> next = NextInOrder();
      if (next != nullptr && next->micro_batch < micro_batch) return std::optional<bool>();
    }
    absl::StatusOr<BeginDecision> decision = steps_.Begin(key.step, micro_batch, attempt, digest, /*first_wins=*/false);
    if (!decision.ok()) return decision.status();
    if (*decision != BeginDecision::kCompute) return std::optional<bool>(false);
    steps_.DropLowerAttempt(micro_batch);
  }
  const absl::Status added = engine_head_->AddToGradient(HeadTensor::kGradWeight, part.row_start * spec_.hidden_size,
                                                         part.row_count * spec_.hidden_size, part.factor, part.data);
  if (!added.ok()) {
    if (IsEngineFailure(added)) {
      MarkLost(added);
    } else {
      absl::MutexLock state_lock(&state_mutex_);
      steps_.ledger().Abort(micro_batch).IgnoreError();
    }
    return added;
  }
  absl::MutexLock state_lock(&state_mutex_);
  steps_.MarkAdded(micro_batch);
  changed_.WakeAll();
  if (absl::Status status = steps_.ledger().FinishCommitted(micro_batch, ContributionForm::kDirect, ContributionCounts());
      !status.ok())
    return status;
  return std::optional<bool>(true);
}

}  // namespace headwater::heads
