#include "server/heads/steps/step_ledger.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "headwater/kernels/error.h"
#include "server/heads/epoch.h"

namespace headwater::heads {
namespace {

constexpr size_t kMaxListedIds = 16;

const char* StateName(ContributionState state) {
  switch (state) {
    case ContributionState::kNone:
      break;
    case ContributionState::kInProgress:
      return "in progress";
    case ContributionState::kStaged:
      return "staged";
    case ContributionState::kCommitted:
      return "committed";
    case ContributionState::kDiscarded:
      return "discarded";
  }
  return "unknown";
}

// Whether there is a contribution, decided or not, and not only a fence or a tombstone.
bool IsPresent(const MicroBatchRecord& record) {
  return record.state != ContributionState::kNone && record.state != ContributionState::kDiscarded;
}

// Reduces the record of a contribution that is gone to its fence and tombstone; false if it has neither.
bool KeepFenceAndTombstone(MicroBatchRecord* record) {
  MicroBatchRecord rest;
  rest.fence_attempt = record->fence_attempt;
  rest.tombstone_attempt = record->tombstone_attempt;
  rest.state = rest.tombstone_attempt >= rest.fence_attempt ? ContributionState::kDiscarded : ContributionState::kNone;
  rest.attempt = std::max(rest.fence_attempt, rest.tombstone_attempt);
  *record = rest;
  return rest.fence_attempt > 0 || rest.tombstone_attempt >= 0;
}

std::string FactorToString(const CommitFactor& factor) {
  return absl::StrCat(factor.factor, factor.token_factors.has_value()
                                         ? absl::StrCat(" and token factors ", EpochToHex(*factor.token_factors))
                                         : "");
}

bool IsUndecided(const MicroBatchRecord& record) {
  return record.state == ContributionState::kInProgress || record.state == ContributionState::kStaged;
}

// The first few of some ids, and how many there are.
class IdList {
 public:
  void Add(int64_t id) {
    if (ids_.size() < kMaxListedIds) ids_.push_back(id);
    ++count_;
  }
  // Ids that are not listed one by one.
  void AddCount(int64_t count) { count_ += count; }
  bool empty() const { return count_ == 0; }
  bool full() const { return ids_.size() == kMaxListedIds; }
  int64_t count() const { return count_; }
  std::string ToString() const {
    return absl::StrCat(absl::StrJoin(ids_, ","), count_ > static_cast<int64_t>(ids_.size()) ? ",..." : "");
  }

 private:
  std::vector<int64_t> ids_;
  int64_t count_ = 0;
};

}  // namespace

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
  if (absl::Status status = CheckStep(step); !status.ok()) return status;
  if (!pending_digests_.contains(micro_batch)) return absl::OkStatus();
  return MakeError(ErrorReason::kMicroBatchInProgress,
                   absl::StrCat("micro-batch ", micro_batch, " of step ", step, " is being computed for another call"),
                   {{"step", absl::StrCat(step)}, {"microBatch", absl::StrCat(micro_batch)}});
}

absl::Status StepLedger::CheckBegin(int64_t step, int64_t micro_batch, int64_t attempt, int64_t max_micro_batches) const {
  if (absl::Status status = CheckStep(step); !status.ok()) return status;
  if (micro_batch < 0 || attempt < 0) {
    const char* field = micro_batch < 0 ? "micro_batch" : "attempt";
    const std::string actual = absl::StrCat(micro_batch < 0 ? micro_batch : attempt);
    return MakeError(ErrorReason::kInvalidField, absl::StrCat(field, " must be at least 0, it is ", actual),
                     {{"field", field}, {"expected", ">= 0"}, {"actual", actual}});
  }
  const ErrorMetadata key = {
      {"step", absl::StrCat(step)}, {"microBatch", absl::StrCat(micro_batch)}, {"attempt", absl::StrCat(attempt)}};
  const auto found = open_.micro_batches.find(micro_batch);
  if (found != open_.micro_batches.end()) {
    const MicroBatchRecord& record = found->second;
    if (attempt <= record.tombstone_attempt) {
      ErrorMetadata metadata = key;
      metadata["discardedAttempt"] = absl::StrCat(record.tombstone_attempt);
      return MakeError(ErrorReason::kMicroBatchDiscarded,
                       absl::StrCat("micro-batch ", micro_batch, " of step ", step, " was discarded up to attempt ",
                                    record.tombstone_attempt, ", the call is attempt ", attempt),
                       std::move(metadata));
    }
    const int64_t known_attempt = IsPresent(record) ? std::max(record.attempt, record.fence_attempt) : record.fence_attempt;
    // A repeat of what is decided is answered whatever attempt a later call has announced.
    const bool repeats = record.state == ContributionState::kCommitted && attempt >= record.attempt;
    if (attempt < known_attempt && !repeats) {
      ErrorMetadata metadata = key;
      metadata["knownAttempt"] = absl::StrCat(known_attempt);
      return MakeError(ErrorReason::kAttemptSuperseded,
                       absl::StrCat("micro-batch ", micro_batch, " of step ", step, " is known with attempt ", known_attempt,
                                    ", the call is attempt ", attempt),
                       std::move(metadata));
    }
    if (record.state == ContributionState::kInProgress && attempt == record.attempt) return CheckNotInProgress(step, micro_batch);
    if (IsPresent(record)) return absl::OkStatus();
  }
  if (open_.state != StepState::kOpen) {
    ErrorMetadata metadata = key;
    metadata["openStep"] = absl::StrCat(open_.step);
    return MakeError(
        ErrorReason::kStepSealed,
        absl::StrCat("step ", step, " is sealed and takes no further micro-batches; the call is for micro-batch ", micro_batch),
        std::move(metadata));
  }
  if (found == open_.micro_batches.end() && static_cast<int64_t>(open_.micro_batches.size()) >= max_micro_batches) {
    const std::string maximum = absl::StrCat(max_micro_batches);
    return MakeError(ErrorReason::kLimitExceeded,
                     absl::StrCat("step ", step, " has ", open_.micro_batches.size(), " micro-batches, the maximum is ", maximum),
                     {{"limit", "max_step_micro_batches"},
                      {"maximum", maximum},
                      {"actual", absl::StrCat(open_.micro_batches.size() + 1)},
                      {"step", absl::StrCat(step)}});
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> StepLedger::Supersede(int64_t step, int64_t micro_batch, int64_t attempt, int64_t max_micro_batches) {
  if (absl::Status status = CheckBegin(step, micro_batch, attempt, max_micro_batches); !status.ok()) return status;
  if (attempt == 0) return false;
  const auto [found, is_new] = open_.micro_batches.try_emplace(micro_batch);
  MicroBatchRecord& record = found->second;
  if (!is_new && record.state == ContributionState::kInProgress) {
    return MakeError(ErrorReason::kInternal, absl::StrCat("micro-batch ", micro_batch, " is being computed"),
                     {{"microBatch", absl::StrCat(micro_batch)}});
  }
  if (!is_new && record.state == ContributionState::kCommitted) return false;
  const bool dropped = !is_new && record.state == ContributionState::kStaged && record.attempt < attempt;
  record.fence_attempt = std::max(record.fence_attempt, attempt);
  if (is_new || dropped || !IsPresent(record)) KeepFenceAndTombstone(&record);
  return dropped;
}

absl::StatusOr<BeginDecision> StepLedger::Begin(int64_t step, int64_t micro_batch, int64_t attempt, const Digest& digest,
                                                bool first_wins, int64_t max_micro_batches) {
  if (absl::Status status = CheckBegin(step, micro_batch, attempt, max_micro_batches); !status.ok()) return status;
  if (absl::Status status = CheckNotInProgress(step, micro_batch); !status.ok()) return status;
  const auto found = open_.micro_batches.find(micro_batch);
  const bool known = found != open_.micro_batches.end() && IsPresent(found->second);
  const bool supersedes = known && found->second.state == ContributionState::kStaged && attempt > found->second.attempt;
  if (known && !supersedes) {
    const MicroBatchRecord& record = found->second;
    if (record.digest == digest) return BeginDecision::kReplay;
    if (first_wins) return BeginDecision::kPayloadDiffers;
    const std::string expected = record.digest.has_value() ? EpochToHex(*record.digest) : "";
    return MakeError(ErrorReason::kMicroBatchConflict,
                     absl::StrCat("micro-batch ", micro_batch, " of step ", step, " is ", StateName(record.state), " with digest ",
                                  expected, ", the call has digest ", EpochToHex(digest)),
                     {{"step", absl::StrCat(step)},
                      {"microBatch", absl::StrCat(micro_batch)},
                      {"expected", expected},
                      {"actual", EpochToHex(digest)}});
  }
  Start(micro_batch, attempt, digest);
  return BeginDecision::kCompute;
}

void StepLedger::Start(int64_t micro_batch, int64_t attempt, const std::optional<Digest>& digest) {
  MicroBatchRecord record;
  if (const auto found = open_.micro_batches.find(micro_batch); found != open_.micro_batches.end()) {
    record.tombstone_attempt = found->second.tombstone_attempt;
    record.fence_attempt = found->second.fence_attempt;
  }
  record.fence_attempt = std::max(record.fence_attempt, attempt);
  record.attempt = attempt;
  open_.micro_batches[micro_batch] = record;
  pending_digests_[micro_batch] = digest;
}

absl::StatusOr<bool> StepLedger::BeginProvisionally(int64_t step, int64_t micro_batch, int64_t attempt, int64_t max_micro_batches) {
  if (absl::Status status = CheckBegin(step, micro_batch, attempt, max_micro_batches); !status.ok()) return status;
  if (absl::Status status = CheckNotInProgress(step, micro_batch); !status.ok()) return status;
  const auto found = open_.micro_batches.find(micro_batch);
  if (found != open_.micro_batches.end() && IsPresent(found->second)) return false;
  Start(micro_batch, attempt, std::nullopt);
  return true;
}

absl::Status StepLedger::SetDigest(int64_t micro_batch, const Digest& digest) {
  const auto pending = pending_digests_.find(micro_batch);
  if (pending != pending_digests_.end() && !pending->second.has_value()) {
    pending->second = digest;
    return absl::OkStatus();
  }
  return MakeError(
      ErrorReason::kInternal,
      absl::StrCat("micro-batch ", micro_batch, " of step ", open_.step, " was expected to be in progress without digest"),
      {{"microBatch", absl::StrCat(micro_batch)}});
}

absl::StatusOr<MicroBatchRecord*> StepLedger::InProgress(int64_t micro_batch) {
  const auto found = open_.micro_batches.find(micro_batch);
  if (found == open_.micro_batches.end() || found->second.state != ContributionState::kInProgress) {
    return MakeError(ErrorReason::kInternal,
                     absl::StrCat("micro-batch ", micro_batch, " of step ", open_.step, " is ",
                                  found == open_.micro_batches.end() ? "not known" : StateName(found->second.state),
                                  ", it was expected to be in progress"),
                     {{"microBatch", absl::StrCat(micro_batch)}});
  }
  return &found->second;
}

absl::Status StepLedger::Finish(int64_t micro_batch, ContributionState state, ContributionForm form,
                                const ContributionCounts& counts) {
  absl::StatusOr<MicroBatchRecord*> record = InProgress(micro_batch);
  if (!record.ok()) return record.status();
  const auto digest = pending_digests_.find(micro_batch);
  if (!digest->second.has_value()) {
    return MakeError(ErrorReason::kInternal,
                     absl::StrCat("micro-batch ", micro_batch, " of step ", open_.step, " has no digest yet"),
                     {{"microBatch", absl::StrCat(micro_batch)}});
  }
  (*record)->state = state;
  (*record)->form = form;
  (*record)->counts = counts;
  (*record)->digest = *digest->second;
  pending_digests_.erase(digest);
  return absl::OkStatus();
}

absl::Status StepLedger::FinishCommitted(int64_t micro_batch, ContributionForm form, const ContributionCounts& counts) {
  return Finish(micro_batch, ContributionState::kCommitted, form, counts);
}

absl::Status StepLedger::FinishStaged(int64_t micro_batch, ContributionForm form, const ContributionCounts& counts) {
  return Finish(micro_batch, ContributionState::kStaged, form, counts);
}

absl::Status StepLedger::Abort(int64_t micro_batch) {
  absl::StatusOr<MicroBatchRecord*> record = InProgress(micro_batch);
  if (!record.ok()) return record.status();
  pending_digests_.erase(micro_batch);
  if (!KeepFenceAndTombstone(*record)) open_.micro_batches.erase(micro_batch);
  return absl::OkStatus();
}

void StepLedger::TakeBack(int64_t micro_batch, const std::optional<MicroBatchRecord>& before) {
  pending_digests_.erase(micro_batch);
  if (before.has_value()) {
    open_.micro_batches[micro_batch] = *before;
  } else {
    open_.micro_batches.erase(micro_batch);
  }
}

std::optional<MicroBatchRecord> StepLedger::Find(int64_t micro_batch) const {
  const auto found = open_.micro_batches.find(micro_batch);
  return found == open_.micro_batches.end() ? std::nullopt : std::optional<MicroBatchRecord>(found->second);
}

absl::StatusOr<bool> StepLedger::CheckCommit(int64_t step, int64_t micro_batch, int64_t attempt, const CommitFactor& factor) const {
  if (absl::Status status = CheckStep(step); !status.ok()) return status;
  if (!std::isfinite(static_cast<float>(factor.factor))) {
    const std::string actual = absl::StrCat(factor.factor);
    return MakeError(ErrorReason::kInvalidField, absl::StrCat("factor must be finite in fp32, it is ", actual),
                     {{"field", "factor"}, {"expected", "finite in fp32"}, {"actual", actual}});
  }
  const auto found = open_.micro_batches.find(micro_batch);
  const bool known = found != open_.micro_batches.end();
  ErrorMetadata key = {{"step", absl::StrCat(step)}, {"microBatch", absl::StrCat(micro_batch)}, {"attempt", absl::StrCat(attempt)}};
  if (absl::Status status = CheckNotInProgress(step, micro_batch); !status.ok()) return status;
  if (known && attempt >= 0 && attempt <= found->second.tombstone_attempt) {
    return MakeError(ErrorReason::kMicroBatchDiscarded,
                     absl::StrCat("micro-batch ", micro_batch, " of step ", step, " was discarded up to attempt ",
                                  found->second.tombstone_attempt, ", the commit is for attempt ", attempt),
                     key);
  }
  // A later attempt of a committed micro-batch was a repeat of it, and so is its commit.
  const bool is_committed = known && found->second.state == ContributionState::kCommitted;
  const bool only_announced = known && found->second.state == ContributionState::kNone;
  if (!known || (attempt > found->second.attempt && !is_committed) || (only_announced && attempt == found->second.attempt)) {
    return MakeError(ErrorReason::kMicroBatchNotFound,
                     absl::StrCat("step ", step, " knows no micro-batch ", micro_batch, " with attempt ", attempt), key);
  }
  const MicroBatchRecord& record = found->second;
  if (attempt < record.attempt) {
    key["knownAttempt"] = absl::StrCat(record.attempt);
    return MakeError(ErrorReason::kAttemptSuperseded,
                     absl::StrCat("micro-batch ", micro_batch, " of step ", step, " is at attempt ", record.attempt,
                                  ", the commit is for attempt ", attempt),
                     key);
  }
  if (record.state == ContributionState::kCommitted) {
    if (record.factor == factor) return false;
    key["expected"] = FactorToString(record.factor);
    key["actual"] = FactorToString(factor);
    return MakeError(ErrorReason::kMicroBatchConflict,
                     absl::StrCat("micro-batch ", micro_batch, " of step ", step, " was committed with factor ", key["expected"],
                                  ", the call has factor ", key["actual"]),
                     key);
  }
  if (open_.state != StepState::kOpen) {
    return MakeError(ErrorReason::kStepSealed,
                     absl::StrCat("step ", step, " is sealed; micro-batch ", micro_batch, " can no longer be committed"), key);
  }
  return true;
}

absl::Status StepLedger::FinishCommit(int64_t micro_batch, const CommitFactor& factor) {
  const auto found = open_.micro_batches.find(micro_batch);
  if (found == open_.micro_batches.end() || found->second.state != ContributionState::kStaged) {
    return MakeError(ErrorReason::kInternal,
                     absl::StrCat("micro-batch ", micro_batch, " of step ", open_.step, " was expected to be staged"),
                     {{"microBatch", absl::StrCat(micro_batch)}});
  }
  found->second.state = ContributionState::kCommitted;
  found->second.factor = factor;
  return absl::OkStatus();
}

absl::Status StepLedger::CheckDiscard(int64_t step, int64_t micro_batch, int64_t attempt, int64_t max_micro_batches) const {
  if (absl::Status status = CheckStep(step); !status.ok()) return status;
  const auto found = open_.micro_batches.find(micro_batch);
  if (found == open_.micro_batches.end()) {
    const absl::Status begin = CheckBegin(step, micro_batch, attempt, max_micro_batches);
    return HasReason(begin, ErrorReason::kStepSealed) ? absl::OkStatus() : begin;
  }
  const MicroBatchRecord& record = found->second;
  ErrorMetadata key = {{"step", absl::StrCat(step)}, {"microBatch", absl::StrCat(micro_batch)}, {"attempt", absl::StrCat(attempt)}};
  switch (record.state) {
    case ContributionState::kInProgress:
      return CheckNotInProgress(step, micro_batch);
    case ContributionState::kCommitted:
      return MakeError(ErrorReason::kMicroBatchConflict,
                       absl::StrCat("micro-batch ", micro_batch, " of step ", step, " is committed and cannot be discarded"),
                       std::move(key));
    case ContributionState::kStaged:
      if (attempt >= record.attempt) return absl::OkStatus();
      key["knownAttempt"] = absl::StrCat(record.attempt);
      return MakeError(ErrorReason::kAttemptSuperseded,
                       absl::StrCat("micro-batch ", micro_batch, " of step ", step, " is staged at attempt ", record.attempt,
                                    ", the discard is for attempt ", attempt),
                       std::move(key));
    case ContributionState::kDiscarded:
    case ContributionState::kNone:
      break;
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> StepLedger::Discard(int64_t step, int64_t micro_batch, int64_t attempt, int64_t max_micro_batches) {
  if (absl::Status status = CheckDiscard(step, micro_batch, attempt, max_micro_batches); !status.ok()) return status;
  auto found = open_.micro_batches.find(micro_batch);
  if (found == open_.micro_batches.end()) {
    if (open_.state != StepState::kOpen) return false;  // nothing new can come in: no tombstone needed
    found = open_.micro_batches.emplace(micro_batch, MicroBatchRecord()).first;
    found->second.state = ContributionState::kDiscarded;
  }
  MicroBatchRecord& record = found->second;
  const bool dropped = record.state == ContributionState::kStaged;
  record.tombstone_attempt = std::max(record.tombstone_attempt, attempt);
  if (record.state == ContributionState::kNone && record.tombstone_attempt < record.fence_attempt) return false;
  record.state = ContributionState::kDiscarded;
  record.attempt = record.tombstone_attempt;
  return dropped;
}

absl::Status StepLedger::CheckExpectation(const ExpectedMicroBatches& expected) const {
  const auto is_committed = [this](int64_t id) {
    const auto found = open_.micro_batches.find(id);
    return found != open_.micro_batches.end() && found->second.state == ContributionState::kCommitted;
  };
  const auto is_undecided = [this](int64_t id) {
    const auto found = open_.micro_batches.find(id);
    return found != open_.micro_batches.end() && IsUndecided(found->second);
  };
  IdList missing, uncommitted, unexpected;
  std::set<int64_t> ids;
  const int64_t* count = std::get_if<int64_t>(&expected);
  if (count != nullptr) {
    if (*count < 0) {
      return MakeError(ErrorReason::kInvalidField, absl::StrCat("expected.count must be at least 0, it is ", *count),
                       {{"field", "expected.count"}, {"expected", ">= 0"}, {"actual", absl::StrCat(*count)}});
    }
    // `count` may be anything: the ids are walked only until enough missing ones are found, the rest is arithmetic.
    int64_t present = 0;
    for (const auto& [id, record] : open_.micro_batches) {
      if (id < *count && IsPresent(record)) ++present;
    }
    const int64_t missing_count = *count - present;
    for (int64_t id = 0; missing.count() < missing_count && !missing.full(); ++id) {
      if (!is_committed(id) && !is_undecided(id)) missing.Add(id);
    }
    missing.AddCount(missing_count - missing.count());
  } else {
    for (const int64_t id : std::get<std::vector<int64_t>>(expected)) {
      if (id < 0 || !ids.insert(id).second) {
        return MakeError(
            ErrorReason::kInvalidField,
            absl::StrCat("expected.ids must be distinct and at least 0; ", id, id < 0 ? " is negative" : " is repeated"),
            {{"field", "expected.ids"}, {"expected", "distinct ids >= 0"}, {"actual", absl::StrCat(id)}});
      }
    }
    for (const int64_t id : ids) {
      if (!is_committed(id) && !is_undecided(id)) missing.Add(id);
    }
  }
  for (const auto& [id, record] : open_.micro_batches) {
    if (IsUndecided(record)) uncommitted.Add(id);
    const bool is_expected = count != nullptr ? id < *count : ids.contains(id);
    if (record.state == ContributionState::kCommitted && !is_expected) unexpected.Add(id);
  }
  if (missing.empty() && uncommitted.empty() && unexpected.empty()) return absl::OkStatus();

  ErrorMetadata metadata = {{"step", absl::StrCat(open_.step)}};
  const auto add = [&metadata](const char* name, const IdList& list) {
    if (list.empty()) return;
    metadata[name] = list.ToString();
    metadata[absl::StrCat(name, "Count")] = absl::StrCat(list.count());
  };
  add("missing", missing);
  add("uncommitted", uncommitted);
  add("unexpected", unexpected);
  if (!missing.empty()) {
    return MakeError(ErrorReason::kMicroBatchMissing,
                     absl::StrCat("step ", open_.step, " lacks ", missing.count(), " expected micro-batches: ", missing.ToString()),
                     std::move(metadata));
  }
  if (!uncommitted.empty()) {
    return MakeError(ErrorReason::kMicroBatchUncommitted,
                     absl::StrCat("step ", open_.step, " has ", uncommitted.count(),
                                  " micro-batches that are neither committed nor discarded: ", uncommitted.ToString()),
                     std::move(metadata));
  }
  return MakeError(ErrorReason::kMicroBatchUnexpected,
                   absl::StrCat("step ", open_.step, " has ", unexpected.count(),
                                " committed micro-batches that are not expected: ", unexpected.ToString()),
                   std::move(metadata));
}

absl::Status StepLedger::CheckSeal(int64_t step, const ExpectedMicroBatches& expected) const {
  if (absl::Status status = CheckStep(step); !status.ok()) return status;
  return CheckExpectation(expected);
}

absl::StatusOr<bool> StepLedger::Seal(int64_t step, const ExpectedMicroBatches& expected) {
  if (absl::Status status = CheckSeal(step, expected); !status.ok()) return status;
  const bool sealed_now = open_.state == StepState::kOpen;
  open_.state = StepState::kSealed;
  return sealed_now;
}

absl::Status StepLedger::CheckClose(int64_t step, StepState how) const {
  if (absl::Status status = CheckStep(step); !status.ok()) return status;
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
  if (absl::Status status = CheckClose(step, how); !status.ok()) return status;
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
