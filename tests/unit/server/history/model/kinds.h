// The kinds of events, each with how often it is chosen and how it is made.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_MODEL_KINDS_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_MODEL_KINDS_H_

#include <algorithm>
#include <functional>
#include <type_traits>
#include <vector>

#include "tests/unit/server/history/generator.h"

namespace headwater::history {

struct Kind {
  // `made_by`: steps in making an event, functions of the generator and the event. One that returns false has found nothing that
  // the event could be about; one without a result cannot fail.
  template <typename... Steps>
  Kind(const char* kind_name, int how_often, const Steps&... made_by) : name(kind_name), weight(how_often) {
    const auto add = [this](const auto& step) {
      steps.push_back([step](Generator& generator, Event& event) {
        if constexpr (std::is_void_v<std::invoke_result_t<decltype(step), Generator&, Event&>>) {
          std::invoke(step, generator, event);
          return true;
        } else {
          return std::invoke(step, generator, event);
        }
      });
    };
    (add(made_by), ...);
  }
  // Takes the steps until one returns false.
  bool Make(Generator& generator, Event& event) const {
    return std::all_of(steps.begin(), steps.end(), [&](const auto& step) { return step(generator, event); });
  }

  const char* name;
  int weight;
  std::vector<std::function<bool(Generator&, Event&)>> steps;
};

std::vector<Kind> Kinds();

// The kinds and their steps, which use the generator's helpers.
struct KindTable {
  using G = Generator;
  using E = Event;

  static bool IsReady(const ModelHead& head) { return head.state == 'R'; }
  static bool IsFrozen(const ModelHead& head) { return !head.spec.trainable && head.state == 'R'; }
  static bool HasSlots(const ModelHead& head) { return head.state == 'R' && head.spec.staging_slots > 0; }
  static bool CallWithSlot(G& g, E& e) { return g.CallOn(e, {g.PickHead(HasSlots)}); }
  static bool IsFresh(const G& g, const E& e) {
    for (const Target& target : e.targets) {
      if (g.At(target.head).open.state != 'O') return false;
      const auto& records = g.At(target.head).open.records;
      const auto found = records.find(e.micro_batch);
      if (found != records.end() && (found->second.state == 'S' || found->second.state == 'C')) return false;
      if (found == records.end() && static_cast<int64_t>(records.size()) >= kMaxStepRecords) return false;
    }
    return true;
  }
  // An EXPLICIT call that is new and finds a slot.
  static bool NewExplicit(G& g, E& e) {
    if (!CallWithSlot(g, e) || !IsFresh(g, e) || g.model_.FreeSlots(e.targets[0].head) <= 0) return false;
    e.is_explicit = true;
    return true;
  }
  static bool NewEager(G& g, E& e) { return g.Call(e) && IsFresh(g, e); }
  static std::vector<int> SomeHeads(G& g, size_t count) {
    std::vector<int> heads;
    for (int attempt = 0; attempt < 12 && heads.size() < count; ++attempt) {
      const int head = g.PickTrainable();
      if (head >= 0 && std::find(heads.begin(), heads.end(), head) == heads.end()) heads.push_back(head);
    }
    if (heads.size() < count) heads = {-1};
    return heads;
  }
  static bool AddTeacher(G& g, Target& target) {
    target.teacher = g.OneIn(3) ? g.PickHead(IsReady) : g.PickHead(IsFrozen);
    if (target.teacher < 0) return false;
    if (g.OneIn(2)) target.teacher_epoch = g.At(target.teacher).epoch;
    return true;
  }
  static bool Resend(G& g, E& e) {
    if (g.sent_.empty()) return false;
    const char* kind = e.kind;
    e = g.PickFrom(g.sent_);
    e.kind = kind;
    e.cancel = Cancel::kNever;
    e.cancel_waiting = false;
    e.session = kNoSession;
    for (const Target& target : e.targets) {
      if (!g.model_.heads().contains(target.head)) return false;
      if (target.teacher >= 0 && !g.model_.heads().contains(target.teacher)) return false;
    }
    return true;
  }
  static void FailAt(E& e, const char* call, ErrorReason reason) {
    e.failing_call = call;
    e.failure = reason;
  }

  // Half of the rows that flow come as they should.
  static void Flows(G& g, E& e) {
    constexpr Flow kFlows[] = {Flow::kFlows, Flow::kFlows, Flow::kFlows, Flow::kStalls, Flow::kBreaks, Flow::kRefused};
    e.flow = kFlows[g.Pick(6)];
  }
  // A call of one or two heads with another one beside it, of other micro-batches; they stage nothing, and there is room for both.
  static bool Beside(G& g, E& e) {
    if (!g.CallOn(e, g.OneIn(3) ? SomeHeads(g, 2) : std::vector<int>{g.PickTrainable()})) return false;
    E other;
    other.kind = e.kind;
    const int head = g.OneIn(3) ? g.PickTrainable() : e.targets[0].head;
    if (!g.CallOn(other, {head})) return false;
    other.session = kNoSession;
    other.attempt = 0;
    if (g.OneIn(4)) {
      other.backward = other.names_micro_batch = false;
      other.targets[0].step.reset();
    } else if (other.micro_batch == e.micro_batch) {
      other.micro_batch = (e.micro_batch + 1) % kMicroBatchIds;
    }
    e.meanwhile = Meanwhile::kOtherCall;
    e.beside = {other};
    return true;
  }

  // ---- steps of several kinds
  static auto OnHead(Op op, bool (*wanted)(const ModelHead& head) = nullptr) {
    return [op, wanted](G& g, E& e) { return g.OnHead(e, op, wanted); };
  }
  static auto OnStep(Op op) {
    return [op](G& g, E& e) { return g.OnStep(e, op); };
  }
  static bool CallOnTwoHeads(G& g, E& e) { return g.CallOn(e, SomeHeads(g, 2)); }
  static bool CallOnFrozenHead(G& g, E& e) {
    e.names_micro_batch = false;
    return g.CallOn(e, {g.PickHead(IsFrozen)});
  }
  static bool NewCall(G& g, E& e) { return g.OneIn(2) ? NewEager(g, e) : NewExplicit(g, e); }
  static bool WithATeacher(G& g, E& e) { return AddTeacher(g, e.targets[0]); }
  static void Explicit(G&, E& e) { e.is_explicit = true; }
  static void ExplicitMayBeHeld(G&, E& e) { e.is_explicit = e.allow_held = true; }
  static void PerhapsExplicit(G& g, E& e) { e.is_explicit = e.allow_held = g.OneIn(2); }
  static void PerhapsLateFactors(G& g, E& e) { e.is_explicit = e.late_factors = g.OneIn(2); }
  static void PerhapsHeld(G& g, E& e) { e.allow_held = g.OneIn(2); }
  static void Refuse(G&, E& e) { e.refuse = true; }
  static void OtherRows(G&, E& e) { e.targets[0].scale += 1; }
  static void Rows(G& g, E& e, int payload) {
    e.payload = payload;
    e.targets[0].row_count = g.model_.payloads()[static_cast<size_t>(payload)].row_count;
  }
  static void InfiniteRows(G& g, E& e) { Rows(g, e, kInfinitePayload); }
  static void BadTarget(G& g, E& e) { Rows(g, e, kBadTargetPayload); }
  static void FlowsWell(G&, E& e) { e.flow = Flow::kFlows; }
  static void PerhapsFlows(G& g, E& e) {
    if (g.OneIn(2)) Flows(g, e);
  }
  static void AnyMicroBatch(G& g, E& e) { e.micro_batch = g.Pick(kMicroBatchIds); }
  static void AnyAttempt(G& g, E& e) { e.attempt = g.Pick(3); }
  static void HigherAttempt(G&, E& e) { e.attempt += 1; }
  static bool LowerAttempt(G&, E& e) { return e.attempt-- > 0; }
  static void CancelledBefore(G&, E& e) { e.cancel = Cancel::kBefore; }
  static void CancelledWhileComputing(G&, E& e) { e.cancel = Cancel::kWhileComputing; }
  static auto During(Meanwhile meanwhile) {
    return [meanwhile](G&, E& e) { e.meanwhile = meanwhile; };
  }
  static void ToCommit(G&, E& e) { e.op = Op::kCommit; }
  static void ToDiscard(G&, E& e) { e.op = Op::kDiscard; }
  static bool Contribution(G& g, E& e) { return g.PickContribution(e); }
  static bool ContributionOfASession(G& g, E& e) {
    return g.PickContribution(e, [](const ModelContribution& it) { return it.session != kNoSession; });
  }
  static bool ContributionOfSeveralHeads(G& g, E& e) {
    return g.PickContribution(e, [](const ModelContribution& it) { return it.heads.size() > 1; });
  }
  static bool Committed(G& g, E& e) { return g.PickRecord(e, 'C'); }
  static bool Discarded(G& g, E& e) { return g.PickRecord(e, 'D'); }
  static bool Announced(G& g, E& e) { return g.PickRecord(e, 'N'); }
  static bool RowsOfAHeader(G& g, E& e) {
    if (g.announced_.empty()) return false;
    const char* kind = e.kind;
    e = g.PickFrom(g.announced_);
    e.kind = kind;
    e.op = Op::kRows;
    return true;
  }
  static bool OfASession(G& g, E& e) { return (e.session = g.PickSession()) != kNoSession; }
  static void AnotherSession(G& g, E& e) { e.session = g.OneIn(2) ? g.PickSession() : kNoSession; }
  static void UnknownSession(G& g, E& e) { e.session = g.OneIn(3) ? kForeignSession : g.Pick(g.model_.session_count() + 1); }
  static void InAnEarlierLife(G& g, E& e) { e.targets[0].epoch = g.PickStaleEpoch(e.targets[0].head); }
  static void PerhapsInAnEarlierLife(G& g, E& e) {
    if (g.OneIn(2)) InAnEarlierLife(g, e);
  }
  // A deleted head, by a pointer to it.
  static bool DeletedHead(G& g, E& e) {
    if (g.model_.deleted().empty()) return false;
    e.deleted_handle = true;
    e.targets = {Target()};
    e.targets[0].epoch = kForeignEpoch;
    return true;
  }
  static void PreviousStep(G&, E& e) { --*e.targets[0].step; }
  static void NextStep(G&, E& e) { ++*e.targets[0].step; }
  static void PerhapsCancelled(G& g, E& e) { e.cancel_waiting = g.OneIn(2); }
  static void ExpectsIds(G& g, E& e) { e.expected = g.CommittedIds(e.targets[0].head, false); }
  static void ExpectsNumber(G& g, E& e) { e.expected = g.CommittedIds(e.targets[0].head, true); }
  static void Weight(G&, E& e) { e.tensors = {HeadTensor::kWeight}; }
  static void Bias(G&, E& e) { e.tensors = {HeadTensor::kBias}; }
  static void AnyNumbers(G& g, E& e) { e.numbers = 1 + g.Pick(8); }
  static void OfAnotherSize(G&, E& e) { e.wrong_size = true; }
  static bool NewestCheckpoint(G& g, E& e) { return g.PickCheckpoint(e, true); }
  static bool AnyCheckpoint(G& g, E& e) { return g.PickCheckpoint(e, false); }
  static void Create(G& g, E& e) {
    e.op = Op::kCreate;
    e.targets = {Target()};
    e.targets[0].head = g.Pick(kHeadCount);
  }
  static void Attach(G&, E& e) { e.if_exists = heads::IfExists::kAttachIfSameSpec; }
  static void WithAnotherSpec(G&, E& e) { e.other_spec = true; }
  static auto EngineFails(const char* call) {
    return [call](G&, E& e) { FailAt(e, call, ErrorReason::kEngineFailed); };
  }
  static auto ShardNotReady(const char* call) {
    return [call](G&, E& e) { FailAt(e, call, ErrorReason::kShardNotReady); };
  }

  static std::vector<Kind> CallKinds();
  static std::vector<Kind> FlowKinds();
  static std::vector<Kind> DecisionKinds();
  static std::vector<Kind> StepKinds();
  static std::vector<Kind> WeightKinds();
  static std::vector<Kind> ServerKinds();
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_MODEL_KINDS_H_
