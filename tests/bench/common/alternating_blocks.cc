#include "tests/bench/common/alternating_blocks.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

#include "tests/bench/common/statistics.h"

namespace headwater::bench {
namespace {

constexpr double kBurstSeconds = 0.06;

// Milliseconds of one call.
double Time(const Repeat& work, int count) {
  const auto start = std::chrono::steady_clock::now();
  work(count);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() / count;
}

int CountFor(double seconds, double ms) { return std::clamp(static_cast<int>(std::lround(seconds * 1000 / ms)), 1, 1000000); }

// One call, after two that pay for what is done once.
double Estimate(const Repeat& work) {
  work(2);
  return std::max(Time(work, 3), 1e-3);
}

double Burst(const Repeat& work, double ms, const BlockOptions& options) {
  std::this_thread::sleep_for(std::chrono::duration<double>(options.idle_seconds));
  return Time(work, CountFor(kBurstSeconds, ms));
}

}  // namespace

BlockTimes TimeAlternately(const Repeat& floor, const Repeat& candidate, const BlockOptions& options, CardMonitor& monitor) {
  const double floor_estimate = Estimate(floor);
  const double candidate_estimate = Estimate(candidate);
  const int floor_count = CountFor(options.block_seconds, floor_estimate);
  const int candidate_count = CountFor(options.block_seconds, candidate_estimate);
  floor(CountFor(options.warmup_seconds, floor_estimate));
  BlockTimes times;
  const auto block = [&](const Repeat& work, int count, CardState* card) {
    monitor.Begin();
    const double ms = Time(work, count);
    *card = monitor.End();
    return ms;
  };
  std::vector<double> floor_ms = {block(floor, floor_count, &times.floor_card)};
  std::vector<double> candidate_ms;
  std::vector<double> ratios;
  for (int round = 0; round < options.rounds; ++round) {
    candidate_ms.push_back(block(candidate, candidate_count, &times.candidate_card));
    floor_ms.push_back(block(floor, floor_count, &times.floor_card));
    ratios.push_back(candidate_ms.back() / (0.5 * (floor_ms[floor_ms.size() - 2] + floor_ms.back())));
  }
  times.floor_ms = Median(floor_ms);
  times.candidate_ms = Median(candidate_ms);
  times.ratio = Median(ratios);
  times.ratio_spread = Spread(ratios);
  if (options.idle_seconds > 0) {
    const double floor_burst = Burst(floor, times.floor_ms, options);
    times.burst_ratio = Burst(candidate, times.candidate_ms, options) / floor_burst;
  }
  return times;
}

BlockTimes TimeAgainst(double floor_ms, const Repeat& candidate, const BlockOptions& options, CardMonitor& monitor) {
  const double estimate = Estimate(candidate);
  candidate(CountFor(options.warmup_seconds, estimate));
  BlockTimes times;
  std::vector<double> candidate_ms;
  for (int round = 0; round <= options.rounds; ++round) {
    monitor.Begin();
    candidate_ms.push_back(Time(candidate, CountFor(options.block_seconds, estimate)));
    times.candidate_card = monitor.End();
  }
  times.floor_ms = floor_ms;
  times.candidate_ms = Median(candidate_ms);
  times.ratio = times.candidate_ms / floor_ms;
  times.ratio_spread = Spread(candidate_ms);
  if (options.idle_seconds > 0) times.burst_ratio = Burst(candidate, times.candidate_ms, options) / floor_ms;
  return times;
}

}  // namespace headwater::bench
