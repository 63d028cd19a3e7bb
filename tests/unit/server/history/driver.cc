#include "driver.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "generator.h"
#include "simulation.h"
#include "tests/unit/server/history/model/model.h"

namespace headwater::history {
namespace {

constexpr int kMaxShrinkRuns = 600;

// Server and model side by side.
class Comparison {
 public:
  Comparison(uint64_t seed, const WorldBugs& bugs)
      : payloads_(MakePayloads(seed)), model_(payloads_), world_(payloads_, 1 + static_cast<int>(seed % 3), bugs) {}

  const Model& model() const { return model_; }
  const Reply& reply() const { return reply_; }

  // Empty if they agree.
  std::string Run(const Event& event) {
    reply_ = world_.Run(event);
    Event known = event;
    if (event.crash_at > 0 && !reply_.numbers.empty()) known.crash_changed = reply_.numbers[0] != 0;
    if (std::string difference = Difference(reply_, model_.Run(known)); !difference.empty()) return difference;
    return View::Difference(world_.Observe(), model_.Observe());
  }

 private:
  static std::string Difference(const Reply& reply, const Expected& expected) {
    if (std::find(expected.reasons.begin(), expected.reasons.end(), reply.reason) == expected.reasons.end()) {
      return absl::StrCat("  answered ", reply.reason, ", expected ", absl::StrJoin(expected.reasons, " or "), "\n");
    }
    if (reply.reason == "OK" && !SameNumbers(reply.numbers, expected.numbers)) {
      return absl::StrCat("  answered ", PrintNumbers(reply.numbers), ", expected ", PrintNumbers(expected.numbers), "\n");
    }
    if (reply.beside.size() != expected.beside.size()) {
      return absl::StrCat("  ", reply.beside.size(), " calls were computed beside it, expected ", expected.beside.size(), "\n");
    }
    for (size_t i = 0; i < reply.beside.size(); ++i) {
      std::string difference = Difference(reply.beside[i], expected.beside[i]);
      if (!difference.empty()) return absl::StrCat("  the call beside it:\n", difference);
    }
    return "";
  }

  const std::vector<Payload> payloads_;
  Model model_;
  World world_;
  Reply reply_;
};

std::string EventLine(int index, const Event& event) { return absl::StrCat("  ", index, ": ", ToString(event), "\n"); }

}  // namespace

void Coverage::Add(const Coverage& other) {
  for (const auto& [kind, count] : other.kinds) kinds[kind] += count;
  for (const auto& [answer, count] : other.answers) answers[answer] += count;
  late_events += other.late_events;
  events += other.events;
  faults.Add(other.faults);
}

std::vector<Event> MakeHistory(uint64_t seed, int length, const WorldBugs& bugs) {
  std::vector<Event> events;
  RunHistory(seed, length, bugs, nullptr, &events);
  return events;
}

std::optional<Failure> RunEvents(uint64_t seed, const std::vector<Event>& events, const WorldBugs& bugs) {
  Comparison comparison(seed, bugs);
  for (size_t index = 0; index < events.size(); ++index) {
    std::string difference = comparison.Run(events[index]);
    if (!difference.empty()) return Failure{static_cast<int>(index), std::move(difference)};
  }
  return std::nullopt;
}

std::optional<Failure> RunHistory(uint64_t seed, int length, const WorldBugs& bugs, Coverage* coverage,
                                  std::vector<Event>* events) {
  Comparison comparison(seed, bugs);
  Coverage own;
  Coverage& seen = coverage != nullptr ? *coverage : own;
  std::unique_ptr<Source> source;
  if (seed % 2 == 1) {
    source = std::make_unique<Generator>(seed, comparison.model());
  } else {
    source = std::make_unique<Simulation>(seed, seen.faults);
  }
  for (int index = 0; index < length; ++index) {
    const Event event = source->Next();
    if (events != nullptr) events->push_back(event);
    std::string difference = comparison.Run(event);
    if (!difference.empty()) return Failure{index, std::move(difference)};
    difference = source->Answered(event, comparison.reply());
    if (!difference.empty()) return Failure{index, std::move(difference), /*by_client=*/true};
    ++seen.events;
    seen.faults.Count(event, comparison.reply());
    if (coverage == nullptr) continue;
    ++seen.kinds[event.kind];
    ++seen.answers[{event.kind, comparison.reply().reason}];
    seen.late_events += event.late;
  }
  return std::nullopt;
}

std::string Report(uint64_t seed, const Failure& failure, const WorldBugs& bugs) {
  const std::vector<Event> events = MakeHistory(seed, failure.event + 1, bugs);
  std::string text =
      absl::StrCat("history ", seed, " fails at event ", failure.event, ":\n", EventLine(failure.event, events.back()),
                   failure.what, "to run it again:\n  HISTORY_SEED=", seed, " HISTORY_LENGTH=", failure.event + 1,
                   " server_history_test --gtest_filter='*RunsOneHistory*'\n");
  if (failure.by_client) return text;  // what the clients knew is not in the events
  std::vector<int> kept;
  for (int index = 0; index <= failure.event; ++index) kept.push_back(index);
  const auto run = [&](const std::vector<int>& indices) {
    std::vector<Event> chosen;
    for (const int index : indices) chosen.push_back(events[static_cast<size_t>(index)]);
    return RunEvents(seed, chosen, bugs);
  };
  // Halves, quarters, ... are left out as long as what remains still fails.
  std::optional<Failure> shortest = failure;
  int runs = 0;
  for (size_t size = kept.size() / 2; size > 0; size /= 2) {
    for (size_t start = 0; start < kept.size() && runs < kMaxShrinkRuns;) {
      std::vector<int> fewer(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(start));
      fewer.insert(fewer.end(), kept.begin() + static_cast<std::ptrdiff_t>(std::min(start + size, kept.size())), kept.end());
      ++runs;
      std::optional<Failure> still = run(fewer);
      // At the same event: another difference is another history.
      if (!still.has_value() || fewer[static_cast<size_t>(still->event)] != failure.event) {
        start += size;
        continue;
      }
      kept = std::move(fewer);
      shortest = std::move(still);
    }
  }
  absl::StrAppend(&text, "the fewest events that were found to fail:\n");
  for (const int index : kept) text += EventLine(index, events[static_cast<size_t>(index)]);
  absl::StrAppend(&text, shortest->what, "to run those:\n  HISTORY_SEED=", seed, " HISTORY_LENGTH=", failure.event + 1,
                  " HISTORY_EVENTS=", absl::StrJoin(kept, ","), " server_history_test --gtest_filter='*RunsOneHistory*'\n");
  return text;
}

Totals RunHistories(uint64_t first_seed, int64_t count, int length, const WorldBugs& bugs, const RunOptions& options) {
  Totals totals;
  std::mutex mutex;
  std::atomic<int64_t> next = 0;
  std::atomic<size_t> failures = 0;
  std::atomic<bool> enough = false;
  const auto work = [&] {
    Coverage coverage;
    int64_t histories = 0;
    for (int64_t number = next++; number < count && !enough; number = next++, ++histories) {
      const uint64_t seed = first_seed + static_cast<uint64_t>(number);
      const std::optional<Failure> failure = RunHistory(seed, length, bugs, &coverage, nullptr);
      if (!failure.has_value()) continue;
      if (failures++ >= options.max_failures) break;
      if (failures >= options.max_failures) enough = true;
      std::string report = options.cuts_failures ? Report(seed, *failure, bugs) : failure->what;
      const std::lock_guard<std::mutex> lock(mutex);
      totals.failures.push_back(std::move(report));
    }
    const std::lock_guard<std::mutex> lock(mutex);
    totals.coverage.Add(coverage);
    totals.histories += histories;
  };
  std::vector<std::thread> threads;
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  for (int i = 0; i < (options.threads > 0 ? options.threads : cores); ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  return totals;
}

}  // namespace headwater::history
