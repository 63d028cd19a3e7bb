// What concerns whole heads: several in one micro-batch, take-over, restart, restore, failing shards.
#include <gtest/gtest.h>

#include <utility>

#include "absl/strings/escaping.h"
#include "tests/integration/transactions/transaction_harness.h"

namespace headwater::testing {
namespace {

const std::vector<std::string> kBoth = {"student", "aux"};

void StageBoth(Trial& t) { EXPECT_EQ(t.Submit({.id = 0, .heads = kBoth, .explicit_commit = true}), "STAGED STAGED"); }

void StageAndCommitBoth(Trial& t) {
  StageBoth(t);
  EXPECT_EQ(t.Commit({.id = 0, .heads = kBoth, .factor = 0.5}), "OK");
}

void MakeBoth(Trial& t) {
  for (const std::string& id : kBoth) t.Head(id);
}

// ---- several terms ---------------------------------------------------------------------------------------------------

// The head `aux` drops its share of a contribution by `drop`; the student keeps a tombstone, and can go on.
TransactionRow DroppedBy(const std::string& what, const std::function<std::string(Trial&)>& drop,
                         const std::function<void(Trial&)>& undisturbed, bool aux_stays) {
  return {"DroppedInAllBy" + what,
          "what one head of a micro-batch drops is dropped in all",
          [drop, aux_stays](Trial& t) {
            EXPECT_EQ(t.Save("beginning", "aux"), "OK") << "of aux, which is made by this";
            StageBoth(t);
            const TestHead old_aux = t.Head("aux");
            EXPECT_EQ(drop(t), "OK");
            EXPECT_EQ(t.MicroBatch(0), "0 DISCARDED STAGED");
            EXPECT_EQ(t.Commit({.id = 0}), "MICRO_BATCH_DISCARDED");
            if (aux_stays) {
              const TestHead aux = t.Head("aux");
              t.Head("aux") = old_aux;
              const std::string answer = t.Commit({.id = 0, .heads = kBoth});
              EXPECT_TRUE(answer == "EPOCH_FENCED" || answer == "STEP_MISMATCH" || answer == "MICRO_BATCH_DISCARDED") << answer;
              t.Head("aux") = aux;
            }
            EXPECT_EQ(t.Submit({.id = 0}), "MICRO_BATCH_DISCARDED");
            EXPECT_EQ(t.Submit({.id = 0, .attempt = 1, .explicit_commit = true}), "STAGED STAGED");  // the slot is free
            EXPECT_EQ(t.Commit({.id = 0, .attempt = 1}), "OK");
          },
          [undisturbed](Trial& t) {
            EXPECT_EQ(t.Save("beginning", "aux"), "OK");
            EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED");
            EXPECT_EQ(t.Commit({.id = 0}), "OK");
            undisturbed(t);
          },
          {"0 COMMITTED STAGED @1"},
          {.checkpoints = true}};
}

std::vector<TransactionRow> TogetherRows() {
  std::vector<TransactionRow> rows;
  rows.push_back({"TermsCommitTogether",
                  "all terms commit together",
                  [](Trial& t) {
                    const LossReply reply = t.Compute({.id = 0, .heads = kBoth});
                    EXPECT_EQ(ReasonOf(reply.status), "OK");
                    EXPECT_EQ(reply.summary.terms_size(), 2);
                    EXPECT_EQ(reply.grad_hidden.size(), 60U);
                    EXPECT_EQ(t.Submit({.id = 0, .heads = kBoth}), "COMMITTED DIRECT replayed");
                  },
                  [](Trial& t) { EXPECT_EQ(t.Submit({.id = 0, .heads = kBoth}), "COMMITTED DIRECT"); },
                  {"aux: 0 COMMITTED DIRECT", kEagerLine}});
  rows.push_back(
      {"TheDecisionNamesAllHeads",
       "a commit or discard names exactly the micro-batch's trainable heads",
       [](Trial& t) {
         StageBoth(t);
         t.Head("third");
         for (const std::vector<std::string>& heads : {std::vector<std::string>{"student"}, {"aux"}, {"student", "student"}}) {
           EXPECT_EQ(t.Commit({.id = 0, .heads = heads}), "INVALID_COMBINATION");
           EXPECT_EQ(t.Discard({.id = 0, .heads = heads}), "INVALID_COMBINATION");
         }
         EXPECT_EQ(t.Commit({.id = 0, .heads = {"student", "aux", "third"}}), "INVALID_COMBINATION");
         EXPECT_EQ(t.Discard({.id = 0, .heads = {"student", "aux", "third"}}), "INVALID_COMBINATION");
         EXPECT_EQ(t.Commit({.id = 0, .heads = {"aux", "student"}, .factor = 0.5}), "OK");
         EXPECT_EQ(t.Commit({.id = 0, .heads = kBoth, .factor = 0.5}), "OK replayed");
         EXPECT_EQ(t.Commit({.id = 0, .heads = kBoth, .factor = 0.25}), "MICRO_BATCH_CONFLICT");
       },
       [](Trial& t) {
         StageAndCommitBoth(t);
         t.Head("third");
       },
       {"aux: 0 COMMITTED STAGED", "0 COMMITTED STAGED"}});
  rows.push_back({"TermsAreDiscardedTogether",
                  "a discard drops the contribution in all heads",
                  [](Trial& t) {
                    StageBoth(t);
                    EXPECT_EQ(t.Discard({.id = 0, .heads = kBoth}), "OK dropped");
                    EXPECT_EQ(t.Discard({.id = 0, .heads = kBoth}), "OK");
                    EXPECT_EQ(t.Submit({.id = 0, .heads = kBoth}), "MICRO_BATCH_DISCARDED");
                  },
                  MakeBoth,
                  {"aux: 0 DISCARDED STAGED", "0 DISCARDED STAGED"}});
  rows.push_back(
      {"HeldTermsCommitTogether",
       "the same for what is held, with token factors for all terms",
       [](Trial& t) {
         EXPECT_EQ(t.Submit({.id = 0, .heads = kBoth, .explicit_commit = true, .late_token_factors = true}), "STAGED HELD");
         EXPECT_EQ(t.Commit({.id = 0, .heads = {"aux"}}), "INVALID_COMBINATION");
         EXPECT_EQ(t.Commit({.id = 0, .heads = kBoth, .token_factors = {1, 0.5F, -2}}), "OK");
       },
       [](Trial& t) {
         EXPECT_EQ(t.Submit({.id = 0, .heads = kBoth, .explicit_commit = true, .late_token_factors = true}), "STAGED HELD");
         EXPECT_EQ(t.Commit({.id = 0, .heads = kBoth, .token_factors = {1, 0.5F, -2}}), "OK");
       },
       {"aux: 0 COMMITTED HELD", "0 COMMITTED HELD"}});
  rows.push_back({"OneHeadRefusesForAll",
                  "all heads take a micro-batch or none does",
                  [](Trial& t) {
                    MakeBoth(t);
                    EXPECT_EQ(t.Submit({.id = 7, .heads = {"aux"}, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Submit({.id = 0, .heads = kBoth, .explicit_commit = true}), "STAGING_FULL");
                    EXPECT_EQ(t.Discard({.id = 7, .heads = {"aux"}}), "OK dropped");
                    EXPECT_EQ(t.Discard({.id = 0, .heads = {"aux"}}), "OK");
                    EXPECT_EQ(t.Submit({.id = 0, .heads = kBoth}), "MICRO_BATCH_DISCARDED");
                    EXPECT_EQ(t.Submit({.id = 1, .heads = kBoth, .refuse_non_finite = true, .has_nan = true}), "NON_FINITE_VALUES");
                    EXPECT_EQ(t.Submit({.id = 2}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Submit({.id = 2, .heads = kBoth}), "MICRO_BATCH_CONFLICT");
                    EXPECT_EQ(t.Submit({.id = 2, .heads = kBoth, .first_wins = true}), "MICRO_BATCH_CONFLICT");
                    EXPECT_EQ(t.Seal({.head = "aux"}), "OK");
                    EXPECT_EQ(t.Submit({.id = 3, .heads = kBoth}), "STEP_SEALED");
                  },
                  [](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 2}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Seal({.head = "aux"}), "OK");
                  },
                  {"aux: 0 DISCARDED", "aux: 7 DISCARDED STAGED", "2 COMMITTED DIRECT"}});
  rows.push_back({"OneHeadHasNoSlot",
                  "all are HELD if one of them finds no slot",
                  [](Trial& t) {
                    MakeBoth(t);
                    EXPECT_EQ(t.Submit({.id = 7, .heads = {"aux"}, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Submit({.id = 0, .heads = kBoth, .explicit_commit = true, .allow_held = true}), "STAGED HELD");
                    EXPECT_EQ(t.Submit({.id = 8, .explicit_commit = true}), "STAGED STAGED");  // the student's slot is free
                    EXPECT_EQ(t.Commit({.id = 0, .heads = kBoth}), "OK");
                    EXPECT_EQ(t.Discard({.id = 7, .heads = {"aux"}}), "OK dropped");
                    EXPECT_EQ(t.Discard({.id = 8}), "OK dropped");
                  },
                  [](Trial& t) { EXPECT_EQ(t.Submit({.id = 0, .heads = kBoth}), "COMMITTED DIRECT"); },
                  {"aux: 0 COMMITTED HELD", "aux: 7 DISCARDED STAGED", "0 COMMITTED HELD", "8 DISCARDED STAGED"}});
  rows.push_back({"AHigherAttemptAbortsAll",
                  "a higher attempt aborts the lower one in all heads",
                  [](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 0, .seed = 7, .heads = kBoth, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Submit({.id = 0, .heads = kBoth, .attempt = 1, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Commit({.id = 0, .heads = kBoth}), "ATTEMPT_SUPERSEDED");
                    EXPECT_EQ(t.Commit({.id = 0, .heads = kBoth, .attempt = 1, .factor = 0.5}), "OK");
                  },
                  StageAndCommitBoth,
                  {"aux: 0 COMMITTED STAGED @1", "0 COMMITTED STAGED @1"}});
  const auto one_head_twice = [](int64_t second_step) {
    return [second_step](v1::MicroBatchHeader& header) {
      v1::LossTerm second = header.terms(0);
      second.set_row_start(1);
      second.set_row_count(2);
      *second.mutable_targets() = Int32Tensor({4, 5});
      second.mutable_head()->set_step(second_step);
      *header.add_terms() = second;
    };
  };
  rows.push_back({"OneHeadInTwoTerms",
                  "terms that name the same head name the same step and epoch of it",
                  [one_head_twice](Trial& t) {
                    EXPECT_EQ(t.SubmitEdited({.id = 0}, one_head_twice(1)), "INVALID_COMBINATION");
                    EXPECT_EQ(t.SubmitEdited({.id = 0, .explicit_commit = true}, one_head_twice(0)), "STAGED STAGED");
                    EXPECT_EQ(t.Discard({.id = 0}), "OK dropped");
                    EXPECT_EQ(t.Submit({.id = 1}), "COMMITTED DIRECT");
                  },
                  [](Trial& t) { EXPECT_EQ(t.Submit({.id = 1}), "COMMITTED DIRECT"); },
                  {"0 DISCARDED STAGED", "1 COMMITTED DIRECT"}});
  return rows;
}

// ---- take-over, restart, restore -------------------------------------------------------------------------------------

// Every call that carries an epoch, with what the trainer believes: all are answered `reason`.
void ExpectRefused(Trial& t, int64_t step, const std::string& reason) {
  for (const StepCall& call : StepCalls()) EXPECT_EQ(call.call(t, "student", step), reason) << call.name;
  EXPECT_EQ(t.GetStep(), reason);
  EXPECT_EQ(t.Save("by-a-zombie"), reason);
}

// The same for what a trainer believes that has been replaced since.
void ExpectFenced(Trial& t, const TestHead& zombie, int64_t step) {
  const TestHead heir = std::exchange(t.Head(), zombie);
  ExpectRefused(t, step, "EPOCH_FENCED");
  t.Head() = heir;
}

void ApplyOneStep(Trial& t) {
  SubmitFirst(t);
  EXPECT_EQ(t.Apply({.ids = {0}}), "OK");
}

void ApplyOneStepAndSubmit(Trial& t) {
  ApplyOneStep(t);
  EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
}

const TrialSetup kWithCheckpoints = {.checkpoints = true};

std::vector<TransactionRow> FencingRows() {
  std::vector<TransactionRow> rows;
  rows.push_back({"TakeHeadFencesTheZombie",
                  "a stale epoch is EPOCH_FENCED: a zombie trainer cannot touch the new run",
                  [](Trial& t) {
                    ApplyOneStepAndSubmit(t);
                    EXPECT_EQ(t.Submit({.id = 1, .step = 1, .explicit_commit = true}), "STAGED STAGED");
                    const TestHead zombie = t.Head();
                    const v1::Head before = t.server().Get(zombie.name());
                    EXPECT_EQ(t.Take(), "OK");
                    const v1::Head after = t.Head().head;
                    EXPECT_NE(after.epoch(), before.epoch());
                    EXPECT_EQ(after.open_step(), 1);
                    EXPECT_EQ(after.weight_version(), before.weight_version());
                    EXPECT_EQ(Floats(t.Gradient()), std::vector<float>(65, 0.0F));
                    EXPECT_EQ(t.MicroBatches(), std::vector<std::string>());
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1, .seed = 7}), "COMMITTED DIRECT");
                    const TestHead heir = t.Head();
                    t.Head() = zombie;
                    ExpectRefused(t, 1, "EPOCH_FENCED");
                    EXPECT_EQ(t.last_error().code, grpc::StatusCode::ABORTED);
                    EXPECT_EQ(t.last_error().at("headEpoch"), absl::BytesToHexString(heir.head.epoch()));
                    EXPECT_EQ(t.last_error().at("openStep"), "1");
                    EXPECT_EQ(t.SetWeights(3), "EPOCH_FENCED");
                    EXPECT_EQ(t.Restore("x"), "EPOCH_FENCED");
                    EXPECT_EQ(t.Delete("student", true, zombie.head.epoch()), "EPOCH_FENCED");
                    t.Head() = heir;
                    EXPECT_EQ(t.Submit({.id = 1, .step = 1, .explicit_commit = true}), "STAGED STAGED");  // the slot is free
                    EXPECT_EQ(t.Discard({.id = 1, .step = 1}), "OK dropped");
                  },
                  [](Trial& t) {
                    ApplyOneStep(t);
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1, .seed = 7}), "COMMITTED DIRECT");
                  },
                  {kEagerLine, "1 DISCARDED STAGED"},
                  kWithCheckpoints});
  rows.push_back({"TakeHeadIfItIsCurrent",
                  "TakeHead with an epoch: of several trainers that try, one succeeds",
                  [](Trial& t) {
                    SubmitFirst(t);
                    const std::string epoch = t.Head().head.epoch();
                    EXPECT_EQ(t.Take("student", std::string(16, 'x')), "EPOCH_FENCED");
                    EXPECT_EQ(t.MicroBatch(0), kEagerLine);
                    EXPECT_EQ(t.Take("student", epoch), "OK");
                    EXPECT_EQ(t.Take("student", epoch), "EPOCH_FENCED");
                  },
                  [](Trial& t) { t.Head(); },
                  {}});
  rows.push_back({"TakeHeadKeepsTheOptimizer",
                  "TakeHead: weights, optimizer state and the step's number stay",
                  [](Trial& t) {
                    ApplyOneStep(t);
                    EXPECT_EQ(t.Take(), "OK");
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Apply({.step = 1, .ids = {0}}), "OK");
                  },
                  [](Trial& t) {
                    ApplyOneStepAndSubmit(t);
                    EXPECT_EQ(t.Apply({.step = 1, .ids = {0}}), "OK");
                  },
                  {}});
  rows.push_back({"WeightsSetOutsideFence",
                  "weights set outside a step: a new epoch, an empty step",
                  [](Trial& t) {
                    SubmitFirst(t);
                    const TestHead zombie = t.Head();
                    EXPECT_EQ(t.SetWeights(3), "OK");
                    ExpectFenced(t, zombie, 0);
                  },
                  [](Trial& t) { EXPECT_EQ(t.SetWeights(3), "OK"); },
                  {},
                  kWithCheckpoints});
  rows.push_back({"ARecreatedHeadFences",
                  "a head that was deleted and made again is another one",
                  [](Trial& t) {
                    SubmitFirst(t);
                    const TestHead zombie = t.Head();
                    EXPECT_EQ(t.Delete("student", false), "HEAD_IN_USE");
                    EXPECT_EQ(t.Delete("student", true), "OK");
                    t.Head();
                    ExpectFenced(t, zombie, 0);
                  },
                  [](Trial& t) { t.Head(); },
                  {},
                  kWithCheckpoints});
  rows.push_back({"RestoreFences",
                  "RestoreCheckpoint: the state in which the saved step began; a new epoch, an empty step",
                  [](Trial& t) {
                    ApplyOneStepAndSubmit(t);
                    EXPECT_EQ(t.Save("s1"), "OK");  // without the contributions of the open step
                    EXPECT_EQ(t.Apply({.step = 1, .ids = {0}}), "OK");
                    const TestHead zombie = t.Head();
                    EXPECT_EQ(t.Restore("s1"), "OK");
                    EXPECT_EQ(t.MicroBatches(), std::vector<std::string>());
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
                    ExpectFenced(t, zombie, 1);
                    EXPECT_EQ(t.Apply({.step = 1, .ids = {0}}), "OK");
                  },
                  [](Trial& t) {
                    ApplyOneStepAndSubmit(t);
                    EXPECT_EQ(t.Apply({.step = 1, .ids = {0}}), "OK");
                  },
                  {},
                  kWithCheckpoints});
  return rows;
}

std::vector<TransactionRow> RestartRows() {
  std::vector<TransactionRow> rows;
  rows.push_back({"ARestartLosesTheStep",
                  "a head comes back at its newest checkpoint, under a new epoch, and answers STEP_LOST {restored_step, "
                  "checkpoint} until a trainer takes it; the client replays the open step from its log",
                  [](Trial& t) {
                    EXPECT_EQ(t.Save("s0"), "OK");
                    ApplyOneStep(t);
                    EXPECT_EQ(t.Save("s1"), "OK");
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Submit({.id = 1, .step = 1, .explicit_commit = true}), "STAGED STAGED");
                    t.Restart();
                    ExpectRefused(t, 1, "STEP_LOST");
                    const v1::Head described = t.server().Get(t.Head().name());
                    for (const char* call : {"GetStep", "Commit", "Submit"}) {
                      const std::string answer = call == std::string("GetStep")  ? t.GetStep()
                                                 : call == std::string("Commit") ? t.Commit({.id = 1, .step = 1})
                                                                                 : t.Submit({.id = 0, .step = 1});
                      EXPECT_EQ(answer, "STEP_LOST") << call;
                      EXPECT_EQ(t.last_error().code, grpc::StatusCode::ABORTED) << call;
                      EXPECT_EQ(t.last_error().at("restoredStep"), "1") << call;
                      EXPECT_EQ(t.last_error().at("openStep"), "1") << call;
                      EXPECT_EQ(t.last_error().at("checkpoint"), "s1") << call;
                      EXPECT_EQ(t.last_error().at("headEpoch"), absl::BytesToHexString(described.epoch())) << call;
                    }
                    EXPECT_EQ(t.Take(), "OK");
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Submit({.id = 1, .step = 1, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Commit({.id = 1, .step = 1, .factor = 0.5}), "OK");
                  },
                  [](Trial& t) {
                    ApplyOneStepAndSubmit(t);
                    EXPECT_EQ(t.Submit({.id = 1, .step = 1, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Commit({.id = 1, .step = 1, .factor = 0.5}), "OK");
                  },
                  {kEagerLine, "1 COMMITTED STAGED"},
                  kWithCheckpoints});
  rows.push_back({"ARestartAtAnOlderStep",
                  "if the restored step is older, the log reaches that far back: rows, Apply arguments",
                  [](Trial& t) {
                    EXPECT_EQ(t.Save("s0"), "OK");
                    ApplyOneStepAndSubmit(t);
                    t.Restart();
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "STEP_LOST");
                    EXPECT_EQ(t.last_error().at("restoredStep"), "0");
                    EXPECT_EQ(t.last_error().at("checkpoint"), "s0");
                    EXPECT_EQ(t.Take(), "OK");
                    ApplyOneStepAndSubmit(t);
                  },
                  ApplyOneStepAndSubmit,
                  {kEagerLine},
                  kWithCheckpoints});
  rows.push_back({"OneTrainerTakesARestoredHead",
                  "of several trainers that find the head restored, one takes it",
                  [](Trial& t) {
                    EXPECT_EQ(t.Save("s0"), "OK");
                    t.Restart();
                    const std::string epoch = t.server().Get(t.Head().name()).epoch();
                    EXPECT_EQ(t.Take("student", t.Head().head.epoch()), "EPOCH_FENCED");  // of the dead server
                    EXPECT_EQ(t.Take("student", epoch), "OK");
                    EXPECT_EQ(t.Take("student", epoch), "EPOCH_FENCED");
                    SubmitFirst(t);
                  },
                  SubmitFirst,
                  {kEagerLine},
                  kWithCheckpoints});
  rows.push_back({"ARestoredHeadCanBeRead",
                  "calls that name no step work on a restored head",
                  [](Trial& t) {
                    EXPECT_EQ(t.Save("s0"), "OK");
                    t.Restart();
                    const v1::Head described = t.server().Get(t.Head().name());
                    EXPECT_EQ(described.state(), v1::HEAD_STATE_RESTORED);
                    EXPECT_EQ(described.restored_checkpoint(), "s0");
                    EXPECT_EQ(described.open_step(), 0);
                    EXPECT_EQ(t.server().Weights(t.Head()), Bytes(t.Head().weight));
                    EXPECT_EQ(t.SubmitEdited({.id = 0}, MakeForwardOnly), "UNSPECIFIED UNSPECIFIED");
                    EXPECT_EQ(t.Take(), "OK");
                  },
                  [](Trial& t) { t.Head(); },
                  {},
                  kWithCheckpoints});
  rows.push_back({"RestoreEndsTheRestoredState",
                  "RestoreCheckpoint with the current epoch makes a restored head ready",
                  [](Trial& t) {
                    EXPECT_EQ(t.Save("s0"), "OK");
                    ApplyOneStep(t);
                    EXPECT_EQ(t.Save("s1"), "OK");
                    t.Restart();
                    EXPECT_EQ(t.Restore("s0"), "STEP_LOST");  // with the epoch of the dead server
                    t.Refresh();
                    EXPECT_EQ(t.Restore("s0"), "OK");
                    SubmitFirst(t);
                  },
                  SubmitFirst,
                  {kEagerLine},
                  kWithCheckpoints});
  rows.push_back({"NewWeightsEndTheRestoredState",
                  "so do uploaded weights",
                  [](Trial& t) {
                    EXPECT_EQ(t.Save("s0"), "OK");
                    t.Restart();
                    EXPECT_EQ(t.SetWeights(3), "STEP_LOST");  // with the epoch of the dead server
                    t.Refresh();
                    EXPECT_EQ(t.SetWeights(3), "OK");
                    SubmitFirst(t);
                  },
                  [](Trial& t) {
                    EXPECT_EQ(t.SetWeights(3), "OK");
                    SubmitFirst(t);
                  },
                  {kEagerLine},
                  kWithCheckpoints});
  v1::HeadSpec frozen = SmallSpec();
  frozen.set_trainable(false);
  frozen.clear_optimizer();
  rows.push_back({"AFrozenHeadComesBackReady",
                  "a frozen head that was saved is ready after a restart",
                  [](Trial& t) {
                    EXPECT_EQ(t.Save("s0", "teacher"), "OK");
                    t.Restart();
                    t.Refresh("teacher");
                    t.Head();
                  },
                  [](Trial& t) {
                    t.Head("teacher");
                    t.Head();
                  },
                  {},
                  {.specs = {{"teacher", frozen}}, .checkpoints = true}});
  const auto find = [](Trial& t, const std::string& id) {
    v1::GetHeadRequest request;
    request.set_name("tenants/default/heads/" + id);
    return ReasonOf(t.server().Call(&Heads::GetHead, request));
  };
  rows.push_back({"ADeletedHeadStaysAway",
                  "a head that was deleted, or never saved, does not come back",
                  [find](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Save("s0", "aux"), "OK");
                    EXPECT_EQ(t.Delete("aux", true), "OK");
                    t.Restart();
                    EXPECT_EQ(find(t, "aux"), "HEAD_NOT_FOUND");
                    EXPECT_EQ(find(t, "student"), "HEAD_NOT_FOUND");
                    EXPECT_EQ(t.Submit({.id = 0}), "HEAD_NOT_FOUND");
                    EXPECT_EQ(t.Commit({.id = 0}), "HEAD_NOT_FOUND");
                    const TestHead zombie = t.Head();
                    t.Forget("student");
                    t.Head();
                    ExpectFenced(t, zombie, 0);
                  },
                  [](Trial& t) { t.Head(); },
                  {},
                  kWithCheckpoints});
  rows.push_back({"RestoringCanBeSwitchedOff",
                  "a server that is told not to brings no head back",
                  [find](Trial& t) {
                    EXPECT_EQ(t.Save("s0"), "OK");
                    t.Restart();
                    EXPECT_EQ(find(t, "student"), "HEAD_NOT_FOUND");
                    t.Forget("student");
                    t.Head();
                  },
                  [](Trial& t) { t.Head(); },
                  {},
                  {.adjust = [](ServerSetup& setup) { setup.options.restore_heads = false; }, .checkpoints = true}});
  rows.push_back({"ARestartEndsSessions",
                  "sessions, and what they left undecided, end with the server",
                  [](Trial& t) {
                    EXPECT_EQ(t.Save("s0"), "OK");
                    const std::string session = t.OpenSession();
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true, .session = session}), "STAGED STAGED");
                    t.Restart();
                    EXPECT_EQ(t.Commit({.id = 0, .session = session}), "SESSION_NOT_FOUND");
                    EXPECT_EQ(t.KeepAlive(session), "SESSION_NOT_FOUND");
                    EXPECT_EQ(t.Take(), "OK");
                    EXPECT_EQ(t.Commit({.id = 0}), "MICRO_BATCH_NOT_FOUND");
                  },
                  [](Trial& t) { t.Head(); },
                  {},
                  kWithCheckpoints});
  return rows;
}

}  // namespace

std::vector<TransactionRow> TermRows() {
  std::vector<TransactionRow> rows = TogetherRows();
  rows.push_back(DroppedBy(
      "DiscardGradient", [](Trial& t) { return t.DiscardGradient({.head = "aux"}); },
      [](Trial& t) { EXPECT_EQ(t.DiscardGradient({.head = "aux"}), "OK"); }, true));
  rows.push_back(DroppedBy(
      "TakeHead", [](Trial& t) { return t.Take("aux"); }, [](Trial&) {}, true));
  rows.push_back(DroppedBy(
      "UploadWeights", [](Trial& t) { return t.SetWeights(3, "aux"); }, [](Trial& t) { EXPECT_EQ(t.SetWeights(3, "aux"), "OK"); },
      true));
  rows.push_back(DroppedBy(
      "RestoreCheckpoint", [](Trial& t) { return t.Restore("beginning", "aux"); }, [](Trial&) {}, true));
  rows.push_back(DroppedBy(
      "DeleteHead", [](Trial& t) { return t.Delete("aux", true); }, [](Trial& t) { EXPECT_EQ(t.Delete("aux", true), "OK"); },
      false));
  rows.push_back({"DroppedInAllByTheSession",
                  "what a session leaves undecided is dropped in all heads",
                  [](Trial& t) {
                    const std::string session = t.OpenSession();
                    EXPECT_EQ(t.Submit({.id = 0, .heads = kBoth, .explicit_commit = true, .session = session}), "STAGED STAGED");
                    EXPECT_EQ(t.CloseSession(session), "OK");
                    EXPECT_EQ(t.Commit({.id = 0, .heads = kBoth}), "MICRO_BATCH_DISCARDED");
                  },
                  MakeBoth,
                  {"aux: 0 DISCARDED STAGED", "0 DISCARDED STAGED"}});
  return rows;
}

std::vector<TransactionRow> EpochRows() {
  std::vector<TransactionRow> rows = FencingRows();
  for (TransactionRow& row : RestartRows()) rows.push_back(row);
  return rows;
}

}  // namespace headwater::testing
