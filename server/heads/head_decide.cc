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
#include "server/heads/compute_locks.h"
#include "server/heads/head.h"
#include "server/observability/busy_clock.h"

namespace headwater::heads {
namespace {

// Begins the reason why a held micro-batch cannot be committed.
constexpr char kNeedsTeacher[] =
    "a held micro-batch is computed at its commit, and needs its teacher's head until then; discard it, or keep the head: ";

// What the digest of token factors begins with; math.md, "Digest".
constexpr char kTokenFactorsHeader[] = "headwater.token_factors.1";

ErrorMetadata MicroBatchMetadata(int64_t micro_batch) { return {{"microBatch", absl::StrCat(micro_batch)}}; }

absl::StatusOr<CommitFactor> ToCommitFactor(const CommitArguments& arguments) {
  CommitFactor factor;
  factor.factor = arguments.factor;
  if (arguments.token_factors.empty()) return factor;
  const auto begin = arguments.token_factors.begin(), end = arguments.token_factors.end();
  if (const auto wrong = std::find_if_not(begin, end, [](float x) { return std::isfinite(x); }); wrong != end) {
    const std::string actual = absl::StrCat(*wrong, " at index ", wrong - begin);
    return MakeError(ErrorReason::kInvalidField, absl::StrCat("token_factors must be finite, there is ", actual),
                     {{"field", "token_factors"}, {"expected", "finite"}, {"actual", actual}});
  }
  DigestBuilder digest;
  // A row for each factor: within a row, zeros at the end would not count.
  digest.AddRows(0, 0, static_cast<int64_t>(arguments.token_factors.size()), sizeof(float), arguments.token_factors.data());
  factor.token_factors = digest.Finish(kTokenFactorsHeader);
  return factor;
}

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

// The rows of one term with factors of their own.
std::vector<float> ScaledWeights(const LossTerm& term, const std::vector<float>& token_factors) {
  std::vector<float> weights(static_cast<size_t>(term.row_count));
  for (size_t i = 0; i < weights.size(); ++i) {
    const float weight = term.token_weights.empty() ? 1.0F : term.token_weights[i];
    weights[i] = weight * token_factors[static_cast<size_t>(term.row_start) + i];
  }
  return weights;
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
    absl::StatusOr<bool> to_do = head.ledger_.CheckCommit(target.key.step, micro_batch, attempt, factor);
    if (!to_do.ok()) return to_do.status();
    if (!*to_do) {
      ++committed_count;
      continue;
    }
    const auto entry = head.pending_.find(micro_batch);
    if (entry == head.pending_.end()) {
      return MakeError(ErrorReason::kInternal, absl::StrCat("the contribution of micro-batch ", micro_batch, " is not there"),
                       MicroBatchMetadata(micro_batch));
    }
    if (!IsOfExactly(*entry->second, targets) || (found != nullptr && found != entry->second)) {
      return OtherHeadsError(*entry->second, targets.size(), micro_batch);
    }
    found = entry->second;
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

absl::Status Head::AddPending(const PendingContribution& pending, const CommitArguments& arguments, LossEngine& engine) {
  if (!pending.is_held()) return pending.staged()->Commit(arguments.factor);
  HeldRows held = pending.held();
  if (absl::Status status = CheckArguments(arguments, held); !status.ok()) return status;
  return AddHeld(std::move(held), arguments, engine);
}

absl::Status Head::CheckArguments(const CommitArguments& arguments, const HeldRows& held) {
  const int64_t count = static_cast<int64_t>(arguments.token_factors.size());
  if (count != 0 && count != held.hidden.row_count) {
    const std::string expected = absl::StrCat(held.hidden.row_count), actual = absl::StrCat(count);
    return MakeError(ErrorReason::kShapeMismatch,
                     absl::StrCat("token_factors has ", actual, " entries, the micro-batch has ", expected, " rows"),
                     {{"field", "token_factors"}, {"expected", expected}, {"actual", actual}});
  }
  const auto not_finite = [](const char* field, const std::string& what) {
    return MakeError(ErrorReason::kInvalidField, absl::StrCat(field, " makes ", what, ", which must stay finite"),
                     {{"field", field}, {"expected", "finite products"}, {"actual", what}});
  };
  for (const LossTerm& term : held.terms) {
    if (const double scale = term.loss_scale * arguments.factor; !std::isfinite(scale)) {
      return not_finite("factor", absl::StrCat("a loss_scale of ", term.loss_scale, " times ", arguments.factor));
    }
    if (count == 0) continue;
    if (!term.entropy_factors.empty() || !term.lse_factors.empty()) {
      return MakeError(ErrorReason::kInvalidCombination, "token_factors are for token weights alone: the micro-batch has factors",
                       {{"field", "token_factors"}, {"expected", "nothing"}, {"actual", "factors of entropy or lse"}});
    }
    const std::vector<float> weights = ScaledWeights(term, arguments.token_factors);
    const auto wrong = std::find_if_not(weights.begin(), weights.end(), [](float weight) { return std::isfinite(weight); });
    if (wrong == weights.end()) continue;
    const auto row = static_cast<size_t>(wrong - weights.begin());
    return not_finite("token_factors",
                      absl::StrCat("a token weight of ", term.token_weights.empty() ? 1.0F : term.token_weights[row], " times ",
                                   arguments.token_factors[static_cast<size_t>(term.row_start) + row], " at row ",
                                   term.row_start + static_cast<int64_t>(row)));
  }
  return absl::OkStatus();
}

absl::Status Head::AddHeld(HeldRows held, const CommitArguments& arguments, LossEngine& engine) {
  std::vector<std::vector<float>> weights;
  weights.reserve(held.terms.size());
  for (LossTerm& term : held.terms) {
    term.loss_scale *= arguments.factor;
    if (arguments.token_factors.empty()) continue;
    weights.push_back(ScaledWeights(term, arguments.token_factors));
    term.token_weights = weights.back();
  }
  MicroBatch micro_batch;
  micro_batch.hidden = held.hidden;
  micro_batch.terms = held.terms;
  micro_batch.backward = true;
  micro_batch.grad_weight = GradWeightMode::kAccumulate;
  return engine.Compute(micro_batch).status();
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
  const bool in_order = targets.front().head->window_ != nullptr;
  const HeldRows held = pending.held();
  const std::vector<Head*> pointers = PointersOf(targets);
  if (in_order) {
    // Once it has its place nobody can refuse it any more.
    if (absl::Status status = CheckArguments(arguments, held); !status.ok()) return status;
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
      head.ledger_.FinishCommit(micro_batch, factor).IgnoreError();
      head.pending_.erase(micro_batch);
      head.changed_.SignalAll();
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
    absl::Status status = head.ledger_.CheckDiscard(target.key.step, micro_batch, attempt, head.limits_.max_step_micro_batches);
    if (!status.ok()) return status;
    const auto entry = head.pending_.find(micro_batch);
    if (entry == head.pending_.end()) continue;
    if (!IsOfExactly(*entry->second, targets)) return OtherHeadsError(*entry->second, targets.size(), micro_batch);
    if (attempt > entry->second->attempt()) continue;
    if (absl::Status owned = CheckOwner(*entry->second, session, micro_batch); !owned.ok()) return owned;
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
      absl::StatusOr<bool> here = head.ledger_.Discard(target.key.step, micro_batch, attempt, head.limits_.max_step_micro_batches);
      if (!here.ok()) return here.status();
      dropped = dropped || *here;
      head.DropPending(micro_batch);
      head.CloseGap(micro_batch);
      head.changed_.SignalAll();
    }
  }
  // Others may have waited for it.
  if (absl::Status status = AddInOrder(PointersOf(targets)); !status.ok()) return status;
  return dropped;
}

void Head::CloseGap(int64_t micro_batch) {
  if (window_ == nullptr) return;
  const auto found = ledger_.open().micro_batches.find(micro_batch);
  if (found == ledger_.open().micro_batches.end() || found->second.state != ContributionState::kDiscarded) return;
  window_->Close(micro_batch);
}

absl::StatusOr<bool> Head::Discard(const StepKey& key, int64_t micro_batch, int64_t attempt) {
  return Discard({{shared_from_this(), key}}, micro_batch, attempt, std::nullopt);
}

int64_t Head::DropSession(const SessionId& session) {
  // Without the compute lock: the end of any session looks at all heads, and one of them may be computing, or be saved or loaded
  // for minutes. Nobody else decides what is dropped here, and engines free it while other calls work.
  absl::MutexLock state_lock(&state_mutex_);
  int64_t dropped = 0;
  for (const auto& [id, pending] : pending_) {
    if (pending->session() == session && pending->DropWithSession()) ++dropped;
  }
  SettleDropped();
  changed_.SignalAll();
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
  if (absl::Status status = ledger_.CheckBegin(key.step, micro_batch, attempt, limits_.max_step_micro_batches); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckOrder(micro_batch); !status.ok()) return status;
  if (window_ == nullptr || IsItsTurn(key, micro_batch)) return absl::OkStatus();
  return WindowFull(micro_batch, "and a trainer's own gradient is not kept meanwhile");
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
    if (window_ != nullptr) {
      const std::shared_ptr<const WaitingAddition> next = NextInOrder();
      if (next != nullptr && next->micro_batch < micro_batch) return std::optional<bool>();
    }
    absl::StatusOr<BeginDecision> decision =
        ledger_.Begin(key.step, micro_batch, attempt, digest, /*first_wins=*/false, limits_.max_step_micro_batches);
    if (!decision.ok()) return decision.status();
    if (*decision != BeginDecision::kCompute) return std::optional<bool>(false);
    DropPending(micro_batch);  // of a lower attempt, which this one supersedes
    if (window_ != nullptr) window_->Reopen(micro_batch);
  }
  const absl::Status added = engine_head_->AddToGradient(HeadTensor::kGradWeight, part.row_start * spec_.hidden_size,
                                                         part.row_count * spec_.hidden_size, part.factor, part.data);
  if (!added.ok()) {
    if (IsEngineFailure(added)) {
      MarkLost(added);
    } else {
      absl::MutexLock state_lock(&state_mutex_);
      ledger_.Abort(micro_batch).IgnoreError();
    }
    return added;
  }
  absl::MutexLock state_lock(&state_mutex_);
  if (window_ != nullptr) window_->MarkAdded(micro_batch);
  changed_.SignalAll();
  if (absl::Status status = ledger_.FinishCommitted(micro_batch, ContributionForm::kDirect, ContributionCounts()); !status.ok())
    return status;
  return std::optional<bool>(true);
}

}  // namespace headwater::heads
