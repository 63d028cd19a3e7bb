// TeacherJoin: teachers' rows and trainers' claims, in either order, kept as long as they are needed and no longer.
#include "server/transport/teacher_join.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "server/observability/monotonic_clock.h"
#include "server/scheduler/waiting.h"
#include "tests/unit/server/heads/head_test_util.h"

namespace headwater::transport {
namespace {

using observability::MonotonicNow;

constexpr int64_t kWidth = 3;
constexpr int64_t kRowBytes = kWidth * int64_t{sizeof(float)};
constexpr JoinOwner kOwner = {1};

using Indices = std::vector<int32_t>;

class TeacherJoinTest : public ::testing::Test {
 protected:
  JoinedSet Set(const std::string& key = "key", int64_t rows = 8, const std::string& tenant = "default") {
    return {tenant, key, rows, kWidth, DataType::kFloat32};
  }
  // Row `index` of a set, as the teacher of `version` computes it.
  static std::vector<float> RowOf(int64_t index, int version = 0) {
    const float value = static_cast<float>(index * 10 + version * 1000);
    return {value, value + 1, value + 2};
  }
  static std::vector<float> RowsOf(const Indices& indices, int version = 0) {
    std::vector<float> rows;
    for (const int32_t index : indices) {
      const std::vector<float> row = RowOf(index, version);
      rows.insert(rows.end(), row.begin(), row.end());
    }
    return rows;
  }
  absl::Status Add(TeacherStream& stream, int64_t start, const std::vector<float>& rows) {
    return stream.Add(start, static_cast<int64_t>(rows.size()) / kWidth, rows.data(),
                      static_cast<int64_t>(rows.size() * sizeof(float)), "chunk");
  }
  // A whole stream.
  absl::Status Send(const Indices& indices, int version = 0, const std::optional<JoinOwner>& owner = std::nullopt,
                    const std::string& key = "key") {
    absl::StatusOr<std::unique_ptr<TeacherStream>> stream = join_.Open(Set(key), indices, owner);
    if (!stream.ok()) return stream.status();
    if (absl::Status status = Add(**stream, 0, RowsOf(indices, version)); !status.ok()) return status;
    return (*stream)->Finish();
  }
  std::shared_ptr<RowClaim> Claim(const Indices& indices, const std::string& user = "", const std::string& key = "key") {
    absl::StatusOr<std::shared_ptr<RowClaim>> claim = join_.Claim(Set(key), static_cast<int64_t>(indices.size()), indices, user);
    EXPECT_OK(claim);
    return *std::move(claim);
  }
  static std::vector<float> Gather(const RowClaim& claim) {
    std::vector<float> rows(static_cast<size_t>(claim.row_count() * kWidth));
    EXPECT_OK(claim.Gather(0, claim.row_count(), rows.data()));
    return rows;
  }
  // OK, or the answer of a trainer that gives up.
  static absl::Status CheckAll(const RowClaim& claim) {
    return claim.ready_rows() == claim.row_count() ? absl::OkStatus() : claim.MissingRow();
  }
  // Waits as a call does, until the claim wakes it.
  static void AwaitAll(RowClaim& claim) {
    absl::Mutex mutex;
    bool changed = true;
    claim.OnChange([&] {
      absl::MutexLock lock(&mutex);
      changed = true;
    });
    do {
      absl::MutexLock lock(&mutex);
      mutex.Await(absl::Condition(&changed));
      changed = false;
    } while (claim.ready_rows() < claim.row_count());
    claim.OnChange(nullptr);
  }
  // Gathers, and ends as a micro-batch that was decided.
  void Use(const Indices& indices, const std::string& user, int version = 0) {
    const std::shared_ptr<RowClaim> claim = Claim(indices, user);
    ASSERT_OK(CheckAll(*claim));
    EXPECT_EQ(Gather(*claim), RowsOf(indices, version));
    claim->MarkUsed();
  }

  absl::Time now_ = absl::UnixEpoch();
  TeacherJoin join_{{.max_bytes = 8 * (kRowBytes + TeacherJoin::kRowOverheadBytes), .max_wait = absl::Seconds(30)},
                    [this] { return now_; }};
};

TEST_F(TeacherJoinTest, ATrainerTakesRowsThatCameBefore) {
  ASSERT_OK(Send({0, 1, 2, 3}));
  const auto claim = Claim({3, 1});
  EXPECT_EQ(claim->row_count(), 2);
  EXPECT_EQ(claim->row_bytes(), kRowBytes);
  EXPECT_EQ(claim->ready_rows(), 2);
  EXPECT_OK(CheckAll(*claim));
  EXPECT_EQ(Gather(*claim), RowsOf({3, 1}));
  std::vector<float> one(kWidth);
  EXPECT_OK(claim->Gather(1, 1, one.data()));
  EXPECT_EQ(one, RowOf(1));
}

TEST_F(TeacherJoinTest, ATrainerWaitsForRowsThatComeLater) {
  const auto claim = Claim({2, 5, 7});
  EXPECT_EQ(claim->ready_rows(), 0);
  EXPECT_ERROR(CheckAll(*claim), kJoinIncomplete, {"missingRow", "2"}, {"joinKey", "key"});
  std::vector<float> nothing(3 * kWidth);
  EXPECT_REASON(claim->Gather(0, 3, nothing.data()), kJoinIncomplete);
  ASSERT_OK_AND_ASSIGN(auto stream, join_.Open(Set(), {7, 5}, std::nullopt));
  // In any order, by any chunks; what other streams have brought can be taken meanwhile.
  ASSERT_OK(Add(*stream, 1, RowOf(5)));
  EXPECT_EQ(claim->ready_rows(), 0);
  ASSERT_OK(Send({2}));
  EXPECT_EQ(claim->ready_rows(), 1);
  EXPECT_ERROR(CheckAll(*claim), kJoinIncomplete, {"missingRow", "5"});
  std::thread teacher([&] {
    absl::SleepFor(absl::Milliseconds(20));
    EXPECT_OK(Add(*stream, 0, RowOf(7)));
    EXPECT_OK(stream->Finish());
  });
  AwaitAll(*claim);
  teacher.join();
  EXPECT_EQ(Gather(*claim), RowsOf({2, 5, 7}));
}

TEST_F(TeacherJoinTest, WithoutIndicesRowsAreInOrder) {
  ASSERT_OK_AND_ASSIGN(auto stream, join_.Open(Set("all", 4), {}, std::nullopt));
  EXPECT_EQ(stream->row_count(), 4);
  ASSERT_OK(Add(*stream, 0, RowsOf({0, 1, 2, 3})));
  ASSERT_OK(stream->Finish());
  ASSERT_OK_AND_ASSIGN(auto claim, join_.Claim(Set("all", 4), 3, {}, ""));
  EXPECT_EQ(Gather(*claim), RowsOf({0, 1, 2}));
}

TEST_F(TeacherJoinTest, AClaimGivesUpByTheJoinsClock) {
  now_ += absl::Seconds(5);
  const auto claim = Claim({1});
  now_ += absl::Seconds(5);
  EXPECT_EQ(claim->give_up(), absl::UnixEpoch() + absl::Seconds(35));
}

TEST_F(TeacherJoinTest, ChunksAreChecked) {
  ASSERT_OK_AND_ASSIGN(auto stream, join_.Open(Set(), {0, 1, 2}, std::nullopt));
  const std::vector<float> rows = RowsOf({0, 1, 2, 3});
  const auto add = [&](int64_t start, int64_t count, int64_t bytes) {
    return stream->Add(start, count, rows.data(), bytes, "chunk");
  };
  EXPECT_REASON(add(-1, 1, kRowBytes), kChunkOutOfRange);
  EXPECT_REASON(add(0, 0, 0), kChunkOutOfRange);
  EXPECT_REASON(add(1, 3, 3 * kRowBytes), kChunkOutOfRange);
  EXPECT_REASON(add(INT64_MAX, 1, kRowBytes), kChunkOutOfRange);
  EXPECT_REASON(add(1, INT64_MAX, kRowBytes), kChunkOutOfRange);
  EXPECT_REASON(add(0, 1, kRowBytes - 1), kDataLengthMismatch);
  ASSERT_OK(add(1, 1, kRowBytes));
  EXPECT_REASON(add(0, 2, 2 * kRowBytes), kChunkOutOfRange);
  EXPECT_ERROR(stream->Finish(), kProtocolViolation, {"missingRow", "0"});
  ASSERT_OK(add(0, 1, kRowBytes));
  ASSERT_OK(add(2, 1, kRowBytes));
  EXPECT_OK(stream->Finish());
}

TEST_F(TeacherJoinTest, ARowComesOnce) {
  ASSERT_OK(Send({0, 1}));
  EXPECT_ERROR(Send({2, 1}), kChunkOutOfRange, {"row", "1"});
  EXPECT_REASON(Send({3, 3}), kChunkOutOfRange);  // twice in one stream
  ASSERT_OK_AND_ASSIGN(auto open, join_.Open(Set(), {4}, std::nullopt));
  EXPECT_REASON(Send({4}), kChunkOutOfRange);  // on its way
  open.reset();
  // Refused streams and broken ones leave nothing behind.
  EXPECT_OK(Send({2, 3, 4}));
  EXPECT_EQ(Gather(*Claim({0, 1, 2, 3, 4})), RowsOf({0, 1, 2, 3, 4}));
}

TEST_F(TeacherJoinTest, ABrokenStreamBringsNothing) {
  const auto claim = Claim({0, 1});
  ASSERT_OK(Send({1}));
  {
    ASSERT_OK_AND_ASSIGN(auto stream, join_.Open(Set(), {0, 2}, std::nullopt));
    ASSERT_OK(Add(*stream, 0, RowsOf({0, 2})));
    EXPECT_EQ(claim->ready_rows(), 0);
  }
  EXPECT_ERROR(CheckAll(*claim), kJoinIncomplete, {"missingRow", "0"});
  ASSERT_OK(Send({0, 2}, 1));
  EXPECT_EQ(Gather(*claim)[0], RowOf(0, 1)[0]);
}

TEST_F(TeacherJoinTest, BothSidesDeclareTheSameSet) {
  ASSERT_OK(Send({0}));
  for (const char* field : {"total_row_count", "hidden_size", "data_type"}) {
    JoinedSet other = Set();
    if (field[0] == 't') other.total_row_count = 9;
    if (field[0] == 'h') other.hidden_size = 4;
    if (field[0] == 'd') other.data_type = DataType::kBFloat16;
    for (const bool is_trainer : {false, true}) {
      EXPECT_ERROR(is_trainer ? join_.Claim(other, 1, {1}, "").status() : join_.Open(other, {1}, std::nullopt), kJoinIncomplete,
                   {"field", field})
          << field;
    }
  }
  EXPECT_EQ(join_.set_count(), 1);
}

// Else the caller learns of its own deadline, and not which row is missing.
TEST_F(TeacherJoinTest, TheAnswerLeavesBeforeTheDeadline) {
  const absl::Time now = absl::UnixEpoch() + absl::Hours(1);
  EXPECT_EQ(scheduler::WaitEnd(now, now + absl::Seconds(1)), now + absl::Seconds(1) - scheduler::kAnswerTime);
  EXPECT_EQ(scheduler::WaitEnd(now, now + absl::Milliseconds(40)), now + absl::Milliseconds(30));
  EXPECT_EQ(scheduler::WaitEnd(now, now), now);
  EXPECT_EQ(scheduler::WaitEnd(now, absl::InfiniteFuture()), absl::InfiniteFuture());
  EXPECT_EQ(scheduler::WaitEnd(now, absl::InfinitePast()), absl::InfinitePast());
}

TEST_F(TeacherJoinTest, TenantsDoNotMeet) {
  ASSERT_OK(Send({0}));
  ASSERT_OK_AND_ASSIGN(auto other, join_.Claim(Set("key", 8, "others"), 1, {0}, ""));
  EXPECT_EQ(other->ready_rows(), 0);
  EXPECT_REASON(CheckAll(*other), kJoinIncomplete);
  // Not even by declaring the key otherwise.
  EXPECT_OK(join_.Claim(Set("key", 5, "third"), 1, {0}, ""));
}

TEST_F(TeacherJoinTest, ADecisionSpendsRowsAndFreesTheKey) {
  ASSERT_OK(Send({0, 1, 2}));
  const int64_t reserved = join_.reserved_bytes();
  EXPECT_EQ(reserved, 3 * (kRowBytes + TeacherJoin::kRowOverheadBytes));
  {
    // An attempt that was not decided leaves them for the next one.
    const auto claim = Claim({0, 1}, "step 0");
    EXPECT_EQ(claim->ready_rows(), 2);
  }
  Use({0, 1}, "step 0");
  // For a repeat of it they are there; to others they are not.
  EXPECT_EQ(Gather(*Claim({0, 1}, "step 0")), RowsOf({0, 1}));
  EXPECT_EQ(Claim({2}, "step 1")->ready_rows(), 1);
  const auto next = Claim({0, 1}, "step 1");
  EXPECT_EQ(next->ready_rows(), 0);
  EXPECT_EQ(Claim({0}, "step 0")->ready_rows(), 0);  // the key is used again
  // But not before all of the set has been used: a teacher that repeats itself must not be taken for the next step's.
  EXPECT_ERROR(Send({0, 1}, 1), kChunkOutOfRange, {"row", "0"});
  ASSERT_OK(Send({7, 6, 3, 5, 4}));
  Use({2, 3, 4, 5, 6, 7}, "step 0, the others");
  ASSERT_OK(Send({0, 1}, 1));
  EXPECT_EQ(Gather(*next), RowsOf({0, 1}, 1));
}

TEST_F(TeacherJoinTest, AKeyServesStepAfterStep) {
  for (int step = 0; step < 5; ++step) {
    ASSERT_OK(Send({0, 1, 2, 3, 4, 5, 6, 7}, step));
    Use({0, 2, 4, 6}, absl::StrCat("even ", step), step);
    Use({7, 5, 3, 1}, absl::StrCat("odd ", step), step);
    EXPECT_LE(join_.reserved_bytes(), 8 * (kRowBytes + TeacherJoin::kRowOverheadBytes));
  }
  // All of it is spent: the key may even name another set.
  JoinedSet other = Set();
  other.total_row_count = 3;
  EXPECT_OK(join_.Open(other, {}, std::nullopt));
}

TEST_F(TeacherJoinTest, ARowThatSeveralUseCountsOnce) {
  const Indices first = {0, 1, 2, 3}, second = {4, 5, 6, 7};
  for (int step = 0; step < 3; ++step) {
    ASSERT_OK(Send({0, 1, 2, 3, 4, 5, 6, 7}, step));
    // Two trainers, each with two micro-batches; each one's second is decided when the other's is.
    std::vector<std::shared_ptr<RowClaim>> claims;
    for (const Indices& rows : {first, second, first, second}) claims.push_back(Claim(rows));
    for (const size_t decided : {0, 2, 1, 3}) {
      EXPECT_EQ(Gather(*claims[decided]), RowsOf(decided % 2 == 0 ? first : second, step));
      claims[decided]->MarkUsed();
      claims[decided].reset();
    }
  }
}

TEST_F(TeacherJoinTest, RowsThatNobodyCanRepeatGoAtOnce) {
  ASSERT_OK(Send({0, 1}));
  Use({0, 1}, "");
  EXPECT_EQ(join_.reserved_bytes(), 0);
  EXPECT_EQ(join_.set_count(), 0);
}

TEST_F(TeacherJoinTest, WhoSharesARowKeepsIt) {
  ASSERT_OK(Send({0, 1}));
  const auto shares = Claim({1}, "two");
  Use({0, 1}, "one");
  EXPECT_EQ(shares->ready_rows(), 1);
  EXPECT_EQ(Gather(*shares), RowOf(1));
  shares->MarkUsed();
}

TEST_F(TeacherJoinTest, AnUndecidedContributionKeepsItsRows) {
  ASSERT_OK(Send({0, 1}));
  auto pending = Claim({0, 1}, "explicit");
  pending->MarkUsed();  // computed, and waits for its commit
  now_ += absl::Hours(1);
  join_.Expire();
  EXPECT_EQ(Gather(*Claim({0, 1}, "explicit")), RowsOf({0, 1}));  // an attempt that supersedes it
  pending.reset();
  EXPECT_EQ(Claim({0, 1}, "another")->ready_rows(), 0);
}

TEST_F(TeacherJoinTest, RowsGoWithTheirSession) {
  ASSERT_OK(Send({0, 1}, 0, kOwner));
  ASSERT_OK(Send({2}));
  const auto claim = Claim({2, 0});
  EXPECT_EQ(claim->ready_rows(), 2);
  join_.DropOwner({9});
  EXPECT_EQ(claim->ready_rows(), 2);
  join_.DropOwner(kOwner);
  EXPECT_EQ(claim->ready_rows(), 1);
  EXPECT_REASON(CheckAll(*claim), kJoinIncomplete);
  EXPECT_EQ(join_.reserved_bytes(), kRowBytes + TeacherJoin::kRowOverheadBytes);
  // Another teacher goes on where that one ended.
  ASSERT_OK(Send({0, 1}, 1));
  EXPECT_OK(CheckAll(*claim));
  ASSERT_OK_AND_ASSIGN(auto stream, join_.Open(Set("lost"), {0}, kOwner));
  join_.DropOwner(kOwner);
  ASSERT_OK(Add(*stream, 0, RowOf(0)));
  EXPECT_REASON(stream->Finish(), kSessionNotFound);
}

TEST_F(TeacherJoinTest, RowsThatNobodyAsksForExpire) {
  ASSERT_OK(Send({0, 1}));
  now_ += absl::Seconds(20);
  EXPECT_EQ(Claim({0})->ready_rows(), 1);  // asks
  now_ += absl::Seconds(20);
  join_.Expire();
  EXPECT_EQ(join_.reserved_bytes(), 2 * (kRowBytes + TeacherJoin::kRowOverheadBytes));  // of one piece
  EXPECT_EQ(Claim({0})->ready_rows(), 1);
  EXPECT_EQ(Claim({1})->ready_rows(), 0);
  const auto claimed = Claim({0});
  now_ += absl::Seconds(60);
  join_.Expire();
  EXPECT_EQ(claimed->ready_rows(), 1);
}

TEST_F(TeacherJoinTest, NothingIsLeftInTheEnd) {
  ASSERT_OK(Send({0, 1}));
  Use({0}, "spent");
  { const auto waits = Claim({5}, "never comes"); }
  { auto stream = join_.Open(Set("broken"), {}, kOwner); }
  EXPECT_EQ(join_.set_count(), 1);
  now_ += absl::Seconds(31);
  join_.Expire();
  EXPECT_EQ(join_.reserved_bytes(), 0);
  EXPECT_EQ(join_.set_count(), 0);
}

TEST_F(TeacherJoinTest, BytesAreBounded) {
  // What no room would do for is not to be tried again.
  constexpr int64_t kBytesOfRow = kRowBytes + TeacherJoin::kRowOverheadBytes;
  const absl::Status big = join_.Open(Set("big", 9), {}, std::nullopt).status();
  EXPECT_ERROR(big, kLimitExceeded, {"field", "header.total_row_count"}, {"limit", "max_join_bytes"},
               {"maximum", absl::StrCat(8 * kBytesOfRow)}, {"actual", absl::StrCat(9 * kBytesOfRow)});
  EXPECT_FALSE(GetErrorMetadata(big).contains("retryAfterMs"));
  EXPECT_REASON(join_.Open(Set("huge", INT64_MAX), {}, std::nullopt), kLimitExceeded);
  EXPECT_ERROR(join_.Open(Set("set", 100), {0, 1, 2, 3, 4, 5, 6, 7, 8}, std::nullopt), kLimitExceeded,
               {"field", "header.row_indices"});
  EXPECT_OK(join_.Open(Set("largest"), {}, std::nullopt));
  EXPECT_REASON(TeacherJoin({.max_bytes = 0}, MonotonicNow).Open(Set("none", 1), {}, std::nullopt), kLimitExceeded);
  EXPECT_EQ(join_.set_count(), 0);
  ASSERT_OK(Send({0, 1, 2, 3, 4, 5}));
  EXPECT_ERROR(Send({0, 1, 2}, 0, std::nullopt, "other"), kInFlightBytesExceeded, {"limit", "max_join_bytes"},
               {"availableBytes", absl::StrCat(2 * (kRowBytes + TeacherJoin::kRowOverheadBytes))});
  // Spent rows make room, whole pieces at a time.
  Use({0, 1, 2, 3, 4}, "some");
  EXPECT_REASON(Send({0, 1, 2}, 0, std::nullopt, "other"), kInFlightBytesExceeded);
  Use({5}, "last");
  EXPECT_OK(Send({0, 1, 2}, 0, std::nullopt, "other"));
  EXPECT_EQ(Claim({0}, "some")->ready_rows(), 0);
}

TEST_F(TeacherJoinTest, RowsOfManyPiecesAreGathered) {
  TeacherJoin join({.max_bytes = int64_t{64} << 20, .max_wait = absl::Seconds(30)}, MonotonicNow);
  constexpr int64_t kRows = 1000, kWide = 1024;  // about four pieces
  const JoinedSet set = {"default", "wide", kRows, kWide, DataType::kFloat32};
  Indices order(kRows);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::shuffle(order.begin(), order.end(), std::mt19937(3));
  std::vector<float> rows(static_cast<size_t>(kRows * kWide));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(order[i / kWide]) + static_cast<float>(i % kWide) / 2048;
  ASSERT_OK_AND_ASSIGN(auto stream, join.Open(set, order, std::nullopt));
  for (int64_t start = 0; start < kRows; start += 300) {
    const int64_t count = std::min<int64_t>(300, kRows - start);
    ASSERT_OK(stream->Add(start, count, rows.data() + start * kWide, count * kWide * 4, "chunk"));
  }
  ASSERT_OK(stream->Finish());
  ASSERT_OK_AND_ASSIGN(auto claim, join.Claim(set, kRows, {}, "all"));
  std::vector<float> gathered(rows.size());
  ASSERT_OK(claim->Gather(0, kRows, gathered.data()));
  for (size_t i = 0; i < gathered.size(); ++i) {
    ASSERT_EQ(gathered[i], static_cast<float>(i / kWide) + static_cast<float>(i % kWide) / 2048) << i;
  }
  claim->MarkUsed();
}

TEST_F(TeacherJoinTest, ManyTeachersAndTrainersAtOnce) {
  // Each of four teachers streams its part of every step's set, each of four trainers takes another part of it; the key is used
  // again step after step. Streams break now and then.
  TeacherJoin join({.max_bytes = 1 << 20, .max_wait = absl::Seconds(30)}, MonotonicNow);
  constexpr int kParts = 4, kSteps = 60;
  constexpr int64_t kRows = 16;
  std::atomic<int> decided[kSteps] = {};
  std::vector<std::thread> threads;
  for (int part = 0; part < kParts; ++part) {
    threads.emplace_back([&, part] {  // a teacher: every fourth row
      for (int step = 0; step < kSteps; ++step) {
        while (step > 0 && decided[step - 1] < kParts) absl::SleepFor(absl::Microseconds(100));
        Indices indices;
        for (int64_t row = part; row < kRows; row += kParts) indices.push_back(static_cast<int32_t>(row));
        for (int attempt = 0; attempt < 2; ++attempt) {
          ASSERT_OK_AND_ASSIGN(auto stream, join.Open(Set("key", kRows), indices, kOwner));
          ASSERT_OK(Add(*stream, 0, RowsOf({indices[0], indices[1]}, step)));
          if (attempt == 0 && step % 3 == 0) continue;  // breaks, and begins anew
          ASSERT_OK(Add(*stream, 2, RowsOf({indices[2], indices[3]}, step)));
          ASSERT_OK(stream->Finish());
          break;
        }
      }
    });
    threads.emplace_back([&, part] {  // a trainer: a quarter of the rows
      Indices indices;
      for (int64_t row = part * 4; row < part * 4 + 4; ++row) indices.push_back(static_cast<int32_t>(row));
      for (int step = 0; step < kSteps; ++step) {
        while (step > 0 && decided[step - 1] < kParts) absl::SleepFor(absl::Microseconds(100));
        ASSERT_OK_AND_ASSIGN(auto claim, join.Claim(Set("key", kRows), 4, indices, absl::StrCat(step, "/", part)));
        std::vector<float> rows(4 * kWidth);
        AwaitAll(*claim);
        ASSERT_OK(claim->Gather(0, 4, rows.data()));
        EXPECT_EQ(rows, RowsOf(indices, step));
        claim->MarkUsed();
        claim.reset();
        ++decided[step];
      }
    });
  }
  threads.emplace_back([&] {
    while (decided[kSteps - 1] < kParts) {
      join.Expire();
      absl::SleepFor(absl::Milliseconds(1));
    }
  });
  for (std::thread& thread : threads) thread.join();
  join.DropOwner(kOwner);
  EXPECT_EQ(join.reserved_bytes(), 0);
  EXPECT_EQ(join.set_count(), 0);
}

}  // namespace
}  // namespace headwater::transport
