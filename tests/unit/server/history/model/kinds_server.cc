#include <string>

#include "absl/strings/str_cat.h"
#include "kinds.h"

namespace headwater::history {
namespace {

std::string CheckpointName(int number) { return absl::StrCat("c", number); }

}  // namespace

std::vector<Kind> KindTable::StepKinds() {
  return {
      {"seal", 24, &G::Seal},
      {"seal by number", 10, &G::Seal, ExpectsNumber},
      {"seal, something is missing", 6, &G::Seal,
       [](G&, E& e) { std::get<std::vector<int64_t>>(*e.expected).push_back(kMicroBatchIds); }},
      {"seal, something is too much", 4, &G::Seal,
       [](G&, E& e) {
         auto& ids = std::get<std::vector<int64_t>>(*e.expected);
         if (ids.empty()) return false;
         ids.pop_back();
         return true;
       }},
      {"seal with an id twice, or negative", 3, &G::Seal,
       [](G& g, E& e) {
         auto& ids = std::get<std::vector<int64_t>>(*e.expected);
         ids.push_back(ids.empty() || g.OneIn(2) ? -1 : ids.front());
         if (g.OneIn(4)) e.expected = int64_t{-1};
       }},
      {"seal in an earlier life", 3, &G::Seal, InAnEarlierLife},
      {"seal the next step", 3, &G::Seal, NextStep, PerhapsCancelled},
      {"the engine fails to tell the norm", 3, &G::Seal, EngineFails("ComputeGradientStats")},
      {"apply", 24, &G::Apply,
       [](G& g, E& e) {
         if (g.At(e.targets[0].head).open.state == 'O') e.expected = g.CommittedIds(e.targets[0].head, false);
       }},
      {"apply with clipping", 4, &G::Apply, ExpectsIds,
       [](G& g, E& e) {
         e.apply.max_grad_norm = 1 + g.Pick(5);
         e.apply.other_grad_norm_squared = g.Pick(3);
       }},
      {"apply without saying what is expected", 6, &G::Apply},
      {"apply, something is missing", 3, [](G&, E& e) { e.expected = int64_t{kMicroBatchIds + 1}; }, &G::Apply},
      {"apply again", 10, &G::Apply,
       [](G& g, E& e) {
         const ModelHead& head = g.At(e.targets[0].head);
         if (!head.closed.has_value()) return false;
         e.targets[0].step = head.closed->number;
         if (!g.OneIn(4)) e.apply = head.applied;
         if (g.OneIn(2)) e.expected = head.applied_expectation;
         return true;
       }},
      {"apply again with other arguments", 4, &G::Apply,
       [](G& g, E& e) {
         const ModelHead& head = g.At(e.targets[0].head);
         if (!head.closed.has_value()) return false;
         e.targets[0].step = head.closed->number;
         e.apply = head.applied;
         e.apply.learning_rate += 1;
         return true;
       }},
      {"apply with arguments that make no sense", 4, &G::Apply,
       [](G& g, E& e) {
         if (g.OneIn(2)) e.apply.momentum = 0.5;
         if (g.OneIn(2)) e.apply.beta1 = 0.5;
         if (g.OneIn(2)) e.apply.learning_rate = -1;
       },
       ExpectsIds},
      {"apply without an optimizer", 2, OnStep(Op::kApply), ExpectsNumber},
      {"apply in an earlier life", 3, &G::Apply, InAnEarlierLife},
      {"a shard is not ready to apply", 4, &G::Apply, ExpectsIds, ShardNotReady("ApplyOptimizer")},
      {"the engine fails to apply", 2, &G::Apply, ExpectsIds, EngineFails("ApplyOptimizer")},
      {"discard the gradient", 8, OnStep(Op::kDiscardGradient)},
      {"discard the gradient again", 4, OnStep(Op::kDiscardGradient), PreviousStep},
      {"discard the next step's gradient", 2, OnStep(Op::kDiscardGradient), NextStep, PerhapsCancelled},
      {"the engine fails to discard the gradient", 1, OnStep(Op::kDiscardGradient), EngineFails("ZeroGradient")},
      {"replace the weights", 24, &G::Replace},
      {"replace the bias", 4, &G::Replace, Bias},
      {"replace the weights again", 6, OnStep(Op::kReplace),
       [](G& g, E& e) {
         --*e.targets[0].step;
         e.tensors = {g.OneIn(4) ? HeadTensor::kBias : HeadTensor::kWeight};
         e.numbers = 1 + g.Pick(3);
       }},
      {"replace the weights of a step that is open", 2, OnStep(Op::kReplace), Weight, [](G&, E& e) { e.numbers = 1; }},
      {"replace by weights of another size", 2, OfAnotherSize, &G::Replace},
      {"replace in an earlier life", 2, &G::Replace, InAnEarlierLife},
      {"the engine fails to replace the weights", 1, &G::Replace, EngineFails("WriteTensor")},
      {"read the gradient", 6, OnStep(Op::kReadGradient),
       [](G& g, E& e) {
         if (g.OneIn(5)) *e.targets[0].step += g.Pick(3) - 1;
         e.cancel_waiting = g.OneIn(3);
       }},
      {"gradient norm", 3, OnStep(Op::kGradientNorm)},
      {"get steps", 3, OnHead(Op::kGetSteps), PerhapsInAnEarlierLife},
      {"get head", 3, OnHead(Op::kGetHead)},
      {"check an epoch", 3, OnHead(Op::kCheckEpoch), PerhapsInAnEarlierLife},
      {"take", 4, OnHead(Op::kTake), [](G&, E& e) { e.targets[0].epoch = kNoEpoch; }},
      {"take if nobody else did", 3, OnHead(Op::kTake),
       [](G&, E& e) {
         e.recovers = {e.targets[0].epoch / 2, e.targets[0].epoch};
       }},
      {"take after somebody else", 3, OnHead(Op::kTake), InAnEarlierLife},
      {"the engine fails to take", 1, OnHead(Op::kTake, IsReady), EngineFails("ZeroGradient")},
  };
}

std::vector<Kind> KindTable::WeightKinds() {
  return {
      {"set the weight", 5, Weight, AnyNumbers, OnHead(Op::kSetTensors)},
      {"set the teacher's weight", 8, Weight, AnyNumbers, OnHead(Op::kSetTensors, IsFrozen)},
      {"set the bias", 2, Bias, AnyNumbers, OnHead(Op::kSetTensors)},
      {"set the weight in an earlier life", 4, Weight, [](G&, E& e) { e.numbers = 1; }, OnHead(Op::kSetTensors), InAnEarlierLife},
      {"set a weight of another size", 2, Weight, OfAnotherSize, OnHead(Op::kSetTensors)},
      {"the engine fails to set the weight", 2, Weight, OnHead(Op::kSetTensors), EngineFails("WriteTensor")},
      {"read the weight", 3, OnHead(Op::kReadWeights),
       [](G& g, E& e) {
         if (g.OneIn(2)) e.version = g.At(e.targets[0].head).version - g.Pick(2);
         if (g.OneIn(2)) e.targets[0].epoch = g.OneIn(2) ? kNoEpoch : g.PickStaleEpoch(e.targets[0].head);
       }},
      {"save", 16, [](G& g, E& e) { e.checkpoint = CheckpointName(g.Pick(4)); }, OnHead(Op::kSave, IsReady)},
      {"save in the place of another", 8,
       [](G& g, E& e) {
         e.checkpoint = CheckpointName(g.Pick(3));
         e.overwrite = true;
       },
       OnHead(Op::kSave, IsReady)},
      {"save on a full disk", 5,
       [](G& g, E& e) {
         e.checkpoint = CheckpointName(g.Pick(3));
         e.overwrite = g.OneIn(2);
         e.disk_full = true;
         e.disk_left = g.OneIn(2) ? 0 : g.Pick(200);
       },
       OnHead(Op::kSave, IsReady)},
      {"save under a name that is none", 1, [](G&, E& e) { e.checkpoint = ".."; }, OnHead(Op::kSave, IsReady)},
      {"save without an epoch, or with an earlier one", 3, [](G&, E& e) { e.checkpoint = "c0"; }, OnHead(Op::kSave),
       [](G& g, E& e) { e.targets[0].epoch = g.OneIn(2) ? kNoEpoch : g.PickStaleEpoch(e.targets[0].head); }},
      {"restore the newest", 6, OnHead(Op::kRestore), NewestCheckpoint},
      {"restore any", 6, OnHead(Op::kRestore), AnyCheckpoint},
      {"restore what is not there", 2, [](G&, E& e) { e.checkpoint = "never"; }, OnHead(Op::kRestore)},
      {"restore in an earlier life", 3, OnHead(Op::kRestore), AnyCheckpoint, InAnEarlierLife},
      {"the engine fails to restore", 1, OnHead(Op::kRestore), NewestCheckpoint, EngineFails("WriteTensor")},
      {"a checkpoint is damaged", 4, OnHead(Op::kDamage), [](G& g, E& e) { return g.PickCheckpoint(e, g.OneIn(2)); },
       [](G& g, E& e) { e.numbers = g.Pick(2); }},
  };
}

std::vector<Kind> KindTable::ServerKinds() {
  return {
      {"create", 6, Create},
      {"create with another spec", 3, Create, WithAnotherSpec},
      {"attach", 6, Attach, Create},
      {"attach with another spec", 3, Attach, Create, WithAnotherSpec},
      {"delete", 4, OnHead(Op::kDelete)},
      {"delete by force", 3, [](G&, E& e) { e.force = true; }, OnHead(Op::kDelete),
       [](G& g, E& e) {
         if (g.OneIn(2)) e.targets[0].epoch = kNoEpoch;
       }},
      {"delete in an earlier life", 3, [](G& g, E& e) { e.force = g.OneIn(2); }, OnHead(Op::kDelete), InAnEarlierLife},
      {"idle heads go", 5,
       [](G& g, E& e) {
         e.op = Op::kExpireIdle;
         e.seconds = g.Pick(16);
       }},
      {"idle heads go, saved before", 5,
       [](G& g, E& e) {
         e.op = Op::kExpireIdle;
         e.save_first = true;
         e.seconds = g.Pick(16);
         e.disk_full = g.OneIn(6);
       }},
      {"the server starts again", 7, [](G&, E& e) { e.op = Op::kRestart; }},
      {"the server dies while it saves", 5, OnHead(Op::kSave, IsReady),
       [](G& g, E& e) {
         e.checkpoint = CheckpointName(g.Pick(3));
         e.overwrite = true;
       },
       [](G& g, E& e) { return g.Crash(e, 60); }},
      {"open a session", 16,
       [](G& g, E& e) {
         e.op = Op::kOpenSession;
         e.seconds = 5 + g.Pick(50);
       }},
      {"renew a session", 6, [](G&, E& e) { e.op = Op::kRenewSession; }, OfASession},
      {"renew a session that may not be there", 4,
       [](G& g, E& e) {
         e.op = Op::kRenewSession;
         e.session = g.OneIn(4) ? kForeignSession : g.Pick(g.model_.session_count() + 1);
       }},
      {"close a session", 5, [](G&, E& e) { e.op = Op::kCloseSession; }, OfASession},
      {"close a session that may not be there", 2,
       [](G& g, E& e) {
         e.op = Op::kCloseSession;
         e.session = g.Pick(g.model_.session_count() + 1);
       }},
      {"the clock goes on", 10,
       [](G& g, E& e) {
         e.op = Op::kAdvance;
         e.seconds = 1 + g.Pick(g.OneIn(4) ? 40 : 8);
       }},
      {"leases end", 10,
       [](G& g, E& e) {
         e.op = Op::kExpireSessions;
         e.seconds = g.Pick(g.OneIn(4) ? 40 : 8);
       }},
  };
}

std::vector<Kind> Kinds() {
  using T = KindTable;
  std::vector<Kind> kinds;
  for (const auto& some :
       {T::CallKinds(), T::FlowKinds(), T::DecisionKinds(), T::StepKinds(), T::WeightKinds(), T::ServerKinds()}) {
    kinds.insert(kinds.end(), some.begin(), some.end());
  }
  return kinds;
}

}  // namespace headwater::history
