#include "client/cpp/src/recovery.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/src/connection.h"
#include "client/cpp/src/error.h"
#include "headwater/client/error.h"

namespace headwater::client::internal {
namespace {

using Heads = v1::HeadService::Stub;

// `cause` with a sentence why it could not be helped.
absl::Status StillLost(const absl::Status& cause, const std::string& why) {
  absl::Status status(cause.code(), absl::StrCat(std::string(cause.message()), " (no replay: ", why, ")"));
  cause.ForEachPayload([&status](absl::string_view url, const absl::Cord& payload) { status.SetPayload(url, payload); });
  return status;
}

std::string Describe(const absl::Status& status) {
  const std::string reason = ErrorReason(status);
  return absl::StrCat(reason.empty() ? absl::StatusCodeToString(status.code()) : reason, ": ", Sentence(status));
}

// One recovery.
class Recovery {
 public:
  Recovery(Connection& connection, HeadUses heads, const Wait& wait)
      : connection_(connection), log_(connection.replay_log()), heads_(std::move(heads)), wait_(wait) {}

  // OK, or why not.
  absl::Status Run() {
    absl::StatusOr<std::string> incarnation = connection_.Incarnation(wait_);
    if (!incarnation.ok()) return incarnation.status();
    bool restarted = false;
    for (const HeadUse& use : heads_) restarted |= IsOlder(*use.state, *incarnation);
    if (!restarted) return absl::FailedPreconditionError("the server has not been started again since; another run took the head");
    for (HeadUse& use : heads_) {
      if (absl::Status status = Take(use, *incarnation); !status.ok()) return status;
    }
    // These calls follow a restart, too: epochs of a later process must not be taken for this one's.
    const absl::StatusOr<std::string> taken_from = connection_.Incarnation(wait_);
    if (!taken_from.ok()) return taken_from.status();
    if (*taken_from != *incarnation) return absl::UnavailableError("the server was started again while its heads were taken");
    for (const LogEntry& entry : log_.EntriesOf(heads_)) {
      if (absl::Status ended = wait_.Check(); !ended.ok()) return ended;
      if (absl::Status status = Repeat(entry); !status.ok()) return status;
    }
    // Only now: a head whose step is not whole keeps its stale epoch, and every call on it is told so.
    for (const HeadUse& use : heads_) use.state->AdoptRecovered(fresh_.at(use.state->name), *incarnation);
    return absl::OkStatus();
  }

 private:
  // Whether the epoch comes from another server process than this one.
  static bool IsOlder(const HeadState& state, const std::string& incarnation) {
    return !state.incarnation().empty() && state.incarnation() != incarnation;
  }

  absl::StatusOr<v1::Head> Get(const std::string& name) {
    v1::GetHeadRequest request;
    request.set_name(name);
    return connection_.Call(connection_.heads(), &Heads::GetHead, request, internal::Repeat::kSafe, wait_);
  }

  absl::Status Take(HeadUse& use, const std::string& incarnation) {
    HeadState& state = *use.state;
    absl::StatusOr<v1::Head> head = Get(state.name);
    if (!head.ok()) return head.status();
    if (!IsOlder(state, incarnation)) {
      head->set_epoch(state.epoch());  // whoever took it since has fenced this client, and rightly
    } else if (!state.spec.trainable) {
      const std::string before = state.weight_checksum();
      if (!before.empty() && !head->weight_checksum().empty() && before != head->weight_checksum()) {
        return absl::FailedPreconditionError(absl::StrCat(state.name, " came back with other weights"));
      }
    } else {
      if (absl::Status status = CheckRun(state, *head); !status.ok()) return status;
      if (absl::Status status = CheckStep(use, *head); !status.ok()) return status;
      if (head->state() == v1::HEAD_STATE_RESTORED) {
        v1::TakeHeadRequest request;
        request.set_name(state.name);
        request.set_epoch(head->epoch());
        for (const std::string& epoch : state.lineage()) request.add_recovers_epochs(epoch);
        absl::StatusOr<v1::Head> taken =
            connection_.Call(connection_.heads(), &Heads::TakeHead, request, internal::Repeat::kIfNothingWasDone, wait_);
        // Another trainer was faster, or this one's answer was lost: the head is taken all the same, and tells by whose run.
        if (!taken.ok() && (absl::IsUnavailable(taken.status()) || ErrorReason(taken.status()) == "EPOCH_FENCED")) {
          taken = Get(state.name);
          if (taken.ok()) {
            if (absl::Status status = CheckRun(state, *taken); !status.ok()) return status;
          }
        }
        if (!taken.ok()) return taken.status();
        head = std::move(taken);
        if (absl::Status status = CheckStep(use, *head); !status.ok()) return status;
      }
      if (head->state() != v1::HEAD_STATE_READY) {
        return absl::UnavailableError(absl::StrCat(state.name, " is not ready after it was taken"));
      }
    }
    use.epoch = head->epoch();
    steps_[state.name] = head->open_step();
    fresh_[state.name] = *std::move(head);
    return absl::OkStatus();
  }

  // Whether a head that came back is this run's to go on with: nobody has taken it yet, or a trainer that went on from an epoch
  // under which this client has worked as well. What was sent for another run's head is never repeated, whatever comes.
  absl::Status CheckRun(HeadState& state, const v1::Head& head) {
    if (!state.is_overtaken()) {
      if (head.state() == v1::HEAD_STATE_RESTORED) return absl::OkStatus();
      const std::vector<std::string> own = state.lineage();
      for (const std::string& epoch : head.recovers_epochs()) {
        if (std::find(own.begin(), own.end(), epoch) != own.end()) return absl::OkStatus();
      }
      state.SetOvertaken();
      log_.Forget(state);
    }
    return absl::FailedPreconditionError("another run has taken the head since the server was started again");
  }

  // Whether the log reaches back to the step that the head came back at.
  absl::Status CheckStep(const HeadUse& use, const v1::Head& head) {
    const int64_t first = use.state->first_logged_step();
    const int64_t known = use.state->known_open_step();
    const int64_t last = std::max(known, use.step.value_or(known));
    if (head.open_step() > last) {
      return absl::FailedPreconditionError(absl::StrCat("step ", head.open_step(), " is open, this client is at ", last));
    }
    if (head.open_step() < first) {
      const ClientOptions& options = connection_.options();
      return absl::FailedPreconditionError(absl::StrCat(
          "step ", head.open_step(), " is open, this client is at ", last, ", and its log reaches back to step ", first,
          ": earlier ones did not fit into the ", options.replay_bytes, " bytes of replay_bytes, ",
          options.replay_steps.has_value() ? absl::StrCat("are more than replay_steps ", *options.replay_steps, ", ") : "",
          "have micro-batches of a joined teacher, or were not this client's"));
    }
    return absl::OkStatus();
  }

  absl::Status Repeat(const LogEntry& entry) {
    HeadUses heads = entry.heads;
    int closed = 0;
    int open = 0;
    for (HeadUse& use : heads) {
      const v1::Head& head = fresh_.at(use.state->name);
      use.epoch = head.epoch();
      if (use.step.has_value()) ++(*use.step < head.open_step() ? closed : open);
    }
    if (open == 0) return absl::OkStatus();
    if (closed > 0) {
      return absl::FailedPreconditionError("a micro-batch of several heads is in a step that one of them has closed");
    }
    for (const auto& [teacher, step] : entry.reads) {
      if (steps_.at(teacher->name) != step) {
        return absl::FailedPreconditionError(
            absl::StrCat("a micro-batch has read ", teacher->name, " at step ", step, ", which came back otherwise"));
      }
    }
    absl::Status status = (*entry.repeat)(connection_, heads, wait_);
    // Another trainer repeats too, and has closed this step with its gradient discarded, as it did before.
    if (open == 1 && ErrorReason(status) == "STEP_MISMATCH") {
      for (const HeadUse& use : heads) {
        if (use.step.has_value() && OpenStep(status).value_or(*use.step) > *use.step) status = absl::OkStatus();
      }
    }
    if (status.ok() && entry.closes) {
      for (const HeadUse& use : heads) steps_[use.state->name] = use.step.value_or(0) + 1;
    }
    return status;
  }

  Connection& connection_;
  ReplayLog& log_;
  HeadUses heads_;
  const Wait& wait_;
  std::map<std::string, v1::Head> fresh_;
  std::map<std::string, int64_t> steps_;  // by head: the step that it has been brought to
};

}  // namespace

bool MayRecover(const ReplayLog& log, const absl::Status& status) {
  if (!log.enabled()) return false;
  return RestoredFrom(status).has_value() || ErrorReason(status) == "EPOCH_FENCED";
}

bool IsRecovered(const HeadUses& heads) {
  return std::any_of(heads.begin(), heads.end(), [](const HeadUse& use) { return use.state->epoch() != use.epoch; });
}

absl::Status Recover(Connection& connection, ReplayLog::Gate gate, const HeadUses& heads, const absl::Status& cause,
                     const Wait& wait) {
  const ReplayLog::Gate closed = std::move(gate);  // until the end
  ReplayLog& log = connection.replay_log();
  if (IsRecovered(heads)) return absl::OkStatus();
  // Calls that were under way when the server went either succeeded, and are about to be logged, or will find the step lost too.
  HeadUses closure = log.Closure(heads);
  if (!log.WaitUntilIdle(closure, wait)) return EndedInRecovery(wait);
  closure = log.Closure(heads);
  absl::Status status;
  for (int round = 0; round < kMaxRecoveries; ++round) {
    status = Recovery(connection, closure, wait).Run();
    if (status.ok()) return status;
    // gRPC's clock may be a little ahead of this one.
    if (absl::IsDeadlineExceeded(status) || !wait.Check().ok()) return EndedInRecovery(wait);
    // The server went again: from the beginning. What was repeated already adds nothing a second time.
    if (!absl::IsUnavailable(status) && !MayRecover(log, status)) break;
  }
  // It stayed away: no reason to give the step up, which the next call finds as this one has.
  return absl::IsUnavailable(status) ? status : StillLost(cause, Describe(status));
}

}  // namespace headwater::client::internal
