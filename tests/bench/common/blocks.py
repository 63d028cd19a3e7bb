"""Times under a power limit: the card at full load, blocks of the floor and of the candidate in turn, ratios of neighbours.

The first 60 to 100 ms after idle run up to 15 % faster than the steady state, so a time without its regime says nothing. The
sustained ratio is the median over blocks of candidate / mean of the floor's blocks before and after it. The burst figure is the
first 60 ms after two seconds of idleness.

Floor and candidate are functions of a number of calls, which make them in a row and return the milliseconds of one.
"""

import dataclasses
import pathlib
import statistics
import sys
import time

import runs

BURST_SECONDS = 0.06


@dataclasses.dataclass(frozen=True)
class Card:
    """The GPU's state during a block; zeros where there is none."""

    samples: int
    sm_mhz: float
    watts: float
    celsius: float
    throttle_reasons: int  # NVML's bits, all that were seen

    def add_to(self, table, case):
        for name, unit in (("sm_mhz", "MHz"), ("watts", "W"), ("celsius", "degrees"), ("throttle_reasons", "NVML bits")):
            table.add(f"{case}_{name}", getattr(self, name), unit)


class CardMonitor:
    """Watches a GPU by its PCI bus id, in another process."""

    def __init__(self, bus):
        self._worker = runs.Worker([sys.executable, pathlib.Path(__file__).with_name("card_monitor.py"), bus])
        self._marks = 0
        self.close = self._worker.close

    def mark(self):
        """Ends an interval, and begins the next one. Waits for nothing: the card must not be idle between blocks."""
        self._worker.send()
        self._marks += 1

    def intervals(self):
        """The card in each interval since this was asked last."""
        lines = [self._worker.read().split() for _ in range(self._marks)]
        self._marks = 0
        return [Card(int(samples), *map(float, means), int(reasons)) for samples, *means, reasons in lines]


def add_arguments(parser, seconds=1.0, bursts=True):
    """--seconds, --warmup, --rounds, and for bursts --idle."""
    parser.add_argument("--seconds", type=float, default=seconds, help="length of a block")
    parser.add_argument("--warmup", type=float, default=2.0, help="seconds of the floor before the first block")
    parser.add_argument("--rounds", type=int, default=2, help="blocks of the candidate; the floor has one more")
    if bursts:
        parser.add_argument("--idle", type=float, default=2.0, help="seconds before a burst; 0: none is taken")


@dataclasses.dataclass
class Times:
    """Milliseconds of one call, medians over blocks, and ratios."""

    floor_ms: float
    candidate_ms: float
    ratio: float
    spread: float  # (largest - smallest) / median
    card: Card  # during the last block of each
    floor_card: Card | None = None
    floors: list[float] = dataclasses.field(default_factory=list)  # milliseconds of each block
    burst_ratio: float = 0.0


def spread(values):
    return (max(values) - min(values)) / statistics.median(values)


def count_for(seconds, ms):
    """Calls that take so long."""
    return min(max(round(seconds * 1000 / ms), 1), 1000000)


def estimate(work):
    """Milliseconds of one call, after two that pay for what is done once."""
    work(2)
    return max(work(3), 1e-3)


def alternate(floor, candidate, floor_count, count, rounds, monitor):
    """Times of blocks of so many calls: floor, candidate, floor, candidate, floor."""

    def block(work, calls):
        ms = work(calls)
        monitor.mark()
        return ms

    monitor.mark()
    floors, taken = [block(floor, floor_count)], []
    for _ in range(rounds):
        taken.append(block(candidate, count))
        floors.append(block(floor, floor_count))
    ratios = [ms / (0.5 * (before + after)) for ms, before, after in zip(taken, floors[:-1], floors[1:], strict=True)]
    *_, card, floor_card = monitor.intervals()
    medians = [statistics.median(values) for values in (floors, taken, ratios)]
    return Times(*medians, spread(ratios), card, floor_card, floors)


def burst(work, ms, options):
    time.sleep(options.idle)
    return work(count_for(BURST_SECONDS, ms))


def time_alternately(floor, candidate, options, monitor):
    """A candidate against a floor."""
    floor_estimate, candidate_estimate = estimate(floor), estimate(candidate)
    floor_count, count = (count_for(options.seconds, ms) for ms in (floor_estimate, candidate_estimate))
    floor(count_for(options.warmup, floor_estimate))
    times = alternate(floor, candidate, floor_count, count, options.rounds, monitor)
    if options.idle > 0:
        floor_burst = burst(floor, times.floor_ms, options)
        times.burst_ratio = burst(candidate, times.candidate_ms, options) / floor_burst
    return times


def time_against(floor_ms, candidate, options, monitor):
    """A candidate against a time that needs no measurement: rounds + 1 blocks after the warm-up."""
    candidate_estimate = estimate(candidate)
    candidate(count_for(options.warmup, candidate_estimate))
    taken = []
    for _ in range(options.rounds + 1):
        monitor.mark()
        taken.append(candidate(count_for(options.seconds, candidate_estimate)))
    monitor.mark()
    ms = statistics.median(taken)
    times = Times(floor_ms, ms, ms / floor_ms, spread(taken), monitor.intervals()[-1])
    if options.idle > 0:
        times.burst_ratio = burst(candidate, ms, options) / floor_ms
    return times


def interleave(rounds, candidates):
    """Calls each candidate once a round, every other round in reverse, after a round that warms up; {name: [result of each round]}.

    The preceding candidate and a drift of the clock then affect all of them alike.
    """
    taken = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name in [*candidates][:: -1 if turn % 2 else 1]:
            result = candidates[name]()
            if turn:
                taken[name].append(result)
    return taken
