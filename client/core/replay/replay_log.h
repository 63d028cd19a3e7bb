// ReplayLog: the calls of the open steps, and those that closed earlier ones, as far as this client made them.
#ifndef HEADWATER_CLIENT_CORE_REPLAY_REPLAY_LOG_H_
#define HEADWATER_CLIENT_CORE_REPLAY_REPLAY_LOG_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "client/core/call/method_table.h"
#include "client/core/link/wait.h"
#include "client/core/replay/head_state.h"
#include "client/core/replay/logged_call.h"

namespace headwater::client::internal {

// The status of a call whose `wait` ended during a recovery, its own or another call's: CANCELLED or DEADLINE_EXCEEDED.
absl::Status EndedInRecovery(const Wait& wait);

// One call that succeeded. Each record has at most one entry for a micro-batch, or for a step and a part of it.
struct LogEntry {
  Record record = Record::kLoss;
  HeadUses heads{};                // all that it names; those with a step are trainable
  int64_t micro_batch = -1;        // a call without one seals or closes the step
  int64_t attempt = 0;             // of the micro-batch
  int part = 0;                    // of weights that close a step: which tensor
  bool closes = false;             // an answered call that closed the step
  bool is_answered_again = false;  // the server had it already
  // Trainable heads that it reads (teachers), with the steps that they were at.
  std::vector<std::pair<std::shared_ptr<HeadState>, int64_t>> reads{};
  std::shared_ptr<const LoggedCall> call{};
};

// Thread-safe. Disabled (max_bytes 0) it keeps nothing and lets every attempt pass.
//
// Attempts on heads enter and leave, so that nothing is added to the log during a recovery. No call slips in between the take-over
// of a head and the repetition of its step.
class ReplayLog {
 public:
  // Keeps `max_steps` closed steps of each head, or as many as there is room for. HeadState::first_logged_step() says how far back
  // it reaches. `on_open` runs after each recovery, for calls that wait for its end without blocking. `on_dropped` gets, once, the
  // reason why an open step is not kept.
  ReplayLog(
      int64_t max_bytes, std::optional<int64_t> max_steps, std::function<void()> on_open,
      std::function<void(const std::string& why)> on_dropped = [](const std::string&) {})
      : max_bytes_(max_bytes), max_steps_(max_steps), on_open_(std::move(on_open)), on_dropped_(std::move(on_dropped)) {}

  bool enabled() const { return max_bytes_ > 0; }

  // An attempt begins; false: a recovery is under way, wait for its end.
  bool TryEnter(const HeadUses& heads);
  bool recovering();
  // The attempt has ended, and is in the log if it succeeded.
  void Leave(const HeadUses& heads);

  // A call on open steps, or one that closed them, has succeeded. Entries that do not fit are dropped: the oldest closed steps, or
  // everything, if the open steps alone are too large. A discard takes the micro-batch out, up to its attempt.
  void Add(LogEntry entry);
  // Whether weights that close the step of `heads` are worth a copy. If not, the log begins after that step.
  bool HasRoomFor(const HeadUses& heads, int64_t bytes);
  // `step` is the head's open step or an earlier one: steps before it are closed. Before the entry of the call that closed it.
  void StepIsOpen(const std::shared_ptr<HeadState>& head, int64_t step);
  // A part of these steps' work is missing here: the log begins after them.
  void Drop(const HeadUses& heads, const std::string& why);
  // The head has a new epoch and an empty step, and perhaps other weights, or is gone. Calls of other heads that name it, as
  // trained head or as teacher, cannot be repeated as they were. The log begins after their steps.
  void Forget(const HeadState& head);

  // ---- for the recovery ----
  // Keeps attempts and other recoveries out until its last copy goes.
  using Gate = std::shared_ptr<ReplayLog>;
  // The gate; null while another recovery has it.
  Gate TryClose();
  // All heads of the log.
  HeadUses Heads();
  // `heads` and all that are connected with them by common calls.
  HeadUses Closure(const HeadUses& heads);
  // Waits until no attempt on `heads` is under way; false if one is when `wait` ends.
  bool WaitUntilIdle(const HeadUses& heads, const Wait& wait);
  // The calls on `heads` (a closure), oldest first.
  std::vector<LogEntry> EntriesOf(const HeadUses& heads);

 private:
  void Open();
  void BeginAfter(const HeadUses& heads);
  // Removes the entries that the new entry replaces; false: it adds nothing.
  bool MakeWayFor(const LogEntry& entry);
  void Place(LogEntry entry);
  void EraseIf(const std::function<bool(const LogEntry&)>& goes);
  // Drops entries before the first logged step of each of their heads.
  void Shorten();

  const int64_t max_bytes_;
  const std::optional<int64_t> max_steps_;
  const std::function<void()> on_open_;
  const std::function<void(const std::string&)> on_dropped_;
  std::atomic<bool> has_told_ = false;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::list<LogEntry> entries_;  // in the order in which they can be repeated
  int64_t bytes_ = 0;
  std::map<const HeadState*, int> in_flight_;
  bool recovering_ = false;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_REPLAY_REPLAY_LOG_H_
