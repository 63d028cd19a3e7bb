#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/observability/logging.h"
#include "server/observability/metrics.h"
#include "server/observability/monotonic_clock.h"
#include "server/observability/repeated_task.h"

namespace headwater::observability {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Logging, WritesOneUnambiguousLine) {
  const std::vector<LogField> fields = {
      {"plain", "a/b-c.d"},   {"empty", ""}, {"spaces", "x y"}, {"hostile", "a\"b\\c\nevent=forged"},
      {"count", int64_t{-7}}, {"ms", 1.5},   {"equals", "a=b"}, {"clean", true},
      {"text", "true"}};
  EXPECT_EQ(FormatLogLine(LogFormat::kText, "T", LogLevel::kWarning, "rpc", fields),
            "T level=warning event=rpc plain=a/b-c.d empty=\"\" spaces=\"x y\" hostile=\"a\\\"b\\\\c\\u000aevent=forged\" count=-7 "
            "ms=1.500 equals=\"a=b\" clean=true text=true");
  EXPECT_EQ(FormatLogLine(LogFormat::kJson, "T", LogLevel::kInfo, "rpc", fields),
            "{\"time\":\"T\",\"level\":\"info\",\"event\":\"rpc\",\"plain\":\"a/b-c.d\",\"empty\":\"\",\"spaces\":\"x y\","
            "\"hostile\":\"a\\\"b\\\\c\\u000aevent=forged\",\"count\":-7,\"ms\":1.500,\"equals\":\"a=b\","
            "\"clean\":true,\"text\":\"true\"}");
}

TEST(Logging, SaysInOneLineThatThereIsNoMemory) {
  const auto end = [](LogFormat format) {
    EndWithoutMemory(format);
    std::get_new_handler()();
  };
  EXPECT_EXIT(end(LogFormat::kText), ::testing::ExitedWithCode(kNoMemoryStatus),
              "^20..-..-..T..:..:..Z level=error event=out_of_memory message=\"an allocation failed; [^\n]*\"\n$");
  EXPECT_EXIT(end(LogFormat::kJson), ::testing::ExitedWithCode(kNoMemoryStatus),
              "^.\"time\":\"20..-..-..T..:..:..Z\",\"level\":\"error\",\"event\":\"out_of_memory\",[^\n]*\n$");
}

TEST(Logging, RefusesUnknownLevelsAndFormats) {
  EXPECT_FALSE(ConfigureLogging("loud", "text").ok());
  EXPECT_FALSE(ConfigureLogging("info", "xml").ok());
  EXPECT_TRUE(ConfigureLogging("info", "text").ok());
}

TEST(Metrics, CountUnderBoundedLabels) {
  Metrics metrics("1.2.3", "cpu");
  metrics.CountRequest(RpcMethod::kSealStep, absl::OkStatus(), absl::Milliseconds(3));
  metrics.CountRequest(RpcMethod::kSealStep, MakeError(ErrorReason::kStepMismatch, "m"), absl::Milliseconds(3));
  metrics.CountRequest(RpcMethod::kSealStep, absl::Status(static_cast<absl::StatusCode>(99), "m"), absl::Milliseconds(3));
  metrics.Count(Metric::kBytes, 5, Direction::kIn);
  metrics.Count(Metric::kBytes, 6, Direction::kIn);
  metrics.SetGaugeSource([&] {
    metrics.SetPlannedBytes({{"weight", 10}, {"something new", 3}, {"something else", 4}});
    metrics.Set(Metric::kHeads, 2);
  });
  const std::string text = metrics.Serialize();
  for (const char* line :
       {"headwater_requests_total{code=\"OK\",method=\"SealStep\"} 1\n",
        "headwater_requests_total{code=\"FAILED_PRECONDITION\",method=\"SealStep\"} 1\n",
        "headwater_requests_total{code=\"UNKNOWN\",method=\"SealStep\"} 1\n",
        "headwater_request_seconds_count{method=\"SealStep\"} 3\n", "headwater_refusals_total{reason=\"STEP_MISMATCH\"} 1\n",
        "headwater_bytes_total{direction=\"in\",transport=\"grpc\"} 11\n",
        "headwater_memory_planned_bytes{purpose=\"weight\"} 10\n", "headwater_memory_planned_bytes{purpose=\"other\"} 7\n",
        "headwater_heads 2\n", "headwater_build_info{engine=\"cpu\",version=\"1.2.3\"} 1\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST(Metrics, ServeWhatIsCountedElsewhereAsCounters) {
  Metrics metrics("1", "cpu");
  double busy = 1.5;
  metrics.SetGaugeSource([&] { metrics.Raise(Metric::kComputeBusy, busy); });
  metrics.Count(Metric::kProductFlops, 4e9);
  metrics.Observe(Metric::kChunkFill, 0.5);
  metrics.Observe(Metric::kCommitSeconds, absl::Milliseconds(2));
  EXPECT_THAT(metrics.Serialize(), HasSubstr("headwater_compute_busy_seconds_total 1.5\n"));
  busy = 1;  // a counter never falls
  EXPECT_THAT(metrics.Serialize(), HasSubstr("headwater_compute_busy_seconds_total 1.5\n"));
  busy = 2.5;
  const std::string text = metrics.Serialize();
  for (const char* line : {"headwater_compute_busy_seconds_total 2.5\n", "headwater_product_flops_total 4000000000\n",
                           "headwater_token_chunk_fill_ratio_bucket{le=\"0.25\"} 0\n",
                           "headwater_token_chunk_fill_ratio_bucket{le=\"0.5\"} 1\n", "headwater_commit_seconds_count 1\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST(Metrics, TellHowTheRanksOfAGroupSpendTheirTime) {
  Metrics metrics("1", "cpu");
  EXPECT_THAT(metrics.Serialize(), Not(HasSubstr("headwater_rank_seconds_total")));  // no group
  const auto raise = [&](size_t rank, absl::Duration compute, absl::Duration wait, absl::Duration communicate) {
    metrics.RaiseRankSeconds(rank, RankActivity::kCompute, compute);
    metrics.RaiseRankSeconds(rank, RankActivity::kWait, wait);
    metrics.RaiseRankSeconds(rank, RankActivity::kCommunicate, communicate);
  };
  raise(0, absl::Seconds(3), absl::Seconds(2), absl::Seconds(1));
  raise(1, absl::Seconds(4), {}, {});
  raise(0, absl::Seconds(2), absl::Seconds(2), absl::Seconds(1));  // a counter never falls
  raise(1, absl::Seconds(4), {}, absl::Milliseconds(500));
  const std::string text = metrics.Serialize();
  for (const char* line : {"{activity=\"compute\",rank=\"0\"} 3\n", "{activity=\"wait\",rank=\"0\"} 2\n",
                           "{activity=\"communicate\",rank=\"0\"} 1\n", "{activity=\"compute\",rank=\"1\"} 4\n",
                           "{activity=\"wait\",rank=\"1\"} 0\n", "{activity=\"communicate\",rank=\"1\"} 0.5\n"}) {
    EXPECT_THAT(text, HasSubstr(std::string("headwater_rank_seconds_total") + line));
  }
}

TEST(BusyClock, CountsOverlappingWorkOnce) {
  BusyClock clock;
  EXPECT_EQ(clock.total(), absl::ZeroDuration());
  const auto start = std::chrono::steady_clock::now();
  {
    const BusyClock::Work first(clock);
    const BusyClock::Work second(clock);
    absl::SleepFor(absl::Milliseconds(5));
    EXPECT_GE(clock.total(), absl::Milliseconds(4));  // also while they work
  }
  const absl::Duration total = clock.total();
  EXPECT_LE(total, absl::FromChrono(std::chrono::steady_clock::now() - start));
  absl::SleepFor(absl::Milliseconds(2));
  EXPECT_EQ(clock.total(), total);
}

TEST(Pause, EndsAtItsTimeOrWhenItIsStopped) {
  Pause pause;
  const absl::Time begin = MonotonicNow();
  EXPECT_FALSE(pause.WaitFor(absl::Milliseconds(20)));
  EXPECT_GE(MonotonicNow() - begin, absl::Milliseconds(20));
  EXPECT_FALSE(pause.WaitFor(absl::ZeroDuration()));
  std::thread stopper([&] {
    absl::SleepFor(absl::Milliseconds(10));
    pause.Stop();
  });
  EXPECT_TRUE(pause.WaitFor(absl::InfiniteDuration()));
  stopper.join();
  EXPECT_TRUE(pause.WaitFor(absl::Hours(1)));
}

TEST(Metrics, DocumentNamesEveryFamily) {
  Metrics metrics("1", "cpu");
  const std::string document = MetricsDocument();
  const std::string text = metrics.Serialize();
  for (size_t begin = text.find("# TYPE "); begin != std::string::npos; begin = text.find("# TYPE ", begin + 1)) {
    const std::string name = text.substr(begin + 7, text.find(' ', begin + 7) - begin - 7);
    EXPECT_THAT(document, HasSubstr("| `" + name + "` |"));
  }
}

TEST(RepeatedTask, IsDoneAgainAndAgainUntilItIsDestroyed) {
  absl::Notification third;
  std::atomic<int> rounds{0};
  {
    RepeatedTask task(absl::Milliseconds(1), [&] {
      if (++rounds == 3) third.Notify();
    });
    third.WaitForNotification();
  }
  const int last = rounds;
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(rounds, last);
}

TEST(RepeatedTask, BeginsAfterAnInterval) {
  const absl::Time begin = MonotonicNow();
  absl::Notification first;
  RepeatedTask task(absl::Milliseconds(20), [&] {
    if (!first.HasBeenNotified()) first.Notify();
  });
  first.WaitForNotification();
  EXPECT_GE(MonotonicNow() - begin, absl::Milliseconds(20));
}

TEST(RepeatedTask, EndsWithoutWaitingForTheInterval) {
  auto task = std::make_unique<RepeatedTask>(absl::InfiniteDuration(), [] { FAIL() << "there is no end of the interval"; });
  task.reset();  // else the test does not end
}

}  // namespace
}  // namespace headwater::observability
