// The kinds of events, each with how often it is chosen and how it is made.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_MODEL_KINDS_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_MODEL_KINDS_H_

#include <algorithm>
#include <vector>

#include "tests/unit/server/history/generator.h"

namespace headwater::history {

struct Kind {
  const char* name;
  int weight;
  // False if there is nothing that such an event could be about.
  bool (*make)(Generator& generator, Event& event);
};

std::vector<Kind> Kinds();

// The makers use the generator's helpers.
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
  static bool FailAt(E& e, const char* call, ErrorReason reason) {
    e.failing_call = call;
    e.failure = reason;
    return true;
  }

  // Half of the rows that flow come as they should.
  static bool Flows(G& g, E& e) {
    constexpr Flow kFlows[] = {Flow::kFlows, Flow::kFlows, Flow::kFlows, Flow::kStalls, Flow::kBreaks, Flow::kRefused};
    e.flow = kFlows[g.Pick(6)];
    return true;
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

  static void AddCalls(std::vector<Kind>& kinds);
  static void AddFlows(std::vector<Kind>& kinds);
  static void AddDecisions(std::vector<Kind>& kinds);
  static void AddSteps(std::vector<Kind>& kinds);
  static void AddWeights(std::vector<Kind>& kinds);
  static void AddServer(std::vector<Kind>& kinds);
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_MODEL_KINDS_H_
