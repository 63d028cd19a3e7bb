// Parts of the client core that need no server: turns, attempts, heads in messages, the log's entries for a subject, queues of
// rows. Threads for blocking work: where the system gives none, a task that was refused never runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "client/core/call/completion_queue.h"
#include "client/core/call/messages.h"
#include "client/core/call/method_table.h"
#include "client/core/call/turns.h"
#include "client/core/link/delayed_tasks.h"
#include "client/core/replay/head_state.h"
#include "client/core/replay/replay_log.h"
#include "client/core/rows/transfer/row_queue.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::client::internal {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(Turns, FollowTheOrderOfTheCallsAndArePassedOn) {
  const char calls[5] = {};
  Turns turns(2);
  EXPECT_TRUE(turns.TryTake(&calls[0]));
  EXPECT_TRUE(turns.TryTake(&calls[1]));
  EXPECT_FALSE(turns.TryTake(&calls[2]));
  EXPECT_FALSE(turns.TryTake(&calls[3]));
  EXPECT_FALSE(turns.TryTake(&calls[4]));
  EXPECT_FALSE(turns.HasCome(&calls[2]));
  EXPECT_EQ(turns.End(&calls[1], /*had_turn=*/true), &calls[2]);
  EXPECT_TRUE(turns.HasCome(&calls[2]));
  EXPECT_FALSE(turns.TryTake(&calls[3]));
  // One that gives up without having taken its turn hands it on, too.
  EXPECT_EQ(turns.End(&calls[2], /*had_turn=*/false), &calls[3]);
  EXPECT_TRUE(turns.TryTake(&calls[3]));
  EXPECT_EQ(turns.End(&calls[4], /*had_turn=*/false), nullptr);
  EXPECT_EQ(turns.End(&calls[0], /*had_turn=*/true), nullptr);
}

TEST(CompletionQueue, IsReadableWhileItIsNotEmpty) {
  CompletionQueue queue;
  pollfd wanted = {queue.fd(), POLLIN, 0};
  EXPECT_EQ(poll(&wanted, 1, 0), 0);
  for (const uint64_t tag : {7U, 8U, 9U}) queue.Push(tag);
  uint64_t tags[2];
  EXPECT_EQ(queue.Take(tags, 2), 2);
  EXPECT_THAT(tags, ElementsAre(7, 8));
  EXPECT_EQ(poll(&wanted, 1, 0), 1);
  EXPECT_EQ(queue.Take(tags, 2), 1);
  EXPECT_EQ(poll(&wanted, 1, 0), 0);
  EXPECT_EQ(queue.Take(tags, 2), 0);
}

// tests/e2e/protocol/retry_cases.py has the other attempts that a call begins with.
TEST(HeadState, AttemptsAreKnownUntilTheStepAfterTheirsIsClosed) {
  HeadState head("h", "e");
  head.NoteAttempt(0, 5, 6, 4);
  head.NoteAttempt(0, 5, 3, 0);
  EXPECT_EQ(head.FirstAttempt(0, 5, 5), 6);  // the attempts that the caller knows of have led there
  EXPECT_EQ(head.AttemptOf(0, 5), 6);
  head.SawStep(1);
  EXPECT_EQ(head.AttemptOf(0, 5), 6);  // repeats of its decisions are still answered
  head.SawStep(2);
  EXPECT_EQ(head.AttemptOf(0, 5), 0);
}

TEST(HeadStates, UnusedEpochsAreRemoved) {
  HeadStates heads;
  v1::Head head;
  head.set_name("h");
  head.set_epoch("kept");
  heads.Introduce(head, "", nullptr);
  const std::shared_ptr<HeadState> kept = heads.FindKnown("h", "kept");
  for (int i = 0; i < 100; ++i) {
    head.set_epoch(std::to_string(i));
    heads.Introduce(head, "", nullptr);
  }
  EXPECT_LE(heads.AllOf("h").size(), 17U);
  EXPECT_EQ(heads.FindKnown("h", "kept"), kept);
  EXPECT_NE(heads.FindKnown("h", "99"), nullptr);
  EXPECT_EQ(heads.FindKnown("h", "other"), nullptr);
  EXPECT_EQ(heads.FindKnown("g", "99"), nullptr);
}

v1::MicroBatchHeader TwoTerms() {
  v1::MicroBatchHeader header;
  v1::LossTerm& first = *header.add_terms();
  first.mutable_head()->set_head("s");
  first.mutable_head()->set_head_epoch("s0");
  first.mutable_head()->set_step(3);
  first.mutable_teacher_hidden()->set_head("t");
  first.mutable_teacher_hidden()->set_head_epoch("t0");
  v1::LossTerm& second = *header.add_terms();
  second.mutable_head()->set_head("t");
  second.mutable_head()->set_head_epoch("t0");
  second.mutable_head()->set_step(4);
  second.mutable_joined_teacher()->set_head("j");
  second.mutable_joined_teacher()->set_head_epoch("j0");
  return header;
}

TEST(Messages, HeadsAreFoundInEveryField) {
  HeadStates heads;
  const HeadUses uses = heads.UsesOf(TwoTerms());
  std::vector<std::string> named;
  for (const HeadUse& use : uses) {
    named.push_back(use.state->name + use.state->epoch() + (use.step.has_value() ? std::to_string(*use.step) : ""));
  }
  EXPECT_THAT(named, ElementsAre("ss03", "tt04", "jj0"));  // a head that is taught too is at its own step
  v1::SaveCheckpointRequest save;
  save.set_name("n");
  save.set_epoch("n0");
  EXPECT_EQ(heads.UsesOf(save).at(0).state->name, "n");
  v1::UploadWeightsHeader upload;
  upload.set_name("n");
  upload.set_epoch("n0");
  upload.set_closes_step(8);
  EXPECT_EQ(heads.UsesOf(upload).at(0).step, 8);
  v1::CreateHeadRequest create;
  create.set_name("n");
  EXPECT_THAT(heads.UsesOf(create), IsEmpty());
}

TEST(Messages, EpochsAreReplacedInEveryField) {
  v1::MicroBatchHeader header = TwoTerms();
  SetEpochs(header, [](const NamedHead& head) { return head.name == "t" ? std::string("new") : std::string(); });
  EXPECT_EQ(header.terms(0).head().head_epoch(), "s0");
  EXPECT_EQ(header.terms(0).teacher_hidden().head_epoch(), "new");
  EXPECT_EQ(header.terms(1).head().head_epoch(), "new");
  EXPECT_EQ(header.terms(1).joined_teacher().head_epoch(), "j0");
}

// tests/e2e/protocol/retry_cases.py has the other decisions by fields.
TEST(MethodTable, WhatIsOnlyValidatedMayBeRepeated) {
  v1::CreateHeadRequest create;
  create.set_if_exists(v1::IF_EXISTS_ATTACH_IF_SAME_SPEC);
  EXPECT_EQ(MethodOf(create).repeat, Repeat::kIfNothingWasDone);
  create.set_validate_only(true);
  EXPECT_EQ(MethodOf(create).repeat, Repeat::kSafe);
  EXPECT_EQ(FindMethod("/headwater.v1.LossService/TransferRows"), nullptr);
}

class ReplayLogOfAStep : public testing::Test {
 protected:
  ReplayLogOfAStep()
      : log_(
            1000, std::nullopt, [] {}, [this](const std::string& why) { told_.push_back(why); }) {
    v1::Head head;
    head.set_name("h");
    head.set_epoch("e");
    head.mutable_spec()->set_trainable(true);
    head_ = std::make_shared<HeadState>(head, "process");
  }

  void Add(Record record, int64_t micro_batch, int64_t attempt = 0, bool again = false, int64_t bytes = 10) {
    LogEntry entry = {.record = record,
                      .heads = {{.state = head_, .step = 0}},
                      .micro_batch = micro_batch,
                      .attempt = attempt,
                      .is_answered_again = again};
    auto call = std::make_shared<LoggedCall>();
    call->bytes = bytes;
    entry.call = std::move(call);
    log_.Add(std::move(entry));
  }
  // `l0.1`: loss of micro-batch 0, attempt 1.
  std::vector<std::string> Entries() {
    std::vector<std::string> result;
    for (const LogEntry& entry : log_.EntriesOf({{.state = head_}})) {
      result.push_back(std::string(1, " lgcdsaz"[static_cast<int>(entry.record)]) + std::to_string(entry.micro_batch) + "." +
                       std::to_string(entry.attempt));
    }
    return result;
  }

  ReplayLog log_;
  std::shared_ptr<HeadState> head_;
  std::vector<std::string> told_;
};

TEST_F(ReplayLogOfAStep, EachSubjectHasOneEntry) {
  Add(Record::kLoss, 0);
  Add(Record::kLoss, 0, 1, /*again=*/true);  // the first one counts
  EXPECT_THAT(Entries(), ElementsAre("l0.0"));
  Add(Record::kLoss, 0, 2);
  EXPECT_THAT(Entries(), ElementsAre("l0.2"));
  Add(Record::kCommit, 0, 2);
  Add(Record::kCommit, 0, 2);
  Add(Record::kSeal, -1);
  Add(Record::kSeal, -1);
  EXPECT_THAT(Entries(), ElementsAre("l0.2", "c0.2", "s-1.0"));
}

TEST_F(ReplayLogOfAStep, CommitOfAnothersMicroBatchIsNotKept) {
  Add(Record::kCommit, 0);
  EXPECT_THAT(Entries(), IsEmpty());
}

TEST_F(ReplayLogOfAStep, OpenStepThatIsTooLargeIsDroppedAndReportedOnce) {
  Add(Record::kLoss, 0, 0, false, 600);
  EXPECT_THAT(told_, IsEmpty());
  Add(Record::kLoss, 1, 0, false, 600);
  EXPECT_THAT(Entries(), IsEmpty());
  EXPECT_EQ(head_->first_logged_step(), 1);
  log_.Drop({{.state = head_, .step = 1}}, "of something else");
  ASSERT_EQ(told_.size(), 1U);
  EXPECT_THAT(told_[0], testing::HasSubstr("replay_bytes=1000"));
}

TEST(RowQueue, FirstRowsOfEveryTensorComeFirstAndEachOnce) {
  const std::vector<unsigned char> memory(100 * 8);
  RowQueue queue(
      {{v1::CHUNK_ROLE_HIDDEN, 0, memory.data(), 100, 8, 0}, {v1::CHUNK_ROLE_TEACHER_HIDDEN, 1, memory.data(), 50, 4, 30}});
  std::vector<int64_t> next = {0, 0};
  bool last = false;
  while (const auto chunk = queue.Next(40)) {
    EXPECT_FALSE(last);
    last = chunk->last;
    const size_t source = chunk->header.role == v1::CHUNK_ROLE_HIDDEN ? 0 : 1;
    EXPECT_EQ(chunk->header.row_start, next[source]);
    EXPECT_EQ(chunk->data, memory.data() + next[source] * (source == 0 ? 8 : 4));
    EXPECT_LE(chunk->header.data_bytes, 40);
    // In rows of the micro-batch, no tensor is ahead of another by more than a chunk.
    if (source == 1 && next[0] < 100) {
      EXPECT_LE(30 + next[1], next[0]);
    }
    if (source == 0 && next[1] < 50) {
      EXPECT_LE(next[0], 30 + next[1]);
    }
    next[source] += chunk->header.row_count;
  }
  EXPECT_TRUE(last);
  EXPECT_THAT(next, testing::ElementsAre(100, 50));
}

TEST(RowQueue, RowLongerThanAChunkIsAChunk) {
  const std::vector<unsigned char> memory(30);
  RowQueue queue({{v1::CHUNK_ROLE_HIDDEN, 0, memory.data(), 3, 10, 0}});
  EXPECT_EQ(queue.Next(1)->header.data_bytes, 10);
  EXPECT_EQ(queue.Next(1)->header.data_bytes, 10);
  EXPECT_TRUE(queue.Next(1)->last);
  EXPECT_FALSE(queue.Next(1).has_value());
  EXPECT_FALSE(RowQueue({}).Next(1).has_value());
}

TEST(RowCoverage, TakesEveryRowOnce) {
  std::mt19937 generator(3);
  for (int round = 0; round < 200; ++round) {
    const int64_t rows = 1 + generator() % 60;
    RowCoverage coverage(rows);
    std::vector<bool> taken(static_cast<size_t>(rows));
    for (int i = 0; i < 100; ++i) {
      const int64_t start = static_cast<int64_t>(generator() % 64) - 2;
      const int64_t count = static_cast<int64_t>(generator() % 8) - 1;
      bool free = start >= 0 && count >= 1 && start + count <= rows;
      for (int64_t row = start; free && row < start + count; ++row) free = !taken[static_cast<size_t>(row)];
      ASSERT_EQ(coverage.Take(start, count), free) << start << " " << count;
      for (int64_t row = start; free && row < start + count; ++row) taken[static_cast<size_t>(row)] = true;
      ASSERT_EQ(coverage.taken(), std::count(taken.begin(), taken.end(), true));
    }
    EXPECT_EQ(coverage.complete(), std::count(taken.begin(), taken.end(), true) == rows);
  }
  EXPECT_FALSE(RowCoverage(5).Take(4, INT64_MAX));
  EXPECT_FALSE(RowCoverage(5).Take(INT64_MAX, 1));
  EXPECT_FALSE(RowCoverage(0).Take(0, 1));
  EXPECT_TRUE(RowCoverage(0).complete());
}

constexpr int kMaxThreads = 4;

// A system that gives so many threads.
class ThreadSource {
 public:
  explicit ThreadSource(int left) : left_(left) {}
  void Set(int left) { left_ = left; }

  DelayedTasks::MakeThread maker() {
    return [this](std::function<void()> loop) {
      if (left_-- <= 0) throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
      return std::thread(std::move(loop));
    };
  }

 private:
  int left_;
};

// The tasks that have run, in order.
class Log {
 public:
  void Add(int value) {
    std::lock_guard<std::mutex> lock(mutex_);
    values_.push_back(value);
    changed_.notify_all();
  }
  // Waits for so many.
  std::vector<int> Await(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return values_.size() >= count; });
    return values_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> values_;
};

TEST(DelayedTasks, TaskWithoutAThreadIsRefusedAndNeverRuns) {
  ThreadSource threads(0);
  Log log;
  {
    DelayedTasks workers(kMaxThreads, threads.maker());
    EXPECT_THROW(workers.Run(&log, [&log] { log.Add(1); }), std::system_error);
    EXPECT_FALSE(workers.Withdraw(&log));
    threads.Set(1);
    workers.Run(&log, [&log] { log.Add(2); });
    log.Await(1);
  }
  EXPECT_EQ(log.Await(1), std::vector<int>{2});
}

TEST(DelayedTasks, ExistingThreadsTakeTasksIfNoNewOneStarts) {
  ThreadSource threads(1);
  Log log;
  std::mutex held;
  {
    DelayedTasks workers(kMaxThreads, threads.maker());
    std::unique_lock<std::mutex> lock(held);
    workers.Run(&log, [&] {
      log.Add(1);
      std::lock_guard<std::mutex> wait(held);
    });
    log.Await(1);  // the only thread is busy
    workers.Run(&log, [&log] { log.Add(2); });
    workers.Run(&held, [&log] { log.Add(3); });
    EXPECT_TRUE(workers.Withdraw(&held));
    lock.unlock();
    log.Await(2);
  }
  EXPECT_EQ(log.Await(2), (std::vector<int>{1, 2}));
}

}  // namespace
}  // namespace headwater::client::internal
