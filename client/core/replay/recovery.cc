#include "client/core/replay/recovery.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/core/call/method_table.h"
#include "client/core/core.h"
#include "client/core/link/error.h"
#include "headwater/client/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

constexpr char kErrorInfoUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";

std::string Describe(const absl::Status& status) {
  const std::string reason = ErrorReason(status);
  return absl::StrCat(reason.empty() ? absl::StatusCodeToString(status.code()) : reason, ": ", Sentence(status));
}

class Recovery {
 public:
  // `heads`: all that are to be brought back; `own`: those of the call that is waiting.
  Recovery(Core& core, HeadUses heads, const HeadUses& own, const Wait& wait)
      : core_(core), log_(core.replay_log()), heads_(std::move(heads)), own_(own), wait_(wait) {}

  // OK, or why not.
  absl::Status Run() {
    HEADWATER_ASSIGN_OR_RETURN(incarnation_, Incarnation());
    const bool restarted = std::any_of(heads_.begin(), heads_.end(), [this](const HeadUse& use) { return IsOlder(*use.state); });
    if (!restarted) {
      return absl::FailedPreconditionError(
          "the server has not been started again since: another run has taken the head, or its engine failed");
    }
    HEADWATER_RETURN_IF_ERROR(LookAtAll());
    for (HeadUse& use : heads_) {
      HEADWATER_RETURN_IF_ERROR(Take(use));
    }
    // Calls of a recovery follow a restart, too: epochs of a later process must not be taken for this one's.
    HEADWATER_ASSIGN_OR_RETURN(const std::string taken_from, Incarnation());
    if (taken_from != incarnation_) return absl::UnavailableError("the server was started again while its heads were taken");
    for (const LogEntry& entry : log_.EntriesOf(heads_)) {
      HEADWATER_RETURN_IF_ERROR(wait_.Check());
      HEADWATER_RETURN_IF_ERROR(RepeatEntry(entry));
    }
    // Epochs are adopted only here: a head whose step is not whole keeps its stale epoch, and every call on it fails.
    for (const HeadUse& use : heads_) use.state->AdoptRecovered(fresh_.at(use.state->name), incarnation_);
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<std::string> Incarnation() {
    HEADWATER_ASSIGN_OR_RETURN(v1::ServerInfo info, core_.Ask<v1::ServerInfo>(v1::GetServerInfoRequest(), wait_));
    return info.incarnation();
  }

  // Whether the epoch comes from another server process than this one.
  bool IsOlder(const HeadState& state) const { return !state.incarnation().empty() && state.incarnation() != incarnation_; }

  absl::StatusOr<v1::Head> Get(const std::string& name) {
    v1::GetHeadRequest request;
    request.set_name(name);
    return core_.Ask<v1::Head>(request, wait_);
  }

  // How all heads came back. Heads that did not come back, or are another run's by now, leave the log, and do not fail the call.
  absl::Status LookAtAll() {
    for (auto use = heads_.begin(); use != heads_.end();) {
      HeadState& state = *use->state;
      absl::StatusOr<v1::Head> head = Get(state.name);
      absl::Status gone;
      if (head.status().code() == absl::StatusCode::kNotFound) {
        log_.Forget(state);
        gone = absl::FailedPreconditionError(absl::StrCat(state.name, " is not there any more"));
      } else if (!head.ok()) {
        return head.status();
      } else if (IsOlder(state) && state.trainable) {
        gone = CheckRun(state, *head);
      }
      if (gone.ok()) {
        fresh_[state.name] = *std::move(head);
        ++use;
        continue;
      }
      const bool is_own = std::any_of(own_.begin(), own_.end(), [&](const HeadUse& own) { return own.state == use->state; });
      if (is_own) return gone;
      use = heads_.erase(use);
    }
    return absl::OkStatus();
  }

  absl::Status Take(HeadUse& use) {
    HeadState& state = *use.state;
    v1::Head& head = fresh_.at(state.name);
    if (!IsOlder(state)) {
      head.set_epoch(state.epoch());  // its taker has rightly fenced this client since
    } else if (!state.trainable) {
      const std::string before = state.weight_checksum();
      if (!before.empty() && !head.weight_checksum().empty() && before != head.weight_checksum()) {
        return absl::FailedPreconditionError(absl::StrCat(state.name, " came back with other weights"));
      }
    } else {
      HEADWATER_RETURN_IF_ERROR(CheckStep(use, head));
      if (head.state() == v1::HEAD_STATE_RESTORED) {
        v1::TakeHeadRequest request;
        request.set_name(state.name);
        request.set_epoch(head.epoch());
        for (const std::string& epoch : state.lineage()) request.add_recovers_epochs(epoch);
        absl::StatusOr<v1::Head> taken = core_.Ask<v1::Head>(request, wait_);
        // Another trainer was faster, or this one's answer was lost: the head is taken all the same, and its lineage shows by whose
        // run.
        if (!taken.ok() && (absl::IsUnavailable(taken.status()) || ErrorReason(taken.status()) == "EPOCH_FENCED")) {
          taken = Get(state.name);
          if (taken.ok()) {
            HEADWATER_RETURN_IF_ERROR(CheckRun(state, *taken));
          }
        }
        if (!taken.ok()) return taken.status();
        head = *std::move(taken);
        HEADWATER_RETURN_IF_ERROR(CheckStep(use, head));
      }
      if (head.state() != v1::HEAD_STATE_READY) {
        return absl::UnavailableError(absl::StrCat(state.name, " is not ready after it was taken"));
      }
    }
    use.epoch = head.epoch();
    steps_[state.name] = head.open_step();
    return absl::OkStatus();
  }

  // Whether a head that came back belongs to this run. No trainer may have taken it yet, except one that continued from an epoch
  // under which this client has worked as well. Contributions to another run's head are never repeated.
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
      const ClientOptions& options = core_.options();
      return absl::FailedPreconditionError(absl::StrCat(
          "step ", head.open_step(), " is open, this client is at ", last, ", and its log reaches back to step ", first,
          ": earlier ones did not fit into the ", options.replay_bytes, " bytes of replay_bytes, ",
          options.replay_steps.has_value() ? absl::StrCat("are more than replay_steps ", *options.replay_steps, ", ") : "",
          "have micro-batches of a joined teacher, or were not this client's"));
    }
    return absl::OkStatus();
  }

  absl::Status RepeatEntry(const LogEntry& entry) {
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
    absl::Status status = CallAgain(core_, *entry.call, heads, wait_);
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

  Core& core_;
  ReplayLog& log_;
  HeadUses heads_;
  const HeadUses& own_;
  const Wait& wait_;
  std::string incarnation_;  // of the server that answers now
  std::map<std::string, v1::Head> fresh_;
  std::map<std::string, int64_t> steps_;  // by head: the step that it has been brought to
};

}  // namespace

bool MayRecover(const ReplayLog& log, const absl::Status& status) {
  if (!log.enabled()) return false;
  return RestoredFrom(status).has_value() || ErrorReason(status) == "EPOCH_FENCED";
}

absl::Status StillLost(const absl::Status& cause, const HeadUses& heads, const std::string& why) {
  absl::Status status(cause.code(), absl::StrCat(std::string(cause.message()), " (no replay: ", why, ")"));
  cause.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    v1::ErrorInfo info;
    if (url != kErrorInfoUrl || !info.ParseFromString(std::string(payload))) return status.SetPayload(url, payload);
    (*info.mutable_metadata())["noReplay"] = why;
    const auto has_step = [](const HeadUse& use) { return use.step.has_value(); };
    if (std::count_if(heads.begin(), heads.end(), has_step) == 1) {
      (*info.mutable_metadata())["trainerStep"] = absl::StrCat(*std::find_if(heads.begin(), heads.end(), has_step)->step);
    }
    status.SetPayload(url, absl::Cord(info.SerializeAsString()));
  });
  return status;
}

bool IsRecovered(const HeadUses& heads) {
  return std::any_of(heads.begin(), heads.end(), [](const HeadUse& use) { return use.state->epoch() != use.epoch; });
}

absl::Status Recover(Core& core, ReplayLog::Gate gate, const HeadUses& heads, const absl::Status& cause, const Wait& wait) {
  const ReplayLog::Gate closed = std::move(gate);  // until the end
  ReplayLog& log = core.replay_log();
  if (IsRecovered(heads)) return absl::OkStatus();
  // Calls that were under way when the server went either succeeded, and are about to be logged, or will find the step lost too.
  HeadUses closure = log.Closure(heads);
  if (!log.WaitUntilIdle(closure, wait)) return EndedInRecovery(wait);
  closure = log.Closure(heads);
  absl::Status status;
  for (int round = 0; round < kMaxRecoveries; ++round) {
    status = Recovery(core, closure, heads, wait).Run();
    if (status.ok()) return status;
    // gRPC's clock may be a little ahead of this one.
    if (absl::IsDeadlineExceeded(status) || !wait.Check().ok()) return EndedInRecovery(wait);
    if (absl::IsCancelled(status)) return status;
    // The server restarted again: start from the beginning. Repeated contributions add nothing a second time.
    if (!absl::IsUnavailable(status) && !MayRecover(log, status)) break;
  }
  // It stayed away: no reason to give the step up, which the next call finds as this one has.
  return absl::IsUnavailable(status) ? status : StillLost(cause, heads, Describe(status));
}

}  // namespace headwater::client::internal
