#include <limits>

#include "kinds.h"

namespace headwater::history {

std::vector<Kind> KindTable::CallKinds() {
  return {
      {"eager", 60, &G::Call},
      {"eager, token weights", 8, &G::Call, [](G&, E& e) { e.targets[0].weighted = true; }},
      {"eager, refuse", 16, Refuse, CallWithSlot},
      {"eager, refuse, may be held", 14, [](G&, E& e) { e.refuse = e.allow_held = true; }, &G::Call},
      {"eager, not finite", 3, &G::Call, InfiniteRows},
      {"refuse, not finite", 8, &G::Call, InfiniteRows, Refuse,
       [](G& g, E& e) {
         e.is_explicit = g.OneIn(2);
         e.allow_held = g.OneIn(2);
       }},
      {"explicit", 36, Explicit, CallWithSlot},
      {"explicit, a head without slots", 4, Explicit, &G::Call},
      {"explicit, may be held", 36, ExplicitMayBeHeld, &G::Call},
      {"explicit, late token factors", 24, [](G&, E& e) { e.is_explicit = e.late_factors = true; }, &G::Call},
      {"explicit, of a session", 16, ExplicitMayBeHeld, &G::Call, OfASession},
      {"two heads, eager", 16, CallOnTwoHeads},
      {"two heads, explicit", 16, Explicit, PerhapsHeld, CallOnTwoHeads},
      {"three heads, explicit", 10, ExplicitMayBeHeld, [](G& g, E& e) { return g.CallOn(e, SomeHeads(g, 3)); }},
      {"two terms of one head", 8,
       [](G& g, E& e) {
         const int head = g.PickTrainable();
         e.is_explicit = e.allow_held = g.OneIn(2);
         return g.CallOn(e, {head, head});
       }},
      {"a trainable and a frozen head", 6, PerhapsLateFactors,
       [](G& g, E& e) {
         return g.CallOn(e, {g.PickTrainable(), g.PickHead(IsFrozen)});
       }},
      {"distillation", 16, PerhapsLateFactors, &G::Call, WithATeacher},
      {"several teachers", 8,
       [](G& g, E& e) {
         const int head = g.PickTrainable();
         e.is_explicit = e.late_factors = g.OneIn(2);
         return g.CallOn(e, {head, head}) && AddTeacher(g, e.targets[0]) && AddTeacher(g, e.targets[1]);
       }},
      {"forward only", 8, [](G& g, E& e) { return g.CallOn(e, {g.PickHead(nullptr)}); },
       [](G& g, E& e) {
         e.backward = e.names_micro_batch = false;
         e.targets[0].step.reset();
         if (g.OneIn(2)) e.targets[0].epoch = kNoEpoch;
       }},
      {"backward on a frozen head", 4, CallOnFrozenHead},
      {"target out of the vocabulary", 4, &G::Call, BadTarget, PerhapsExplicit},
      {"same call again", 24, Resend},
      {"same call again, higher attempt", 16, Resend, [](G& g, E& e) { e.attempt += 1 + g.Pick(2); }},
      {"same call again, lower attempt", 6, Resend, LowerAttempt},
      {"other rows under the same id", 10, Resend, OtherRows},
      {"other rows under the same id, first wins", 12, Resend, OtherRows, [](G&, E& e) { e.first_wins = true; }},
      {"other rows, higher attempt", 6, Resend, OtherRows, HigherAttempt},
      {"header alone", 14, PerhapsExplicit, &G::Call,
       [](G& g, E& e) {
         e.op = Op::kAnnounce;
         if (g.OneIn(2)) e.attempt += 1;
       }},
      {"header of a higher attempt", 8, Resend, [](G&, E& e) { e.op = Op::kAnnounce; }, HigherAttempt},
      {"rows of a header", 14, RowsOfAHeader},
      {"call for the next step", 6, &G::Call, NextStep},
      {"call for the next step, cancelled while it waits", 4, &G::Call, NextStep, [](G&, E& e) { e.cancel_waiting = true; }},
      {"call for a step beyond the next", 3, &G::Call, [](G&, E& e) { *e.targets[0].step += 2; }, PerhapsCancelled},
      {"call for a step before", 3, &G::Call, PreviousStep},
      {"call of an earlier life", 10, &G::Call, InAnEarlierLife},
      {"call on a head that is not ready", 6,
       [](G& g, E& e) {
         return g.CallOn(e, {g.PickHead([](const ModelHead& head) { return head.spec.trainable && head.state != 'R'; })});
       }},
      {"call on two heads, one of an earlier life", 3, CallOnTwoHeads,
       [](G& g, E& e) { e.targets[1].epoch = g.PickStaleEpoch(e.targets[1].head); }},
      {"call of a session that is not there", 4, &G::Call, UnknownSession},
      {"expected weight version", 6, &G::Call, [](G& g, E& e) { e.targets[0].version = g.At(e.targets[0].head).version; }},
      {"expected weight version, another", 3, &G::Call,
       [](G& g, E& e) { e.targets[0].version = g.At(e.targets[0].head).version - 1; }},
      {"expected version of the teacher, another", 3, &G::Call, WithATeacher,
       [](G& g, E& e) { e.targets[0].teacher_version = g.At(e.targets[0].teacher).version + 1; }},
      {"teacher of an earlier life", 3, &G::Call, WithATeacher,
       [](G& g, E& e) { e.targets[0].teacher_epoch = g.PickStaleEpoch(e.targets[0].teacher); }},
      {"cancelled before it begins", 8, CancelledBefore, PerhapsExplicit, &G::Call},
      {"eager, cancelled while it computes", 4, CancelledWhileComputing, &G::Call},
      {"explicit, cancelled while it computes", 8, CancelledWhileComputing, ExplicitMayBeHeld, &G::Call},
      {"refuse, cancelled while it computes", 4, CancelledWhileComputing, Refuse, &G::Call},
      {"the same call while it computes", 6, During(Meanwhile::kSameCall), NewCall},
      {"discarded while it computes", 5, During(Meanwhile::kDiscard), NewCall},
      {"committed while it computes", 5, During(Meanwhile::kCommit), NewExplicit},
      {"its session is closed while it computes", 6, During(Meanwhile::kCloseSession),
       [](G& g, E& e) { return g.OneIn(3) ? NewEager(g, e) : NewExplicit(g, e); }, OfASession},
      {"its lease would end while it computes", 5, During(Meanwhile::kLeasePasses), NewExplicit,
       [](G& g, E& e) { e.session = g.PickSession(); }},
      {"a shard is not ready to compute", 6, PerhapsExplicit, &G::Call, ShardNotReady("Compute")},
      {"the engine fails, eager", 2, &G::Call, EngineFails("Compute")},
      {"the engine fails, two heads", 1, CallOnTwoHeads, EngineFails("Compute")},
      {"the engine fails, explicit", 4, ExplicitMayBeHeld, &G::Call, EngineFails("Compute")},
      {"a shard is not ready to add what was not refused", 4, Refuse, CallWithSlot, ShardNotReady("Commit")},
      {"the engine fails to add what was not refused", 1, Refuse, CallWithSlot, EngineFails("Commit")},
      {"call by a pointer to a deleted head", 3, DeletedHead,
       [](G& g, E& e) {
         e.op = Op::kCall;
         e.targets[0].head = *g.model_.deleted().begin();
         e.names_micro_batch = SpecOf(e.targets[0].head, false).trainable;
         if (e.names_micro_batch) e.targets[0].step = 0;
         e.targets[0].row_count = g.model_.payloads()[0].row_count;
       }},
  };
}

std::vector<Kind> KindTable::DecisionKinds() {
  return {
      {"commit", 60, ToCommit, [](G& g, E& e) { e.factor = g.OneIn(2) ? 1 : g.Pick(4) - 1; }, Contribution},
      {"commit again", 8, ToCommit, Committed},
      {"commit again with another factor", 6, ToCommit, Committed, [](G&, E& e) { e.factor += 1; }},
      {"commit another attempt", 8, ToCommit, Contribution, [](G& g, E& e) { e.attempt += g.OneIn(2) && e.attempt > 0 ? -1 : 1; }},
      {"commit with token factors", 20, ToCommit,
       [](G& g, E& e) {
         e.factor = g.Pick(3) - 1;
         e.token_factors = 1 + g.Pick(2);
       },
       [](G& g, E& e) { return g.PickContribution(e, [](const ModelContribution& it) { return it.held; }); }},
      {"commit with token factors that do not fit", 4, ToCommit, [](G& g, E& e) { e.token_factors = 3 + g.Pick(2); }, Contribution},
      {"commit with token factors what is staged", 3, ToCommit, [](G&, E& e) { e.token_factors = 1; },
       [](G& g, E& e) { return g.PickContribution(e, [](const ModelContribution& it) { return !it.held; }); }},
      {"commit by another session", 5, ToCommit, ContributionOfASession, AnotherSession},
      {"commit by a session that is not there", 3, ToCommit, Contribution, UnknownSession},
      {"commit for a head too few", 4, ToCommit, ContributionOfSeveralHeads, [](G&, E& e) { e.targets.pop_back(); }},
      {"commit for a head too many", 4, ToCommit,
       [](G& g, E& e) {
         const int head = g.PickTrainable();
         if (head < 0 || !g.PickContribution(e)) return false;
         e.targets.push_back(g.TargetOf(head));
         return true;
       }},
      {"commit what is not known", 3, OnStep(Op::kCommit), AnyMicroBatch},
      {"commit what was discarded", 4, ToCommit, Discarded},
      {"commit what was announced", 4, ToCommit, Announced,
       [](G& g, E& e) {
         if (g.OneIn(2) && e.attempt > 0) --e.attempt;
       }},
      {"commit with a factor that is not finite", 3, ToCommit, Contribution,
       [](G& g, E& e) { e.factor = g.OneIn(2) ? std::numeric_limits<double>::quiet_NaN() : 1e300; }},
      {"commit for the next step, cancelled while it waits", 3, ToCommit, Contribution, NextStep, PerhapsCancelled},
      {"commit in an earlier life", 4, ToCommit, Contribution, InAnEarlierLife},
      {"a shard is not ready to commit", 8, ToCommit, Contribution,
       [](G& g, E& e) { FailAt(e, g.OneIn(2) ? "Commit" : "Compute", ErrorReason::kShardNotReady); }},
      {"the engine fails to commit", 2, ToCommit, Contribution,
       [](G& g, E& e) { FailAt(e, g.OneIn(2) ? "Commit" : "Compute", ErrorReason::kEngineFailed); }},
      {"commit by a pointer to a deleted head", 2, DeletedHead, ToCommit,
       [](G& g, E& e) {
         e.targets[0].head = *g.model_.deleted().rbegin();
         e.targets[0].step = 0;
       }},
      {"discard", 24, ToDiscard, Contribution},
      {"discard a higher attempt of any owner", 6, ToDiscard, Contribution, HigherAttempt,
       [](G&, E& e) { e.session = kNoSession; }},
      {"discard a lower attempt", 4, ToDiscard, Contribution, LowerAttempt},
      {"discard what is not known", 8, OnStep(Op::kDiscard), AnyMicroBatch, AnyAttempt},
      {"discard in two heads what is not known", 3, ToDiscard,
       [](G& g, E& e) {
         for (const int head : SomeHeads(g, 2)) {
           if (head < 0) return false;
           e.targets.push_back(g.TargetOf(head));
         }
         e.micro_batch = g.Pick(kMicroBatchIds);
         return true;
       }},
      {"discard what is committed", 4, ToDiscard, Committed},
      {"discard again", 5, ToDiscard, Discarded, [](G& g, E& e) { e.attempt += g.Pick(2); }},
      {"discard what was announced", 4, ToDiscard, Announced,
       [](G& g, E& e) { e.attempt = std::max<int64_t>(0, e.attempt - g.Pick(2)); }},
      {"discard by another session", 5, ToDiscard, ContributionOfASession, AnotherSession},
      {"discard for a head too few", 3, ToDiscard, ContributionOfSeveralHeads,
       [](G&, E& e) { e.targets.erase(e.targets.begin()); }},
      {"discard in an earlier life", 3, ToDiscard, Contribution,
       [](G& g, E& e) { e.targets.back().epoch = g.PickStaleEpoch(e.targets.back().head); }},
      {"add a gradient", 16, &G::AddGradient},
      {"add a gradient over a micro-batch", 6, &G::AddGradient, AnyMicroBatch, AnyAttempt},
      {"add a gradient out of range", 2, &G::AddGradient, [](G&, E& e) { e.row_count = static_cast<int>(kMaxVocab) + 1; }},
      {"add a gradient, cancelled", 2, CancelledBefore, &G::AddGradient},
      {"a shard is not ready to add a gradient", 4, &G::AddGradient, ShardNotReady("AddToGradient")},
      {"the engine fails to add a gradient", 1, &G::AddGradient, EngineFails("AddToGradient")},
  };
}

}  // namespace headwater::history
