#include "server/heads/steps/step_ledger.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/heads/head_name.h"

namespace headwater::heads {
namespace {

constexpr size_t kMaxListedIds = 16;

// Reduces the record of a contribution that is gone to its fence and tombstone; false if it has neither.
bool KeepFenceAndTombstone(MicroBatchRecord* record) {
  MicroBatchRecord rest;
  rest.state = ContributionState::kNone;
  rest.attempt = rest.fence_attempt = record->fence_attempt;  // above the tombstone
  rest.tombstone_attempt = record->tombstone_attempt;
  *record = rest;
  return rest.fence_attempt > 0;
}

std::string FactorToString(const CommitFactor& factor) {
  return absl::StrCat(factor.factor, factor.token_factors.has_value()
                                         ? absl::StrCat(" and token factors ", EpochToHex(*factor.token_factors))
                                         : "");
}

bool IsUndecided(const MicroBatchRecord& record) {
  return record.state == ContributionState::kInProgress || record.state == ContributionState::kStaged;
}

// An error about one attempt of a micro-batch; `what` follows it in the message.
absl::Status AttemptError(ErrorReason reason, int64_t step, int64_t micro_batch, int64_t attempt, const std::string& what,
                          ErrorMetadata metadata = {}) {
  metadata.insert({{"step", absl::StrCat(step)}, {"microBatch", absl::StrCat(micro_batch)}, {"attempt", absl::StrCat(attempt)}});
  return MakeError(reason, absl::StrCat("micro-batch ", micro_batch, " of step ", step, " ", what), std::move(metadata));
}

absl::Status DiscardedError(int64_t step, int64_t micro_batch, int64_t attempt, const MicroBatchRecord& record) {
  constexpr std::pair<const char*, const char*> kBy[] = {
      {"call", "a call"}, {"session", "the end of its session"}, {"head", "another of its heads"}};
  const auto& [by, words] = kBy[static_cast<size_t>(record.discarded_by)];
  const std::string discarded = absl::StrCat(record.tombstone_attempt);
  return AttemptError(ErrorReason::kMicroBatchDiscarded, step, micro_batch, attempt,
                      absl::StrCat("was discarded up to attempt ", discarded, " by ", words, "; the call is for attempt ", attempt),
                      {{"discardedAttempt", discarded}, {"discardedBy", by}});
}

// The caller does not keep to the order of the diagram.
absl::Status Defect(int64_t micro_batch, const std::string& what) {
  return MakeError(ErrorReason::kInternal, absl::StrCat("micro-batch ", micro_batch, " ", what),
                   {{"microBatch", absl::StrCat(micro_batch)}});
}

// The first few of some ids, and how many there are.
struct IdList {
  void Add(int64_t id) {
    if (ids.size() < kMaxListedIds) ids.push_back(id);
    ++count;
  }
  std::string ToString() const {
    return absl::StrCat(absl::StrJoin(ids, ","), count > static_cast<int64_t>(ids.size()) ? ",..." : "");
  }

  std::vector<int64_t> ids;
  int64_t count = 0;
};

}  // namespace

absl::Status CheckFactor(double factor) {
  if (std::isfinite(static_cast<float>(factor))) return absl::OkStatus();
  return FieldError(ErrorReason::kInvalidField, "factor", "finite in fp32", absl::StrCat(factor));
}

const MicroBatchRecord* StepRecord::Find(int64_t micro_batch) const {
  const auto found = micro_batches.find(micro_batch);
  return found != micro_batches.end() ? &found->second : nullptr;
}

StepTotals StepRecord::Totals() const {
  StepTotals totals;
  for (const auto& [id, record] : micro_batches) {
    if (record.state != ContributionState::kCommitted) continue;
    ++totals.micro_batch_count;
    totals.valid_token_count += record.counts.valid_token_count;
    totals.loss_sum += record.counts.loss_sum;
    totals.token_weight_sum += record.counts.token_weight_sum;
    totals.non_finite_row_count += record.counts.non_finite_row_count;
  }
  return totals;
}

bool StepRecord::HasUndecided() const {
  return std::any_of(micro_batches.begin(), micro_batches.end(), [](const auto& entry) { return IsUndecided(entry.second); });
}

absl::Status StepLedger::CheckStep(int64_t step) const {
  if (step == open_.step) return absl::OkStatus();
  return MakeError(ErrorReason::kStepMismatch,
                   absl::StrCat("the open step is ", open_.step, ", the call names step ", step,
                                checkpoints_.empty() ? "" : "; the checkpoints, with their steps, are " + checkpoints_),
                   {{"openStep", absl::StrCat(open_.step)}, {"step", absl::StrCat(step)}, {"checkpoints", checkpoints_}});
}

absl::Status StepLedger::CheckNotInProgress(int64_t step, int64_t micro_batch) const {
  HEADWATER_RETURN_IF_ERROR(CheckStep(step));
  if (!pending_digests_.contains(micro_batch)) return absl::OkStatus();
  return MakeError(ErrorReason::kMicroBatchInProgress,
                   absl::StrCat("micro-batch ", micro_batch, " of step ", step, " is being computed for another call"),
                   {{"step", absl::StrCat(step)}, {"microBatch", absl::StrCat(micro_batch)}});
}

absl::Status StepLedger::CheckBegin(int64_t step, int64_t micro_batch, int64_t attempt) const {
  HEADWATER_RETURN_IF_ERROR(CheckStep(step));
  if (micro_batch < 0) return FieldError(ErrorReason::kInvalidField, "micro_batch", ">= 0", absl::StrCat(micro_batch));
  if (attempt < 0) return FieldError(ErrorReason::kInvalidField, "attempt", ">= 0", absl::StrCat(attempt));
  const MicroBatchRecord* const known = open_.Find(micro_batch);
  if (known != nullptr) {
    const MicroBatchRecord& record = *known;
    if (attempt <= record.tombstone_attempt) return DiscardedError(step, micro_batch, attempt, record);
    if (attempt < record.fence_attempt) {  // which is the attempt of a contribution that is present
      return AttemptError(ErrorReason::kAttemptSuperseded, step, micro_batch, attempt,
                          absl::StrCat("is known with attempt ", record.fence_attempt, ", the call is attempt ", attempt),
                          {{"knownAttempt", absl::StrCat(record.fence_attempt)}});
    }
    if (record.state == ContributionState::kInProgress && attempt == record.attempt) return CheckNotInProgress(step, micro_batch);
    if (record.IsPresent()) return absl::OkStatus();
  }
  if (open_.state != StepState::kOpen) {
    return AttemptError(ErrorReason::kStepSealed, step, micro_batch, attempt,
                        "is unknown, and the step is sealed: it takes no others", {{"openStep", absl::StrCat(open_.step)}});
  }
  if (known == nullptr && static_cast<int64_t>(open_.micro_batches.size()) >= max_micro_batches_) {
    const std::string maximum = absl::StrCat(max_micro_batches_);
    return MakeError(ErrorReason::kLimitExceeded,
                     absl::StrCat("step ", step, " has ", open_.micro_batches.size(), " micro-batches, the maximum is ", maximum),
                     {{"limit", "max_step_micro_batches"},
                      {"maximum", maximum},
                      {"actual", absl::StrCat(open_.micro_batches.size() + 1)},
                      {"step", absl::StrCat(step)}});
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> StepLedger::Supersede(int64_t step, int64_t micro_batch, int64_t attempt) {
  HEADWATER_RETURN_IF_ERROR(CheckBegin(step, micro_batch, attempt));
  if (attempt == 0) return false;
  const auto [found, is_new] = open_.micro_batches.try_emplace(micro_batch);
  MicroBatchRecord& record = found->second;
  if (!is_new && record.state == ContributionState::kInProgress) return Defect(micro_batch, "is being computed");
  if (!is_new && record.state == ContributionState::kCommitted) return false;
  const bool dropped = !is_new && record.state == ContributionState::kStaged && record.attempt < attempt;
  record.fence_attempt = std::max(record.fence_attempt, attempt);
  if (is_new || dropped || !record.IsPresent()) KeepFenceAndTombstone(&record);
  return dropped;
}

absl::StatusOr<BeginDecision> StepLedger::CheckBegin(int64_t step, int64_t micro_batch, int64_t attempt,
                                                     const std::optional<Digest>& digest, bool first_wins) const {
  HEADWATER_RETURN_IF_ERROR(CheckBegin(step, micro_batch, attempt));
  HEADWATER_RETURN_IF_ERROR(CheckNotInProgress(step, micro_batch));
  const MicroBatchRecord* const known = open_.Find(micro_batch);
  if (known == nullptr || !known->IsPresent()) return BeginDecision::kCompute;
  if (!digest.has_value()) return BeginDecision::kReplay;
  const bool is_staged = known->state == ContributionState::kStaged;
  if (is_staged && attempt > known->attempt) return BeginDecision::kCompute;
  const MicroBatchRecord& record = *known;
  if (record.digest == digest) return BeginDecision::kReplay;
  if (first_wins) return BeginDecision::kPayloadDiffers;
  const std::string expected = EpochToHex(*record.digest);
  return MakeError(ErrorReason::kMicroBatchConflict,
                   absl::StrCat("micro-batch ", micro_batch, " of step ", step, " is ", is_staged ? "staged" : "committed",
                                " with digest ", expected, ", the call has digest ", EpochToHex(*digest)),
                   {{"step", absl::StrCat(step)},
                    {"microBatch", absl::StrCat(micro_batch)},
                    {"expected", expected},
                    {"actual", EpochToHex(*digest)}});
}

void StepLedger::Begin(int64_t micro_batch, int64_t attempt, const std::optional<Digest>& digest) {
  MicroBatchRecord record;
  if (const MicroBatchRecord* const known = open_.Find(micro_batch); known != nullptr) {
    record.tombstone_attempt = known->tombstone_attempt;
  }
  record.attempt = record.fence_attempt = attempt;
  open_.micro_batches[micro_batch] = record;
  pending_digests_[micro_batch] = digest;
}

absl::Status StepLedger::SetDigest(int64_t micro_batch, const Digest& digest) {
  const auto pending = pending_digests_.find(micro_batch);
  if (pending != pending_digests_.end() && !pending->second.has_value()) {
    pending->second = digest;
    return absl::OkStatus();
  }
  return Defect(micro_batch, "was expected to be in progress without digest");
}

absl::StatusOr<MicroBatchRecord*> StepLedger::InProgress(int64_t micro_batch) {
  const auto found = open_.micro_batches.find(micro_batch);
  if (found == open_.micro_batches.end() || found->second.state != ContributionState::kInProgress) {
    return Defect(micro_batch, "was expected to be in progress");
  }
  return &found->second;
}

absl::Status StepLedger::Finish(int64_t micro_batch, ContributionState state, ContributionForm form,
                                const ContributionCounts& counts) {
  HEADWATER_ASSIGN_OR_RETURN(auto* record, InProgress(micro_batch));
  const auto digest = pending_digests_.find(micro_batch);
  if (!digest->second.has_value()) return Defect(micro_batch, "has no digest yet");
  record->state = state;
  record->form = form;
  record->counts = counts;
  record->digest = *digest->second;
  pending_digests_.erase(digest);
  return absl::OkStatus();
}

absl::Status StepLedger::Abort(int64_t micro_batch) {
  HEADWATER_ASSIGN_OR_RETURN(auto* record, InProgress(micro_batch));
  pending_digests_.erase(micro_batch);
  if (!KeepFenceAndTombstone(record)) open_.micro_batches.erase(micro_batch);
  return absl::OkStatus();
}

absl::StatusOr<bool> StepLedger::CheckCommit(int64_t step, int64_t micro_batch, int64_t attempt, const CommitFactor& factor) const {
  HEADWATER_RETURN_IF_ERROR(CheckStep(step));
  HEADWATER_RETURN_IF_ERROR(CheckFactor(factor.factor));
  const MicroBatchRecord* const known = open_.Find(micro_batch);
  if (known != nullptr && attempt >= 0 && attempt <= known->tombstone_attempt) {
    return DiscardedError(step, micro_batch, attempt, *known);
  }
  if (known != nullptr && attempt < known->attempt) {
    return AttemptError(ErrorReason::kAttemptSuperseded, step, micro_batch, attempt,
                        absl::StrCat("is at attempt ", known->attempt, ", the commit is for attempt ", attempt),
                        {{"knownAttempt", absl::StrCat(known->attempt)}});
  }
  HEADWATER_RETURN_IF_ERROR(CheckNotInProgress(step, micro_batch));
  // A later attempt of a committed micro-batch was a repeat of it, and so is its commit.
  const bool is_committed = known != nullptr && known->state == ContributionState::kCommitted;
  const bool only_announced = known != nullptr && known->state == ContributionState::kNone;
  if (known == nullptr || only_announced || (attempt > known->attempt && !is_committed)) {
    return AttemptError(ErrorReason::kMicroBatchNotFound, step, micro_batch, attempt,
                        absl::StrCat("is unknown with attempt ", attempt));
  }
  if (!is_committed) return true;  // the step is open: one with an undecided micro-batch is not sealed
  if (known->factor == factor) return false;
  const std::string expected = FactorToString(known->factor), actual = FactorToString(factor);
  return AttemptError(ErrorReason::kMicroBatchConflict, step, micro_batch, attempt,
                      absl::StrCat("was committed with factor ", expected, ", the call has factor ", actual),
                      {{"expected", expected}, {"actual", actual}});
}

absl::Status StepLedger::FinishCommit(int64_t micro_batch, const CommitFactor& factor) {
  const auto found = open_.micro_batches.find(micro_batch);
  if (found == open_.micro_batches.end() || found->second.state != ContributionState::kStaged) {
    return Defect(micro_batch, "was expected to be staged");
  }
  found->second.state = ContributionState::kCommitted;
  found->second.factor = factor;
  return absl::OkStatus();
}

absl::Status StepLedger::CheckDiscard(int64_t step, int64_t micro_batch, int64_t attempt) const {
  HEADWATER_RETURN_IF_ERROR(CheckStep(step));
  const MicroBatchRecord* const known = open_.Find(micro_batch);
  if (known == nullptr) {
    const absl::Status begin = CheckBegin(step, micro_batch, attempt);
    return HasReason(begin, ErrorReason::kStepSealed) ? absl::OkStatus() : begin;
  }
  const MicroBatchRecord& record = *known;
  switch (record.state) {
    case ContributionState::kInProgress:
      return CheckNotInProgress(step, micro_batch);
    case ContributionState::kCommitted:
      return AttemptError(ErrorReason::kMicroBatchConflict, step, micro_batch, attempt, "is committed and cannot be discarded");
    case ContributionState::kStaged:
      if (attempt >= record.attempt) return absl::OkStatus();
      return AttemptError(ErrorReason::kAttemptSuperseded, step, micro_batch, attempt,
                          absl::StrCat("is staged at attempt ", record.attempt, ", the discard is for attempt ", attempt),
                          {{"knownAttempt", absl::StrCat(record.attempt)}});
    case ContributionState::kDiscarded:
    case ContributionState::kNone:
      break;
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> StepLedger::Discard(int64_t step, int64_t micro_batch, int64_t attempt, DiscardedBy by) {
  HEADWATER_RETURN_IF_ERROR(CheckDiscard(step, micro_batch, attempt));
  auto found = open_.micro_batches.find(micro_batch);
  if (found == open_.micro_batches.end()) {
    if (open_.state != StepState::kOpen) return false;  // nothing new can come in: no tombstone needed
    found = open_.micro_batches.emplace(micro_batch, MicroBatchRecord()).first;
  }
  MicroBatchRecord& record = found->second;
  const bool dropped = record.state == ContributionState::kStaged;
  if (attempt > record.tombstone_attempt) {
    record.tombstone_attempt = attempt;
    record.discarded_by = by;
  }
  if (record.state == ContributionState::kNone && record.tombstone_attempt < record.fence_attempt) return false;
  record.state = ContributionState::kDiscarded;
  record.attempt = record.tombstone_attempt;
  return dropped;
}

absl::Status StepLedger::CheckExpectation(const ExpectedMicroBatches& expected) const {
  const auto is_present = [this](int64_t id) {
    const MicroBatchRecord* const known = open_.Find(id);
    return known != nullptr && known->IsPresent();
  };
  IdList missing, uncommitted, unexpected;
  std::set<int64_t> ids;
  const int64_t* count = std::get_if<int64_t>(&expected);
  if (count != nullptr) {
    if (*count < 0) return FieldError(ErrorReason::kInvalidField, "expected.count", ">= 0", absl::StrCat(*count));
    // `count` may be anything: the ids are walked only until enough missing ones are found, the rest is arithmetic.
    int64_t present = 0;
    for (const auto& [id, record] : open_.micro_batches) {
      if (id < *count && record.IsPresent()) ++present;
    }
    const int64_t missing_count = *count - present;
    for (int64_t id = 0; missing.count < missing_count && missing.ids.size() < kMaxListedIds; ++id) {
      if (!is_present(id)) missing.Add(id);
    }
    missing.count = missing_count;
  } else {
    for (const int64_t id : std::get<std::vector<int64_t>>(expected)) {
      if (id < 0 || !ids.insert(id).second) {
        return FieldError(ErrorReason::kInvalidField, "expected.ids", "distinct ids >= 0", absl::StrCat(id));
      }
    }
    for (const int64_t id : ids) {
      if (!is_present(id)) missing.Add(id);
    }
  }
  for (const auto& [id, record] : open_.micro_batches) {
    if (IsUndecided(record)) uncommitted.Add(id);
    const bool is_expected = count != nullptr ? id < *count : ids.contains(id);
    if (record.state == ContributionState::kCommitted && !is_expected) unexpected.Add(id);
  }
  if (missing.count == 0 && uncommitted.count == 0 && unexpected.count == 0) return absl::OkStatus();

  ErrorMetadata metadata = {{"step", absl::StrCat(open_.step)}};
  const auto add = [&metadata](const char* name, const IdList& list) {
    if (list.count == 0) return;
    metadata[name] = list.ToString();
    metadata[absl::StrCat(name, "Count")] = absl::StrCat(list.count);
  };
  add("missing", missing);
  add("uncommitted", uncommitted);
  add("unexpected", unexpected);
  const auto refuse = [&](ErrorReason reason, const char* verb, const IdList& list, const char* what) {
    return MakeError(reason, absl::StrCat("step ", open_.step, verb, list.count, what, list.ToString()), std::move(metadata));
  };
  if (missing.count > 0) return refuse(ErrorReason::kMicroBatchMissing, " lacks ", missing, " expected micro-batches: ");
  if (uncommitted.count == 0) {
    return refuse(ErrorReason::kMicroBatchUnexpected, " has ", unexpected, " committed micro-batches that are not expected: ");
  }
  return refuse(ErrorReason::kMicroBatchUncommitted, " has ", uncommitted,
                " micro-batches that are neither committed nor discarded: ");
}

absl::Status StepLedger::CheckSeal(int64_t step, const ExpectedMicroBatches& expected) const {
  HEADWATER_RETURN_IF_ERROR(CheckStep(step));
  return CheckExpectation(expected);
}

absl::StatusOr<bool> StepLedger::Seal(int64_t step, const ExpectedMicroBatches& expected) {
  HEADWATER_RETURN_IF_ERROR(CheckSeal(step, expected));
  const bool sealed_now = open_.state == StepState::kOpen;
  open_.state = StepState::kSealed;
  return sealed_now;
}

absl::Status StepLedger::CheckClose(int64_t step, StepState how) const {
  HEADWATER_RETURN_IF_ERROR(CheckStep(step));
  if (how != StepState::kApplied && how != StepState::kReplaced && how != StepState::kDiscarded) {
    return MakeError(ErrorReason::kInternal, "a step is closed as applied, discarded or replaced",
                     {{"actual", absl::StrCat(static_cast<int>(how))}});
  }
  if (how != StepState::kDiscarded && open_.state != StepState::kSealed) {
    return MakeError(ErrorReason::kStepNotSealed, absl::StrCat("step ", step, " must be sealed, it is open"),
                     {{"step", absl::StrCat(step)}, {"openStep", absl::StrCat(open_.step)}});
  }
  if (open_.step == std::numeric_limits<int64_t>::max()) {
    return MakeError(ErrorReason::kLimitExceeded, absl::StrCat("step ", step, " is the last one that can be numbered"),
                     {{"limit", "step"}, {"maximum", absl::StrCat(open_.step)}, {"actual", absl::StrCat(open_.step)}});
  }
  if (!pending_digests_.empty()) return CheckNotInProgress(step, pending_digests_.begin()->first);
  return absl::OkStatus();
}

absl::Status StepLedger::Close(int64_t step, StepState how) {
  HEADWATER_RETURN_IF_ERROR(CheckClose(step, how));
  for (auto& [id, record] : open_.micro_batches) {
    if (record.state != ContributionState::kStaged) continue;
    record.state = ContributionState::kDiscarded;
    record.tombstone_attempt = record.attempt;
  }
  open_.state = how;
  last_closed_ = std::exchange(open_, StepRecord());
  open_.step = step + 1;
  return absl::OkStatus();
}

void StepLedger::Reset(int64_t step) {
  open_ = StepRecord();
  open_.step = step;
  last_closed_.reset();
  pending_digests_.clear();
}

}  // namespace headwater::heads
