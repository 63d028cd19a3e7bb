"""Times under a power limit: which calls are made, and what their times become."""

import argparse

import blocks


def test_blocks_alternate_and_each_is_compared_with_its_neighbours():
    calls = []

    def work(name, *times):
        remaining = [*times]

        def run(count):
            calls.append((name, count))
            return remaining.pop(0)

        return run

    # Two calls to warm up, three for the estimate; the floor's warm-up; then the blocks, and a burst.
    floor = work("floor", 10.0, 10.0, 10.0, 10.0, 20.0, 30.0, 5.0)
    candidate = work("candidate", 40.0, 40.0, 30.0, 50.0, 10.0)
    options = argparse.Namespace(seconds=1.0, warmup=2.0, rounds=2, idle=0.001)
    monitor = blocks.CardMonitor("-")
    times = blocks.time_alternately(floor, candidate, options, monitor)
    monitor.close()
    assert calls == [
        *(("floor", 2), ("floor", 3), ("candidate", 2), ("candidate", 3), ("floor", 200)),
        *(("floor", 100), ("candidate", 25), ("floor", 100), ("candidate", 25), ("floor", 100)),
        *(("floor", 3), ("candidate", 2)),
    ]
    assert (times.floor_ms, times.candidate_ms, times.floors) == (20.0, 40.0, [10.0, 20.0, 30.0])
    assert (times.ratio, times.spread, times.burst_ratio) == (2.0, 0.0, 2.0)
    assert times.card == times.floor_card == blocks.Card(0, 0.0, 0.0, 0.0, 0)
