#include "model.h"

#include <algorithm>

namespace headwater::history {

std::vector<double> Model::HeadNumbers(int name) {
  ModelHead& head = At(name);
  if (head.epoch < 0) head.epoch = epoch_count_++;
  return {static_cast<double>(head.epoch), static_cast<double>(head.state),
          static_cast<double>(head.spec.trainable ? head.open.number : -1), static_cast<double>(head.version)};
}

Expected Model::Run(const Event& event) {
  if (event.crash_at > 0) return CrashIn(event);
  switch (event.op) {
    case Op::kDamage: {
      auto& checkpoints = checkpoints_[event.targets[0].head];
      if (const auto found = checkpoints.find(event.checkpoint); found != checkpoints.end()) found->second.damaged = true;
      return {};
    }
    case Op::kCreate:
      return Create(event);
    case Op::kDelete:
      return Delete(event);
    case Op::kExpireIdle:
      return ExpireIdle(event);
    case Op::kOpenSession: {
      if (static_cast<int64_t>(sessions_.size()) >= kMaxSessions) ExpireSessions();
      if (static_cast<int64_t>(sessions_.size()) >= kMaxSessions) return Refuse("QUOTA_EXCEEDED");
      const double lease = std::min(event.seconds + 0.5, kMaxLeaseSeconds);
      sessions_[session_count_++] = {lease, now_ + lease};
      return Answer(Numbers(lease, session_count_ - 1));
    }
    case Op::kRenewSession: {
      if (std::string problem = UseSession(event.session); !problem.empty()) return Refuse(problem);
      return Answer({sessions_.at(event.session).lease});
    }
    case Op::kCloseSession: {
      const auto found = sessions_.find(event.session);
      const bool there = found != sessions_.end() && found->second.lease_end > now_;
      if (there) {
        sessions_.erase(found);
        DropSession(event.session);
      }
      return Answer(Numbers(there));
    }
    case Op::kAdvance:
      now_ += event.seconds;
      return {};
    case Op::kExpireSessions: {
      now_ += event.seconds;
      const size_t before = sessions_.size();
      ExpireSessions();
      return Answer(Numbers(before - sessions_.size()));
    }
    case Op::kRestart:
      return Restart();
    default:
      if (std::string problem = UseSession(event.session); !problem.empty()) return Refuse(problem);
      if (std::string problem = FindHeads(event); !problem.empty()) return Refuse(problem);
      if (event.deleted_handle) return {};
      if (std::string problem = AwaitStep(event); !problem.empty()) return Refuse(problem);
      return OnHeads(event);
  }
}

Expected Model::OnHeads(const Event& event) {
  const Target& target = event.targets[0];
  switch (event.op) {
    case Op::kCommit:
      return Commit(event);
    case Op::kDiscard:
      return Discard(event);
    case Op::kAddGradient:
      return AddGradient(event);
    case Op::kSeal:
      return Seal(event);
    case Op::kApply:
      return Apply(event);
    case Op::kDiscardGradient:
      return DiscardGradient(event);
    case Op::kReplace:
      return Replace(event);
    case Op::kReadGradient:
    case Op::kGradientNorm:
      return ReadGradient(event);
    case Op::kGetSteps:
    case Op::kCheckEpoch: {
      const bool steps = event.op == Op::kGetSteps;
      const std::string problem = CheckHead(target.head, target.epoch, steps, steps ? 'N' : 'A');
      return problem.empty() ? Expected() : Refuse(problem);
    }
    case Op::kGetHead:
      return Answer(HeadNumbers(target.head));
    case Op::kSetTensors:
      return SetTensors(event);
    case Op::kReadWeights:
      return ReadWeights(event);
    case Op::kSave:
      return Save(event);
    case Op::kRestore:
      return Restore(event);
    case Op::kTake:
      return Take(event);
    default:
      return Call(event);
  }
}

void Model::ExpireSessions() {
  std::vector<int> ended;
  for (const auto& [id, session] : sessions_) {
    if (session.lease_end <= now_) ended.push_back(id);
  }
  for (const int id : ended) {
    sessions_.erase(id);
    DropSession(id);
  }
}

// ---- what calls begin with -------------------------------------------------------------------------------------------

std::string Model::UseSession(int session) {
  if (session == kNoSession) return "";
  const auto found = sessions_.find(session);
  if (found == sessions_.end() || found->second.lease_end <= now_) return "SESSION_NOT_FOUND";
  found->second.lease_end = now_ + found->second.lease;
  return "";
}

std::string Model::FindHeads(const Event& event) {
  if (event.deleted_handle) return deleted_.contains(event.targets[0].head) ? "HEAD_NOT_FOUND" : "";
  for (const Target& target : event.targets) {
    for (const int head : {target.head, target.teacher}) {
      if (head < 0) continue;
      if (!heads_.contains(head)) return "HEAD_NOT_FOUND";
      At(head).last_use = now_;
    }
  }
  return "";
}

// `need`: 'A' any state, 'N' not lost, 'R' ready.
std::string Model::CheckHead(int name, int epoch, bool names_step, char need) const {
  const ModelHead& head = heads_.at(name);
  if (names_step && !head.spec.trainable) return "HEAD_NOT_TRAINABLE";
  if (head.state == 'B' && epoch != kNoEpoch && (need != 'A' || epoch != head.epoch)) return "STEP_LOST";
  if (epoch != kNoEpoch && epoch != head.epoch) return "EPOCH_FENCED";
  if (need != 'A' && head.state == 'X') return "STEP_LOST";
  if (need == 'R' && head.state == 'L') return "WEIGHTS_NOT_LOADED";
  return "";
}

std::string Model::CheckKey(const Target& target) const {
  if (std::string problem = CheckHead(target.head, target.epoch, true, 'R'); !problem.empty()) return problem;
  return *target.step == heads_.at(target.head).open.number ? "" : "STEP_MISMATCH";
}

// A call for the next step waits for it: until it is cancelled, or its deadline passes; then it is refused like one for any other.
std::string Model::AwaitStep(const Event& event) const {
  for (const Target& target : event.targets) {
    if (!target.step.has_value() || !heads_.at(target.head).spec.trainable || (event.is_call() && !event.backward)) continue;
    if (!CheckHead(target.head, target.epoch, true, 'R').empty()) continue;
    if (*target.step == heads_.at(target.head).open.number + 1 && event.cancel_waiting) return "CANCELLED";
  }
  return "";
}

bool Model::Fails(const Event& event, const char* call) const {
  return event.failing_call != nullptr && std::string(event.failing_call) == call;
}

Expected Model::Fail(const Event& event, const std::set<int>& heads) {
  if (event.failure == ErrorReason::kEngineFailed) std::for_each(heads.begin(), heads.end(), [this](int head) { Lose(head); });
  return Refuse(ErrorReasonName(event.failure));
}

// ---- the observable state --------------------------------------------------------------------------------------------

int Model::held_count() const {
  return static_cast<int>(
      std::count_if(contributions_.begin(), contributions_.end(), [](const auto& entry) { return entry.second.held; }));
}

int Model::FreeSlots(int head) const {
  int taken = 0;
  for (const auto& [id, contribution] : contributions_) taken += !contribution.held && contribution.heads.contains(head);
  return heads_.at(head).spec.staging_slots - taken;
}

void Model::ObserveStep(View& view, const ModelStep& step) const {
  view.Section("step, state", step.number, step.state);
  view.Section("totals", TotalsOf(step));
  view.Section("records: id, state, tombstone, fence, attempt, form, digest, counts, factor, token factors");
  for (const auto& [id, record] : step.records) {
    view.Add(id, record.state, record.tombstone, record.fence);
    if (record.state != 'S' && record.state != 'C') continue;
    const auto& [valid_tokens, loss, token_weight, non_finite_rows] = record.counts;
    view.Add(record.attempt, record.form, record.content >> 16, valid_tokens, loss, token_weight, non_finite_rows);
    const bool decided = record.state == 'C';
    view.Add(decided ? record.factor : 1, decided && record.token_factors > 0);
  }
}

View Model::Observe() {
  View view;
  view.Section("server/: heads, sessions, contributions held as rows", heads_.size(), sessions_.size(), held_count());
  for (auto& [name, head] : heads_) {
    if (head.epoch < 0) head.epoch = epoch_count_++;
    view.Section(kHeadSections[name]);
    view.Section("epoch", head.epoch);
    view.Section("recovers", head.recovers);
    view.Section("state", head.state);
    view.Section("weight version, open step", head.version, head.spec.trainable ? head.open.number : -1);
    view.Section("in use", InUse(head));
    view.Section("restored from", head.restored_checkpoint);
    view.Section("free slots", FreeSlots(name));
    view.Section("checksum", head.has_checksum);
    if (head.state == 'X') continue;  // what is in it is unknown
    if (head.spec.trainable && head.state != 'B') {
      ObserveStep(view, head.open);
      view.Section("last closed", head.closed.has_value());
      if (head.closed.has_value()) ObserveStep(view, *head.closed);
    }
    view.Section("gradient", head.gradient);
    view.Section("gradient of bias", head.gradient_bias);
    if (head.state == 'L') continue;
    const ModelTensors& tensors = head.tensors;
    view.Section("weight", tensors.weight);
    view.Section("bias", tensors.bias);
    view.Section("moments", tensors.moment1, tensors.moment1_bias, tensors.moment2, tensors.moment2_bias);
  }
  return view;
}

}  // namespace headwater::history
