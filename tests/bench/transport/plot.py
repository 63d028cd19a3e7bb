#!/usr/bin/env python3
"""Draws the figures of docs/benchmarks/transport.csv, and writes their table into docs/benchmarks/transport.md.

    tests/bench/transport/plot.py [--figures FILE.csv] [--plot FILE.svg] [--page FILE.md]

The plot needs matplotlib; --plot '' leaves it out.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
import figures
import plots
from figures import cell, markdown

MARK = "<!-- figures -->"
PREFIX = figures.GPU_PREFIX + "transport_"
RATIO = "_ratio"
# The project's aims, beyond its requirements.
AIMS = {
    "grpc": 1.08,
    "grpc_two_in_flight": 1.01,
    "shared_memory": 1.02,
    "cuda_ipc": 1.01,
    "grpc_frozen_head": 1.10,
    "grpc_explicit": 1.02,
    "shared_memory_explicit": 1.02,
    "cuda_ipc_explicit": 1.02,
    "grpc_held": 1.35,
    "shared_memory_held": 1.35,
    "cuda_ipc_held": 1.35,
    "grpc_python": 1.02,
    "shared_memory_python": 1.02,
    "cuda_ipc_python": 1.02,
    "grpc_many_clients": 1.0526,
    "grpc_against_torch_compile": 1.05,
}


def cases_of(values):
    """The names of the cases, in the file's order."""
    names = [case[len(PREFIX) : -len(RATIO)] for case in values if case.startswith(PREFIX) and case.endswith(RATIO)]
    return [name for name in names if not name.endswith("_burst")]


def table_of(values):
    header = ("case", "ms", "against", "ms", "ratio", "required", "aim", "spread", "burst", "x products", "MHz", "W")
    lines = []
    for name in cases_of(values):

        def value(figure, form="{:.3f}", case=PREFIX + name):
            return cell(values.get(f"{case}_{figure}"), form)

        row = values[PREFIX + name + RATIO]
        times = (value("ms"), row["unit"].removeprefix("x "), value("base_ms"), value("ratio"))
        bounds = (row["required"], f"{AIMS[name]:g}" if name in AIMS else "")
        others = (*map(value, ("spread", "burst_ratio", "of_products")), value("sm_mhz", "{:.0f}"), value("watts", "{:.0f}"))
        lines.append((name, *times, *bounds, *others))
    others = [
        (row["case"], row["value"], row["unit"], row["required"]) for case, row in values.items() if not case.startswith(PREFIX)
    ]
    return markdown(header, lines) + (markdown(("figure", "value", "unit", "required"), others) if others else [])


def draw(rows, options):
    """Bars of the ratios, with what is required."""
    values = {row["case"]: row for row in rows}
    names = cases_of(values)
    units = [values[PREFIX + name + RATIO]["unit"].removeprefix("x ") for name in names]
    labels = [f"{name} / {unit}" for name, unit in zip(names, units, strict=True)]
    ratios = [float(values[PREFIX + name + RATIO]["value"]) for name in names]
    label = "time over that of what stands behind the stroke; black: required"
    with plots.bars(options.plot, labels, (10, 0.35 * len(names) + 1.5), label) as axes:
        axes.barh(range(len(names)), ratios, 0.6)
        for place, (name, ratio) in enumerate(zip(names, ratios, strict=True)):
            required = values[PREFIX + name + RATIO]["required"]
            if required:
                axes.plot([float(required)] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.5)
            axes.annotate(f" {ratio:.3f}", (ratio, place), va="center", fontsize=8)
        axes.set_xlim(0.5, max(1.6, *ratios) + 0.1)


def write(rows, options):
    figures.write_block(options.page, MARK, [figures.origin(rows), "", *table_of({row["case"]: row for row in rows})[:-1]])


if __name__ == "__main__":
    plots.main(__doc__, "transport", PREFIX, write, draw)
