// What the client knows of a head.
#ifndef HEADWATER_CLIENT_SRC_HEAD_STATE_H_
#define HEADWATER_CLIENT_SRC_HEAD_STATE_H_

#include <algorithm>
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

// Shared by the copies of a Head and by the replay log; knows no connection. Thread-safe.
class HeadState {
 public:
  HeadState(const v1::Head& head, std::string incarnation)
      : name(head.name()),
        spec(FromProto(head.spec())),
        epoch_(head.epoch()),
        incarnation_(std::move(incarnation)),
        weight_checksum_(head.weight_checksum()),
        known_open_step_(head.open_step()),
        first_logged_step_(head.open_step()) {}

  const std::string name;
  const HeadSpec spec;

  std::string epoch() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return epoch_;
  }
  // The server process that `epoch` was learned from; empty if it is not known.
  std::string incarnation() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return incarnation_;
  }
  std::string weight_checksum() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return weight_checksum_;
  }
  // What this client has sent for this step and later ones is in the replay log.
  int64_t first_logged_step() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return first_logged_step_;
  }
  void RaiseFirstLoggedStep(int64_t step) {
    std::lock_guard<std::mutex> lock(mutex_);
    first_logged_step_ = std::max(first_logged_step_, step);
  }
  // The open step is this one or a later one.
  int64_t known_open_step() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return known_open_step_;
  }

  // The head has another state, of the caller's making.
  void Adopt(const v1::Head& head, std::string incarnation) {
    std::lock_guard<std::mutex> lock(mutex_);
    epoch_ = head.epoch();
    incarnation_ = std::move(incarnation);
    weight_checksum_ = head.weight_checksum();
    known_open_step_ = head.open_step();
    first_logged_step_ = head.open_step();
  }
  // The head was taken at some step, and has been brought back to where it was.
  void AdoptRecovered(const v1::Head& head, std::string incarnation) {
    std::lock_guard<std::mutex> lock(mutex_);
    epoch_ = head.epoch();
    incarnation_ = std::move(incarnation);
    weight_checksum_ = head.weight_checksum();
    known_open_step_ = std::max(known_open_step_, head.open_step());
  }

  // A call on `step` has succeeded: no earlier step is open.
  void SawStep(int64_t step) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (step <= known_open_step_) return;
    known_open_step_ = step;
    // The last closed step still answers repeats of its decisions.
    attempts_.erase(attempts_.begin(), attempts_.lower_bound({step - 1, 0}));
  }

  // The attempt under which a micro-batch was computed: its decision must name it. 0 if nothing else is known.
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

 private:
  mutable std::mutex mutex_;
  std::string epoch_;
  std::string incarnation_;
  std::string weight_checksum_;
  int64_t known_open_step_;
  int64_t first_logged_step_;
  std::map<std::pair<int64_t, int64_t>, int64_t> attempts_;
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
