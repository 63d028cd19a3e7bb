#include "generator.h"

#include <algorithm>
#include <utility>

#include "tests/unit/server/history/model/kinds.h"

namespace headwater::history {
namespace {

constexpr size_t kRememberedCalls = 24;
constexpr int kCallsPerCrash = 80;
// They are few, and mostly of heads that have no files to be waited for.
constexpr int kDeletionsPerCrash = 12;

// May arrive late or twice.
bool CanBeLate(const Event& event) {
  if (event.crash_at > 0 || event.failing_call != nullptr || event.meanwhile != Meanwhile::kNothing || event.deleted_handle)
    return false;
  constexpr Op kOps[] = {Op::kCall,         Op::kAnnounce,    Op::kCommit,          Op::kDiscard, Op::kAddGradient,
                         Op::kSeal,         Op::kApply,       Op::kDiscardGradient, Op::kReplace, Op::kReadGradient,
                         Op::kSetTensors,   Op::kSave,        Op::kRestore,         Op::kTake,    Op::kDelete,
                         Op::kRenewSession, Op::kCloseSession};
  return std::find(std::begin(kOps), std::end(kOps), event.op) != std::end(kOps);
}

}  // namespace

// ---- what there is ---------------------------------------------------------------------------------------------------

int Generator::PickHead(bool (*wanted)(const ModelHead& head)) {
  std::vector<int> heads;
  for (const auto& [name, head] : model_.heads()) {
    if (wanted == nullptr || wanted(head)) heads.push_back(name);
  }
  return heads.empty() ? -1 : PickFrom(heads);
}

int Generator::PickTrainable() {
  return PickHead([](const ModelHead& head) { return head.spec.trainable && head.state == 'R'; });
}

Target Generator::TargetOf(int head) const {
  Target target;
  target.head = head;
  target.epoch = At(head).epoch;
  if (At(head).spec.trainable) target.step = At(head).open.number;
  return target;
}

int Generator::PickSession() {
  std::vector<int> sessions;
  for (const auto& [id, session] : model_.sessions()) {
    if (session.lease_end > model_.now()) sessions.push_back(id);
  }
  return sessions.empty() ? kNoSession : PickFrom(sessions);
}

bool Generator::PickContribution(Event& event, bool (*wanted)(const ModelContribution& contribution)) {
  std::vector<const ModelContribution*> contributions;
  for (const auto& [id, contribution] : model_.contributions()) {
    if (wanted == nullptr || wanted(contribution)) contributions.push_back(&contribution);
  }
  if (contributions.empty()) return false;
  const ModelContribution& contribution = *PickFrom(contributions);
  for (const int head : contribution.heads) event.targets.push_back(TargetOf(head));
  event.micro_batch = contribution.call.micro_batch;
  event.attempt = contribution.attempt;
  event.payload = contribution.call.payload;
  const bool lapsed =
      !model_.sessions().contains(contribution.session) || model_.sessions().at(contribution.session).lease_end <= model_.now();
  event.session = contribution.session != kNoSession && lapsed ? kNoSession : contribution.session;
  return true;
}

bool Generator::PickRecord(Event& event, char state) {
  std::vector<std::pair<int, int64_t>> records;
  for (const auto& [name, head] : model_.heads()) {
    if (head.state != 'R') continue;
    for (const auto& [id, record] : head.open.records) {
      if (record.state == state) records.push_back({name, id});
    }
  }
  if (records.empty()) return false;
  const auto [head, id] = PickFrom(records);
  const ModelRecord& record = At(head).open.records.at(id);
  event.targets = {TargetOf(head)};
  event.micro_batch = id;
  event.attempt = record.attempt;
  event.factor = record.factor;
  event.token_factors = record.token_factors / 10;
  return true;
}

bool Generator::PickCheckpoint(Event& event, bool newest) {
  const int head = event.targets[0].head;
  const auto found = model_.checkpoints().find(head);
  if (found == model_.checkpoints().end() || found->second.empty()) return false;
  std::vector<std::pair<int64_t, std::string>> all;
  for (const auto& [name, checkpoint] : found->second) all.push_back({checkpoint.sequence, name});
  std::sort(all.begin(), all.end());
  event.checkpoint = newest ? all.back().second : PickFrom(all).second;
  return true;
}

int Generator::PickStaleEpoch(int head) {
  const int count = model_.epoch_count();
  const int epoch = Pick(std::max(count, 1));
  return count == 0 || epoch == At(head).epoch || OneIn(5) ? kForeignEpoch : epoch;
}

void Generator::PickId(Event& event) {
  std::vector<int64_t> fresh;
  for (int64_t id = 0; id < kMicroBatchIds; ++id) {
    const bool known = std::any_of(event.targets.begin(), event.targets.end(),
                                   [&](const Target& target) { return At(target.head).open.records.contains(id); });
    if (!known) fresh.push_back(id);
  }
  event.micro_batch = fresh.empty() || OneIn(8) ? Pick(static_cast<int>(kMicroBatchIds)) : PickFrom(fresh);
  event.attempt = OneIn(8) ? 1 + Pick(2) : 0;
  for (const Target& target : event.targets) {
    const auto found = At(target.head).open.records.find(event.micro_batch);
    if (found == At(target.head).open.records.end()) continue;
    event.attempt = std::max({event.attempt, found->second.fence, found->second.tombstone + 1});
  }
}

heads::ExpectedMicroBatches Generator::CommittedIds(int head, bool count) {
  std::vector<int64_t> ids;
  for (const auto& [id, record] : At(head).open.records) {
    if (record.state == 'C') ids.push_back(id);
  }
  if (count) return static_cast<int64_t>(ids.size());
  std::shuffle(ids.begin(), ids.end(), random_);
  return ids;
}

// ---- events of a sort ------------------------------------------------------------------------------------------------

bool Generator::CallOn(Event& event, const std::vector<int>& heads) {
  event.op = Op::kCall;
  event.payload = Pick(kInfinitePayload);
  const int row_count = model_.payloads()[static_cast<size_t>(event.payload)].row_count;
  for (const int head : heads) {
    if (head < 0) return false;
    Target target = TargetOf(head);
    target.row_start = heads.size() > 1 ? Pick(row_count) : 0;
    target.row_count = heads.size() > 1 ? 1 + Pick(row_count - target.row_start) : row_count;
    target.scale = OneIn(3) ? 1 + Pick(3) : 1;
    event.targets.push_back(target);
  }
  PickId(event);
  if (OneIn(3)) event.session = PickSession();
  return true;
}

bool Generator::Call(Event& event) { return CallOn(event, {PickTrainable()}); }

bool Generator::OnHead(Event& event, Op op, bool (*wanted)(const ModelHead& head)) {
  const int head = PickHead(wanted);
  if (head < 0) return false;
  event.op = op;
  event.targets = {TargetOf(head)};
  event.targets[0].step.reset();
  return true;
}

bool Generator::OnStep(Event& event, Op op) {
  const int head = PickTrainable();
  if (head < 0) return false;
  event.op = op;
  event.targets = {TargetOf(head)};
  return true;
}

bool Generator::Seal(Event& event) {
  if (!OnStep(event, Op::kSeal)) return false;
  event.expected = CommittedIds(event.targets[0].head, false);
  return true;
}

bool Generator::Apply(Event& event) {
  const int head = PickHead([](const ModelHead& it) {
    return it.state == 'R' && it.spec.trainable && !std::holds_alternative<std::monostate>(it.spec.optimizer);
  });
  if (head < 0) return false;
  event.op = Op::kApply;
  event.targets = {TargetOf(head)};
  event.apply.learning_rate = Pick(2);
  event.apply.gradient_factor = OneIn(4) ? -1 : 1;
  return true;
}

bool Generator::Replace(Event& event) {
  const int head = PickHead([](const ModelHead& it) { return it.state == 'R' && it.open.state == 'S'; });
  if (head < 0) return false;
  event.op = Op::kReplace;
  event.targets = {TargetOf(head)};
  const bool missing_bias = At(head).spec.has_bias && At(head).shadow.contains(HeadTensor::kWeight);
  event.tensors = {missing_bias ? HeadTensor::kBias : HeadTensor::kWeight};
  event.numbers = 1 + Pick(8);
  return true;
}

bool Generator::AddGradient(Event& event) {
  if (!OnStep(event, Op::kAddGradient)) return false;
  PickId(event);
  event.row_start = Pick(3);
  event.row_count = 1 + Pick(3 - event.row_start);
  event.numbers = 1 + Pick(6);
  event.factor = 1 + Pick(3);
  return true;
}

bool Generator::Prepare(Event& event) {
  if (model_.heads().size() < 2 || (model_.heads().size() < 4 && OneIn(6))) {
    event.kind = "create";
    event.op = Op::kCreate;
    event.targets = {Target()};
    event.targets[0].head = OneIn(8) ? 5 : Pick(5);
    return true;
  }
  const auto begin = [&](const char* kind, Op op, int head) {
    event.kind = kind;
    event.op = op;
    event.targets = {TargetOf(head)};
    event.targets[0].step.reset();
    return true;
  };
  const int loading = PickHead([](const ModelHead& head) { return head.state == 'L'; });
  if (loading >= 0 && OneIn(2)) {
    begin("set tensors of a new head", Op::kSetTensors, loading);
    event.tensors = {HeadTensor::kWeight};
    if (At(loading).spec.has_bias) event.tensors = {HeadTensor::kBias, HeadTensor::kWeight};
    event.numbers = 1 + Pick(8);
    return true;
  }
  const int restored = PickHead([](const ModelHead& head) { return head.state == 'B'; });
  if (restored >= 0 && OneIn(3)) return begin("take a head that came back", Op::kTake, restored);
  const int lost = PickHead([](const ModelHead& head) { return head.state == 'X'; });
  if (lost >= 0 && OneIn(4)) {
    begin("set the tensors of a lost head", Op::kSetTensors, lost);
    event.tensors = {HeadTensor::kWeight};
    if (At(lost).spec.has_bias && !OneIn(3)) event.tensors.push_back(HeadTensor::kBias);
    event.numbers = 1 + Pick(8);
    return true;
  }
  return false;
}

// ---- choosing --------------------------------------------------------------------------------------------------------

Event Generator::Choose() {
  Event event;
  if (Prepare(event)) return event;
  static const std::vector<Kind> kinds = Kinds();
  static const int total = [] {
    int sum = 0;
    for (const Kind& kind : kinds) sum += kind.weight;
    return sum;
  }();
  for (int attempt = 0; attempt < 20; ++attempt) {
    int left = Pick(total);
    const Kind* chosen = kinds.data();
    while (left >= chosen->weight) left -= (chosen++)->weight;
    event = Event();
    event.kind = chosen->name;
    if (chosen->Make(*this, event)) return event;
  }
  event = Event();
  event.kind = "the clock goes on";
  event.op = Op::kAdvance;
  event.seconds = 1;
  return event;
}

Event Generator::Next() {
  if (!delayed_.empty() && OneIn(9)) {
    const size_t index = static_cast<size_t>(Pick(static_cast<int>(delayed_.size())));
    Event event = delayed_[index];
    delayed_.erase(delayed_.begin() + static_cast<std::ptrdiff_t>(index));
    event.late = true;
    return event;
  }
  Event event = Choose();
  if (CanBeLate(event)) {
    if (OneIn(20)) {  // overtaken by another one
      delayed_.push_back(std::exchange(event, Choose()));
    } else if (OneIn(10)) {  // delivered twice
      delayed_.push_back(event);
      delayed_.back().again = true;
    }
  }
  if (event.op == Op::kAnnounce) announced_.push_back(event);
  if (event.op == Op::kCall && event.failing_call == nullptr && event.meanwhile == Meanwhile::kNothing) {
    sent_.push_back(event);
    if (sent_.size() > kRememberedCalls) sent_.erase(sent_.begin());
  }
  const int calls_per_crash = event.op == Op::kDelete ? kDeletionsPerCrash : kCallsPerCrash;
  if (OneIn(calls_per_crash) && CanBeLate(event)) Crash(event, OneIn(4) ? 1 : OneIn(2) ? 3 : 60);
  if (event.op == Op::kRestart || event.crash_at > 0) announced_.clear();
  return event;
}

std::vector<std::string> Generator::KindNames() {
  std::vector<std::string> names = {"create", "set tensors of a new head", "take a head that came back",
                                    "set the tensors of a lost head"};
  for (const Kind& kind : Kinds()) {
    if (std::find(names.begin(), names.end(), kind.name) == names.end()) names.push_back(kind.name);
  }
  return names;
}

}  // namespace headwater::history
