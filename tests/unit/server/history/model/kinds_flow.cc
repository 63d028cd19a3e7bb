#include <string>
#include <vector>

#include "kinds.h"

namespace headwater::history {

void KindTable::AddFlows(std::vector<Kind>& kinds) {
  kinds.insert(
      kinds.end(),
      {
          {"eager, rows flow", 20, [](G& g, E& e) { return g.Call(e) && Flows(g, e); }},
          {"explicit, rows flow", 12,
           [](G& g, E& e) {
             e.is_explicit = e.allow_held = true;
             e.late_factors = g.OneIn(3);
             return g.Call(e) && Flows(g, e);
           }},
          {"refuse, rows flow", 8,
           [](G& g, E& e) {
             e.refuse = true;
             e.allow_held = g.OneIn(2);
             return CallWithSlot(g, e) && Flows(g, e);
           }},
          {"two heads, rows flow", 10,
           [](G& g, E& e) {
             e.is_explicit = e.allow_held = g.OneIn(2);
             return g.CallOn(e, SomeHeads(g, 2)) && Flows(g, e);
           }},
          {"distillation, rows flow", 6, [](G& g, E& e) { return g.Call(e) && AddTeacher(g, e.targets[0]) && Flows(g, e); }},
          {"forward only, rows flow", 5,
           [](G& g, E& e) {
             if (!g.CallOn(e, {g.PickHead(IsReady)})) return false;
             e.backward = e.names_micro_batch = false;
             e.targets[0].step.reset();
             return Flows(g, e);
           }},
          {"backward on a frozen head, rows flow", 3,
           [](G& g, E& e) {
             e.names_micro_batch = false;
             return g.CallOn(e, {g.PickHead(IsFrozen)}) && Flows(g, e);
           }},
          {"same call again, rows flow", 10, [](G& g, E& e) { return Resend(g, e) && Flows(g, e); }},
          {"same call again, higher attempt, rows flow", 6,
           [](G& g, E& e) {
             if (!Resend(g, e)) return false;
             e.attempt += 1;
             return Flows(g, e);
           }},
          {"other rows under the same id, rows flow", 8,
           [](G& g, E& e) {
             if (!Resend(g, e)) return false;
             e.targets[0].scale += 1;
             e.first_wins = g.OneIn(2);
             return Flows(g, e);
           }},
          {"rows of a header flow", 6,
           [](G& g, E& e) {
             if (g.announced_.empty()) return false;
             const char* kind = e.kind;
             e = g.PickFrom(g.announced_);
             e.kind = kind;
             e.op = Op::kRows;
             return Flows(g, e);
           }},
          {"rows flow, not finite", 3,
           [](G& g, E& e) {
             if (!g.Call(e)) return false;
             e.payload = kInfinitePayload;
             e.targets[0].row_count = g.model_.payloads()[kInfinitePayload].row_count;
             e.refuse = e.allow_held = g.OneIn(2);
             return Flows(g, e);
           }},
          {"rows flow, target out of the vocabulary", 3,
           [](G& g, E& e) {
             if (!g.Call(e)) return false;
             e.payload = kBadTargetPayload;
             e.targets[0].row_count = g.model_.payloads()[kBadTargetPayload].row_count;
             e.flow = Flow::kFlows;
             return true;
           }},
          {"eager, cancelled while rows flow", 6,
           [](G& g, E& e) {
             e.cancel = Cancel::kWhileComputing;
             return g.Call(e) && Flows(g, e);
           }},
          {"cancelled when all rows are there", 6,
           [](G& g, E& e) {
             e.cancel = Cancel::kAtDecision;
             e.is_explicit = e.allow_held = g.OneIn(3);
             return g.Call(e) && Flows(g, e);
           }},
          {"cancelled before rows flow", 3,
           [](G& g, E& e) {
             e.cancel = Cancel::kBefore;
             return g.Call(e) && Flows(g, e);
           }},
          {"the same call while rows flow", 5,
           [](G& g, E& e) {
             e.meanwhile = Meanwhile::kSameCall;
             return (g.OneIn(2) ? NewEager(g, e) : NewExplicit(g, e)) && Flows(g, e);
           }},
          {"discarded while rows flow", 4,
           [](G& g, E& e) {
             e.meanwhile = Meanwhile::kDiscard;
             if (!NewEager(g, e)) return false;
             e.flow = g.OneIn(2) ? Flow::kFlows : Flow::kStalls;
             return true;
           }},
          {"a shard is not ready while rows flow", 4,
           [](G& g, E& e) {
             e.is_explicit = e.allow_held = g.OneIn(2);
             e.flow = Flow::kFlows;
             return g.Call(e) && FailAt(e, g.OneIn(2) ? "Upload" : "Compute", ErrorReason::kShardNotReady);
           }},
          {"the engine fails before rows are decided", 5,
           [](G& g, E& e) {
             e.is_explicit = e.allow_held = g.OneIn(3);
             e.flow = Flow::kFlows;
             return g.CallOn(e, g.OneIn(3) ? SomeHeads(g, 2) : std::vector<int>{g.PickTrainable()}) &&
                    FailAt(e, "Upload", ErrorReason::kEngineFailed);
           }},
          {"the engine fails after rows were decided", 1,
           [](G& g, E& e) {
             e.flow = Flow::kFlows;
             return g.Call(e) && FailAt(e, "Compute", ErrorReason::kEngineFailed);
           }},
          {"two calls beside each other", 24, [](G& g, E& e) { return Beside(g, e); }},
          {"two calls beside each other, rows flow", 16,
           [](G& g, E& e) {
             if (!Beside(g, e)) return false;
             if (g.OneIn(2)) Flows(g, e);
             return Flows(g, e.beside[0]);
           }},
          {"a repeat beside a call", 8,
           [](G& g, E& e) {
             E other;
             other.kind = e.kind;
             if (!Resend(g, other) || other.is_explicit || other.refuse || other.attempt > 0) return false;
             if (!Beside(g, e) || e.micro_batch == other.micro_batch) return false;
             e.beside = {other};
             return true;
           }},
          {"a call beside one that is cancelled", 5,
           [](G& g, E& e) {
             e.cancel = Cancel::kWhileComputing;
             if (!Beside(g, e)) return false;
             if (g.OneIn(2)) e.flow = Flow::kFlows;
             return true;
           }},
          {"the engine fails the call beside", 3,
           [](G& g, E& e) {
             if (!Beside(g, e)) return false;
             if (g.OneIn(2)) Flows(g, e);
             return FailAt(e.beside[0], "Compute", ErrorReason::kEngineFailed);
           }},
          {"a shard is not ready for the call beside", 4,
           [](G& g, E& e) { return Beside(g, e) && FailAt(e.beside[0], "Compute", ErrorReason::kShardNotReady); }},
      });
}

}  // namespace headwater::history
