#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/heads/head.h"
#include "server/heads/steps/pending_contribution.h"
#include "server/heads/steps/submit.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::heads {
namespace {

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
  return MakeError(ErrorReason::kInvalidCombination,
                   absl::StrCat("micro-batch ", micro_batch, " adds to ", pending.targets().size(),
                                " heads, and its decision must name exactly those; the call names ", named),
                   {{"microBatch", absl::StrCat(micro_batch)},
                    {"field", "heads"},
                    {"expected", absl::StrCat(pending.targets().size())},
                    {"actual", absl::StrCat(named)}});
}

absl::Status CheckOwner(const PendingContribution& pending, const std::optional<SessionId>& session, int64_t micro_batch) {
  if (!pending.session().has_value() || pending.session() == session) return absl::OkStatus();
  return MakeError(ErrorReason::kNotSessionOwner,
                   absl::StrCat("micro-batch ", micro_batch, " belongs to ", session.has_value() ? "another" : "a",
                                " session, and only that one decides this attempt of it"),
                   MicroBatchMetadata(micro_batch));
}

std::vector<Head*> HeadsOf(const std::vector<DecisionTarget>& targets) {
  std::vector<Head*> heads;
  for (const DecisionTarget& target : targets) heads.push_back(target.head.get());
  return heads;
}

// ---- commit ----------------------------------------------------------------------------------------------------------

// The beginning of the digest of token factors; math.md, "Digest".
constexpr char kTokenFactorsHeader[] = "headwater.token_factors.1";

// The arguments as the ledger keeps them. kInvalidField unless token factors are finite.
absl::StatusOr<CommitFactor> ToCommitFactor(const CommitArguments& arguments) {
  CommitFactor factor;
  factor.factor = arguments.factor;
  if (arguments.token_factors.empty()) return factor;
  const auto begin = arguments.token_factors.begin(), end = arguments.token_factors.end();
  if (const auto wrong = std::find_if_not(begin, end, [](float x) { return std::isfinite(x); }); wrong != end) {
    return FieldError(ErrorReason::kInvalidField, "token_factors", "finite", absl::StrCat(*wrong, " at index ", wrong - begin));
  }
  DigestBuilder digest;
  // A row for each factor: within a row, zeros at the end would not count.
  digest.AddRows(0, 0, static_cast<int64_t>(arguments.token_factors.size()), sizeof(float), arguments.token_factors.data());
  factor.token_factors = digest.Finish(kTokenFactorsHeader);
  return factor;
}

// The pending contribution that a commit is for: the same in all targets, and theirs alone. Null if an equal call has committed it.
// In a turn.
absl::StatusOr<std::shared_ptr<PendingContribution>> FindPending(const std::vector<DecisionTarget>& targets, int64_t micro_batch,
                                                                 int64_t attempt, const CommitFactor& factor,
                                                                 const std::optional<SessionId>& session) {
  std::shared_ptr<PendingContribution> found;
  for (const DecisionTarget& target : targets) {
    Head& head = *target.head;
    HEADWATER_RETURN_IF_ERROR(head.Check(target.key.epoch, Need::kReady, true));
    HEADWATER_ASSIGN_OR_RETURN(bool to_do, head.steps.ledger().CheckCommit(target.key.step, micro_batch, attempt, factor));
    if (!to_do) continue;
    const std::shared_ptr<PendingContribution> pending = head.steps.FindPending(micro_batch);
    if (pending == nullptr) {
      return MakeError(ErrorReason::kInternal, absl::StrCat("the contribution of micro-batch ", micro_batch, " is not there"),
                       MicroBatchMetadata(micro_batch));
    }
    if (!IsOfExactly(*pending, targets) || (found != nullptr && found != pending)) {
      return OtherHeadsError(*pending, targets.size(), micro_batch);
    }
    found = pending;
  }
  // A contribution is pending in all of its heads, or in none.
  if (found == nullptr) return found;
  HEADWATER_RETURN_IF_ERROR(CheckOwner(*found, session, micro_batch));
  if (factor.token_factors.has_value() && !found->is_held()) {
    return MakeError(ErrorReason::kInvalidCombination,
                     absl::StrCat("micro-batch ", micro_batch,
                                  " is staged, not held, and takes no token_factors; submit it with late_token_factors"),
                     {{"microBatch", absl::StrCat(micro_batch)}, {"field", "token_factors"}});
  }
  return found;
}

// Commits what FindPending() has found and no other call can drop: adds it, or puts it in its place in the order. By an operation
// that is admitted to all heads concerned.
absl::Status CarryOut(const std::vector<Head*>& targets, int64_t micro_batch, PendingContribution& pending,
                      const CommitArguments& arguments, const CommitFactor& factor) {
  const bool in_order = targets.front()->steps.in_order();
  // Once it has its place it can no longer be refused.
  if (pending.is_held()) HEADWATER_RETURN_IF_ERROR(CheckCommit(arguments, pending.held()));
  if (!in_order) {
    const absl::Status added =
        pending.is_held() ? AddHeld(pending.held(), arguments, targets.front()->engine) : pending.staged().Commit(arguments.factor);
    for (Head* target : targets) target->AfterChange(added).IgnoreError();
    HEADWATER_RETURN_IF_ERROR(added);
  }
  const Turn turn(targets.front()->sequencer);
  for (Head* target : targets) {
    if (in_order) target->steps.Wait(micro_batch, pending.held(), arguments, *target->on_engine);
    // Cannot fail: it was staged when this operation was admitted.
    target->steps.FinishCommit(micro_batch, factor);
  }
  pending.Drop();  // wakes all that wait for it
  return absl::OkStatus();
}

// Whether Discard() would be refused. In a turn.
absl::Status CheckDiscard(const std::vector<DecisionTarget>& targets, int64_t micro_batch, int64_t attempt,
                          const std::optional<SessionId>& session) {
  for (const DecisionTarget& target : targets) {
    Head& head = *target.head;
    HEADWATER_RETURN_IF_ERROR(head.Check(target.key.epoch, Need::kReady, true));
    HEADWATER_RETURN_IF_ERROR(head.steps.ledger().CheckDiscard(target.key.step, micro_batch, attempt));
    const std::shared_ptr<PendingContribution> pending = head.steps.FindPending(micro_batch);
    if (pending == nullptr) continue;
    if (!IsOfExactly(*pending, targets)) return OtherHeadsError(*pending, targets.size(), micro_batch);
    if (attempt > pending->attempt()) continue;
    HEADWATER_RETURN_IF_ERROR(CheckOwner(*pending, session, micro_batch));
  }
  return absl::OkStatus();
}

// ---- the trainer's own part ------------------------------------------------------------------------------------------

// AddGradient() after the checks of its arguments, without the additions that follow in order. Null if waiting contributions must
// be added first.
absl::StatusOr<std::optional<bool>> AddOwnPart(Head& head, const StepKey& key, int64_t micro_batch, int64_t attempt,
                                               const Digest& digest, const GradientPart& part,
                                               const std::function<bool()>& cancelled, const WaitLimits& limits) {
  HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, head.Admit(kChangesGradient, limits));
  HEADWATER_RETURN_IF_ERROR(head.CheckAddGradient(key, micro_batch, attempt, part.row_start, part.row_count));
  if (cancelled != nullptr && cancelled()) {
    return MakeError(ErrorReason::kCancelled, "the call was cancelled before its gradient was added; nothing was added");
  }
  {
    const Turn turn(head.sequencer);
    const std::shared_ptr<const WaitingAddition> next = head.NextInOrder();
    if (next != nullptr && next->micro_batch < micro_batch) return std::optional<bool>();
    HEADWATER_ASSIGN_OR_RETURN(const BeginDecision decision,
                               head.steps.ledger().CheckBegin(key.step, micro_batch, attempt, digest, /*first_wins=*/false));
    if (decision != BeginDecision::kCompute) return std::optional<bool>(false);
    head.steps.ledger().Begin(micro_batch, attempt, digest);
    head.steps.DropLowerAttempt(micro_batch);
  }
  const int64_t width = head.spec().hidden_size;
  const absl::Status added = head.AfterChange(head.on_engine->AddToGradient(HeadTensor::kGradWeight, part.row_start * width,
                                                                            part.row_count * width, part.factor, part.data));
  const Turn turn(head.sequencer);
  if (!added.ok()) {
    if (!IsEngineFailure(added)) head.steps.ledger().Abort(micro_batch).IgnoreError();
    return added;
  }
  head.steps.MarkAdded(micro_batch);
  head.MicroBatchChanged();
  HEADWATER_RETURN_IF_ERROR(head.steps.ledger().FinishCommitted(micro_batch, ContributionForm::kDirect, ContributionCounts()));
  return std::optional<bool>(true);
}

}  // namespace

absl::StatusOr<bool> Commit(const std::vector<DecisionTarget>& targets, int64_t micro_batch, int64_t attempt,
                            const CommitArguments& arguments, const std::optional<SessionId>& session,
                            observability::BusyClock* busy, const WaitLimits& limits) {
  HEADWATER_RETURN_IF_ERROR(CheckTargets(targets));
  HEADWATER_ASSIGN_OR_RETURN(CommitFactor factor, ToCommitFactor(arguments));
  const std::vector<Head*> heads = HeadsOf(targets);
  scheduler::Sequencer& sequencer = heads.front()->sequencer;
  std::shared_ptr<PendingContribution> pending;
  HeldTeachers teachers;
  // Refusals and replays wait for no head. During the wait another attempt may supersede this one, or its session may end.
  const auto needs = [&]() -> absl::StatusOr<scheduler::Needs> {
    HEADWATER_ASSIGN_OR_RETURN(std::shared_ptr<PendingContribution> found,
                               FindPending(targets, micro_batch, attempt, factor, session));
    Turn::Free(std::exchange(pending, std::move(found)));
    scheduler::Needs needed;
    if (pending == nullptr) return needed;
    for (const Head* head : heads) head->AddNeed(kChangesGradient, needed);
    teachers.Find(pending->held(), needed);  // held rows are computed with the teachers' weights
    return needed;
  };
  {
    HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, sequencer.Acquire(needs, limits, kWaitsForHead));
    if (pending == nullptr) return false;
    {
      const Turn turn(sequencer);
      // Its session may have ended since.
      absl::Status status = FindPending(targets, micro_batch, attempt, factor, session).status();
      if (status.ok()) status = teachers.Check();
      if (!status.ok()) return status;
      pending->BeginCommit();
    }
    const absl::Cleanup is_over = [&] {
      const Turn turn(sequencer);
      pending->EndCommit();
    };
    std::optional<observability::BusyClock::Work> work;
    if (busy != nullptr) work.emplace(*busy);
    HEADWATER_RETURN_IF_ERROR(CarryOut(heads, micro_batch, *pending, arguments, factor));
  }
  // In deterministic mode it only has its place so far. This thread waits for no head: parked calls that have them may need it.
  HEADWATER_RETURN_IF_ERROR(AddInOrder(heads, {}));
  return true;
}

absl::StatusOr<bool> Discard(const std::vector<DecisionTarget>& targets, int64_t micro_batch, int64_t attempt,
                             const std::optional<SessionId>& session, const WaitLimits& limits) {
  HEADWATER_RETURN_IF_ERROR(CheckTargets(targets));
  const std::vector<Head*> heads = HeadsOf(targets);
  scheduler::Sequencer& sequencer = heads.front()->sequencer;
  bool dropped = false;
  {
    // A discard of a micro-batch that is being computed is answered at once.
    const auto needs = [&]() -> absl::StatusOr<scheduler::Needs> {
      HEADWATER_RETURN_IF_ERROR(CheckDiscard(targets, micro_batch, attempt, session));
      scheduler::Needs needed;
      for (const Head* head : heads) head->AddNeed(kChangesGradient, needed);
      return needed;
    };
    HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, sequencer.Acquire(needs, limits, kWaitsForHead));
    const Turn turn(sequencer);
    for (const DecisionTarget& target : targets) {
      Head& head = *target.head;
      HEADWATER_ASSIGN_OR_RETURN(bool here, head.steps.Discard(target.key.step, micro_batch, attempt));
      dropped = dropped || here;
      head.MicroBatchChanged();
    }
  }
  // Others may have waited for it.
  HEADWATER_RETURN_IF_ERROR(AddInOrder(heads, {}));
  return dropped;
}

int64_t Head::DropSession(const SessionId& session) {
  // Without an admission: the end of any session looks at all heads, and some of them may compute, or be set, for minutes. No other
  // call decides what is dropped here, and engines free it while other calls work.
  const Turn turn(sequencer);
  return steps.DropSession(session);
}

absl::Status Head::CheckAddGradient(const StepKey& key, int64_t micro_batch, int64_t attempt, int64_t row_start,
                                    int64_t row_count) const {
  const Turn turn(sequencer);
  HEADWATER_RETURN_IF_ERROR(Check(key.epoch, Need::kReady, true));
  const int64_t rows = spec_.vocab_size;
  if (row_start < 0 || row_count < 1 || row_count > rows || row_start > rows - row_count) {
    return MakeError(
        ErrorReason::kChunkOutOfRange,
        absl::StrCat(row_count, " rows from ", row_start, " on do not lie in the weight, which has ", rows),
        {{"rowStart", absl::StrCat(row_start)}, {"rowCount", absl::StrCat(row_count)}, {"expected", absl::StrCat(rows)}});
  }
  HEADWATER_RETURN_IF_ERROR(steps.CheckBegin(key.step, micro_batch, attempt));
  if (IsItsTurn(key, micro_batch)) return absl::OkStatus();
  return steps.WindowFull(micro_batch, "and a trainer's own gradient is not kept meanwhile");
}

absl::StatusOr<bool> Head::AddGradient(const StepKey& key, int64_t micro_batch, int64_t attempt, const Digest& digest,
                                       const GradientPart& part, const std::function<bool()>& cancelled, const WaitLimits& limits) {
  HEADWATER_RETURN_IF_ERROR(CheckFactor(part.factor));
  HEADWATER_RETURN_IF_ERROR(CheckAddGradient(key, micro_batch, attempt, part.row_start, part.row_count));
  while (true) {
    HEADWATER_ASSIGN_OR_RETURN(std::optional<bool> added,
                               AddOwnPart(*this, key, micro_batch, attempt, digest, part, cancelled, limits));
    if (added.has_value()) {
      // Others may have waited for it.
      HEADWATER_RETURN_IF_ERROR(AddInOrder(std::vector<Head*>{this}));
      return *added;
    }
    // The predecessors could not be added, for example because a shard was not ready. If that persists this call fails too.
    HEADWATER_RETURN_IF_ERROR(AddInOrder(*this, limits));
  }
}

}  // namespace headwater::heads
