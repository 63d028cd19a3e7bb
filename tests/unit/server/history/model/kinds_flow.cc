#include <vector>

#include "kinds.h"

namespace headwater::history {

std::vector<Kind> KindTable::FlowKinds() {
  return {
      {"eager, rows flow", 20, &G::Call, Flows},
      {"explicit, rows flow", 12, ExplicitMayBeHeld, [](G& g, E& e) { e.late_factors = g.OneIn(3); }, &G::Call, Flows},
      {"refuse, rows flow", 8, Refuse, PerhapsHeld, CallWithSlot, Flows},
      {"two heads, rows flow", 10, PerhapsExplicit, CallOnTwoHeads, Flows},
      {"distillation, rows flow", 6, &G::Call, WithATeacher, Flows},
      {"forward only, rows flow", 5, [](G& g, E& e) { return g.CallOn(e, {g.PickHead(IsReady)}); },
       [](G&, E& e) {
         e.backward = e.names_micro_batch = false;
         e.targets[0].step.reset();
       },
       Flows},
      {"backward on a frozen head, rows flow", 3, CallOnFrozenHead, Flows},
      {"same call again, rows flow", 10, Resend, Flows},
      {"same call again, higher attempt, rows flow", 6, Resend, HigherAttempt, Flows},
      {"other rows under the same id, rows flow", 8, Resend, OtherRows, [](G& g, E& e) { e.first_wins = g.OneIn(2); }, Flows},
      {"rows of a header flow", 6, RowsOfAHeader, Flows},
      {"rows flow, not finite", 3, &G::Call, InfiniteRows, [](G& g, E& e) { e.refuse = e.allow_held = g.OneIn(2); }, Flows},
      {"rows flow, target out of the vocabulary", 3, &G::Call, BadTarget, FlowsWell},
      {"eager, cancelled while rows flow", 6, CancelledWhileComputing, &G::Call, Flows},
      {"cancelled when all rows are there", 6,
       [](G& g, E& e) {
         e.cancel = Cancel::kAtDecision;
         e.is_explicit = e.allow_held = g.OneIn(3);
       },
       &G::Call, Flows},
      {"cancelled before rows flow", 3, CancelledBefore, &G::Call, Flows},
      {"the same call while rows flow", 5, During(Meanwhile::kSameCall), NewCall, Flows},
      {"discarded while rows flow", 4, During(Meanwhile::kDiscard), NewEager,
       [](G& g, E& e) { e.flow = g.OneIn(2) ? Flow::kFlows : Flow::kStalls; }},
      {"a shard is not ready while rows flow", 4, PerhapsExplicit, FlowsWell, &G::Call,
       [](G& g, E& e) { FailAt(e, g.OneIn(2) ? "Upload" : "Compute", ErrorReason::kShardNotReady); }},
      {"the engine fails before rows are decided", 5, [](G& g, E& e) { e.is_explicit = e.allow_held = g.OneIn(3); }, FlowsWell,
       [](G& g, E& e) { return g.CallOn(e, g.OneIn(3) ? SomeHeads(g, 2) : std::vector<int>{g.PickTrainable()}); },
       EngineFails("Upload")},
      {"the engine fails after rows were decided", 1, FlowsWell, &G::Call, EngineFails("Compute")},
      {"two calls beside each other", 24, Beside},
      {"two calls beside each other, rows flow", 16, Beside, PerhapsFlows, [](G& g, E& e) { return Flows(g, e.beside[0]); }},
      {"a repeat beside a call", 8,
       [](G& g, E& e) {
         E other;
         other.kind = e.kind;
         if (!Resend(g, other) || other.is_explicit || other.refuse || other.attempt > 0) return false;
         if (!Beside(g, e) || e.micro_batch == other.micro_batch) return false;
         e.beside = {other};
         return true;
       }},
      {"a call beside one that is cancelled", 5, CancelledWhileComputing, Beside,
       [](G& g, E& e) {
         if (g.OneIn(2)) e.flow = Flow::kFlows;
       }},
      {"the engine fails the call beside", 3, Beside, PerhapsFlows,
       [](G&, E& e) { FailAt(e.beside[0], "Compute", ErrorReason::kEngineFailed); }},
      {"a shard is not ready for the call beside", 4, Beside,
       [](G&, E& e) { FailAt(e.beside[0], "Compute", ErrorReason::kShardNotReady); }},
  };
}

}  // namespace headwater::history
