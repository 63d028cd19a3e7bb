#include "server/transport/row_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "headwater/kernels/error.h"
#include "server/observability/monotonic_clock.h"
#include "tests/unit/expect_status.h"

namespace headwater::transport {
namespace {

using observability::MonotonicNow;

constexpr int64_t kMostRows = std::numeric_limits<int64_t>::max();
constexpr int64_t kRowBytes = 8;

// A micro-batch of `row_count` rows of hidden states, and teacher rows of a term that begins at row `term_start`.
struct Bench {
  explicit Bench(int64_t rows, int64_t term_start = 0, int64_t term_rows = 0)
      : row_count(rows),
        hidden(static_cast<size_t>(row_count * kRowBytes)),
        teacher(static_cast<size_t>(term_rows * kRowBytes)),
        exchange(row_count, {{"hidden", 0, row_count, kRowBytes, hidden.data()},
                             {"teacher_hidden", term_start, term_rows, kRowBytes, teacher.data()}}) {}

  absl::Status Put(size_t tensor, int64_t start, int64_t count) {
    auto place = exchange.Claim(tensor, start, count, count * kRowBytes, "chunk");
    if (!place.ok()) return place.status();
    std::memset(*place, static_cast<int>(start), static_cast<size_t>(count * kRowBytes));
    exchange.Deliver(tensor, start, count);
    return absl::OkStatus();
  }

  // Whether rows [0, row_end) are there, at `deadline` at the latest.
  absl::StatusOr<bool> AwaitRows(int64_t row_end, absl::Time deadline) {
    while (true) {
      const int64_t seen = exchange.version();
      const RowProgress rows = exchange.Look();
      if (!rows.input.ok()) return rows.input;
      if (row_end < row_count ? rows.ready_rows >= row_end : rows.complete) return true;
      if (MonotonicNow() >= deadline) return false;
      exchange.AwaitChange(seen, deadline);
    }
  }

  const int64_t row_count;
  std::vector<uint8_t> hidden;
  std::vector<uint8_t> teacher;
  RowExchange exchange;
};

TEST(RowRanges, MergeWhatTouchesAndKnowTheirPrefix) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    constexpr int64_t kRows = 40;
    std::vector<bool> there(kRows);
    RowRanges ranges;
    for (int step = 0; step < 60; ++step) {
      const int64_t start = std::uniform_int_distribution<int64_t>(0, kRows - 1)(random);
      const int64_t count = std::uniform_int_distribution<int64_t>(1, std::min<int64_t>(6, kRows - start))(random);
      const auto begin = there.begin() + start;
      const bool overlaps = std::find(begin, begin + count, true) != begin + count;
      ASSERT_EQ(ranges.Overlaps(start, count), overlaps);
      if (overlaps) continue;
      ranges.Add(start, count);
      std::fill(begin, begin + count, true);
      ASSERT_EQ(ranges.prefix(), std::find(there.begin(), there.end(), false) - there.begin());
      ASSERT_EQ(ranges.row_count(), std::count(there.begin(), there.end(), true));
    }
  }
}

TEST(RowExchange, TakesRowsFromManyThreadsInAnyOrder) {
  constexpr int64_t kRows = 1000;
  Bench bench(kRows);
  std::vector<std::pair<int64_t, int64_t>> chunks;
  for (int64_t row = 0; row < kRows; row += 8) chunks.emplace_back(row, 8);
  std::shuffle(chunks.begin(), chunks.end(), std::mt19937(3));
  std::vector<std::thread> stripes;
  for (size_t stripe = 0; stripe < 4; ++stripe) {
    stripes.emplace_back([&, stripe] {
      for (size_t i = stripe; i < chunks.size(); i += 4) EXPECT_TRUE(bench.Put(0, chunks[i].first, chunks[i].second).ok());
    });
  }
  for (int64_t row = 100; row <= kRows; row += 100) {
    const auto there = bench.AwaitRows(row, absl::InfiniteFuture());
    ASSERT_TRUE(there.ok() && *there);
    for (int64_t i = 0; i < row; ++i) ASSERT_EQ(bench.hidden[static_cast<size_t>(i * kRowBytes)], static_cast<uint8_t>(i / 8 * 8));
  }
  for (std::thread& stripe : stripes) stripe.join();
  EXPECT_TRUE(bench.exchange.complete());
  EXPECT_EQ(bench.exchange.Look().received_bytes, kRows * kRowBytes);
  EXPECT_EQ(bench.exchange.total_bytes(), kRows * kRowBytes);
}

TEST(RowExchange, RefusesOverlapsAndWhatLiesOutside) {
  Bench bench(10);
  ASSERT_TRUE(bench.Put(0, 0, 2).ok());
  ASSERT_TRUE(bench.exchange.Claim(0, 5, 3, 24, "chunk").ok());  // claimed is taken, though it has not been delivered
  using Range = std::pair<int64_t, int64_t>;
  const auto wrong = {Range(0, 1),
                      Range(1, 2),
                      Range(4, 2),
                      Range(5, 3),
                      Range(6, 1),
                      Range(7, 2),
                      Range(4, 5),
                      Range(10, 1),
                      Range(9, 2),
                      Range(0, 0),
                      Range(3, 0),
                      Range(-1, 2),
                      Range(3, -1),
                      Range(kMostRows, 1),
                      Range(1, kMostRows),
                      Range(kMostRows, kMostRows),
                      Range(2, kMostRows - 1),
                      Range(11, 1),
                      Range(-kMostRows, kMostRows)};
  for (const auto& [start, count] : wrong) {
    const absl::Status status = bench.exchange.Claim(0, start, count, 8, "chunk").status();
    EXPECT_TRUE(HasReason(status, ErrorReason::kChunkOutOfRange) || HasReason(status, ErrorReason::kDataLengthMismatch));
    const absl::Status exact =
        count >= 0 && count < 100 ? bench.exchange.Claim(0, start, count, count * 8, "chunk").status() : status;
    EXPECT_ERROR(exact, kChunkOutOfRange, {"field", "chunk"}) << start << " " << count;
  }
  for (const int64_t bytes : {int64_t{0}, int64_t{15}, int64_t{17}, kMostRows, int64_t{-1}}) {
    EXPECT_ERROR(bench.exchange.Claim(0, 2, 2, bytes, "chunk"), kDataLengthMismatch, {"field", "chunk.data"}) << bytes;
  }
  EXPECT_EQ(bench.exchange.Look().received_bytes, 16);
  EXPECT_TRUE(bench.Put(0, 2, 3).ok());  // what was refused has taken nothing
}

TEST(RowExchange, CountsTheRowsThatAreThereInAllTensors) {
  Bench bench(10, /*term_start=*/4, /*term_rows=*/3);
  EXPECT_EQ(bench.exchange.Look().ready_rows, 0);
  ASSERT_TRUE(bench.Put(0, 1, 5).ok());
  EXPECT_EQ(bench.exchange.Look().ready_rows, 0);
  ASSERT_TRUE(bench.Put(0, 0, 1).ok());
  EXPECT_EQ(bench.exchange.Look().ready_rows, 4);  // the teacher's first row belongs to row 4
  ASSERT_TRUE(bench.Put(1, 0, 2).ok());
  EXPECT_EQ(bench.exchange.Look().ready_rows, 6);
  ASSERT_TRUE(bench.Put(0, 6, 4).ok());
  EXPECT_EQ(bench.exchange.Look().ready_rows, 6);
  EXPECT_FALSE(bench.exchange.complete());
  ASSERT_TRUE(bench.Put(1, 2, 1).ok());
  EXPECT_EQ(bench.exchange.Look().ready_rows, 10);
  EXPECT_TRUE(bench.exchange.complete());
}

TEST(RowExchange, ATensorWithoutMemoryIsThereAndTakesNothing) {
  std::vector<uint8_t> teacher(24);
  RowExchange exchange(3, {{"hidden", 0, 3, 8, nullptr}, {"teacher_hidden", 0, 3, 8, teacher.data()}});
  EXPECT_EQ(exchange.total_bytes(), 24);
  EXPECT_TRUE(HasReason(exchange.Claim(0, 0, 3, 24, "chunk").status(), ErrorReason::kChunkOutOfRange));
  ASSERT_TRUE(exchange.Claim(1, 0, 3, 24, "chunk").ok());
  exchange.Deliver(1, 0, 3);
  EXPECT_TRUE(exchange.complete());
  EXPECT_TRUE(RowExchange(0, {{"hidden", 0, 0, 8, nullptr}}).complete());
}

TEST(RowExchange, KnowsWhenOnlyRowsOfOthersAreMissing) {
  std::vector<uint8_t> hidden(24), teacher(24);
  RowExchange exchange(3, {{"hidden", 0, 3, 8, hidden.data()}, {"teacher_hidden", 0, 3, 8, teacher.data(), /*by_input=*/false}});
  const auto put = [&](size_t tensor, int64_t start, int64_t count) {
    EXPECT_TRUE(exchange.Claim(tensor, start, count, count * 8, "chunk").ok());
    exchange.Deliver(tensor, start, count);
  };
  EXPECT_FALSE(exchange.Look().misses_only_others_rows);
  put(0, 0, 2);
  EXPECT_FALSE(exchange.Look().misses_only_others_rows);
  put(0, 2, 1);
  EXPECT_TRUE(exchange.Look().misses_only_others_rows);
  put(1, 1, 2);
  EXPECT_TRUE(exchange.Look().misses_only_others_rows);
  put(1, 0, 1);
  EXPECT_FALSE(exchange.Look().misses_only_others_rows);  // none is
}

TEST(RowExchange, WaitsForTheEndOfTheInputWhereThatIsAskedFor) {
  Bench bench(4);
  bench.exchange.RequireClose();
  ASSERT_TRUE(bench.Put(0, 0, 4).ok());
  EXPECT_FALSE(bench.exchange.complete());
  EXPECT_EQ(*bench.AwaitRows(3, MonotonicNow()), true);
  EXPECT_EQ(*bench.AwaitRows(4, MonotonicNow()), false);
  bench.exchange.CloseInput();
  EXPECT_TRUE(bench.exchange.complete());
  EXPECT_EQ(*bench.AwaitRows(4, MonotonicNow()), true);
}

TEST(RowExchange, TellsTimesOfTheSteadyClock) {
  const absl::Time begin = MonotonicNow();
  Bench bench(2);
  EXPECT_GE(bench.exchange.Look().last_row_time, begin);
  const absl::Time between = MonotonicNow();
  EXPECT_LE(bench.exchange.Look().last_row_time, between);
  ASSERT_TRUE(bench.Put(0, 0, 1).ok());
  EXPECT_GE(bench.exchange.Look().last_row_time, between);
  EXPECT_LE(bench.exchange.Look().last_row_time, MonotonicNow());
  // Nothing else comes: these end at their deadlines, and not before.
  const absl::Time deadline = MonotonicNow() + absl::Milliseconds(20);
  EXPECT_EQ(*bench.AwaitRows(2, deadline), false);
  EXPECT_GE(MonotonicNow(), deadline);
  const absl::Time later = MonotonicNow() + absl::Milliseconds(20);
  bench.exchange.AwaitChange(bench.exchange.version(), later);
  EXPECT_GE(MonotonicNow(), later);
}

TEST(RowExchange, NamesTheFirstMissingRowWhenTheInputEndsEarly) {
  Bench bench(4, 0, 2);
  ASSERT_TRUE(bench.Put(0, 0, 4).ok());
  ASSERT_TRUE(bench.Put(1, 1, 1).ok());
  EXPECT_TRUE(bench.exchange.Look().input.ok());
  std::thread closer([&] { bench.exchange.CloseInput(); });
  const absl::Status status = bench.AwaitRows(4, absl::InfiniteFuture()).status();
  closer.join();
  EXPECT_REASON(bench.exchange.Look().input, kProtocolViolation);
  EXPECT_ERROR(status, kProtocolViolation, {"field", "teacher_hidden"}, {"expected", "2"}, {"actual", "1"},
               {"firstMissingRow", "0"});
}

TEST(RowExchange, BreaksForEverybodyWithTheFirstReason) {
  Bench bench(4);
  bench.exchange.OpenGrad(4, 2);
  bench.exchange.GradReady(4);
  std::thread breaker([&] {
    bench.exchange.Break(absl::AbortedError("first"));
    bench.exchange.Break(absl::AbortedError("second"));
  });
  EXPECT_EQ(bench.AwaitRows(4, absl::InfiniteFuture()).status().message(), "first");
  breaker.join();
  EXPECT_EQ(bench.exchange.status().message(), "first");
  EXPECT_EQ(bench.exchange.Claim(0, 0, 1, 8, "chunk").status().message(), "first");
  EXPECT_EQ(bench.exchange.NextGrad().row_count, 0);
  EXPECT_FALSE(bench.exchange.grad_taken());
}

TEST(RowExchange, OnceCompleteIsBrokenOnlyByThoseWhoMeanIt) {
  const absl::Status slow = MakeError(ErrorReason::kQueueFull, "too slow");
  Bench early(4);
  EXPECT_TRUE(early.exchange.BreakIfIncomplete(slow));
  EXPECT_FALSE(early.exchange.BreakIfIncomplete(MakeError(ErrorReason::kCancelled, "later")));
  EXPECT_EQ(early.exchange.status(), slow);
  Bench there(4);
  ASSERT_TRUE(there.Put(0, 0, 4).ok());
  EXPECT_FALSE(there.exchange.BreakIfIncomplete(slow));
  EXPECT_TRUE(there.exchange.status().ok());
  // The last row is not the last word.
  Bench open(4);
  open.exchange.RequireClose();
  ASSERT_TRUE(open.Put(0, 0, 4).ok());
  EXPECT_TRUE(open.exchange.BreakIfIncomplete(slow));
}

TEST(RowExchange, HandsOutTheGradientInOrderAsItGetsReady) {
  Bench bench(10);
  bench.exchange.OpenGrad(10, 4);
  EXPECT_EQ(bench.exchange.NextGrad().row_count, 0);
  bench.exchange.GradReady(3);
  EXPECT_EQ(bench.exchange.NextGrad().row_count, 0);  // less than a piece, and more is to come
  bench.exchange.GradReady(5);
  bench.exchange.GradReady(2);  // never takes back
  GradRows rows = bench.exchange.NextGrad();
  EXPECT_EQ(rows.row_start, 0);
  EXPECT_EQ(rows.row_count, 4);
  EXPECT_EQ(bench.exchange.NextGrad().row_count, 0);
  bench.exchange.GradReady(1000);
  rows = bench.exchange.NextGrad();
  EXPECT_EQ(rows.row_start, 4);
  EXPECT_EQ(rows.row_count, 4);
  EXPECT_FALSE(bench.exchange.grad_taken());
  rows = bench.exchange.NextGrad();
  EXPECT_EQ(rows.row_start, 8);
  EXPECT_EQ(rows.row_count, 2);
  EXPECT_TRUE(bench.exchange.grad_taken());
  EXPECT_EQ(bench.exchange.NextGrad().row_count, 0);
  EXPECT_TRUE(Bench(3).exchange.grad_taken());  // there is none
}

TEST(RowExchange, TellsOfEveryChange) {
  Bench bench(2);
  int64_t seen = bench.exchange.version();
  std::thread other([&] { ASSERT_TRUE(bench.Put(0, 0, 1).ok()); });
  bench.exchange.AwaitChange(seen, absl::InfiniteFuture());
  other.join();
  EXPECT_EQ(bench.exchange.Look().ready_rows, 1);
  seen = bench.exchange.version();
  bench.exchange.AwaitChange(seen, MonotonicNow());  // nothing happens: the deadline ends it
  bench.exchange.Notify();
  bench.exchange.AwaitChange(seen, absl::InfiniteFuture());
}

TEST(RowExchange, EveryBreakWakes) {
  Bench bench(2);
  bench.exchange.Break(absl::AbortedError("first"));
  const int64_t seen = bench.exchange.version();
  bench.exchange.Break(absl::AbortedError("second"));
  EXPECT_GT(bench.exchange.version(), seen);
}

TEST(GradGate, KeepsRowsUntilAllHaveCome) {
  GradGate gate;
  EXPECT_EQ(gate.Ready(4), 0);
  EXPECT_EQ(gate.Open(), 4);
  EXPECT_EQ(gate.Ready(7), 7);
  EXPECT_EQ(gate.Open(), 7);
}

TEST(GradGate, OpensBeforeTheFirstRowAndNeverTakesRowsBack) {
  GradGate gate;
  EXPECT_EQ(gate.Open(), 0);
  EXPECT_EQ(gate.Ready(5), 5);
  EXPECT_EQ(gate.Ready(2), 5);
}

TEST(GradGate, LetsNothingOutOfAComputationThatWasGivenUp) {
  GradGate gate;
  EXPECT_EQ(gate.Ready(4), 0);
  EXPECT_FALSE(gate.is_shut());
  EXPECT_TRUE(gate.Shut());
  EXPECT_TRUE(gate.is_shut());
  EXPECT_TRUE(gate.Shut());
  EXPECT_EQ(gate.Open(), 0);
  EXPECT_EQ(gate.Ready(8), 0);
}

TEST(GradGate, IsNotShutOnceRowsMayHaveLeft) {
  GradGate gate;
  gate.Open();
  EXPECT_FALSE(gate.Shut());
  EXPECT_FALSE(gate.is_shut());
  EXPECT_EQ(gate.Ready(1), 1);
}

}  // namespace
}  // namespace headwater::transport
