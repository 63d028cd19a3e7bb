// Times under a power limit: the card at full load, blocks of the floor and of the candidate in turn, ratios of neighbours.
//
// The first 60 to 100 ms after idle run up to 15 % faster than the steady state, so a time without its regime says nothing. The
// sustained ratio is the median over blocks of candidate / mean of the floor's blocks before and after it. The burst figure is the
// first 60 ms after two seconds of idleness.
#ifndef HEADWATER_TESTS_BENCH_COMMON_ALTERNATING_BLOCKS_H_
#define HEADWATER_TESTS_BENCH_COMMON_ALTERNATING_BLOCKS_H_

#include <functional>

#include "tests/bench/common/card_monitor.h"

namespace headwater::bench {

// Does the work so many times, back to back, and returns when it is done.
using Repeat = std::function<void(int count)>;

struct BlockOptions {
  double warmup_seconds = 2;
  double block_seconds = 1;
  int rounds = 2;  // blocks of the candidate; the floor has one more
  double idle_seconds = 2;
};

struct BlockTimes {
  double floor_ms = 0;  // one call, median over blocks
  double candidate_ms = 0;
  double ratio = 0;         // median over blocks
  double ratio_spread = 0;  // (largest - smallest) / median
  double burst_ratio = 0;
  CardState candidate_card, floor_card;  // during the last block of each
};

// A floor against a candidate.
BlockTimes TimeAlternately(const Repeat& floor, const Repeat& candidate, const BlockOptions& options, CardMonitor& monitor);

// A candidate against a time that needs no measurement: rounds + 1 blocks after the warm-up.
BlockTimes TimeAgainst(double floor_ms, const Repeat& candidate, const BlockOptions& options, CardMonitor& monitor);

}  // namespace headwater::bench

#endif  // HEADWATER_TESTS_BENCH_COMMON_ALTERNATING_BLOCKS_H_
