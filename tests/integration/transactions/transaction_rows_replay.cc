// Repeats, attempts, tombstones, sessions: who may still decide what.
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>

#include "tests/integration/transactions/transaction_harness.h"

namespace headwater::testing {
namespace {

void StageFirst(Trial& t) { EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED"); }

void StageAndCommitFirst(Trial& t) {
  StageFirst(t);
  EXPECT_EQ(t.Commit({.id = 0}), "OK");
}

// Attempt 1 of micro-batch 0 has other rows.
void StageAndCommitSecond(Trial& t) {
  EXPECT_EQ(t.Submit({.id = 0, .seed = 7, .explicit_commit = true}), "STAGED STAGED");
  EXPECT_EQ(t.Commit({.id = 0}), "OK");
}

void SpellOutDefaults(v1::MicroBatchHeader& header) {
  header.mutable_terms(0)->set_loss_scale(1);
  header.mutable_terms(0)->set_ignore_index(-100);
  header.mutable_terms(0)->set_row_count(3);
  header.set_grad_hidden_data_type(v1::DATA_TYPE_FLOAT32);
  header.set_return_grad_hidden(true);
  header.set_commit_mode(v1::COMMIT_MODE_EAGER);
}

void Sleep(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

std::vector<TransactionRow> DigestRows() {
  std::vector<TransactionRow> rows;
  rows.push_back(
      {"SameDigest", "same key, same digest: the answer is computed again, nothing is added, replayed = true", [](Trial& t) {
         const LossReply first = t.Compute({.id = 0});
         const LossReply second = t.Compute({.id = 0});
         EXPECT_TRUE(second.summary.replayed());
         EXPECT_EQ(second.grad_hidden, first.grad_hidden);
         EXPECT_EQ(second.summary.digest(), first.summary.digest());
         EXPECT_EQ(second.summary.terms(0).sums().SerializeAsString(), first.summary.terms(0).sums().SerializeAsString());
         EXPECT_EQ(t.Submit({.id = 0, .first_wins = true}), "COMMITTED DIRECT replayed");
       }});
  rows.push_back(
      {"DigestCoversNotTransport", "the digest covers the canonical header and the rows, not transport or attempt", [](Trial& t) {
         SubmitFirst(t);
         EXPECT_TRUE(t.Compute({.id = 0}, {.chunk_rows = 1, .reversed = true}).summary.replayed());
         EXPECT_EQ(t.Submit({.id = 0, .attempt = 3}), "COMMITTED DIRECT replayed");
         EXPECT_EQ(t.SubmitEdited({.id = 0}, SpellOutDefaults), "COMMITTED DIRECT replayed");
         EXPECT_EQ(t.Submit({.id = 0}), "COMMITTED DIRECT replayed");
       }});
  rows.push_back({"OtherDigest", "other digest: MICRO_BATCH_CONFLICT", [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Submit({.id = 0, .seed = 7}), "MICRO_BATCH_CONFLICT");
                    EXPECT_EQ(t.Submit({.id = 0, .loss_scale = 2}), "MICRO_BATCH_CONFLICT");
                    EXPECT_EQ(t.Submit({.id = 0, .seed = 7, .attempt = 1}), "MICRO_BATCH_CONFLICT");
                    EXPECT_EQ(t.last_error().code, grpc::StatusCode::ABORTED);
                    EXPECT_TRUE(t.Compute({.id = 0, .seed = 7}).grad_hidden.empty());
                  }});
  rows.push_back(
      {"FirstWins", "other digest with FIRST_WINS: computed and answered, nothing added, payload_differs = true", [](Trial& t) {
         SubmitFirst(t);
         const LossReply reply = t.Compute({.id = 0, .seed = 7, .first_wins = true});
         EXPECT_TRUE(reply.summary.payload_differs());
         EXPECT_FALSE(reply.summary.replayed());
         EXPECT_EQ(reply.grad_hidden.size(), 60U);
       }});
  rows.push_back({"SameDigestStaged",
                  "a repeat of what is undecided is a replay too, and takes no further slot",
                  [](Trial& t) {
                    StageFirst(t);
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED replayed");
                    EXPECT_EQ(t.Submit({.id = 0, .seed = 7, .explicit_commit = true}), "MICRO_BATCH_CONFLICT");
                    EXPECT_EQ(t.Submit({.id = 0, .seed = 7, .explicit_commit = true, .first_wins = true}), "STAGED STAGED differs");
                    EXPECT_EQ(t.Commit({.id = 0}), "OK");
                  },
                  StageAndCommitFirst,
                  {"0 COMMITTED STAGED"}});
  rows.push_back({"SameDigestHeld",
                  "the same for what is held",
                  [](Trial& t) {
                    for (const char* answer : {"STAGED HELD", "STAGED HELD replayed"}) {
                      EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true, .late_token_factors = true}), answer);
                    }
                    EXPECT_TRUE(t.AwaitMetric("headwater_held_bytes", 72));
                    EXPECT_EQ(t.Commit({.id = 0}), "OK");
                  },
                  SubmitFirst,
                  {"0 COMMITTED HELD"}});
  rows.push_back({"SameAttemptInProgress", "the same attempt while it is computed: MICRO_BATCH_IN_PROGRESS", [](Trial& t) {
                    t.Head();
                    t.server().gate().Close();
                    const auto first = t.Open({.id = 0}, 3);
                    t.server().gate().AwaitWaiting();
                    EXPECT_EQ(t.Submit({.id = 0}), "MICRO_BATCH_IN_PROGRESS");
                    EXPECT_EQ(t.Submit({.id = 0, .seed = 7}), "MICRO_BATCH_IN_PROGRESS");
                    EXPECT_EQ(t.Commit({.id = 0}), "MICRO_BATCH_IN_PROGRESS");
                    EXPECT_EQ(t.Discard({.id = 0}), "MICRO_BATCH_IN_PROGRESS");
                    t.server().gate().Open();
                    EXPECT_EQ(first->End(), "COMMITTED DIRECT");
                  }});
  rows.push_back({"ReplayInASealedStep",
                  "a known micro-batch may be replayed while the step is sealed, a new one may not come",
                  [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Seal({.ids = {0}}), "OK");
                    EXPECT_EQ(t.Submit({.id = 0}), "COMMITTED DIRECT replayed");
                    EXPECT_EQ(t.Submit({.id = 1}), "STEP_SEALED");
                  },
                  [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Seal({.ids = {0}}), "OK");
                  },
                  {kEagerLine}});
  return rows;
}

std::vector<TransactionRow> AttemptRows() {
  std::vector<TransactionRow> rows;
  rows.push_back({"AHigherAttemptAborts",
                  "a higher attempt aborts what a lower one has not committed, a lower one is refused",
                  [](Trial& t) {
                    StageFirst(t);
                    EXPECT_EQ(t.Submit({.id = 0, .seed = 7, .attempt = 1, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "ATTEMPT_SUPERSEDED");
                    EXPECT_EQ(t.last_error().at("knownAttempt"), "1");
                    EXPECT_EQ(t.last_error().code, grpc::StatusCode::ABORTED);
                    EXPECT_TRUE(t.AwaitMetric("headwater_micro_batches_total{outcome=\"superseded\"}", 1));
                    EXPECT_EQ(t.Commit({.id = 0}), "ATTEMPT_SUPERSEDED");
                    EXPECT_EQ(t.Discard({.id = 0}), "ATTEMPT_SUPERSEDED");
                    EXPECT_EQ(t.Commit({.id = 0, .attempt = 2}), "MICRO_BATCH_NOT_FOUND");
                    EXPECT_EQ(t.Commit({.id = 0, .attempt = 1}), "OK");
                    EXPECT_EQ(t.Commit({.id = 0, .attempt = 2}), "OK replayed");  // as attempt 2 of the micro-batch would be
                  },
                  StageAndCommitSecond,
                  {"0 COMMITTED STAGED @1"}});
  rows.push_back({"AHigherAttemptAbortsTheHeld",
                  "the same for what is held",
                  [](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true, .late_token_factors = true}), "STAGED HELD");
                    EXPECT_EQ(t.Submit({.id = 0, .seed = 7, .attempt = 1, .explicit_commit = true, .late_token_factors = true}),
                              "STAGED HELD");
                    EXPECT_TRUE(t.AwaitMetric("headwater_held_bytes", 72));
                    EXPECT_EQ(t.Commit({.id = 0, .attempt = 1}), "OK");
                  },
                  [](Trial& t) { EXPECT_EQ(t.Submit({.id = 0, .seed = 7}), "COMMITTED DIRECT"); },
                  {"0 COMMITTED HELD @1"}});
  rows.push_back({"ItsHeaderIsEnough",
                  "a higher attempt takes effect once its header is accepted, though its rows never come",
                  [](Trial& t) {
                    StageFirst(t);
                    const auto call = t.Open({.id = 0, .attempt = 2, .explicit_commit = true}, 1);
                    EXPECT_TRUE(Await([&] { return t.MicroBatch(0) == "0 UNSPECIFIED @2"; })) << t.MicroBatch(0);
                    EXPECT_EQ(t.Commit({.id = 0}), "ATTEMPT_SUPERSEDED");
                    EXPECT_EQ(t.Commit({.id = 0, .attempt = 2}), "MICRO_BATCH_NOT_FOUND");
                    EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true}), "STAGED STAGED");  // the slot is free
                    EXPECT_EQ(t.Discard({.id = 1}), "OK dropped");
                    t.Cancel(*call);
                    EXPECT_TRUE(t.NothingInFlight());
                    EXPECT_EQ(t.Submit({.id = 0, .attempt = 1, .explicit_commit = true}), "ATTEMPT_SUPERSEDED");
                    EXPECT_EQ(t.Submit({.id = 0, .attempt = 2, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Commit({.id = 0, .attempt = 2}), "OK");
                  },
                  StageAndCommitFirst,
                  {"0 COMMITTED STAGED @2", "1 DISCARDED STAGED"}});
  rows.push_back({"ARunningLowerOneGivesWay",
                  "a running lower attempt ends with ATTEMPT_SUPERSEDED before the point of no return",
                  [](Trial& t) {
                    t.Head();
                    t.server().gate().Close();
                    const auto lower = t.Open({.id = 0, .explicit_commit = true}, 3);
                    t.server().gate().AwaitWaiting();
                    const auto higher = t.Open({.id = 0, .seed = 7, .attempt = 1, .explicit_commit = true}, 3);
                    EXPECT_TRUE(t.AwaitMetric("headwater_in_flight_bytes", 240));  // its header has come
                    Sleep(100);                                                    // and waits for the lower one
                    t.server().gate().Open();
                    EXPECT_EQ(lower->End(), "ATTEMPT_SUPERSEDED");
                    EXPECT_EQ(higher->End(), "STAGED STAGED");
                    EXPECT_EQ(t.Commit({.id = 0, .attempt = 1}), "OK");
                  },
                  StageAndCommitSecond,
                  {"0 COMMITTED STAGED @1"}});
  rows.push_back({"APastNoReturnStays", "past the point of no return the higher attempt is a replay, or a conflict", [](Trial& t) {
                    t.Head();
                    t.server().gate().Close();
                    const auto lower = t.Open({.id = 0}, 3);
                    t.server().gate().AwaitWaiting();
                    const auto higher = t.Open({.id = 0, .attempt = 1}, 3);
                    const auto other = t.Open({.id = 0, .seed = 7, .attempt = 2}, 3);
                    EXPECT_TRUE(t.AwaitMetric("headwater_in_flight_bytes", 360));
                    t.server().gate().Open();
                    EXPECT_EQ(lower->End(), "COMMITTED DIRECT");
                    EXPECT_EQ(higher->End(), "COMMITTED DIRECT replayed");
                    EXPECT_EQ(other->End(), "MICRO_BATCH_CONFLICT");
                  }});
  rows.push_back({"Tombstone",
                  "a discard leaves a tombstone for its attempt and those below; a higher attempt may submit anew",
                  [](Trial& t) {
                    StageFirst(t);
                    EXPECT_EQ(t.Discard({.id = 0, .attempt = 1}), "OK dropped");
                    EXPECT_EQ(t.Submit({.id = 0}), "MICRO_BATCH_DISCARDED");
                    EXPECT_EQ(t.Submit({.id = 0, .attempt = 1}), "MICRO_BATCH_DISCARDED");
                    EXPECT_EQ(t.Commit({.id = 0, .attempt = 1}), "MICRO_BATCH_DISCARDED");
                    EXPECT_EQ(t.Discard({.id = 0, .attempt = 1}), "OK");
                    EXPECT_EQ(t.MicroBatch(0), "0 DISCARDED STAGED @1");
                    EXPECT_EQ(t.Submit({.id = 0, .attempt = 2}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Submit({.id = 0, .attempt = 1}), "MICRO_BATCH_DISCARDED");
                  },
                  SubmitFirst,
                  {"0 COMMITTED DIRECT @2"}});
  rows.push_back({"TombstoneOfTheUnseen",
                  "a discard of what was never seen leaves a tombstone: a late upload cannot bring it back",
                  [](Trial& t) {
                    const auto late = t.Open({.id = 5}, 1);
                    EXPECT_EQ(t.Discard({.id = 5}), "OK");
                    late->SendRest();
                    EXPECT_EQ(late->End(), "MICRO_BATCH_DISCARDED");
                    EXPECT_EQ(t.Submit({.id = 5}), "MICRO_BATCH_DISCARDED");
                    SubmitFirst(t);
                  },
                  SubmitFirst,
                  {kEagerLine, "5 DISCARDED"}});
  rows.push_back({"ACommittedOneStays", "a discard of what is committed, or of a lower attempt, is refused", [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Discard({.id = 0}), "MICRO_BATCH_CONFLICT");
                    EXPECT_EQ(t.Discard({.id = 0, .attempt = 4}), "MICRO_BATCH_CONFLICT");
                    EXPECT_EQ(t.Commit({.id = 1}), "MICRO_BATCH_NOT_FOUND");
                  }});
  return rows;
}

}  // namespace

std::vector<TransactionRow> ReplayRows() {
  std::vector<TransactionRow> rows = DigestRows();
  for (TransactionRow& row : AttemptRows()) rows.push_back(row);
  return rows;
}

std::vector<TransactionRow> SessionRows() {
  std::vector<TransactionRow> rows;
  rows.push_back({"TheOwnerDecides",
                  "a session owns its uncommitted contributions: NOT_SESSION_OWNER for everybody else",
                  [](Trial& t) {
                    const std::string owner = t.OpenSession();
                    const std::string other = t.OpenSession();
                    EXPECT_NE(owner, other);
                    EXPECT_EQ(owner.size(), 32U);
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true, .session = owner}), "STAGED STAGED");
                    for (const std::string& session : {other, std::string()}) {
                      EXPECT_EQ(t.Commit({.id = 0, .session = session}), "NOT_SESSION_OWNER");
                      EXPECT_EQ(t.last_error().code, grpc::StatusCode::PERMISSION_DENIED);
                      EXPECT_EQ(t.Discard({.id = 0, .session = session}), "NOT_SESSION_OWNER");
                    }
                    EXPECT_EQ(t.MicroBatch(0), "0 STAGED STAGED");
                    EXPECT_EQ(t.Commit({.id = 0, .session = owner}), "OK");
                    EXPECT_EQ(t.CloseSession(owner), "OK");
                  },
                  StageAndCommitFirst,
                  {"0 COMMITTED STAGED"}});
  rows.push_back({"AHigherAttemptNeedsNoOwner",
                  "a discard with a higher attempt needs no session",
                  [](Trial& t) {
                    const std::string owner = t.OpenSession();
                    SubmitFirst(t);
                    EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true, .session = owner}), "STAGED STAGED");
                    EXPECT_EQ(t.Discard({.id = 1}), "NOT_SESSION_OWNER");
                    EXPECT_EQ(t.Discard({.id = 1, .attempt = 1}), "OK dropped");
                    EXPECT_EQ(t.Commit({.id = 1, .session = owner}), "MICRO_BATCH_DISCARDED");
                  },
                  SubmitFirst,
                  {kEagerLine, "1 DISCARDED STAGED @1"}});
  rows.push_back({"TheLeaseEnds",
                  "when the lease ends its uncommitted contributions go (committed ones stay)",
                  [](Trial& t) {
                    const std::string session = t.OpenSession(1500);
                    EXPECT_EQ(t.Submit({.id = 0, .session = session}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true, .session = session}), "STAGED STAGED");
                    EXPECT_EQ(t.Submit({.id = 2, .explicit_commit = true, .late_token_factors = true, .session = session}),
                              "STAGED HELD");
                    EXPECT_TRUE(Await([&] { return t.MicroBatch(2) == "2 DISCARDED HELD"; })) << t.MicroBatch(2);
                    EXPECT_EQ(t.MicroBatch(1), "1 DISCARDED STAGED");
                    EXPECT_TRUE(t.AwaitMetric("headwater_held_bytes", 0));
                    EXPECT_TRUE(t.AwaitMetric("headwater_sessions_ended_total{how=\"expired\"}", 1));
                    EXPECT_TRUE(t.AwaitMetric("headwater_session_discards_total{how=\"expired\"}", 2));
                    EXPECT_EQ(t.KeepAlive(session), "SESSION_NOT_FOUND");
                    EXPECT_EQ(t.Commit({.id = 1, .session = session}), "SESSION_NOT_FOUND");
                    EXPECT_EQ(t.Commit({.id = 1}), "MICRO_BATCH_DISCARDED");
                    EXPECT_EQ(t.Submit({.id = 1}), "MICRO_BATCH_DISCARDED");
                    EXPECT_EQ(t.Submit({.id = 1, .attempt = 1}), "COMMITTED DIRECT");
                  },
                  [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Submit({.id = 1}), "COMMITTED DIRECT");
                  },
                  {kEagerLine, "1 COMMITTED DIRECT @1", "2 DISCARDED HELD"}});
  rows.push_back({"TheLeaseIsRenewed",
                  "a lease is renewed by any call or KeepAlive",
                  [](Trial& t) {
                    const std::string kept = t.OpenSession(3000), busy = t.OpenSession(3000);
                    const Batch held = {.id = 1, .explicit_commit = true, .late_token_factors = true, .session = busy};
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true, .session = kept}), "STAGED STAGED");
                    EXPECT_EQ(t.Submit(held), "STAGED HELD");
                    Sleep(1600);
                    EXPECT_EQ(t.KeepAlive(kept), "OK");
                    EXPECT_EQ(t.Submit(held), "STAGED HELD replayed");
                    Sleep(1600);
                    EXPECT_EQ(t.Commit({.id = 0, .session = kept}), "OK");
                    EXPECT_EQ(t.Commit({.id = 1, .session = busy}), "OK");
                  },
                  [](Trial& t) {
                    StageAndCommitFirst(t);
                    EXPECT_EQ(t.Submit({.id = 1}), "COMMITTED DIRECT");
                  },
                  {"0 COMMITTED STAGED", "1 COMMITTED HELD"}});
  rows.push_back({"NoLeaseEndsWhileACallRuns",
                  "a session never ends while one of its calls runs",
                  [](Trial& t) {
                    const std::string session = t.OpenSession(1200);
                    t.Head();
                    t.server().gate().Close();
                    const auto call = t.Open({.id = 0, .explicit_commit = true, .session = session}, 3);
                    t.server().gate().AwaitWaiting();
                    Sleep(1500);
                    t.server().gate().Open();
                    EXPECT_EQ(call->End(), "STAGED STAGED");
                    EXPECT_EQ(t.Commit({.id = 0, .session = session}), "OK");
                  },
                  StageAndCommitFirst,
                  {"0 COMMITTED STAGED"}});
  rows.push_back({"TheSessionIsClosed",
                  "a closed session's uncommitted contributions go; closing again is no error",
                  [](Trial& t) {
                    const std::string session = t.OpenSession();
                    const std::string other = t.OpenSession();
                    EXPECT_EQ(t.Submit({.id = 0, .session = session}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true, .session = session}), "STAGED STAGED");
                    EXPECT_EQ(t.CloseSession(other), "OK");
                    EXPECT_EQ(t.MicroBatch(1), "1 STAGED STAGED");
                    EXPECT_EQ(t.CloseSession(session), "OK");
                    EXPECT_EQ(t.CloseSession(session), "OK");
                    EXPECT_EQ(t.MicroBatch(1), "1 DISCARDED STAGED");
                    EXPECT_TRUE(t.AwaitMetric("headwater_session_discards_total{how=\"closed\"}", 1));
                    EXPECT_TRUE(t.AwaitMetric("headwater_session_discards_total{how=\"expired\"}", 0));
                    EXPECT_EQ(t.Submit({.id = 2, .session = session}), "SESSION_NOT_FOUND");
                    EXPECT_EQ(t.KeepAlive(session), "SESSION_NOT_FOUND");
                  },
                  SubmitFirst,
                  {kEagerLine, "1 DISCARDED STAGED"}});
  rows.push_back({"TheSessionIsClosedWhileACallRuns",
                  "so do those of calls that are running then, when they end",
                  [](Trial& t) {
                    const std::string session = t.OpenSession();
                    t.Head();
                    t.server().gate().Close();
                    const auto call = t.Open({.id = 0, .explicit_commit = true, .session = session}, 3);
                    t.server().gate().AwaitWaiting();
                    auto close = std::async(std::launch::async, [&] { return t.CloseSession(session); });
                    EXPECT_TRUE(Await([&] { return t.KeepAlive(session) == "SESSION_NOT_FOUND"; }));
                    t.server().gate().Open();
                    call->End();
                    EXPECT_EQ(close.get(), "OK");
                    EXPECT_TRUE(Await([&] { return t.MicroBatch(0) == "0 DISCARDED STAGED"; })) << t.MicroBatch(0);
                  },
                  [](Trial& t) { t.Head(); },
                  {"0 DISCARDED STAGED"}});
  return rows;
}

}  // namespace headwater::testing
