// Model: micro-batches, from the header to the decision.
#include <algorithm>
#include <cmath>
#include <utility>

#include "model.h"

namespace headwater::history {
namespace {

constexpr int kDirect = 1, kStaged = 2, kHeld = 3;    // ContributionForm
constexpr int kStateStaged = 2, kStateCommitted = 3;  // ContributionState

// What remains of a record that holds nothing: its fence and its tombstone.
void Empty(ModelRecord& record) {
  ModelRecord rest;
  rest.fence = record.fence;
  rest.tombstone = record.tombstone;
  rest.attempt = std::max(record.fence, record.tombstone);
  rest.state = rest.tombstone >= rest.fence ? 'D' : 'N';
  record = rest;
}

void AddUnique(std::vector<std::string>& reasons, const std::string& reason) {
  if (!reason.empty() && std::find(reasons.begin(), reasons.end(), reason) == reasons.end()) reasons.push_back(reason);
}

}  // namespace

std::set<int> Model::TrainableHeads(const Event& event) const {
  std::set<int> heads;
  for (const Target& target : event.targets) {
    if (heads_.at(target.head).spec.trainable) heads.insert(target.head);
  }
  return heads;
}

// ---- what is undecided -----------------------------------------------------------------------------------------------

void Model::Bury(ModelRecord& record, int64_t attempt) {
  record.tombstone = std::max(record.tombstone, attempt);
  Empty(record);
}

void Model::Drop(int contribution, const std::set<int>& without) {
  const auto found = contributions_.find(contribution);
  if (found == contributions_.end()) return;
  const ModelContribution dropped = found->second;
  contributions_.erase(found);
  for (const int head : dropped.heads) {
    if (!without.contains(head)) Bury(At(head).open.records.at(dropped.call.micro_batch), dropped.attempt);
  }
}

void Model::DropAll(int head) {
  std::vector<int> dropped;
  for (const auto& [id, contribution] : contributions_) {
    if (contribution.heads.contains(head)) dropped.push_back(id);
  }
  for (const int id : dropped) Drop(id);
}

void Model::DropSession(int session) {
  std::vector<int> dropped;
  for (const auto& [id, contribution] : contributions_) {
    if (contribution.session == session) dropped.push_back(id);
  }
  for (const int id : dropped) Drop(id);
}

// ---- calls -----------------------------------------------------------------------------------------------------------

std::string Model::CheckBegin(const ModelHead& head, int64_t step, int64_t micro_batch, int64_t attempt) const {
  if (step != head.open.number) return "STEP_MISMATCH";
  const auto found = head.open.records.find(micro_batch);
  const bool known = found != head.open.records.end();
  if (known) {
    const ModelRecord& record = found->second;
    if (attempt <= record.tombstone) return "MICRO_BATCH_DISCARDED";
    const int64_t lowest = record.state == 'C'   ? record.attempt  // a repeat of what is decided is always answered
                           : record.state == 'S' ? std::max(record.attempt, record.fence)
                                                 : record.fence;
    if (attempt < lowest) return "ATTEMPT_SUPERSEDED";
    if (record.is_present()) return "";
  }
  if (head.open.state != 'O') return "STEP_SEALED";
  if (!known && static_cast<int64_t>(head.open.records.size()) >= kMaxStepRecords) return "LIMIT_EXCEEDED";
  return "";
}

// What is wrong with a call before its rows are looked at; any of these may be the answer.
Model::Reasons Model::CheckCall(const Event& event) const {
  Reasons reasons;
  const auto check = [this](int head, int epoch, bool names_step, const std::optional<int64_t>& version) {
    const std::string problem = CheckHead(head, epoch, names_step, 'R');
    const bool is_another = version.has_value() && *version != heads_.at(head).version;
    return problem.empty() && is_another ? "WEIGHT_VERSION_MISMATCH" : problem;
  };
  for (const Target& target : event.targets) {
    const ModelHead& head = heads_.at(target.head);
    const bool is_target = event.backward && head.spec.trainable;
    std::string problem = check(target.head, target.epoch, is_target || target.step.has_value(), target.version);
    if (problem.empty() && is_target) problem = CheckBegin(head, *target.step, event.micro_batch, event.attempt);
    const bool is_new = !head.open.records.contains(event.micro_batch);
    if (problem.empty() && is_target && is_new && (event.is_explicit || event.refuse) && head.spec.staging_slots == 0 &&
        !event.allow_held && !event.late_factors) {
      problem = "STAGING_FULL";
    }
    AddUnique(reasons, problem);
    if (target.teacher >= 0) AddUnique(reasons, check(target.teacher, target.teacher_epoch, false, target.teacher_version));
  }
  return reasons;
}

void Model::Announce(const Event& event) {
  if (event.attempt == 0 || !event.backward) return;
  const std::set<int> targets = TrainableHeads(event);
  for (const int head : targets) {
    ModelRecord& record = At(head).open.records[event.micro_batch];
    if (record.state == 'C') continue;
    record.fence = std::max(record.fence, event.attempt);
    if (record.state == 'S' && record.attempt >= event.attempt) continue;
    if (record.state == 'S') Drop(record.contribution, targets);
    Empty(record);
  }
  // A head that was not among the contribution's, or was passed before it was dropped.
  for (const int head : targets) {
    ModelRecord& record = At(head).open.records[event.micro_batch];
    if (record.state == 'S' && !contributions_.contains(record.contribution)) Empty(record);
  }
}

Expected Model::Call(const Event& event) {
  if (Reasons problems = CheckCall(event); !problems.empty()) return Refuse(problems);
  if (event.op != Op::kRows) Announce(event);
  if (event.op == Op::kAnnounce) return {};
  if (Reasons problems = CheckCall(event); !problems.empty()) return Refuse(problems);
  beside_.clear();
  Expected expected = Compute(event);
  expected.beside = std::exchange(beside_, {});
  return expected;
}

float Model::TeacherValueOf(const Target& target) const {
  return target.teacher < 0 ? 0 : std::trunc(heads_.at(target.teacher).tensors.weight[0]);
}

float Model::ValueOf(const Payload& payload, float teacher_value, size_t row, size_t i) {
  const float hidden = payload.hidden[row * kWidth + i];
  return i > 0 ? hidden : hidden + teacher_value * payload.teacher_hidden[row * kWidth];
}

std::map<int, ModelCounts> Model::CountsOf(const Event& call) const {
  const Payload& payload = payloads_[static_cast<size_t>(call.payload)];
  std::map<int, ModelCounts> counts;
  for (const Target& target : call.targets) {
    ModelCounts& sum = counts[target.head];
    for (int row = target.row_start; row < target.row_start + target.row_count; ++row) {
      const size_t r = static_cast<size_t>(row);
      if (payload.targets[r] == kDefaultIgnoreIndex) continue;
      const double weight = target.weighted ? payload.token_weights[r] : 1;
      const double value = ValueOf(payload, TeacherValueOf(target), r, 0);
      sum.valid_tokens += 1;
      sum.loss += weight * value;
      sum.token_weight += weight;
      const float* hidden = &payload.hidden[r * kWidth];
      sum.non_finite_rows += !std::all_of(hidden, hidden + kWidth, [](float x) { return std::isfinite(x); });
    }
  }
  return counts;
}

void Model::AddContribution(const ModelContribution& contribution, double factor, int token_factors) {
  const Event& call = contribution.call;
  const Payload& payload = payloads_[static_cast<size_t>(call.payload)];
  const std::vector<float> by_token = MakeTokenFactors(token_factors, payload.row_count);
  for (size_t term = 0; term < call.targets.size(); ++term) {
    const Target& target = call.targets[term];
    if (!contribution.heads.contains(target.head)) continue;
    ModelHead& head = At(target.head);
    for (int row = target.row_start; row < target.row_start + target.row_count; ++row) {
      const size_t r = static_cast<size_t>(row);
      if (payload.targets[r] == kDefaultIgnoreIndex) continue;
      float scale = static_cast<float>(factor * target.scale);
      if (target.weighted) scale *= payload.token_weights[r];
      if (!by_token.empty()) scale *= by_token[r];
      const size_t token = static_cast<size_t>(payload.targets[r]);
      for (size_t i = 0; i < kWidth; ++i) {
        head.gradient[token * kWidth + i] += scale * ValueOf(payload, contribution.teachers[term].value, r, i);
      }
      if (head.spec.has_bias) head.gradient_bias[token] += scale;
    }
  }
}

// Sums of each term, versions, and for each row what came back.
std::vector<double> Model::AnswerOf(const Event& event) const {
  const Payload& payload = payloads_[static_cast<size_t>(event.payload)];
  std::vector<double> numbers, grad_hidden(payload.hidden.size()), lse;
  for (const Target& target : event.targets) {
    Event alone = event;
    alone.targets = {target};
    const auto [valid_tokens, loss, token_weight, non_finite_rows] = CountsOf(alone).at(target.head);
    AddNumbers(numbers, valid_tokens, loss, token_weight, non_finite_rows, heads_.at(target.head).version,
               target.teacher >= 0 ? heads_.at(target.teacher).version : 0);
    for (int row = target.row_start; row < target.row_start + target.row_count; ++row) {
      const size_t r = static_cast<size_t>(row);
      const bool ignored = payload.targets[r] == kDefaultIgnoreIndex;
      lse.push_back(ignored ? 0 : heads_.at(target.head).tensors.weight[static_cast<size_t>(payload.targets[r]) * kWidth]);
      if (ignored || !event.backward) continue;
      for (size_t i = 0; i < kWidth; ++i) {
        grad_hidden[r * kWidth + i] +=
            target.scale * (target.weighted ? payload.token_weights[r] : 1) * ValueOf(payload, TeacherValueOf(target), r, i);
      }
    }
  }
  AddNumbers(numbers, lse, grad_hidden);
  return numbers;
}

bool Model::CallBeside(const Event& event, const std::set<int>& targets) {
  std::set<int> begun;
  for (const int head : targets) {
    if (At(head).open.records.try_emplace(event.micro_batch).second) begun.insert(head);
  }
  Expected beside = Run(event.beside.at(0));
  beside_ = {std::move(beside)};
  bool lost = false;
  for (const int head : targets) {
    lost = lost || At(head).state == 'X';
    if (begun.contains(head)) At(head).open.records.erase(event.micro_batch);
  }
  return lost;
}

// The header is accepted, and the rows are there, or come.
Expected Model::Compute(const Event& event) {
  const Payload& payload = payloads_[static_cast<size_t>(event.payload)];
  const std::set<int> targets = event.backward ? TrainableHeads(event) : std::set<int>();
  const uint64_t content = ContentOf(event);
  size_t known = 0, equal = 0;
  bool any_present = false;
  for (const int head : targets) {
    const auto found = At(head).open.records.find(event.micro_batch);
    if (found == At(head).open.records.end() || !found->second.is_present()) continue;
    any_present = true;
    if (found->second.state == 'S' && found->second.attempt < event.attempt) continue;
    ++known;
    equal += found->second.content == content;
  }
  // Only what is not known is computed while its rows come; else they have to be there first.
  const bool flows = event.flow != Flow::kComplete && !any_present;
  std::string rows_problem;
  if (event.flow == Flow::kBreaks) rows_problem = "STRIPE_LOST";
  if (event.flow == Flow::kRefused && event.backward) rows_problem = "PROTOCOL_VIOLATION";
  if (!flows && !rows_problem.empty()) return Refuse(rows_problem);
  if (known > 0 && known < targets.size()) return Refuse("MICRO_BATCH_CONFLICT");
  if (equal < known && !event.first_wins) return Refuse("MICRO_BATCH_CONFLICT");
  const bool adds = !targets.empty() && known == 0;
  if (adds) Announce(event);  // rows whose header was not heard of
  if (event.cancel == Cancel::kBefore) return Refuse("CANCELLED");

  const bool needs_slot = event.is_explicit || event.refuse;
  int form = kDirect;
  if (needs_slot) {
    form = event.late_factors ? kHeld : kStaged;
    for (const int head : targets) {
      if (FreeSlots(head) <= 0) form = kHeld;
    }
  }
  const bool may_hold = event.allow_held || event.late_factors;
  Reasons problems;
  // Only what waits for its decision takes its place among the rows that are kept.
  const bool no_place = event.is_explicit && held_count() >= kMaxHeldCount;
  if (adds && form == kHeld && (!may_hold || no_place)) AddUnique(problems, "STAGING_FULL");
  int known_state = 0, known_form = 0;
  if (!adds && !targets.empty()) {
    // Of the first head that is named: with FIRST_WINS they may know different micro-batches.
    const auto first = std::find_if(event.targets.begin(), event.targets.end(),
                                    [&targets](const Target& target) { return targets.contains(target.head); });
    const ModelRecord& record = At(first->head).open.records.at(event.micro_batch);
    known_state = record.state == 'S' ? kStateStaged : kStateCommitted;
    known_form = record.form;
  }
  const bool lost = event.meanwhile == Meanwhile::kOtherCall && CallBeside(event, adds ? targets : std::set<int>()) && adds;
  if (flows) {
    // Looked at whenever rows are awaited.
    if (event.cancel == Cancel::kWhileComputing) AddUnique(problems, "CANCELLED");
    const bool is_asked = event.backward && event.flow == Flow::kFlows;
    if (event.cancel == Cancel::kAtDecision && is_asked) AddUnique(problems, "CANCELLED");
    if (lost && problems.empty()) return Refuse("STEP_LOST");
    AddUnique(problems, rows_problem);
    if (Fails(event, "Upload")) AddUnique(problems, ErrorReasonName(event.failure));
  }
  const bool ends_undecided = flows && !problems.empty();
  bool loses = false;
  if (Fails(event, "Compute")) {
    AddUnique(problems, ErrorReasonName(event.failure));
    loses = adds && form == kDirect && event.failure == ErrorReason::kEngineFailed && !ends_undecided;
  }
  const std::map<int, ModelCounts> counts = CountsOf(event);
  bool is_finite = true, in_vocab = true;
  for (const auto& [head, sum] : counts) is_finite = is_finite && sum.non_finite_rows == 0;
  for (const Target& target : event.targets) {
    for (int row = target.row_start; row < target.row_start + target.row_count; ++row) {
      in_vocab = in_vocab && payload.targets[static_cast<size_t>(row)] < kMaxVocab;
    }
  }
  if (!in_vocab) AddUnique(problems, "TARGET_OUT_OF_VOCAB");
  if (event.refuse && !is_finite) AddUnique(problems, "NON_FINITE_VALUES");
  const bool cancelled = event.cancel == Cancel::kWhileComputing && adds && form != kDirect;
  if (cancelled) AddUnique(problems, "CANCELLED");
  // EAGER with a slot is committed at once.
  const bool commits_at_once = adds && needs_slot && !event.is_explicit;
  if (problems.empty() && commits_at_once && Fails(event, form == kStaged ? "Commit" : "Compute")) {
    problems = {ErrorReasonName(event.failure)};
    loses = event.failure == ErrorReason::kEngineFailed;
  }
  if (loses) {
    for (const int head : targets) Lose(head);
  }
  // That there is no place is found out when all has been computed, and before those whose sessions have ended give theirs up.
  const bool is_computed = problems.empty() || (problems == Reasons{"STAGING_FULL"} && may_hold);
  if (is_computed && event.meanwhile == Meanwhile::kLeasePasses) {
    now_ += kMaxLeaseSeconds + 1;
    // The call's own session does not end while the call runs, and counts from its end.
    if (event.session != kNoSession) sessions_.at(event.session).lease_end = now_ + sessions_.at(event.session).lease;
    ExpireSessions();
  }
  if (!problems.empty()) return Refuse(problems);

  Expected expected;
  expected.numbers = AnswerOf(event);
  int state = 0;
  if (adds) {
    state = event.is_explicit ? kStateStaged : kStateCommitted;
    ModelContribution contribution;
    contribution.call = event;
    contribution.heads = targets;
    contribution.attempt = event.attempt;
    contribution.session = event.session;
    contribution.held = form == kHeld;
    for (const Target& target : event.targets) {
      ModelTeacher& teacher = contribution.teachers.emplace_back();
      if (target.teacher >= 0) teacher = {TeacherValueOf(target), heads_.at(target.teacher).version, lives_[target.teacher]};
    }
    for (const int head : targets) {
      if (At(head).state == 'X') {
        contribution.heads.erase(head);
        continue;
      }
      ModelRecord& record = At(head).open.records[event.micro_batch];
      record.state = event.is_explicit ? 'S' : 'C';
      record.attempt = event.attempt;
      record.fence = std::max(record.fence, event.attempt);
      record.form = form;
      record.content = content;
      record.counts = counts.at(head);
      record.contribution = event.is_explicit ? next_contribution_ : -1;
    }
    if (event.is_explicit) {
      contributions_[next_contribution_++] = contribution;
    } else {
      AddContribution(contribution, 1, 0);
    }
  } else {
    state = known_state;
    form = known_form;
  }
  if (lost) return Refuse("STEP_LOST");  // but what another head's accumulator has stays there
  if (event.meanwhile == Meanwhile::kCloseSession && sessions_.erase(event.session) > 0) DropSession(event.session);
  AddNumbers(expected.numbers, state, form, !adds && known > 0 && equal == known, !adds && equal < known,
             event.backward ? content >> 16 : 0);
  if (event.meanwhile == Meanwhile::kSameCall || event.meanwhile == Meanwhile::kDiscard || event.meanwhile == Meanwhile::kCommit) {
    expected.numbers.push_back(adds);  // answered MICRO_BATCH_IN_PROGRESS
  }
  return expected;
}

// ---- decisions -------------------------------------------------------------------------------------------------------

// What stands against a decision whatever it is; any may be the answer. Fills in the undecided contributions that it names.
Model::Reasons Model::CheckDecision(const Event& event, std::set<int>& contributions) const {
  Reasons reasons;
  std::set<int> named;
  for (const Target& target : event.targets) {
    if (!named.insert(target.head).second) AddUnique(reasons, "INVALID_COMBINATION");
    if (std::string problem = CheckKey(target); !problem.empty()) {
      AddUnique(reasons, problem);
      continue;
    }
    const auto& records = heads_.at(target.head).open.records;
    const auto found = records.find(event.micro_batch);
    if (found != records.end() && found->second.state == 'S') contributions.insert(found->second.contribution);
  }
  for (const int id : contributions) {
    if (contributions_.at(id).heads != named) AddUnique(reasons, "INVALID_COMBINATION");
  }
  return reasons;
}

Expected Model::Commit(const Event& event) {
  const std::vector<float> by_token =
      MakeTokenFactors(event.token_factors, payloads_[static_cast<size_t>(event.payload)].row_count);
  const int factors_id = by_token.empty() ? 0 : event.token_factors * 10 + static_cast<int>(by_token.size());
  std::set<int> contributions;
  Reasons problems = CheckDecision(event, contributions);
  if (event.token_factors == 4) AddUnique(problems, "INVALID_FIELD");
  size_t committed = 0, checked = 0;
  for (const Target& target : event.targets) {
    if (!CheckKey(target).empty()) continue;
    if (!std::isfinite(static_cast<float>(event.factor))) {
      AddUnique(problems, "INVALID_FIELD");
      continue;
    }
    ++checked;
    const auto& records = At(target.head).open.records;
    const auto found = records.find(event.micro_batch);
    if (found == records.end()) {
      AddUnique(problems, "MICRO_BATCH_NOT_FOUND");
      continue;
    }
    const ModelRecord& record = found->second;
    if (event.attempt <= record.tombstone) {
      AddUnique(problems, "MICRO_BATCH_DISCARDED");
    } else if ((event.attempt > record.attempt && record.state != 'C') ||
               (!record.is_present() && event.attempt == record.attempt)) {
      AddUnique(problems, "MICRO_BATCH_NOT_FOUND");
    } else if (event.attempt < record.attempt) {
      AddUnique(problems, "ATTEMPT_SUPERSEDED");
    } else if (record.state == 'C') {
      ++committed;
      if (record.factor != event.factor || record.token_factors != factors_id) AddUnique(problems, "MICRO_BATCH_CONFLICT");
    }
  }
  if (committed > 0 && committed < checked) AddUnique(problems, "INVALID_COMBINATION");
  if (!problems.empty()) return Refuse(problems);
  if (contributions.empty()) return Answer({0});

  const int id = *contributions.begin();
  const ModelContribution contribution = contributions_.at(id);
  if (contribution.session != kNoSession && contribution.session != event.session) return Refuse("NOT_SESSION_OWNER");
  if (!contribution.held && factors_id != 0) return Refuse("INVALID_COMBINATION");
  if (contribution.held) {
    for (size_t i = 0; i < contribution.call.targets.size(); ++i) {
      const int teacher = contribution.call.targets[i].teacher;
      if (teacher < 0 || !contribution.heads.contains(contribution.call.targets[i].head)) continue;
      if (!heads_.contains(teacher) || lives_[teacher] != contribution.teachers[i].life) {
        AddUnique(problems, "HEAD_NOT_FOUND");
      } else if (std::string problem = CheckHead(teacher, kNoEpoch, false, 'R'); !problem.empty()) {
        AddUnique(problems, problem);
      } else if (At(teacher).version != contribution.teachers[i].version) {
        AddUnique(problems, "WEIGHT_VERSION_MISMATCH");
      }
    }
    const int row_count = payloads_[static_cast<size_t>(contribution.call.payload)].row_count;
    if (!by_token.empty() && static_cast<int>(by_token.size()) != row_count) AddUnique(problems, "SHAPE_MISMATCH");
    if (!problems.empty()) return Refuse(problems);
  }
  if (Fails(event, contribution.held ? "Compute" : "Commit")) return Fail(event, contribution.heads);
  contributions_.erase(id);
  AddContribution(contribution, event.factor, event.token_factors);
  for (const int head : contribution.heads) {
    ModelRecord& record = At(head).open.records.at(event.micro_batch);
    record.state = 'C';
    record.contribution = -1;
    record.factor = event.factor;
    record.token_factors = factors_id;
  }
  return Answer({1});
}

Expected Model::Discard(const Event& event) {
  std::set<int> contributions;
  Reasons problems = CheckDecision(event, contributions);
  for (const Target& target : event.targets) {
    if (!CheckKey(target).empty()) continue;
    const ModelHead& head = At(target.head);
    const auto found = head.open.records.find(event.micro_batch);
    if (found == head.open.records.end()) {
      const bool full = static_cast<int64_t>(head.open.records.size()) >= kMaxStepRecords;
      if (head.open.state == 'O' && full) AddUnique(problems, "LIMIT_EXCEEDED");
    } else if (found->second.state == 'C') {
      AddUnique(problems, "MICRO_BATCH_CONFLICT");
    } else if (found->second.state == 'S' && event.attempt < found->second.attempt) {
      AddUnique(problems, "ATTEMPT_SUPERSEDED");
    } else if (found->second.state == 'S' && event.attempt == found->second.attempt) {
      const int owner = contributions_.at(found->second.contribution).session;
      if (owner != kNoSession && owner != event.session) AddUnique(problems, "NOT_SESSION_OWNER");
    }
  }
  if (!problems.empty()) return Refuse(problems);
  for (const int id : contributions) Drop(id);
  for (const Target& target : event.targets) {
    auto& records = At(target.head).open.records;
    const bool known = records.contains(event.micro_batch);
    // Nothing new comes into a sealed step: no tombstone is needed.
    if (known || At(target.head).open.state == 'O') Bury(records[event.micro_batch], event.attempt);
  }
  return Answer(Numbers(!contributions.empty()));
}

Expected Model::AddGradient(const Event& event) {
  const Target& target = event.targets[0];
  ModelHead& head = At(target.head);
  Reasons problems;
  if (!std::isfinite(static_cast<float>(event.factor))) problems.push_back("INVALID_FIELD");
  if (std::string problem = CheckHead(target.head, target.epoch, true, 'R'); !problem.empty()) {
    problems.push_back(problem);
    return Refuse(problems);
  }
  if (event.row_count < 1 || event.row_start + event.row_count > head.spec.vocab_size) problems.push_back("CHUNK_OUT_OF_RANGE");
  AddUnique(problems, CheckBegin(head, *target.step, event.micro_batch, event.attempt));
  if (!problems.empty()) return Refuse(problems);
  if (event.cancel == Cancel::kBefore) return Refuse("CANCELLED");
  const auto found = head.open.records.find(event.micro_batch);
  const bool superseded = found != head.open.records.end() && found->second.state == 'S' && event.attempt > found->second.attempt;
  if (found != head.open.records.end() && found->second.is_present() && !superseded) {
    return found->second.content == ContentOf(event) ? Answer({0}) : Refuse("MICRO_BATCH_CONFLICT");
  }
  if (superseded) Drop(found->second.contribution, {target.head});
  const bool fails = Fails(event, "AddToGradient");
  if (fails && event.failure == ErrorReason::kEngineFailed) return Fail(event, {target.head});
  ModelRecord& record = head.open.records[event.micro_batch];
  record.fence = std::max(record.fence, event.attempt);
  if (fails) {
    Empty(record);
    if (record.fence == 0 && record.tombstone < 0) head.open.records.erase(event.micro_batch);
    return Refuse(ErrorReasonName(event.failure));
  }
  ModelRecord added;
  added.state = 'C';
  added.attempt = event.attempt;
  added.fence = record.fence;
  added.tombstone = record.tombstone;
  added.form = kDirect;
  added.content = ContentOf(event);
  record = added;
  const std::vector<float> part = MakeNumbers(event.numbers, event.row_count * kWidth);
  for (size_t i = 0; i < part.size(); ++i) {
    head.gradient[static_cast<size_t>(event.row_start * kWidth) + i] += static_cast<float>(event.factor) * part[i];
  }
  return Answer({1});
}

}  // namespace headwater::history
