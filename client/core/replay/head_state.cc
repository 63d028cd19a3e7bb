#include "client/core/replay/head_state.h"

#include <algorithm>

#include "client/core/call/messages.h"

namespace headwater::client::internal {
namespace {

// The server takes no more of them (TakeHeadRequest.recovers_epochs).
constexpr size_t kMaxRecoversEpochs = 16;
// States of one name that are kept though no call and no log uses them.
constexpr size_t kMaxIdleStates = 16;

using Lock = std::lock_guard<std::mutex>;

void MakeRoom(std::vector<std::shared_ptr<HeadState>>& states) {
  if (states.size() < kMaxIdleStates) return;
  const auto idle = std::find_if(states.begin(), states.end(), [](const auto& state) { return state.use_count() == 1; });
  if (idle != states.end()) states.erase(idle);
}

}  // namespace

HeadState::HeadState(const v1::Head& head, std::string incarnation)
    : name(head.name()),
      trainable(head.spec().trainable()),
      is_introduced_(true),
      epoch_(head.epoch()),
      lineage_{head.epoch()},
      epochs_{head.epoch()},
      incarnation_(std::move(incarnation)),
      weight_checksum_(head.weight_checksum()),
      known_open_step_(head.open_step()),
      first_logged_step_(head.open_step()) {}

HeadState::HeadState(std::string head, const std::string& epoch)
    : name(std::move(head)),
      trainable(true),
      is_introduced_(false),
      epoch_(epoch),
      lineage_{epoch},
      epochs_{epoch},
      known_open_step_(0),
      first_logged_step_(INT64_MAX) {}

void HeadState::RaiseFirstLoggedStep(int64_t step) {
  Lock lock(mutex_);
  first_logged_step_ = std::max(first_logged_step_, step);
}

void HeadState::SawStep(int64_t step) {
  Lock lock(mutex_);
  if (step <= known_open_step_) return;
  known_open_step_ = step;
  // The last closed step still answers repeats of its decisions.
  attempts_.erase(attempts_.begin(), attempts_.lower_bound({step - 1, 0}));
}

void HeadState::Begin(const v1::Head& head, std::string incarnation) {
  Lock lock(mutex_);
  incarnation_ = std::move(incarnation);
  weight_checksum_ = head.weight_checksum();
  known_open_step_ = head.open_step();
  first_logged_step_ = head.open_step();
}

void HeadState::End() {
  Lock lock(mutex_);
  first_logged_step_ = std::max(first_logged_step_, known_open_step_ + 1);
}

void HeadState::AdoptRecovered(const v1::Head& head, std::string incarnation) {
  Lock lock(mutex_);
  if (head.epoch() != epoch_) lineage_.push_back(head.epoch());
  if (lineage_.size() > kMaxRecoversEpochs) lineage_.erase(lineage_.begin());
  epochs_.insert(head.epoch());
  epoch_ = head.epoch();
  incarnation_ = std::move(incarnation);
  weight_checksum_ = head.weight_checksum();
  known_open_step_ = std::max(known_open_step_, head.open_step());
}

int64_t HeadState::AttemptOf(int64_t step, int64_t micro_batch) const {
  Lock lock(mutex_);
  const auto known = attempts_.find({step, micro_batch});
  return known == attempts_.end() ? 0 : known->second.highest;
}

int64_t HeadState::FirstAttempt(int64_t step, int64_t micro_batch, int64_t named) const {
  Lock lock(mutex_);
  const auto known = attempts_.find({step, micro_batch});
  if (known == attempts_.end()) return named;
  const Attempts& attempts = known->second;
  return named == 0 || (attempts.begun <= named && named <= attempts.highest) ? attempts.highest : named;
}

void HeadState::NoteAttempt(int64_t step, int64_t micro_batch, int64_t attempt, int64_t named) {
  if (attempt == 0) return;
  Lock lock(mutex_);
  Attempts& known = attempts_[{step, micro_batch}];
  if (attempt <= known.highest) return;
  if (named > known.highest) known.begun = named;
  known.highest = attempt;
}

void HeadState::TakeAttempts(const HeadState& other) {
  std::scoped_lock lock(mutex_, other.mutex_);
  attempts_ = other.attempts_;
}

void SetEpochs(google::protobuf::Message& message, const HeadUses& heads) {
  SetEpochs(message, [&heads](const NamedHead& head) -> std::string {
    const auto use = std::find_if(heads.begin(), heads.end(), [&](const HeadUse& known) { return known.state->name == head.name; });
    return head.epoch.empty() || use == heads.end() ? "" : use->epoch;
  });
}

std::shared_ptr<HeadState> HeadStates::FindLocked(const std::string& name, const std::string& epoch) const {
  const auto named = states_.find(name);
  if (named == states_.end()) return nullptr;
  for (const std::shared_ptr<HeadState>& state : named->second) {
    if (state->HasEpoch(epoch)) return state;
  }
  return nullptr;
}

std::shared_ptr<HeadState> HeadStates::Find(const std::string& name, const std::string& epoch) {
  Lock lock(mutex_);
  if (std::shared_ptr<HeadState> state = FindLocked(name, epoch); state != nullptr) return state;
  std::vector<std::shared_ptr<HeadState>>& states = states_[name];
  MakeRoom(states);
  return states.emplace_back(std::make_shared<HeadState>(name, epoch));
}

std::shared_ptr<HeadState> HeadStates::FindKnown(const std::string& name, const std::string& epoch) const {
  Lock lock(mutex_);
  return FindLocked(name, epoch);
}

std::vector<std::shared_ptr<HeadState>> HeadStates::AllOf(const std::string& name) const {
  Lock lock(mutex_);
  const auto named = states_.find(name);
  return named == states_.end() ? std::vector<std::shared_ptr<HeadState>>() : named->second;
}

void HeadStates::Introduce(const v1::Head& head, const std::string& incarnation, const std::shared_ptr<HeadState>& before) {
  const auto described = std::make_shared<HeadState>(head, incarnation);
  if (before != nullptr) described->TakeAttempts(*before);
  Lock lock(mutex_);
  std::vector<std::shared_ptr<HeadState>>& states = states_[head.name()];
  for (std::shared_ptr<HeadState>& state : states) {
    if (!state->HasEpoch(head.epoch())) continue;
    if (!state->is_introduced()) {
      // A call has named the epoch before: nothing of it is in the log, but it may have attempts.
      if (before == nullptr) described->TakeAttempts(*state);
      state = described;
    } else if (before != nullptr) {
      state->Begin(head, incarnation);
    } else {
      state->SawStep(head.open_step());
    }
    return;
  }
  MakeRoom(states);
  states.push_back(described);
}

HeadUses HeadStates::UsesOf(const google::protobuf::Message& message) {
  HeadUses uses;
  ForEachHead(message, [&](const NamedHead& head) {
    if (head.epoch.empty()) return;
    const auto known = std::find_if(uses.begin(), uses.end(), [&](const HeadUse& use) { return use.state->name == head.name; });
    if (known == uses.end()) {
      uses.push_back({.state = Find(head.name, head.epoch), .step = head.step});
    } else if (!known->step.has_value()) {
      known->step = head.step;
    }
  });
  return uses;
}

}  // namespace headwater::client::internal
