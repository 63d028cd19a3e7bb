// The client's state of the heads that its calls name.
#ifndef HEADWATER_CLIENT_CORE_REPLAY_HEAD_STATE_H_
#define HEADWATER_CLIENT_CORE_REPLAY_HEAD_STATE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "google/protobuf/message.h"
#include "headwater/v1/head_service.pb.h"

namespace headwater::client::internal {

// A head under one epoch and the epochs after it by recoveries, with the work done in them. Thread-safe.
class HeadState {
 public:
  // The state of a head that the server has described. `incarnation`: the server process that described it; empty: unknown, so that
  // no lost step of it is recovered.
  HeadState(const v1::Head& head, std::string incarnation);
  // The state of an epoch that the server has not described: the log has nothing of it.
  HeadState(std::string head, const std::string& epoch);

  const std::string name;
  const bool trainable;

  // The newest epoch, which is the last of lineage(). The lineage holds the epochs under which this client has worked on the head,
  // linked by recoveries, at most as many as TakeHeadRequest.recovers_epochs takes.
  std::string epoch() const { return Get(epoch_); }
  std::vector<std::string> lineage() const { return Get(lineage_); }
  bool HasEpoch(const std::string& epoch) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return epochs_.contains(epoch);
  }
  bool is_introduced() const { return is_introduced_; }

  std::string incarnation() const { return Get(incarnation_); }
  std::string weight_checksum() const { return Get(weight_checksum_); }
  // The first step from which the replay log holds everything that this client has sent.
  int64_t first_logged_step() const { return Get(first_logged_step_); }
  void RaiseFirstLoggedStep(int64_t step);
  // The open step is this one or a later one.
  int64_t known_open_step() const { return Get(known_open_step_); }
  // A call on `step` has succeeded: no earlier step is open.
  void SawStep(int64_t step);

  // The epoch continues with an empty step; earlier work has left the log.
  void Begin(const v1::Head& head, std::string incarnation);
  // The head has another epoch, of the caller's making: calls that still name this one are fenced.
  void End();
  // The head was taken at some step, and has been brought back to where it was.
  void AdoptRecovered(const v1::Head& head, std::string incarnation);
  // A recovery has found that another run has the head; no later recovery continues with it.
  void SetOvertaken() { is_overtaken_ = true; }
  bool is_overtaken() const { return is_overtaken_; }

  // ---- attempts under which micro-batches were submitted ----
  // The newest attempt of a micro-batch; 0 if none is known.
  int64_t AttemptOf(int64_t step, int64_t micro_batch) const;
  // The attempt at which a submission begins if its caller names `named`. The caller does not know of this client's repetitions: an
  // attempt from which they began stands for their latest one. An attempt that the caller itself has exceeded stays, and the server
  // refuses it.
  int64_t FirstAttempt(int64_t step, int64_t micro_batch, int64_t named) const;
  // `attempt` is submitted, or the next that may be; a lower one than is known changes nothing.
  void NoteAttempt(int64_t step, int64_t micro_batch, int64_t attempt, int64_t named);
  // Takes over the attempts of `other`, whose last closed step this epoch still answers for.
  void TakeAttempts(const HeadState& other);

 private:
  struct Attempts {
    int64_t highest = 0;
    int64_t begun = 0;  // the attempt from which repetitions alone have led to `highest`
  };

  template <typename Value>
  Value Get(const Value& value) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return value;
  }

  const bool is_introduced_;
  std::atomic<bool> is_overtaken_ = false;
  mutable std::mutex mutex_;
  std::string epoch_;
  std::vector<std::string> lineage_;
  std::set<std::string> epochs_;  // all of the lineage, however long
  std::string incarnation_;
  std::string weight_checksum_;
  int64_t known_open_step_;
  int64_t first_logged_step_;
  std::map<std::pair<int64_t, int64_t>, Attempts> attempts_;
};

// A head as one call names it.
struct HeadUse {
  std::shared_ptr<HeadState> state;
  std::optional<int64_t> step{};  // absent for frozen heads, teachers, and calls that name the epoch alone
  std::string epoch{};            // of the attempt under way
};

using HeadUses = std::vector<HeadUse>;

// Puts the epochs of `heads` in where a message names these heads with epochs.
void SetEpochs(google::protobuf::Message& message, const HeadUses& heads);

// All heads of a connection. Thread-safe.
class HeadStates {
 public:
  // Finds the state of an epoch, and makes it if there is none.
  std::shared_ptr<HeadState> Find(const std::string& name, const std::string& epoch);
  // Finds a state without making one; null if there is none.
  std::shared_ptr<HeadState> FindKnown(const std::string& name, const std::string& epoch) const;
  std::vector<std::shared_ptr<HeadState>> AllOf(const std::string& name) const;
  // The server has described the head. `before`: the state that was the head's until this client has given it another one; null:
  // the head is only looked at.
  void Introduce(const v1::Head& head, const std::string& incarnation, const std::shared_ptr<HeadState>& before);
  // The heads that a message names with epochs, once each; where a head is a student and a teacher the step is the student's.
  HeadUses UsesOf(const google::protobuf::Message& message);

 private:
  std::shared_ptr<HeadState> FindLocked(const std::string& name, const std::string& epoch) const;

  mutable std::mutex mutex_;
  // By name, oldest first; states of unused epochs are removed.
  std::map<std::string, std::vector<std::shared_ptr<HeadState>>> states_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_REPLAY_HEAD_STATE_H_
