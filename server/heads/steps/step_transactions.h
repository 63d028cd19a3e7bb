// StepTransactions: one head's open step: its ledger, the contributions that wait for their decision, and their order.
//
// Bookkeeping over several parts: drops what the ledger forgets, and closes the gaps that discarded contributions leave in the
// order. No engine, no locks. For turns, except in_order().
#ifndef HEADWATER_SERVER_HEADS_STEPS_STEP_TRANSACTIONS_H_
#define HEADWATER_SERVER_HEADS_STEPS_STEP_TRANSACTIONS_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "server/heads/head_name.h"
#include "server/heads/session_registry.h"
#include "server/heads/steps/pending_contribution.h"
#include "server/heads/steps/step_calls.h"
#include "server/heads/steps/step_ledger.h"
#include "server/scheduler/sequencer.h"

namespace headwater::heads {

// A committed contribution to one head: its terms against that head, and what they are multiplied by.
struct WaitingAddition {
  int64_t micro_batch = 0;
  HeldRows rows;
  CommitArguments arguments;
};

// The order in which contributions go into one head's accumulator, in deterministic mode: ascending id, whatever the order in which
// they come. A committed one waits, as rows, until no lower id is missing: until each is there, or its trainer has discarded it.
// One dropped with its session stays missing, because a higher attempt may come. In a sealed step nothing is missing any more. Only
// additions move the place: a discarded id may come back until a higher id has been added. No tensors, no locks. For turns.
class OrderedWindow {
 public:
  // At most `capacity` (>= 1) contributions, decided or not, may be there whose predecessors are not.
  explicit OrderedWindow(int64_t capacity) : capacity_(capacity) {}

  // A higher one has been added: it is too late for this one.
  bool HasPassed(int64_t micro_batch) const { return micro_batch < floor_; }
  // No predecessor is missing, or undecided; some may wait to be added first.
  bool IsFront(int64_t micro_batch) const { return micro_batch >= floor_ && micro_batch <= FirstMissing(); }
  // Room for one that is not the front. `undecided`: contributions that are there without a decision.
  bool HasRoom(int64_t undecided) const { return undecided + waiting_count() < capacity_; }
  // The lowest id whose contribution is not there.
  int64_t FirstMissing() const {
    int64_t id = floor_;
    while (closed_.contains(id) || waiting_.contains(id)) ++id;
    return id;
  }

  // The trainer has discarded the micro-batch: the next one need not wait for it.
  void Close(int64_t micro_batch) { closed_.insert(micro_batch); }
  // Another attempt of it has begun.
  void Reopen(int64_t micro_batch) { closed_.erase(micro_batch); }
  void Wait(std::shared_ptr<const WaitingAddition> addition) {
    const int64_t micro_batch = addition->micro_batch;
    waiting_[micro_batch] = std::move(addition);
  }
  // The one whose turn it is, or null. `sealed`: nothing that is missing will come.
  std::shared_ptr<const WaitingAddition> Next(bool sealed) const {
    if (waiting_.empty()) return nullptr;
    const auto& [micro_batch, addition] = *waiting_.begin();
    return sealed || IsFront(micro_batch) ? addition : nullptr;
  }
  // The contribution is in the accumulator, whether it had to wait or not.
  void MarkAdded(int64_t micro_batch) {
    waiting_.erase(micro_batch);
    floor_ = std::max(floor_, micro_batch + 1);
    closed_.erase(closed_.begin(), closed_.lower_bound(floor_));
  }
  // The step is closed, or lost.
  void Clear() {
    floor_ = 0;
    closed_.clear();
    for (auto& [micro_batch, addition] : waiting_) scheduler::Turn::Free(std::move(addition));
    waiting_.clear();
  }

  int64_t capacity() const { return capacity_; }
  int64_t waiting_count() const { return static_cast<int64_t>(waiting_.size()); }

 private:
  const int64_t capacity_;
  int64_t floor_ = 0;  // above all that have been added
  std::set<int64_t> closed_;
  std::map<int64_t, std::shared_ptr<const WaitingAddition>> waiting_;
};

// Limits of a head's steps, fixed when it is created.
struct HeadLimits {
  int64_t max_step_micro_batches = 1 << 20;  // records of one step, tombstones included
  bool deterministic = false;                // contributions are added in ascending id
  int64_t ordered_window = 1024;             // that may be there before their predecessors; >= 1
};

// The arguments and the reply of the Apply() that closed the last step.
struct AppliedStep {
  ApplyArguments arguments;
  std::optional<ExpectedMicroBatches> expected;
  ApplyReply reply;
};

// Attempts that wait to abort lower ones of their micro-batches, which give up as soon as they may.
class WaitingAttempts {
 public:
  // A higher attempt that waits too keeps its mark.
  void Mark(int64_t micro_batch, int64_t attempt) {
    int64_t& waiting = attempts_[micro_batch];
    waiting = std::max(waiting, attempt);
  }
  void Unmark(int64_t micro_batch, int64_t attempt) {
    const auto waiting = attempts_.find(micro_batch);
    if (waiting != attempts_.end() && waiting->second == attempt) attempts_.erase(waiting);
  }
  // The attempt that waits, if it is higher than this one.
  std::optional<int64_t> Higher(int64_t micro_batch, int64_t attempt) const {
    const auto waiting = attempts_.find(micro_batch);
    return waiting != attempts_.end() && waiting->second > attempt ? std::optional(waiting->second) : std::nullopt;
  }

 private:
  std::map<int64_t, int64_t> attempts_;  // by micro-batch
};

class StepTransactions {
 public:
  // `name` must outlive it.
  StepTransactions(const HeadName& name, const HeadSpec& spec, const HeadLimits& limits);

  const StepLedger& ledger() const { return ledger_; }
  StepLedger& ledger() { return ledger_; }
  const StepRecord& open() const { return ledger_.open(); }
  // The step is sealed, or has committed or undecided micro-batches.
  bool HasContributions() const;

  // ---- the step's end ------------------------------------------------------------------------------------------------
  // Closes the step, with everything that belonged to it alone.
  absl::Status Close(int64_t step, StepState how);
  // Starts again at `step` with nothing known.
  void Reset(int64_t step);
  // Drops everything that is undecided or waits: its step is closed, or lost. The ledger is the caller's to change.
  void DropAll();
  // The Apply() that closed the last step; empty if another call closed it.
  std::optional<AppliedStep>& last_apply() { return last_apply_; }

  // ---- begin ---------------------------------------------------------------------------------------------------------
  // StepLedger::CheckBegin(), and, for a new micro-batch in order, kOrderPassed and kOrderedWindowFull.
  absl::Status CheckBegin(int64_t step, int64_t micro_batch, int64_t attempt) const;
  // A new attempt has begun in all heads: drops what a lower one has left here.
  void DropLowerAttempt(int64_t micro_batch);
  // StepLedger::Supersede(), with what it drops.
  absl::Status Supersede(int64_t step, int64_t micro_batch, int64_t attempt);
  WaitingAttempts& waiting_attempts() { return waiting_attempts_; }

  // ---- decisions -----------------------------------------------------------------------------------------------------
  // Contributions that wait for their decision, by micro-batch: STAGED in the ledger.
  const std::map<int64_t, std::shared_ptr<PendingContribution>>& pending() const { return pending_; }
  // Null if there is none.
  std::shared_ptr<PendingContribution> FindPending(int64_t micro_batch) const;
  // The end of a micro-batch in progress; cannot fail.
  void FinishPending(int64_t micro_batch, std::shared_ptr<PendingContribution> pending, ContributionForm form,
                     const ContributionCounts& counts);
  // A staged micro-batch is committed; cannot fail. Its pending contribution is the caller's to drop.
  void FinishCommit(int64_t micro_batch, const CommitFactor& factor);
  // StepLedger::Discard(), with what it drops. Higher micro-batches need not wait for this one in order.
  absl::StatusOr<bool> Discard(int64_t step, int64_t micro_batch, int64_t attempt);
  // Turns contributions that another head, or the end of a session, has dropped into tombstones.
  void Settle();
  // Drops a session's undecided contributions, except one that is being committed. Returns how many.
  int64_t DropSession(const SessionId& session);

  // ---- order, in deterministic mode ----------------------------------------------------------------------------------
  // Contributions are added in ascending id. Methods without "without order" in their comment need in_order().
  bool in_order() const { return window_ != nullptr; }
  const OrderedWindow* window() const { return window_.get(); }                                // null without order
  int64_t waiting_count() const { return window_ == nullptr ? 0 : window_->waiting_count(); }  // 0 without order
  // kOrderedWindowFull; `why` ends the sentence.
  absl::Status WindowFull(int64_t micro_batch, const std::string& why) const;
  // kStepNotSealed while the accumulator lacks what has been committed. OK without order.
  absl::Status CheckNothingWaits() const;
  // Whether it need not wait for a predecessor: none is missing, or none can come, or it has been added.
  bool IsDue(int64_t micro_batch) const;
  // Puts the part of a contribution that is `head`'s in its place.
  void Wait(int64_t micro_batch, const HeldRows& held, const CommitArguments& arguments, const EngineHead& head);
  // It is in the accumulator. Nothing without order.
  void MarkAdded(int64_t micro_batch);

 private:
  absl::Status CheckOrder(int64_t micro_batch) const;
  void Drop(int64_t micro_batch);

  const HeadName& name_;
  StepLedger ledger_;
  std::map<int64_t, std::shared_ptr<PendingContribution>> pending_;
  const std::unique_ptr<OrderedWindow> window_;  // null: not in order
  WaitingAttempts waiting_attempts_;
  std::optional<AppliedStep> last_apply_;
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_STEPS_STEP_TRANSACTIONS_H_
