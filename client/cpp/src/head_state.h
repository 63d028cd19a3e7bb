// What the client knows of a head.
#ifndef HEADWATER_CLIENT_SRC_HEAD_STATE_H_
#define HEADWATER_CLIENT_SRC_HEAD_STATE_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/src/convert.h"
#include "headwater/client/types.h"
#include "headwater/v1/head_service.pb.h"

namespace headwater::client::internal {

// The server takes no more of them (TakeHeadRequest.recovers_epochs).
inline constexpr size_t kMaxRecoversEpochs = 16;

// What is known of an epoch of a head, and what was done in it. Thread-safe.
class HeadEpoch {
 public:
  HeadEpoch(const v1::Head& head, std::string incarnation)
      : epoch_(head.epoch()),
        lineage_{head.epoch()},
        incarnation_(std::move(incarnation)),
        weight_checksum_(head.weight_checksum()),
        known_open_step_(head.open_step()),
        first_logged_step_(head.open_step()) {}

  std::string epoch() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return epoch_;
  }
  // Those that recoveries have replaced, the newest of them, and behind them epoch().
  std::vector<std::string> lineage() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return lineage_;
  }
  std::string incarnation() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return incarnation_;
  }
  std::string weight_checksum() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return weight_checksum_;
  }
  int64_t first_logged_step() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return first_logged_step_;
  }
  void RaiseFirstLoggedStep(int64_t step) {
    std::lock_guard<std::mutex> lock(mutex_);
    first_logged_step_ = std::max(first_logged_step_, step);
  }
  int64_t known_open_step() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return known_open_step_;
  }

  // The epoch goes on, with an empty step.
  void Begin(const v1::Head& head, std::string incarnation) {
    std::lock_guard<std::mutex> lock(mutex_);
    incarnation_ = std::move(incarnation);
    weight_checksum_ = head.weight_checksum();
    known_open_step_ = head.open_step();
    first_logged_step_ = head.open_step();
  }
  // Whoever is still at it is fenced, and what was done in it has left the log.
  void End() {
    std::lock_guard<std::mutex> lock(mutex_);
    first_logged_step_ = std::max(first_logged_step_, known_open_step_ + 1);
  }
  // A recovery has found that another run has the head: no later one goes on with it.
  void SetOvertaken() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_overtaken_ = true;
  }
  bool is_overtaken() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_overtaken_;
  }
  void AdoptRecovered(const v1::Head& head, std::string incarnation) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (head.epoch() != epoch_) lineage_.push_back(head.epoch());
    if (lineage_.size() > kMaxRecoversEpochs) lineage_.erase(lineage_.begin());
    epoch_ = head.epoch();
    incarnation_ = std::move(incarnation);
    weight_checksum_ = head.weight_checksum();
    known_open_step_ = std::max(known_open_step_, head.open_step());
  }

  void SawStep(int64_t step) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (step <= known_open_step_) return;
    known_open_step_ = step;
    // The last closed step still answers repeats of its decisions.
    attempts_.erase(attempts_.begin(), attempts_.lower_bound({step - 1, 0}));
  }

  int64_t AttemptOf(int64_t step, int64_t micro_batch) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto attempt = attempts_.find({step, micro_batch});
    return attempt == attempts_.end() ? 0 : attempt->second;
  }
  void SetAttempt(int64_t step, int64_t micro_batch, int64_t attempt) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (attempt == 0) {
      attempts_.erase({step, micro_batch});
    } else {
      attempts_[{step, micro_batch}] = attempt;
    }
  }
  // Those of `other`, whose last closed step this epoch goes on to answer for.
  void TakeAttempts(const HeadEpoch& other) {
    std::scoped_lock lock(mutex_, other.mutex_);
    attempts_ = other.attempts_;
  }

 private:
  mutable std::mutex mutex_;
  std::string epoch_;
  std::vector<std::string> lineage_;
  bool is_overtaken_ = false;
  std::string incarnation_;
  std::string weight_checksum_;
  int64_t known_open_step_;
  int64_t first_logged_step_;
  std::map<std::pair<int64_t, int64_t>, int64_t> attempts_;
};

// Shared by the copies of a Head and by the replay log; knows no connection. Thread-safe.
//
// Handles that were opened apart at one epoch of a head have a state each, but share that epoch: a recovery brings back what was
// done through any of them, and all go on. The one that takes a new epoch leaves the others behind, fenced.
class HeadState {
 public:
  HeadState(const v1::Head& head, std::string incarnation)
      : name(head.name()), spec(FromProto(head.spec())), current_(std::make_shared<HeadEpoch>(head, std::move(incarnation))) {}
  // At the epoch of `other`.
  explicit HeadState(const HeadState& other) : name(other.name), spec(other.spec), current_(other.current()) {}

  const std::string name;
  const HeadSpec spec;

  // Whether the caller should be warned that a micro-batch was HELD for want of a slot: once. `unasked`: it might have been STAGED.
  // Where nothing ever is, no slot is missing: deterministic mode holds everything.
  bool ShouldWarnOfHeld(ContributionForm form, bool unasked) {
    if (form == ContributionForm::kStaged) has_staged_ = true;
    return form == ContributionForm::kHeld && unasked && has_staged_ && !warned_of_held_.exchange(true);
  }

  // The step that Seal() has closed without micro-batches; -1: none.
  int64_t empty_step() const { return empty_step_; }
  void SetEmptyStep(int64_t step) { empty_step_ = step; }

  bool SharesEpochWith(const HeadState& other) const { return current() == other.current(); }

  std::string epoch() const { return current()->epoch(); }
  // The epochs under which this client has worked on the head, as far as recoveries have led from one to the next: epoch() is the
  // last. At most kMaxRecoversEpochs.
  std::vector<std::string> lineage() const { return current()->lineage(); }
  // The server process that `epoch` was learned from; empty if it is not known.
  std::string incarnation() const { return current()->incarnation(); }
  std::string weight_checksum() const { return current()->weight_checksum(); }
  // What this client has sent for this step and later ones is in the replay log.
  int64_t first_logged_step() const { return current()->first_logged_step(); }
  void RaiseFirstLoggedStep(int64_t step) { current()->RaiseFirstLoggedStep(step); }
  // The open step is this one or a later one.
  int64_t known_open_step() const { return current()->known_open_step(); }

  // The head has another state, of the caller's making. What was done before has left the log.
  void Adopt(const v1::Head& head, std::string incarnation) {
    const std::shared_ptr<HeadEpoch> before = current();
    if (head.epoch() == before->epoch()) return before->Begin(head, std::move(incarnation));
    auto after = std::make_shared<HeadEpoch>(head, std::move(incarnation));
    after->TakeAttempts(*before);
    before->End();
    std::lock_guard<std::mutex> lock(mutex_);
    current_ = std::move(after);
  }
  // Another run has taken the head since the server was started again: this client stays fenced, until the caller takes the head.
  void SetOvertaken() { current()->SetOvertaken(); }
  bool is_overtaken() const { return current()->is_overtaken(); }
  // The head was taken at some step, and has been brought back to where it was.
  void AdoptRecovered(const v1::Head& head, std::string incarnation) { current()->AdoptRecovered(head, std::move(incarnation)); }

  // A call on `step` has succeeded: no earlier step is open.
  void SawStep(int64_t step) { current()->SawStep(step); }

  // The attempt under which a micro-batch was computed: its decision must name it. 0 if nothing else is known.
  int64_t AttemptOf(int64_t step, int64_t micro_batch) const { return current()->AttemptOf(step, micro_batch); }
  void SetAttempt(int64_t step, int64_t micro_batch, int64_t attempt) { current()->SetAttempt(step, micro_batch, attempt); }

 private:
  std::shared_ptr<HeadEpoch> current() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return current_;
  }

  std::atomic<int64_t> empty_step_ = -1;
  std::atomic<bool> has_staged_ = false;
  std::atomic<bool> warned_of_held_ = false;
  mutable std::mutex mutex_;
  std::shared_ptr<HeadEpoch> current_;
};

// The states of a connection's handles. Thread-safe.
class HeadStates {
 public:
  // Of a head that the server has just described.
  std::shared_ptr<HeadState> Open(const v1::Head& head, std::string incarnation) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(states_, [](const std::weak_ptr<HeadState>& state) { return state.expired(); });
    std::shared_ptr<HeadState> opened;
    for (const std::weak_ptr<HeadState>& weak : states_) {
      const std::shared_ptr<HeadState> state = weak.lock();
      if (state == nullptr || state->name != head.name() || state->epoch() != head.epoch()) continue;
      if (state->incarnation() != incarnation) continue;
      opened = std::make_shared<HeadState>(*state);
      opened->SawStep(head.open_step());
      break;
    }
    if (opened == nullptr) opened = std::make_shared<HeadState>(head, std::move(incarnation));
    states_.push_back(opened);
    return opened;
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<HeadState>> states_;  // of handles and of the replay log
};

// A head as one call names it.
struct HeadUse {
  std::shared_ptr<HeadState> state;
  std::optional<int64_t> step{};  // absent for frozen heads, teachers, and calls that name the epoch alone
  std::string epoch{};            // of the attempt under way

  v1::HeadStep ToHeadStep() const {
    v1::HeadStep head;
    head.set_head(state->name);
    head.set_head_epoch(epoch);
    if (step.has_value()) head.set_step(*step);
    return head;
  }
};

using HeadUses = std::vector<HeadUse>;

// What a decision about a micro-batch names.
struct MicroBatchKey {
  HeadUses heads;  // the trainable ones
  int64_t micro_batch = 0;
  int64_t attempt = 0;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_HEAD_STATE_H_
