#include <cmath>
#include <limits>
#include <string>

#include "kinds.h"

namespace headwater::history {

void KindTable::AddCalls(std::vector<Kind>& kinds) {
  kinds.insert(
      kinds.end(),
      {
          {"eager", 60, [](G& g, E& e) { return g.Call(e); }},
          {"eager, token weights", 8,
           [](G& g, E& e) {
             if (!g.Call(e)) return false;
             e.targets[0].weighted = true;
             return true;
           }},
          {"eager, refuse", 16,
           [](G& g, E& e) {
             e.refuse = true;
             return CallWithSlot(g, e);
           }},
          {"eager, refuse, may be held", 14,
           [](G& g, E& e) {
             e.refuse = e.allow_held = true;
             return g.Call(e);
           }},
          {"eager, not finite", 3,
           [](G& g, E& e) {
             if (!g.Call(e)) return false;
             e.payload = kInfinitePayload;
             e.targets[0].row_count = g.model_.payloads()[kInfinitePayload].row_count;
             return true;
           }},
          {"refuse, not finite", 8,
           [](G& g, E& e) {
             if (!g.Call(e)) return false;
             e.payload = kInfinitePayload;
             e.targets[0].row_count = g.model_.payloads()[kInfinitePayload].row_count;
             e.refuse = true;
             e.is_explicit = g.OneIn(2);
             e.allow_held = g.OneIn(2);
             return true;
           }},
          {"explicit", 36,
           [](G& g, E& e) {
             e.is_explicit = true;
             return CallWithSlot(g, e);
           }},
          {"explicit, a head without slots", 4,
           [](G& g, E& e) {
             e.is_explicit = true;
             return g.Call(e);
           }},
          {"explicit, may be held", 36,
           [](G& g, E& e) {
             e.is_explicit = e.allow_held = true;
             return g.Call(e);
           }},
          {"explicit, late token factors", 24,
           [](G& g, E& e) {
             e.is_explicit = e.late_factors = true;
             return g.Call(e);
           }},
          {"explicit, of a session", 16,
           [](G& g, E& e) {
             e.is_explicit = e.allow_held = true;
             if (!g.Call(e)) return false;
             e.session = g.PickSession();
             return e.session != kNoSession;
           }},
          {"two heads, eager", 16, [](G& g, E& e) { return g.CallOn(e, SomeHeads(g, 2)); }},
          {"two heads, explicit", 16,
           [](G& g, E& e) {
             e.is_explicit = true;
             e.allow_held = g.OneIn(2);
             return g.CallOn(e, SomeHeads(g, 2));
           }},
          {"three heads, explicit", 10,
           [](G& g, E& e) {
             e.is_explicit = e.allow_held = true;
             return g.CallOn(e, SomeHeads(g, 3));
           }},
          {"two terms of one head", 8,
           [](G& g, E& e) {
             const int head = g.PickTrainable();
             e.is_explicit = e.allow_held = g.OneIn(2);
             return g.CallOn(e, {head, head});
           }},
          {"a trainable and a frozen head", 6,
           [](G& g, E& e) {
             e.is_explicit = e.late_factors = g.OneIn(2);
             return g.CallOn(e, {g.PickTrainable(), g.PickHead(IsFrozen)});
           }},
          {"distillation", 16,
           [](G& g, E& e) {
             e.is_explicit = e.late_factors = g.OneIn(2);
             return g.Call(e) && AddTeacher(g, e.targets[0]);
           }},
          {"several teachers", 8,
           [](G& g, E& e) {
             const int head = g.PickTrainable();
             e.is_explicit = e.late_factors = g.OneIn(2);
             return g.CallOn(e, {head, head}) && AddTeacher(g, e.targets[0]) && AddTeacher(g, e.targets[1]);
           }},
          {"forward only", 8,
           [](G& g, E& e) {
             if (!g.CallOn(e, {g.PickHead(nullptr)})) return false;
             e.backward = e.names_micro_batch = false;
             e.targets[0].step.reset();
             if (g.OneIn(2)) e.targets[0].epoch = kNoEpoch;
             return true;
           }},
          {"backward on a frozen head", 4,
           [](G& g, E& e) {
             e.names_micro_batch = false;
             return g.CallOn(e, {g.PickHead(IsFrozen)});
           }},
          {"target out of the vocabulary", 4,
           [](G& g, E& e) {
             if (!g.Call(e)) return false;
             e.payload = kBadTargetPayload;
             e.targets[0].row_count = g.model_.payloads()[kBadTargetPayload].row_count;
             e.is_explicit = e.allow_held = g.OneIn(2);
             return true;
           }},
          {"same call again", 24, [](G& g, E& e) { return Resend(g, e); }},
          {"same call again, higher attempt", 16,
           [](G& g, E& e) {
             if (!Resend(g, e)) return false;
             e.attempt += 1 + g.Pick(2);
             return true;
           }},
          {"same call again, lower attempt", 6,
           [](G& g, E& e) {
             if (!Resend(g, e) || e.attempt == 0) return false;
             --e.attempt;
             return true;
           }},
          {"other rows under the same id", 10,
           [](G& g, E& e) {
             if (!Resend(g, e)) return false;
             e.targets[0].scale += 1;
             return true;
           }},
          {"other rows under the same id, first wins", 12,
           [](G& g, E& e) {
             if (!Resend(g, e)) return false;
             e.targets[0].scale += 1;
             e.first_wins = true;
             return true;
           }},
          {"other rows, higher attempt", 6,
           [](G& g, E& e) {
             if (!Resend(g, e)) return false;
             e.targets[0].scale += 1;
             e.attempt += 1;
             return true;
           }},
          {"header alone", 14,
           [](G& g, E& e) {
             e.is_explicit = e.allow_held = g.OneIn(2);
             if (!g.Call(e)) return false;
             e.op = Op::kAnnounce;
             if (g.OneIn(2)) e.attempt += 1;
             return true;
           }},
          {"header of a higher attempt", 8,
           [](G& g, E& e) {
             if (!Resend(g, e)) return false;
             e.op = Op::kAnnounce;
             e.attempt += 1;
             return true;
           }},
          {"rows of a header", 14,
           [](G& g, E& e) {
             if (g.announced_.empty()) return false;
             e = g.PickFrom(g.announced_);
             e.kind = "rows of a header";
             e.op = Op::kRows;
             return true;
           }},
          {"call for the next step", 6,
           [](G& g, E& e) {
             if (!g.Call(e)) return false;
             ++*e.targets[0].step;
             return true;
           }},
          {"call for the next step, cancelled while it waits", 4,
           [](G& g, E& e) {
             if (!g.Call(e)) return false;
             ++*e.targets[0].step;
             e.cancel_waiting = true;
             return true;
           }},
          {"call for a step beyond the next", 3,
           [](G& g, E& e) {
             if (!g.Call(e)) return false;
             *e.targets[0].step += 2;
             e.cancel_waiting = g.OneIn(2);
             return true;
           }},
          {"call for a step before", 3,
           [](G& g, E& e) {
             if (!g.Call(e)) return false;
             --*e.targets[0].step;
             return true;
           }},
          {"call of an earlier life", 10,
           [](G& g, E& e) {
             if (!g.Call(e)) return false;
             e.targets[0].epoch = g.PickStaleEpoch(e.targets[0].head);
             return true;
           }},
          {"call on a head that is not ready", 6,
           [](G& g, E& e) {
             return g.CallOn(e, {g.PickHead([](const ModelHead& head) { return head.spec.trainable && head.state != 'R'; })});
           }},
          {"call on two heads, one of an earlier life", 3,
           [](G& g, E& e) {
             if (!g.CallOn(e, SomeHeads(g, 2))) return false;
             e.targets[1].epoch = g.PickStaleEpoch(e.targets[1].head);
             return true;
           }},
          {"call of a session that is not there", 4,
           [](G& g, E& e) {
             if (!g.Call(e)) return false;
             e.session = g.OneIn(3) ? kForeignSession : g.Pick(g.model_.session_count() + 1);
             return true;
           }},
          {"expected weight version", 6,
           [](G& g, E& e) {
             if (!g.Call(e)) return false;
             e.targets[0].version = g.At(e.targets[0].head).version;
             return true;
           }},
          {"expected weight version, another", 3,
           [](G& g, E& e) {
             if (!g.Call(e)) return false;
             e.targets[0].version = g.At(e.targets[0].head).version - 1;
             return true;
           }},
          {"expected version of the teacher, another", 3,
           [](G& g, E& e) {
             if (!g.Call(e) || !AddTeacher(g, e.targets[0])) return false;
             e.targets[0].teacher_version = g.At(e.targets[0].teacher).version + 1;
             return true;
           }},
          {"teacher of an earlier life", 3,
           [](G& g, E& e) {
             if (!g.Call(e) || !AddTeacher(g, e.targets[0])) return false;
             e.targets[0].teacher_epoch = g.PickStaleEpoch(e.targets[0].teacher);
             return true;
           }},
          {"cancelled before it begins", 8,
           [](G& g, E& e) {
             e.cancel = Cancel::kBefore;
             e.is_explicit = e.allow_held = g.OneIn(2);
             return g.Call(e);
           }},
          {"eager, cancelled while it computes", 4,
           [](G& g, E& e) {
             e.cancel = Cancel::kWhileComputing;
             return g.Call(e);
           }},
          {"explicit, cancelled while it computes", 8,
           [](G& g, E& e) {
             e.cancel = Cancel::kWhileComputing;
             e.is_explicit = e.allow_held = true;
             return g.Call(e);
           }},
          {"refuse, cancelled while it computes", 4,
           [](G& g, E& e) {
             e.cancel = Cancel::kWhileComputing;
             e.refuse = true;
             return g.Call(e);
           }},
          {"the same call while it computes", 6,
           [](G& g, E& e) {
             e.meanwhile = Meanwhile::kSameCall;
             return g.OneIn(2) ? NewEager(g, e) : NewExplicit(g, e);
           }},
          {"discarded while it computes", 5,
           [](G& g, E& e) {
             e.meanwhile = Meanwhile::kDiscard;
             return g.OneIn(2) ? NewEager(g, e) : NewExplicit(g, e);
           }},
          {"committed while it computes", 5,
           [](G& g, E& e) {
             e.meanwhile = Meanwhile::kCommit;
             return NewExplicit(g, e);
           }},
          {"its session is closed while it computes", 6,
           [](G& g, E& e) {
             e.meanwhile = Meanwhile::kCloseSession;
             if (!(g.OneIn(3) ? NewEager(g, e) : NewExplicit(g, e))) return false;
             e.session = g.PickSession();
             return e.session != kNoSession;
           }},
          {"its lease would end while it computes", 5,
           [](G& g, E& e) {
             e.meanwhile = Meanwhile::kLeasePasses;
             if (!NewExplicit(g, e)) return false;
             e.session = g.PickSession();
             return true;
           }},
          {"a shard is not ready to compute", 6,
           [](G& g, E& e) {
             e.is_explicit = e.allow_held = g.OneIn(2);
             return g.Call(e) && FailAt(e, "Compute", ErrorReason::kShardNotReady);
           }},
          {"the engine fails, eager", 2, [](G& g, E& e) { return g.Call(e) && FailAt(e, "Compute", ErrorReason::kEngineFailed); }},
          {"the engine fails, two heads", 1,
           [](G& g, E& e) { return g.CallOn(e, SomeHeads(g, 2)) && FailAt(e, "Compute", ErrorReason::kEngineFailed); }},
          {"the engine fails, explicit", 4,
           [](G& g, E& e) {
             e.is_explicit = e.allow_held = true;
             return g.Call(e) && FailAt(e, "Compute", ErrorReason::kEngineFailed);
           }},
          {"a shard is not ready to add what was not refused", 4,
           [](G& g, E& e) {
             e.refuse = true;
             return CallWithSlot(g, e) && FailAt(e, "Commit", ErrorReason::kShardNotReady);
           }},
          {"the engine fails to add what was not refused", 1,
           [](G& g, E& e) {
             e.refuse = true;
             return CallWithSlot(g, e) && FailAt(e, "Commit", ErrorReason::kEngineFailed);
           }},
          {"call by a pointer to a deleted head", 3,
           [](G& g, E& e) {
             if (g.model_.deleted().empty()) return false;
             e.op = Op::kCall;
             e.deleted_handle = true;
             e.targets = {Target()};
             e.targets[0].head = *g.model_.deleted().begin();
             e.targets[0].epoch = kForeignEpoch;
             e.names_micro_batch = SpecOf(e.targets[0].head, false).trainable;
             if (e.names_micro_batch) e.targets[0].step = 0;
             e.targets[0].row_count = g.model_.payloads()[0].row_count;
             return true;
           }},
      });
}

void KindTable::AddDecisions(std::vector<Kind>& kinds) {
  kinds.insert(kinds.end(),
               {
                   {"commit", 60,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      e.factor = g.OneIn(2) ? 1 : g.Pick(4) - 1;
                      return g.PickContribution(e);
                    }},
                   {"commit again", 8,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      return g.PickRecord(e, 'C');
                    }},
                   {"commit again with another factor", 6,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      if (!g.PickRecord(e, 'C')) return false;
                      e.factor += 1;
                      return true;
                    }},
                   {"commit another attempt", 8,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      if (!g.PickContribution(e)) return false;
                      e.attempt += g.OneIn(2) && e.attempt > 0 ? -1 : 1;
                      return true;
                    }},
                   {"commit with token factors", 20,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      e.factor = g.Pick(3) - 1;
                      e.token_factors = 1 + g.Pick(2);
                      return g.PickContribution(e, [](const ModelContribution& it) { return it.held; });
                    }},
                   {"commit with token factors that do not fit", 4,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      e.token_factors = 3 + g.Pick(2);
                      return g.PickContribution(e);
                    }},
                   {"commit with token factors what is staged", 3,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      e.token_factors = 1;
                      return g.PickContribution(e, [](const ModelContribution& it) { return !it.held; });
                    }},
                   {"commit by another session", 5,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      if (!g.PickContribution(e, [](const ModelContribution& it) { return it.session != kNoSession; }))
                        return false;
                      e.session = g.OneIn(2) ? g.PickSession() : kNoSession;
                      return true;
                    }},
                   {"commit by a session that is not there", 3,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      if (!g.PickContribution(e)) return false;
                      e.session = g.OneIn(3) ? kForeignSession : g.Pick(g.model_.session_count() + 1);
                      return true;
                    }},
                   {"commit for a head too few", 4,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      if (!g.PickContribution(e, [](const ModelContribution& it) { return it.heads.size() > 1; })) return false;
                      e.targets.pop_back();
                      return true;
                    }},
                   {"commit for a head too many", 4,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      const int head = g.PickTrainable();
                      if (head < 0 || !g.PickContribution(e)) return false;
                      e.targets.push_back(g.TargetOf(head));
                      return true;
                    }},
                   {"commit what is not known", 3,
                    [](G& g, E& e) {
                      if (!g.OnStep(e, Op::kCommit)) return false;
                      e.micro_batch = g.Pick(kMicroBatchIds);
                      return true;
                    }},
                   {"commit what was discarded", 4,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      return g.PickRecord(e, 'D');
                    }},
                   {"commit what was announced", 4,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      if (!g.PickRecord(e, 'N')) return false;
                      if (g.OneIn(2) && e.attempt > 0) --e.attempt;
                      return true;
                    }},
                   {"commit with a factor that is not finite", 3,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      if (!g.PickContribution(e)) return false;
                      e.factor = g.OneIn(2) ? std::numeric_limits<double>::quiet_NaN() : 1e300;
                      return true;
                    }},
                   {"commit for the next step, cancelled while it waits", 3,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      if (!g.PickContribution(e)) return false;
                      ++*e.targets[0].step;
                      e.cancel_waiting = g.OneIn(2);
                      return true;
                    }},
                   {"commit in an earlier life", 4,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      if (!g.PickContribution(e)) return false;
                      e.targets[0].epoch = g.PickStaleEpoch(e.targets[0].head);
                      return true;
                    }},
                   {"a shard is not ready to commit", 8,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      if (!g.PickContribution(e)) return false;
                      return FailAt(e, g.OneIn(2) ? "Commit" : "Compute", ErrorReason::kShardNotReady);
                    }},
                   {"the engine fails to commit", 2,
                    [](G& g, E& e) {
                      e.op = Op::kCommit;
                      if (!g.PickContribution(e)) return false;
                      return FailAt(e, g.OneIn(2) ? "Commit" : "Compute", ErrorReason::kEngineFailed);
                    }},
                   {"commit by a pointer to a deleted head", 2,
                    [](G& g, E& e) {
                      if (g.model_.deleted().empty()) return false;
                      e.op = Op::kCommit;
                      e.deleted_handle = true;
                      e.targets = {Target()};
                      e.targets[0].head = *g.model_.deleted().rbegin();
                      e.targets[0].epoch = kForeignEpoch;
                      e.targets[0].step = 0;
                      return true;
                    }},
                   {"discard", 24,
                    [](G& g, E& e) {
                      e.op = Op::kDiscard;
                      return g.PickContribution(e);
                    }},
                   {"discard a higher attempt, whoever owns it", 6,
                    [](G& g, E& e) {
                      e.op = Op::kDiscard;
                      if (!g.PickContribution(e)) return false;
                      e.attempt += 1;
                      e.session = kNoSession;
                      return true;
                    }},
                   {"discard a lower attempt", 4,
                    [](G& g, E& e) {
                      e.op = Op::kDiscard;
                      if (!g.PickContribution(e) || e.attempt == 0) return false;
                      --e.attempt;
                      return true;
                    }},
                   {"discard what is not known", 8,
                    [](G& g, E& e) {
                      if (!g.OnStep(e, Op::kDiscard)) return false;
                      e.micro_batch = g.Pick(kMicroBatchIds);
                      e.attempt = g.Pick(3);
                      return true;
                    }},
                   {"discard in two heads what is not known", 3,
                    [](G& g, E& e) {
                      e.op = Op::kDiscard;
                      for (const int head : SomeHeads(g, 2)) {
                        if (head < 0) return false;
                        e.targets.push_back(g.TargetOf(head));
                      }
                      e.micro_batch = g.Pick(kMicroBatchIds);
                      return true;
                    }},
                   {"discard what is committed", 4,
                    [](G& g, E& e) {
                      e.op = Op::kDiscard;
                      return g.PickRecord(e, 'C');
                    }},
                   {"discard again", 5,
                    [](G& g, E& e) {
                      e.op = Op::kDiscard;
                      if (!g.PickRecord(e, 'D')) return false;
                      e.attempt += g.Pick(2);
                      return true;
                    }},
                   {"discard what was announced", 4,
                    [](G& g, E& e) {
                      e.op = Op::kDiscard;
                      if (!g.PickRecord(e, 'N')) return false;
                      e.attempt = std::max<int64_t>(0, e.attempt - g.Pick(2));
                      return true;
                    }},
                   {"discard by another session", 5,
                    [](G& g, E& e) {
                      e.op = Op::kDiscard;
                      if (!g.PickContribution(e, [](const ModelContribution& it) { return it.session != kNoSession; }))
                        return false;
                      e.session = g.OneIn(2) ? g.PickSession() : kNoSession;
                      return true;
                    }},
                   {"discard for a head too few", 3,
                    [](G& g, E& e) {
                      e.op = Op::kDiscard;
                      if (!g.PickContribution(e, [](const ModelContribution& it) { return it.heads.size() > 1; })) return false;
                      e.targets.erase(e.targets.begin());
                      return true;
                    }},
                   {"discard in an earlier life", 3,
                    [](G& g, E& e) {
                      e.op = Op::kDiscard;
                      if (!g.PickContribution(e)) return false;
                      e.targets.back().epoch = g.PickStaleEpoch(e.targets.back().head);
                      return true;
                    }},
                   {"add a gradient", 16, [](G& g, E& e) { return g.AddGradient(e); }},
                   {"add a gradient over a micro-batch", 6,
                    [](G& g, E& e) {
                      if (!g.AddGradient(e)) return false;
                      e.micro_batch = g.Pick(kMicroBatchIds);
                      e.attempt = g.Pick(3);
                      return true;
                    }},
                   {"add a gradient out of range", 2,
                    [](G& g, E& e) {
                      if (!g.AddGradient(e)) return false;
                      e.row_count = static_cast<int>(kMaxVocab) + 1;
                      return true;
                    }},
                   {"add a gradient, cancelled", 2,
                    [](G& g, E& e) {
                      e.cancel = Cancel::kBefore;
                      return g.AddGradient(e);
                    }},
                   {"a shard is not ready to add a gradient", 4,
                    [](G& g, E& e) { return g.AddGradient(e) && FailAt(e, "AddToGradient", ErrorReason::kShardNotReady); }},
                   {"the engine fails to add a gradient", 1,
                    [](G& g, E& e) { return g.AddGradient(e) && FailAt(e, "AddToGradient", ErrorReason::kEngineFailed); }},
               });
}

}  // namespace headwater::history
