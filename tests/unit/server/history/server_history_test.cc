// Histories of a server: what clients, the network, the operator and accidents do to it, compared after every event with a
// sequential model. Those of odd seeds are random calls, those of even seeds simulated trainers (simulation.h).
//
//   HISTORIES=10000 FIRST_SEED=1 server_history_test
//                                             as many histories as that, of the seeds from FIRST_SEED on, of HISTORY_LENGTH events
//                                             each (200 if not said), by HISTORY_THREADS threads (0: one for each core)
//   HISTORY_SEED=17 HISTORY_LENGTH=143 server_history_test --gtest_filter='*RunsOneHistory*'
//   HISTORY_SEED=17 HISTORY_LENGTH=143 HISTORY_EVENTS=3,8,142 ...   these events of it alone
//   HISTORY_COVERAGE=1 ...                    also prints how often each kind of event got each answer
//   HISTORY_CUT=0 ...                         the first failure ends it, and is not cut to the events that matter
//
// A history follows from its seed; a failure prints the command that runs it again. At the end there is a table: how often each
// call met each fault.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "driver.h"
#include "generator.h"

namespace headwater::history {
namespace {

using testing::FakeBug;

// Two minutes of one core that others use too, and a third of it under AddressSanitizer, where a history takes twenty times as
// long.
#if defined(HEADWATER_SANITIZED)
constexpr int kDefaultHistories = HEADWATER_SANITIZED;
#else
constexpr int kDefaultHistories = 20000;
#endif
constexpr int kDefaultLength = 200;
constexpr int kLongRun = 50000;
constexpr int kFirstSeed = 1;

// What no history is answered, or hardly one: services, transports, limits and modes that the world does not have.
constexpr ErrorReason kElsewhere[] = {ErrorReason::kDataTypeMismatch,
                                      ErrorReason::kVocabSizeMismatch,
                                      ErrorReason::kWeightsNotFound,
                                      ErrorReason::kRegionNotFound,
                                      ErrorReason::kTransferNotFound,
                                      ErrorReason::kStorageNotConfigured,
                                      ErrorReason::kCheckpointSpecMismatch,
                                      ErrorReason::kJoinIncomplete,
                                      ErrorReason::kTransportUnavailable,
                                      ErrorReason::kOrderPassed,
                                      ErrorReason::kMicroBatchInProgress,
                                      ErrorReason::kQueueFull,
                                      ErrorReason::kMemoryBudgetExceeded,
                                      ErrorReason::kInFlightBytesExceeded,
                                      ErrorReason::kOrderedWindowFull,
                                      ErrorReason::kDraining,
                                      ErrorReason::kStarting,
                                      ErrorReason::kFeatureNotBuilt,
                                      ErrorReason::kFileCorrupt,
                                      ErrorReason::kDeadlineExceeded,
                                      ErrorReason::kInternal,
                                      ErrorReason::kUnauthenticated,
                                      ErrorReason::kPermissionDenied};

int FromEnvironment(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

// The library looks for deadlocks at every lock, which takes longer than what is tested; under TSan there is a better one.
const bool kNoDeadlockDetection = [] {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  return true;
}();

TEST(ServerHistoryTest, AgreesWithTheModel) {
  const int64_t count = FromEnvironment("HISTORIES", kDefaultHistories);
  const int length = FromEnvironment("HISTORY_LENGTH", kDefaultLength);
  const uint64_t first_seed = static_cast<uint64_t>(FromEnvironment("FIRST_SEED", kFirstSeed));
  RunOptions options = {.threads = FromEnvironment("HISTORY_THREADS", 0), .cuts_failures = FromEnvironment("HISTORY_CUT", 1) != 0};
  options.max_failures = options.cuts_failures ? 3 : 1;
  const Totals totals = RunHistories(first_seed, count, length, WorldBugs(), options);
  for (const std::string& failure : totals.failures) ADD_FAILURE() << failure;
  if (!totals.failures.empty()) return;
  EXPECT_EQ(totals.histories, count);
  if (std::getenv("HISTORY_COVERAGE") != nullptr) {
    for (const auto& [answer, number] : totals.coverage.answers) {
      std::printf("%10lld  %s: %s\n", static_cast<long long>(number), answer.first, answer.second.c_str());
    }
  }
  std::printf("%lld histories of the seeds %llu to %llu, %lld events\n%s", static_cast<long long>(totals.histories),
              static_cast<unsigned long long>(first_seed),
              static_cast<unsigned long long>(first_seed + static_cast<uint64_t>(count) - 1),
              static_cast<long long>(totals.coverage.events), totals.coverage.faults.ToString().c_str());
  RecordProperty("histories", static_cast<int>(count));
  if (count < 1000 || length < 200) return;
  const int64_t wanted = count < kLongRun ? 1 : 100;
  EXPECT_EQ(totals.coverage.faults.Problems(wanted), "") << "of what is possible each pair " << wanted << " times, else none";

  // The histories went where they were meant to go.
  const std::vector<std::string> kinds = Generator::KindNames();
  EXPECT_GE(kinds.size(), 64u);
  for (const std::string& kind : kinds) {
    const auto found = totals.coverage.kinds.find(kind);
    EXPECT_GE(found == totals.coverage.kinds.end() ? 0 : found->second, 5) << "too few events: " << kind;
  }
  EXPECT_GE(totals.coverage.late_events, count);
  std::map<std::string, int64_t> reasons;
  for (const auto& [answer, number] : totals.coverage.answers) reasons[answer.second] += number;
  EXPECT_GE(reasons["OK"], 1);
  for (int number = 0; number <= static_cast<int>(ErrorReason::kNotSessionOwner); ++number) {
    const bool is_elsewhere = std::find(std::begin(kElsewhere), std::end(kElsewhere), ErrorReason{number}) != std::end(kElsewhere);
    const char* name = ErrorReasonName(ErrorReason{number});
    EXPECT_TRUE(is_elsewhere || reasons[name] > 0) << name;
  }
}

TEST(ServerHistoryTest, RunsOneHistory) {
  const uint64_t seed = static_cast<uint64_t>(FromEnvironment("HISTORY_SEED", 1));
  const int length = FromEnvironment("HISTORY_LENGTH", kDefaultLength);
  std::vector<Event> events = MakeHistory(seed, length, WorldBugs());
  const char* chosen = std::getenv("HISTORY_EVENTS");
  if (chosen != nullptr) {
    std::vector<Event> all = std::move(events);
    events.clear();
    for (const absl::string_view index : absl::StrSplit(chosen, ',')) {
      events.push_back(all.at(static_cast<size_t>(std::atoi(std::string(index).c_str()))));
    }
  }
  const std::optional<Failure> failure =
      chosen != nullptr ? RunEvents(seed, events, WorldBugs()) : RunHistory(seed, length, WorldBugs(), nullptr, nullptr);
  if (std::getenv("HISTORY_SEED") != nullptr) {
    const size_t end = failure.has_value() ? static_cast<size_t>(failure->event) + 1 : events.size();
    for (size_t index = 0; index < end; ++index) std::printf("%zu: %s\n", index, ToString(events[index]).c_str());
  }
  if (failure.has_value()) ADD_FAILURE() << "at event " << failure->event << ":\n" << failure->what;
}

// A history follows from its seed alone, and a shorter one is the beginning of a longer one.
TEST(ServerHistoryTest, FollowsFromItsSeed) {
  const auto print = [](const std::vector<Event>& events) {
    std::vector<std::string> lines;
    for (const Event& event : events) lines.push_back(ToString(event));
    return lines;
  };
  for (const uint64_t seed : {5, 6}) {
    std::vector<std::string> whole = print(MakeHistory(seed, 150, WorldBugs()));
    const std::vector<std::string> part = print(MakeHistory(seed, 60, WorldBugs()));
    EXPECT_NE(whole, print(MakeHistory(seed + 2, 150, WorldBugs())));
    whole.resize(part.size());
    EXPECT_EQ(whole, part);
  }
}

// ---- the test of the test --------------------------------------------------------------------------------------------

struct PlantedBug {
  const char* name;
  WorldBugs bugs;
};

class PlantedBugTest : public ::testing::TestWithParam<PlantedBug> {};

TEST_P(PlantedBugTest, IsFound) {
  const Totals totals = RunHistories(kFirstSeed, 200, kDefaultLength, GetParam().bugs, RunOptions());
  ASSERT_FALSE(totals.failures.empty());
  EXPECT_NE(totals.failures[0].find("to run it again:\n  HISTORY_SEED="), std::string::npos) << totals.failures[0];
}

INSTANTIATE_TEST_SUITE_P(ServerHistoryTest, PlantedBugTest,
                         ::testing::Values(PlantedBug{"DropsACommit", {.engine = FakeBug::kDropsCommit}},
                                           PlantedBug{"AddsAContributionTwice", {.engine = FakeBug::kAddsTwice}},
                                           PlantedBug{"LeaksAStagingSlot", {.engine = FakeBug::kLeaksSlot}},
                                           PlantedBug{"KeepsADiscardedGradient", {.engine = FakeBug::kKeepsGradient}},
                                           PlantedBug{"AddsWhatWasNotDecided", {.engine = FakeBug::kAddsUndecided}},
                                           PlantedBug{"AnswersARepeatOtherwise", {.engine = FakeBug::kRepeatsOtherwise}},
                                           PlantedBug{"AppliesByHalf", {.engine = FakeBug::kAppliesByHalf}},
                                           PlantedBug{"SwapsByHalf", {.engine = FakeBug::kSwapsByHalf}},
                                           PlantedBug{"LetsStaleEpochsIn", {.ignores_epochs = true}},
                                           PlantedBug{"AcknowledgesBeforeTheSync", {.never_syncs = true}},
                                           PlantedBug{"ComesBackInSilence", {.comes_back_in_silence = true}},
                                           PlantedBug{"RestoresAnOlderCheckpoint", {.keeps_older_checkpoint = true}},
                                           PlantedBug{"NeverExpiresASession", {.session_clock_stands = true}},
                                           PlantedBug{"EndsALeaseInACall", {.forgets_call_of_session = true}}),
                         [](const auto& bug) { return bug.param.name; });

}  // namespace
}  // namespace headwater::history
