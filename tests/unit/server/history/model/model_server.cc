// Model: weights, checkpoints, heads, the server's end and return.
#include <algorithm>

#include "model.h"

namespace headwater::history {

// ---- weights ---------------------------------------------------------------------------------------------------------

Expected Model::SetTensors(const Event& event) {
  const Target& target = event.targets[0];
  ModelHead& head = At(target.head);
  Reasons problems;
  const auto sets = [&event](HeadTensor tensor) {
    return std::find(event.tensors.begin(), event.tensors.end(), tensor) != event.tensors.end();
  };
  if (sets(HeadTensor::kBias) && !head.spec.has_bias) problems.push_back("INVALID_FIELD");
  if (event.wrong_size) problems.push_back("DATA_LENGTH_MISMATCH");
  if (std::string problem = CheckHead(target.head, target.epoch, false, 'A'); !problem.empty()) problems.push_back(problem);
  if (!problems.empty()) return Refuse(problems);
  const bool was_loading = head.state == 'L';
  if (Fails(event, "WriteTensor")) {
    if (!was_loading) {
      Lose(target.head);
    } else {
      if (sets(HeadTensor::kWeight)) head.has_weight = head.has_checksum = false;
      if (sets(HeadTensor::kBias)) head.has_bias = false;
    }
    return Refuse(ErrorReasonName(event.failure));
  }
  was_loading ? Reset(target.head, head.open.number) : StartAgain(target.head, head.open.number);
  if (sets(HeadTensor::kWeight)) {
    head.tensors.weight = MakeNumbers(event.numbers, head.spec.vocab_size * kWidth);
    head.has_weight = head.has_checksum = true;
  }
  if (sets(HeadTensor::kBias)) {
    head.tensors.bias = MakeNumbers(event.numbers, head.spec.vocab_size);
    head.has_bias = true;
  }
  for (std::vector<float>* moment :
       {&head.tensors.moment1, &head.tensors.moment1_bias, &head.tensors.moment2, &head.tensors.moment2_bias}) {
    std::fill(moment->begin(), moment->end(), 0.0f);
  }
  head.state = head.has_weight && (head.has_bias || !head.spec.has_bias) ? 'R' : 'L';
  head.update_count = 0;
  ++head.version;
  return Answer(HeadNumbers(target.head));
}

Expected Model::ReadWeights(const Event& event) {
  const Target& target = event.targets[0];
  if (std::string problem = CheckHead(target.head, target.epoch, false, 'A'); !problem.empty()) return Refuse(problem);
  if (std::string problem = CheckHead(target.head, kNoEpoch, false, 'R'); !problem.empty()) return Refuse(problem);
  const ModelHead& head = At(target.head);
  if (event.version.has_value() && *event.version != head.version) return Refuse("WEIGHT_VERSION_MISMATCH");
  if (Fails(event, "ReadTensor")) return Fail(event);
  return Answer(Numbers(head.tensors.weight));
}

// ---- checkpoints -----------------------------------------------------------------------------------------------------

void Model::SaveAs(int name, const std::string& checkpoint) {
  const ModelHead& head = At(name);
  const int64_t sequence = ++saved_[name];
  const int64_t first = live_.emplace(name, sequence).first->second;
  checkpoints_[name][checkpoint] = {head.spec, sequence, head.open.number, head.update_count, head.tensors, false, first};
}

Expected Model::Save(const Event& event) {
  const Target& target = event.targets[0];
  const ModelHead& head = At(target.head);
  if (head.spec.trainable && target.epoch == kNoEpoch) return Refuse("MISSING_FIELD");
  if (std::string problem = CheckHead(target.head, target.epoch, false, 'R'); !problem.empty()) return Refuse(problem);
  if (event.checkpoint.front() == '.') return Refuse("INVALID_NAME");
  if (checkpoints_[target.head].contains(event.checkpoint) && !event.overwrite) return Refuse("CHECKPOINT_ALREADY_EXISTS");
  Reasons problems;
  if (event.disk_full) problems.push_back("DISK_FULL");
  if (Fails(event, "ReadTensor")) problems.push_back(ErrorReasonName(event.failure));
  if (!problems.empty()) return Refuse(problems);
  SaveAs(target.head, event.checkpoint);
  return Answer(Numbers(head.open.number));
}

void Model::LoadInto(ModelHead& head, const ModelCheckpoint& checkpoint) {
  head.tensors = checkpoint.tensors;
  head.update_count = checkpoint.update_count;
  head.has_weight = head.has_checksum = true;
  head.has_bias = head.spec.has_bias;
  head.state = 'R';
  ++head.version;
}

Expected Model::Restore(const Event& event) {
  const Target& target = event.targets[0];
  if (std::string problem = CheckHead(target.head, target.epoch, false, 'A'); !problem.empty()) return Refuse(problem);
  ModelHead& head = At(target.head);
  const auto found = checkpoints_[target.head].find(event.checkpoint);
  if (found == checkpoints_[target.head].end()) return Refuse("CHECKPOINT_NOT_FOUND");
  const ModelCheckpoint& checkpoint = found->second;
  Reasons problems;
  if (checkpoint.damaged) problems = {"CHECKSUM_MISMATCH", "FILE_CORRUPT"};
  if (checkpoint.spec.vocab_size != head.spec.vocab_size) problems.push_back("CHECKPOINT_SPEC_MISMATCH");
  if (!problems.empty()) return Refuse(problems);
  if (Fails(event, "WriteTensor")) {
    Lose(target.head);
    return Refuse(ErrorReasonName(event.failure));
  }
  live_.emplace(target.head, checkpoint.first);  // a head that has no run yet goes on with this one
  StartAgain(target.head, checkpoint.step);
  LoadInto(head, checkpoint);
  return Answer(HeadNumbers(target.head));
}

// ---- heads -----------------------------------------------------------------------------------------------------------

ModelHead Model::NewHead(const HeadSpec& spec) const {
  ModelHead head;
  head.spec = spec;
  head.last_use = now_;
  head.open.number = spec.initial_step;
  const size_t rows = static_cast<size_t>(spec.vocab_size), bias_rows = spec.has_bias ? rows : 0;
  const size_t moment_rows = std::holds_alternative<AdamWSpec>(spec.optimizer) ? rows : 0;
  head.tensors.weight.resize(rows * kWidth);
  head.tensors.bias.resize(bias_rows);
  if (spec.trainable) {
    head.gradient.resize(rows * kWidth);
    head.gradient_bias.resize(bias_rows);
  }
  for (auto* moment : {&head.tensors.moment1, &head.tensors.moment2}) moment->resize(moment_rows * kWidth);
  for (auto* moment : {&head.tensors.moment1_bias, &head.tensors.moment2_bias}) {
    moment->resize(moment_rows > 0 ? bias_rows : 0);
  }
  return head;
}

bool Model::HasRoom(int name, const HeadSpec& spec) const {
  int64_t count = 0, bytes = spec.vocab_size * kWidth * 4;
  for (const auto& [other, head] : heads_) {
    if (NameOf(other).tenant != NameOf(name).tenant) continue;
    ++count;
    bytes += head.spec.vocab_size * kWidth * 4;
  }
  return static_cast<int64_t>(heads_.size()) < kMaxHeads && count < kMaxHeadsPerTenant && bytes <= kMaxTenantMemoryBytes;
}

Expected Model::Create(const Event& event) {
  const int name = event.targets[0].head;
  const HeadSpec spec = SpecOf(name, event.other_spec);
  if (const auto found = heads_.find(name); found != heads_.end()) {
    if (event.if_exists == heads::IfExists::kFail) return Refuse("HEAD_ALREADY_EXISTS");
    if (found->second.spec.vocab_size != spec.vocab_size) return Refuse("HEAD_SPEC_MISMATCH");
    found->second.last_use = now_;
    return Answer(Numbers(HeadNumbers(name), 0));
  }
  if (!HasRoom(name, spec)) return Refuse("QUOTA_EXCEEDED");
  if (Fails(event, "CreateHead")) return Fail(event);
  heads_[name] = NewHead(spec);
  ++lives_[name];
  // What a former one has saved that could not come back is not its own.
  live_.erase(name);
  return Answer(Numbers(HeadNumbers(name), 1));
}

bool Model::InUse(const ModelHead& head) const {
  return head.open.state == 'S' || std::any_of(head.open.records.begin(), head.open.records.end(),
                                               [](const auto& entry) { return entry.second.is_present(); });
}

void Model::Remove(int name) {
  DropAll(name);
  heads_.erase(name);
  live_.erase(name);
  deleted_.insert(name);
}

Expected Model::Delete(const Event& event) {
  const Target& target = event.targets[0];
  if (!heads_.contains(target.head)) {
    // One that could not come back is forgotten.
    return target.epoch == kNoEpoch && live_.erase(target.head) > 0 ? Expected() : Refuse("HEAD_NOT_FOUND");
  }
  if (std::string problem = CheckHead(target.head, target.epoch, false, 'A'); !problem.empty()) return Refuse(problem);
  if (InUse(At(target.head)) && !event.force) return Refuse("HEAD_IN_USE");
  Remove(target.head);
  return {};
}

Expected Model::ExpireIdle(const Event& event) {
  now_ += event.seconds;
  Expected expected;
  std::vector<int> idle;
  for (const auto& [name, head] : heads_) {
    if (head.last_use + kIdleSeconds <= now_) idle.push_back(name);
  }
  for (const int name : idle) {
    // Only a head that is ready has anything to save.
    if (event.save_first && At(name).state == 'R') {
      if (event.disk_full) continue;
      SaveAs(name, "idle-" + std::to_string(At(name).open.number));
    }
    Remove(name);
    expected.numbers.push_back(name);
  }
  return expected;
}

// The process ends and starts again: what is saved comes back, all else is gone.
Expected Model::Restart() {
  heads_.clear();
  contributions_.clear();
  sessions_.clear();
  deleted_.clear();
  Expected expected;
  std::vector<int> names;
  for (const auto& [name, first] : live_) names.push_back(name);
  std::sort(names.begin(), names.end(),
            [](int a, int b) { return std::pair(NameOf(a).tenant, NameOf(a).head) < std::pair(NameOf(b).tenant, NameOf(b).head); });
  for (const int name : names) {
    const std::string* newest = nullptr;
    for (const auto& [id, checkpoint] : checkpoints_[name]) {
      if (checkpoint.damaged || checkpoint.first != live_.at(name)) continue;  // or of a former head
      if (newest == nullptr || checkpoint.sequence > checkpoints_[name].at(*newest).sequence) newest = &id;
    }
    if (newest == nullptr || !HasRoom(name, checkpoints_[name].at(*newest).spec)) continue;
    expected.numbers.push_back(name);
    const ModelCheckpoint& checkpoint = checkpoints_[name].at(*newest);
    ModelHead head = NewHead(checkpoint.spec);
    ++lives_[name];
    head.open.number = checkpoint.step;
    LoadInto(head, checkpoint);
    if (head.spec.trainable) {
      head.state = 'B';
      head.restored_checkpoint = *newest;
    }
    heads_[name] = head;
  }
  std::sort(expected.numbers.begin(), expected.numbers.end());
  return expected;
}

// What the call was about in the files is done or not, never by half; all else is gone anyway.
Expected Model::CrashIn(const Event& event) {
  if (event.crash_changed) {
    Event whole = event;
    whole.crash_at = 0;
    Model after(*this);
    if (after.Run(whole).reasons != Reasons{"OK"}) return Refuse("that the files change");
    checkpoints_ = std::move(after.checkpoints_);
    saved_ = std::move(after.saved_);
    live_ = std::move(after.live_);
  }
  Expected expected = Restart();
  expected.numbers.insert(expected.numbers.begin(), event.crash_changed);
  return expected;
}

}  // namespace headwater::history
