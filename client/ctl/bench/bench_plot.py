"""Draws the results of `headwaterctl bench`: its CSV on standard input, the PNG file as the argument. Part of the program."""

import csv
import sys

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

rows = list(csv.DictReader(sys.stdin))
for row in rows:
    for name in ("in_flight", "rows", "median_ms", "period_ms", "engine_ms", "rows_per_second"):
        row[name] = float(row[name])
shape = "N={rows:.0f} H={hidden_size} V={vocab_size} {data_type}"
figure, (paths, concurrency, sizes) = pyplot.subplots(1, 3, figsize=(15, 4.5))

bars = [row for row in rows if row["sweep"] == "transport"]
paths.bar([row["transport"] for row in bars], [row["median_ms"] for row in bars], label="from call to result")
paths.bar([row["transport"] for row in bars], [row["engine_ms"] for row in bars], width=0.5, label="of it in the engine")
paths.set_ylabel("ms")
paths.set_title("one micro-batch at a time, " + shape.format(**bars[0]) if bars else "")
paths.legend()


def curve(axes, sweep, transport, across, up):
    """A path's points of a sweep, in order."""
    points = sorted((across(row), up(row)) for row in rows if (row["sweep"], row["transport"]) == (sweep, transport))
    if points:
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=transport)


for name in dict.fromkeys(row["transport"] for row in rows):
    curve(concurrency, "concurrency", name, lambda row: row["in_flight"], lambda row: row["rows_per_second"])
    curve(sizes, "size", name, lambda row: row["rows"], lambda row: row["median_ms"] / row["engine_ms"])
concurrency.set_title("several micro-batches in flight")
concurrency.set_xscale("log", base=2)
concurrency.set_ylim(bottom=0)
concurrency.set_xlabel("micro-batches in flight")
concurrency.set_ylabel("rows per second")
concurrency.legend()
sizes.set_title("micro-batches of other sizes")
sizes.set_xscale("log", base=2)
sizes.axhline(1, color="grey", linewidth=0.8, linestyle="--")
sizes.set_xlabel("rows of a micro-batch")
sizes.set_ylabel("time over the engine's")
sizes.legend()
figure.tight_layout()
figure.savefig(sys.argv[1], dpi=120, format="png")
