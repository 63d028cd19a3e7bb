// HeadCore: the state that the calls on one head share, with its parts and its record. For server/heads alone; callers have Head.
//
// All changing state is read and written in turns of the sequencer. While a call holds an admission to compute, epoch, step,
// version and state stay as they are, except for changes by:
//   - a call that shares the accumulator: records and pending contributions of its own micro-batches, and the loss of the head;
//   - Retire, and the end of a session, which wait for no admission;
//   - beside a call that only reads the weights: every call that does not write them.
#ifndef HEADWATER_SERVER_HEADS_HEAD_CORE_H_
#define HEADWATER_SERVER_HEADS_HEAD_CORE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "server/heads/epoch.h"
#include "server/heads/head_info.h"
#include "server/heads/head_name.h"
#include "server/heads/steps/step_calls.h"
#include "server/heads/steps/step_transactions.h"
#include "server/heads/weights/weight_record.h"
#include "server/heads/weights/weight_tensors.h"
#include "server/scheduler/sequencer.h"
#include "server/scheduler/waiting.h"

namespace headwater::heads {

using scheduler::Turn;
using scheduler::WaitLimits;

// The state that a call needs.
enum class Need { kAnyState, kNotLost, kReady };

// How a call uses a head (docs/adr/0033-one-sequencer.md).
inline constexpr scheduler::Uses kReadsWeights = {scheduler::Use::kShared, scheduler::Use::kNone};
// Saves of one head follow each other.
inline constexpr scheduler::Uses kSaves = {scheduler::Use::kShared, scheduler::Use::kNone, scheduler::Use::kExclusive};
inline constexpr scheduler::Uses kSharesGradient = {scheduler::Use::kShared, scheduler::Use::kShared};
inline constexpr scheduler::Uses kChangesGradient = {scheduler::Use::kShared, scheduler::Use::kExclusive};
inline constexpr scheduler::Uses kWritesWeights = {scheduler::Use::kExclusive, scheduler::Use::kExclusive};

// After an engine's failure the numbers that it was changing are unknown.
inline bool IsEngineFailure(const absl::Status& status) {
  return HasReason(status, ErrorReason::kEngineFailed) || HasReason(status, ErrorReason::kInternal);
}

struct HeadCore {
  HeadCore(const HeadName& head_name, const HeadSpec& head_spec, const HeadLimits& head_limits, LossEngine& head_engine,
           std::shared_ptr<scheduler::Sequencer> head_sequencer, std::unique_ptr<EngineHead> head_on_engine);

  // The checks that every call begins with, in the order of head.h. `expected` null: the epoch is not checked. In a turn.
  absl::Status Check(const Epoch* expected, Need need, bool for_step);
  // In a turn.
  absl::Status EpochError(const Epoch& named) const;
  absl::Status LostError() const;
  HeadInfo Describe() const;
  // True if there are uncommitted contributions, running calls or a non-empty open step. In a turn.
  bool InUse();
  // Contributions are added in ascending id.
  bool in_order() const { return limits.deterministic && spec.trainable; }
  // How a computation uses a head to which it adds nothing. In deterministic mode it is not computed together with others: that
  // would show in the last bits.
  scheduler::Uses reads() const { return limits.deterministic ? kChangesGradient : kReadsWeights; }

  // Waits for this use of the head alone. The error of the limits; kHeadNotFound once the head has been retired.
  absl::StatusOr<scheduler::Admission> Admit(scheduler::Uses uses, const WaitLimits& wait);
  // Wakes calls that wait for micro-batches or their turn; StepChanged() wakes all that wait for the step. In a turn, afterwards.
  void MicroBatchChanged() { micro_batch_changed->WakeAll(); }
  void StepChanged();
  // The contribution whose turn it is to be added, or null. In a turn.
  std::shared_ptr<const WaitingAddition> NextInOrder() const;
  // Closes the step, with everything that belonged to it alone. In a turn.
  absl::Status CloseStep(int64_t step, StepState how);
  // Whether a micro-batch of this step need not wait for a predecessor in order. In a turn.
  bool IsItsTurn(const StepKey& key, int64_t micro_batch) const;
  // Ends every wait for the head, now and from now on. In a turn.
  void MarkRetired();
  // Restarts at a step: new epoch, nothing known, READY. In a turn.
  void StartAfresh(int64_t step);
  // After an engine call that changes the head: an engine failure makes the head LOST. Returns `status`.
  absl::Status AfterChange(const absl::Status& status);
  void MarkLost(const absl::Status& cause);

  const HeadName name;
  const HeadSpec spec;
  const HeadLimits limits;
  const absl::Time create_time;
  LossEngine& engine;
  const std::shared_ptr<scheduler::Sequencer> sequencer_owner;
  scheduler::Sequencer& sequencer = *sequencer_owner;
  const std::shared_ptr<scheduler::Record> record = std::make_shared<scheduler::Record>();
  const std::unique_ptr<EngineHead> on_engine;  // calls other than spec(), plan(), shards() and the sizes need an admission
  WeightTensors tensors;                        // needs an admission, except for its checks

  StepTransactions steps;
  WeightRecord weights;
  const std::shared_ptr<scheduler::WaitList> micro_batch_changed = std::make_shared<scheduler::WaitList>();
  scheduler::WaitList step_changed;
  Epoch epoch;
  std::vector<Epoch> recovers_epochs;  // belong to `epoch`
  HeadState state = HeadState::kLoading;
  std::string state_cause;  // the failure of a LOST head, the checkpoint of a RESTORED one
  std::string restore_note;
  bool retired = false;
  int64_t running_calls = 0;  // submissions that wait or compute
  int64_t use_count = 0;      // HeadUse objects
};

// Completes "the call ..." in messages about a call that waits for its heads.
inline constexpr char kWaitsForHead[] = "waited for its turn on the head";

// kHeadNotFound for a call that still holds a head that has been deleted.
absl::Status HeadDeleted(const HeadName& name);

// Adds a use of a head to the needs of an operation.
void AddNeed(const HeadCore& head, const scheduler::Uses& uses, scheduler::Needs& needs);

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
  std::vector<std::shared_ptr<Head>> heads_;  // null: deleted
  std::vector<int64_t> versions_;             // of each head's weights
};

// Adds the contributions whose turn has come, one after the other, each as an operation of its own. Does nothing outside
// deterministic mode. An engine failure, or a teacher that has changed or gone, makes the head LOST. After any other error the
// waiting contributions stay as they are.
absl::Status AddInOrder(HeadCore& head, const WaitLimits& limits);
// AddInOrder() for several heads, except those whose weights are written. Returns only errors that made a head LOST. After other
// errors the next submission, decision, gradient or seal adds the rest. `limits` without a deadline: does not wait for a head.
absl::Status AddInOrder(const std::vector<HeadCore*>& heads, const WaitLimits& limits = scheduler::AsLongAsItTakes());

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_HEAD_CORE_H_
