#include <string>

#include "absl/strings/str_cat.h"
#include "kinds.h"

namespace headwater::history {
namespace {

std::string CheckpointName(int number) { return absl::StrCat("c", number); }

}  // namespace

void KindTable::AddSteps(std::vector<Kind>& kinds) {
  kinds.insert(
      kinds.end(),
      {
          {"seal", 24, [](G& g, E& e) { return g.Seal(e); }},
          {"seal by number", 10,
           [](G& g, E& e) {
             if (!g.Seal(e)) return false;
             e.expected = g.CommittedIds(e.targets[0].head, true);
             return true;
           }},
          {"seal, something is missing", 6,
           [](G& g, E& e) {
             if (!g.Seal(e)) return false;
             std::get<std::vector<int64_t>>(*e.expected).push_back(kMicroBatchIds);
             return true;
           }},
          {"seal, something is too much", 4,
           [](G& g, E& e) {
             if (!g.Seal(e)) return false;
             auto& ids = std::get<std::vector<int64_t>>(*e.expected);
             if (ids.empty()) return false;
             ids.pop_back();
             return true;
           }},
          {"seal with an id twice, or negative", 3,
           [](G& g, E& e) {
             if (!g.Seal(e)) return false;
             auto& ids = std::get<std::vector<int64_t>>(*e.expected);
             ids.push_back(ids.empty() || g.OneIn(2) ? -1 : ids.front());
             if (g.OneIn(4)) e.expected = int64_t{-1};
             return true;
           }},
          {"seal in an earlier life", 3,
           [](G& g, E& e) {
             if (!g.Seal(e)) return false;
             e.targets[0].epoch = g.PickStaleEpoch(e.targets[0].head);
             return true;
           }},
          {"seal the next step", 3,
           [](G& g, E& e) {
             if (!g.Seal(e)) return false;
             ++*e.targets[0].step;
             e.cancel_waiting = g.OneIn(2);
             return true;
           }},
          {"the engine fails to tell the norm", 3,
           [](G& g, E& e) { return g.Seal(e) && FailAt(e, "ComputeGradientStats", ErrorReason::kEngineFailed); }},
          {"apply", 24,
           [](G& g, E& e) {
             if (!g.Apply(e)) return false;
             if (g.At(e.targets[0].head).open.state == 'O') e.expected = g.CommittedIds(e.targets[0].head, false);
             return true;
           }},
          {"apply with clipping", 4,
           [](G& g, E& e) {
             if (!g.Apply(e)) return false;
             e.expected = g.CommittedIds(e.targets[0].head, false);
             e.apply.max_grad_norm = 1 + g.Pick(5);
             e.apply.other_grad_norm_squared = g.Pick(3);
             return true;
           }},
          {"apply without saying what is expected", 6, [](G& g, E& e) { return g.Apply(e); }},
          {"apply, something is missing", 3,
           [](G& g, E& e) {
             e.expected = int64_t{kMicroBatchIds + 1};
             return g.Apply(e);
           }},
          {"apply again", 10,
           [](G& g, E& e) {
             if (!g.Apply(e)) return false;
             const ModelHead& head = g.At(e.targets[0].head);
             if (!head.closed.has_value()) return false;
             e.targets[0].step = head.closed->number;
             if (!g.OneIn(4)) e.apply = head.applied;
             if (g.OneIn(2)) e.expected = head.applied_expectation;
             return true;
           }},
          {"apply again with other arguments", 4,
           [](G& g, E& e) {
             if (!g.Apply(e)) return false;
             const ModelHead& head = g.At(e.targets[0].head);
             if (!head.closed.has_value()) return false;
             e.targets[0].step = head.closed->number;
             e.apply = head.applied;
             e.apply.learning_rate += 1;
             return true;
           }},
          {"apply with arguments that make no sense", 4,
           [](G& g, E& e) {
             if (!g.Apply(e)) return false;
             if (g.OneIn(2)) e.apply.momentum = 0.5;
             if (g.OneIn(2)) e.apply.beta1 = 0.5;
             if (g.OneIn(2)) e.apply.learning_rate = -1;
             e.expected = g.CommittedIds(e.targets[0].head, false);
             return true;
           }},
          {"apply without an optimizer", 2,
           [](G& g, E& e) {
             if (!g.OnStep(e, Op::kApply)) return false;
             e.expected = g.CommittedIds(e.targets[0].head, true);
             return true;
           }},
          {"apply in an earlier life", 3,
           [](G& g, E& e) {
             if (!g.Apply(e)) return false;
             e.targets[0].epoch = g.PickStaleEpoch(e.targets[0].head);
             return true;
           }},
          {"a shard is not ready to apply", 4,
           [](G& g, E& e) {
             if (!g.Apply(e)) return false;
             e.expected = g.CommittedIds(e.targets[0].head, false);
             return FailAt(e, "ApplyOptimizer", ErrorReason::kShardNotReady);
           }},
          {"the engine fails to apply", 2,
           [](G& g, E& e) {
             if (!g.Apply(e)) return false;
             e.expected = g.CommittedIds(e.targets[0].head, false);
             return FailAt(e, "ApplyOptimizer", ErrorReason::kEngineFailed);
           }},
          {"discard the gradient", 8, [](G& g, E& e) { return g.OnStep(e, Op::kDiscardGradient); }},
          {"discard the gradient again", 4,
           [](G& g, E& e) {
             if (!g.OnStep(e, Op::kDiscardGradient)) return false;
             --*e.targets[0].step;
             return true;
           }},
          {"discard the next step's gradient", 2,
           [](G& g, E& e) {
             if (!g.OnStep(e, Op::kDiscardGradient)) return false;
             ++*e.targets[0].step;
             e.cancel_waiting = g.OneIn(2);
             return true;
           }},
          {"the engine fails to discard the gradient", 1,
           [](G& g, E& e) { return g.OnStep(e, Op::kDiscardGradient) && FailAt(e, "ZeroGradient", ErrorReason::kEngineFailed); }},
          {"replace the weights", 24, [](G& g, E& e) { return g.Replace(e); }},
          {"replace the bias", 4,
           [](G& g, E& e) {
             if (!g.Replace(e)) return false;
             e.tensors = {HeadTensor::kBias};
             return true;
           }},
          {"replace the weights again", 6,
           [](G& g, E& e) {
             if (!g.OnStep(e, Op::kReplace)) return false;
             --*e.targets[0].step;
             e.tensors = {g.OneIn(4) ? HeadTensor::kBias : HeadTensor::kWeight};
             e.numbers = 1 + g.Pick(3);
             return true;
           }},
          {"replace the weights of a step that is open", 2,
           [](G& g, E& e) {
             if (!g.OnStep(e, Op::kReplace)) return false;
             e.tensors = {HeadTensor::kWeight};
             e.numbers = 1;
             return true;
           }},
          {"replace by weights of another size", 2,
           [](G& g, E& e) {
             e.wrong_size = true;
             return g.Replace(e);
           }},
          {"replace in an earlier life", 2,
           [](G& g, E& e) {
             if (!g.Replace(e)) return false;
             e.targets[0].epoch = g.PickStaleEpoch(e.targets[0].head);
             return true;
           }},
          {"the engine fails to replace the weights", 1,
           [](G& g, E& e) { return g.Replace(e) && FailAt(e, "WriteTensor", ErrorReason::kEngineFailed); }},
          {"read the gradient", 6,
           [](G& g, E& e) {
             if (!g.OnStep(e, Op::kReadGradient)) return false;
             if (g.OneIn(5)) *e.targets[0].step += g.Pick(3) - 1;
             e.cancel_waiting = g.OneIn(3);
             return true;
           }},
          {"gradient norm", 3, [](G& g, E& e) { return g.OnStep(e, Op::kGradientNorm); }},
          {"get steps", 3,
           [](G& g, E& e) {
             if (!g.OnHead(e, Op::kGetSteps)) return false;
             if (g.OneIn(2)) e.targets[0].epoch = g.PickStaleEpoch(e.targets[0].head);
             return true;
           }},
          {"get head", 3, [](G& g, E& e) { return g.OnHead(e, Op::kGetHead); }},
          {"check an epoch", 3,
           [](G& g, E& e) {
             if (!g.OnHead(e, Op::kCheckEpoch)) return false;
             if (g.OneIn(2)) e.targets[0].epoch = g.PickStaleEpoch(e.targets[0].head);
             return true;
           }},
          {"take", 4,
           [](G& g, E& e) {
             if (!g.OnHead(e, Op::kTake)) return false;
             e.targets[0].epoch = kNoEpoch;
             return true;
           }},
          {"take if nobody else did", 3,
           [](G& g, E& e) {
             if (!g.OnHead(e, Op::kTake)) return false;
             e.recovers = {e.targets[0].epoch / 2, e.targets[0].epoch};
             return true;
           }},
          {"take after somebody else", 3,
           [](G& g, E& e) {
             if (!g.OnHead(e, Op::kTake)) return false;
             e.targets[0].epoch = g.PickStaleEpoch(e.targets[0].head);
             return true;
           }},
          {"the engine fails to take", 1,
           [](G& g, E& e) { return g.OnHead(e, Op::kTake, IsReady) && FailAt(e, "ZeroGradient", ErrorReason::kEngineFailed); }},
      });
}

void KindTable::AddWeights(std::vector<Kind>& kinds) {
  kinds.insert(kinds.end(),
               {
                   {"set the weight", 5,
                    [](G& g, E& e) {
                      e.tensors = {HeadTensor::kWeight};
                      e.numbers = 1 + g.Pick(8);
                      return g.OnHead(e, Op::kSetTensors);
                    }},
                   {"set the teacher's weight", 8,
                    [](G& g, E& e) {
                      e.tensors = {HeadTensor::kWeight};
                      e.numbers = 1 + g.Pick(8);
                      return g.OnHead(e, Op::kSetTensors, IsFrozen);
                    }},
                   {"set the bias", 2,
                    [](G& g, E& e) {
                      e.tensors = {HeadTensor::kBias};
                      e.numbers = 1 + g.Pick(8);
                      return g.OnHead(e, Op::kSetTensors);
                    }},
                   {"set the weight in an earlier life", 4,
                    [](G& g, E& e) {
                      e.tensors = {HeadTensor::kWeight};
                      e.numbers = 1;
                      if (!g.OnHead(e, Op::kSetTensors)) return false;
                      e.targets[0].epoch = g.PickStaleEpoch(e.targets[0].head);
                      return true;
                    }},
                   {"set a weight of another size", 2,
                    [](G& g, E& e) {
                      e.tensors = {HeadTensor::kWeight};
                      e.wrong_size = true;
                      return g.OnHead(e, Op::kSetTensors);
                    }},
                   {"the engine fails to set the weight", 2,
                    [](G& g, E& e) {
                      e.tensors = {HeadTensor::kWeight};
                      return g.OnHead(e, Op::kSetTensors) && FailAt(e, "WriteTensor", ErrorReason::kEngineFailed);
                    }},
                   {"read the weight", 3,
                    [](G& g, E& e) {
                      if (!g.OnHead(e, Op::kReadWeights)) return false;
                      if (g.OneIn(2)) e.version = g.At(e.targets[0].head).version - g.Pick(2);
                      if (g.OneIn(2)) e.targets[0].epoch = g.OneIn(2) ? kNoEpoch : g.PickStaleEpoch(e.targets[0].head);
                      return true;
                    }},
                   {"save", 16,
                    [](G& g, E& e) {
                      e.checkpoint = CheckpointName(g.Pick(4));
                      return g.OnHead(e, Op::kSave, IsReady);
                    }},
                   {"save in the place of another", 8,
                    [](G& g, E& e) {
                      e.checkpoint = CheckpointName(g.Pick(3));
                      e.overwrite = true;
                      return g.OnHead(e, Op::kSave, IsReady);
                    }},
                   {"save on a full disk", 5,
                    [](G& g, E& e) {
                      e.checkpoint = CheckpointName(g.Pick(3));
                      e.overwrite = g.OneIn(2);
                      e.disk_full = true;
                      e.disk_left = g.OneIn(2) ? 0 : g.Pick(200);
                      return g.OnHead(e, Op::kSave, IsReady);
                    }},
                   {"save under a name that is none", 1,
                    [](G& g, E& e) {
                      e.checkpoint = "..";
                      return g.OnHead(e, Op::kSave, IsReady);
                    }},
                   {"save without an epoch, or with an earlier one", 3,
                    [](G& g, E& e) {
                      e.checkpoint = "c0";
                      if (!g.OnHead(e, Op::kSave)) return false;
                      e.targets[0].epoch = g.OneIn(2) ? kNoEpoch : g.PickStaleEpoch(e.targets[0].head);
                      return true;
                    }},
                   {"restore the newest", 6, [](G& g, E& e) { return g.OnHead(e, Op::kRestore) && g.PickCheckpoint(e, true); }},
                   {"restore any", 6, [](G& g, E& e) { return g.OnHead(e, Op::kRestore) && g.PickCheckpoint(e, false); }},
                   {"restore what is not there", 2,
                    [](G& g, E& e) {
                      e.checkpoint = "never";
                      return g.OnHead(e, Op::kRestore);
                    }},
                   {"restore in an earlier life", 3,
                    [](G& g, E& e) {
                      if (!g.OnHead(e, Op::kRestore) || !g.PickCheckpoint(e, false)) return false;
                      e.targets[0].epoch = g.PickStaleEpoch(e.targets[0].head);
                      return true;
                    }},
                   {"the engine fails to restore", 1,
                    [](G& g, E& e) {
                      return g.OnHead(e, Op::kRestore) && g.PickCheckpoint(e, true) &&
                             FailAt(e, "WriteTensor", ErrorReason::kEngineFailed);
                    }},
                   {"a checkpoint is damaged", 4,
                    [](G& g, E& e) {
                      if (!g.OnHead(e, Op::kDamage) || !g.PickCheckpoint(e, g.OneIn(2))) return false;
                      e.numbers = g.Pick(2);
                      return true;
                    }},
               });
}

void KindTable::AddServer(std::vector<Kind>& kinds) {
  const auto create = [](G& g, E& e) {
    e.op = Op::kCreate;
    e.targets = {Target()};
    e.targets[0].head = g.Pick(kHeadCount);
    return true;
  };
  kinds.insert(kinds.end(), {
                                {"create", 6, create},
                                {"create with another spec", 3,
                                 [](G& g, E& e) {
                                   e.op = Op::kCreate;
                                   e.targets = {Target()};
                                   e.targets[0].head = g.Pick(kHeadCount);
                                   e.other_spec = true;
                                   return true;
                                 }},
                                {"attach", 6,
                                 [](G& g, E& e) {
                                   e.if_exists = heads::IfExists::kAttachIfSameSpec;
                                   e.op = Op::kCreate;
                                   e.targets = {Target()};
                                   e.targets[0].head = g.Pick(kHeadCount);
                                   return true;
                                 }},
                                {"attach with another spec", 3,
                                 [](G& g, E& e) {
                                   e.if_exists = heads::IfExists::kAttachIfSameSpec;
                                   e.op = Op::kCreate;
                                   e.targets = {Target()};
                                   e.targets[0].head = g.Pick(kHeadCount);
                                   e.other_spec = true;
                                   return true;
                                 }},
                                {"delete", 4, [](G& g, E& e) { return g.OnHead(e, Op::kDelete); }},
                                {"delete by force", 3,
                                 [](G& g, E& e) {
                                   e.force = true;
                                   if (!g.OnHead(e, Op::kDelete)) return false;
                                   if (g.OneIn(2)) e.targets[0].epoch = kNoEpoch;
                                   return true;
                                 }},
                                {"delete in an earlier life", 3,
                                 [](G& g, E& e) {
                                   e.force = g.OneIn(2);
                                   if (!g.OnHead(e, Op::kDelete)) return false;
                                   e.targets[0].epoch = g.PickStaleEpoch(e.targets[0].head);
                                   return true;
                                 }},
                                {"idle heads go", 5,
                                 [](G& g, E& e) {
                                   e.op = Op::kExpireIdle;
                                   e.seconds = g.Pick(16);
                                   return true;
                                 }},
                                {"idle heads go, saved before", 5,
                                 [](G& g, E& e) {
                                   e.op = Op::kExpireIdle;
                                   e.save_first = true;
                                   e.seconds = g.Pick(16);
                                   e.disk_full = g.OneIn(6);
                                   return true;
                                 }},
                                {"the server starts again", 7,
                                 [](G&, E& e) {
                                   e.op = Op::kRestart;
                                   return true;
                                 }},
                                {"the server dies while it saves", 5,
                                 [](G& g, E& e) {
                                   if (!g.OnHead(e, Op::kSave, IsReady)) return false;
                                   e.checkpoint = CheckpointName(g.Pick(3));
                                   e.overwrite = true;
                                   return g.Crash(e, 60);
                                 }},
                                {"open a session", 16,
                                 [](G& g, E& e) {
                                   e.op = Op::kOpenSession;
                                   e.seconds = 5 + g.Pick(50);
                                   return true;
                                 }},
                                {"renew a session", 6,
                                 [](G& g, E& e) {
                                   e.op = Op::kRenewSession;
                                   e.session = g.PickSession();
                                   return e.session != kNoSession;
                                 }},
                                {"renew a session that may not be there", 4,
                                 [](G& g, E& e) {
                                   e.op = Op::kRenewSession;
                                   e.session = g.OneIn(4) ? kForeignSession : g.Pick(g.model_.session_count() + 1);
                                   return true;
                                 }},
                                {"close a session", 5,
                                 [](G& g, E& e) {
                                   e.op = Op::kCloseSession;
                                   e.session = g.PickSession();
                                   return e.session != kNoSession;
                                 }},
                                {"close a session that may not be there", 2,
                                 [](G& g, E& e) {
                                   e.op = Op::kCloseSession;
                                   e.session = g.Pick(g.model_.session_count() + 1);
                                   return true;
                                 }},
                                {"the clock goes on", 10,
                                 [](G& g, E& e) {
                                   e.op = Op::kAdvance;
                                   e.seconds = 1 + g.Pick(g.OneIn(4) ? 40 : 8);
                                   return true;
                                 }},
                                {"leases end", 10,
                                 [](G& g, E& e) {
                                   e.op = Op::kExpireSessions;
                                   e.seconds = g.Pick(g.OneIn(4) ? 40 : 8);
                                   return true;
                                 }},
                            });
}

std::vector<Kind> Kinds() {
  std::vector<Kind> kinds;
  KindTable::AddCalls(kinds);
  KindTable::AddFlows(kinds);
  KindTable::AddDecisions(kinds);
  KindTable::AddSteps(kinds);
  KindTable::AddWeights(kinds);
  KindTable::AddServer(kinds);
  return kinds;
}

}  // namespace headwater::history
