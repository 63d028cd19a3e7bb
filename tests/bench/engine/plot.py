#!/usr/bin/env python3
"""Writes the tables of docs/benchmarks/engine.md from engine.csv, draws the GPU's figures, and prints those that miss their bound.

    tests/bench/engine/plot.py [--figures FILE.csv] [--plot FILE.svg] [--page FILE.md]

The plot needs matplotlib; --plot '' leaves it out.
"""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
import figures
import plots
from figures import cell, markdown

MARK = "<!-- gpu figures -->"
PEERS_MARK = "<!-- peers -->"
TAU_MARK = "<!-- gradient resolution -->"
ERRORS_MARK = "<!-- errors -->"
CPU_MARK = "<!-- figures -->"
PEERS_PREFIX = figures.GPU_PREFIX + "peers_"
PEER = re.compile(rf"{PEERS_PREFIX}(?P<case>.+_v\d+)_(?P<way>.+)_(?P<work>anew|first|bf16|fp32)_(?P<figure>ms|ratio|peak_mib)")
TAU = re.compile(rf"{PEERS_PREFIX}(?P<case>.+_v\d+)_headwater_(?P<work>fp32|tau_2_\d+)_(?P<figure>ratio|over_exact)")
ERROR = re.compile(
    rf"{PEERS_PREFIX}(?P<case>smollm2.*)_n\d+_h\d+_v\d+_(?P<way>.+)_(?:anew|bf16|fp32)_(?P<figure>loss|grad_hidden|grad_weight)_error"
)
DRAWN = ("torch_compile", "torch_compile_addmm", "liger_sm90", "quack")
# The ways and cases in the page's tables; the file has all.
SHOWN = (
    *("headwater", "torch_eager", "torch_compile", "torch_compile_addmm"),
    *("liger_sm90", "liger_sm90_addmm", "liger_chunked", "quack", "cce"),
)
LEFT_OUT = ("trained_shuffled", "ce_n8192_h2048")
WORKS = {"added, fp32": ("fp32",), "added, bf16": ("bf16",), "not accumulated": ("first", "anew")}
RESOLUTIONS = (12, 10, 8)
EXACTNESS = {"exactness_ce": "cross entropy", "exactness_jsd": "divergence", "memory": "memory in use"}
CPU = {
    "cpu_cross_entropy_float32_ratio": "fp32, to the products in fp32",
    "cpu_cross_entropy_bfloat16_ratio": "bf16, to the products in fp32",
    "cpu_cross_entropy_bfloat16_of_onednn_products": "bf16, to oneDNN's products in bf16",
    "cpu_cross_entropy_float32_of_torch_added": "fp32, to PyTorch that adds in fp32",
    "cpu_cross_entropy_bfloat16_of_torch_added": "bf16, to PyTorch that adds in fp32",
    "cpu_explicit_over_eager": "a contribution staged and committed, to one added in place",
    "cpu_direct_over_engine": "`Head::Submit()`, to the engine's bare call",
    "cpu_cross_entropy_float32_peak_of_eager": "peak memory in fp32, to eager PyTorch's",
    "cpu_cross_entropy_bfloat16_peak_of_eager": "peak memory in bf16, to eager PyTorch's",
}


def cases_of(values):
    """The engine's cases, in the file's order: those with a ratio that is no peer's."""
    suffix = "_ratio"
    names = [case[len(figures.GPU_PREFIX) : -len(suffix)] for case in values if case.endswith(suffix)]
    return [name for name in names if not name.endswith("_burst") and not name.startswith("peers_")]


def engine_tables(rows):
    """The engine's cases; then exactness and memory, a line per quantity with the figure that is nearest to its bound."""
    values = {row["case"]: row for row in rows}
    header = ("case", "ms", "floor ms", "ratio", "required", "spread", "burst", "MHz", "W")
    lines = []
    forms = {"burst_ratio": "{:.3f}", "sm_mhz": "{:.0f}", "watts": "{:.0f}"}
    for name in cases_of(values):
        case = figures.GPU_PREFIX + name
        times = [cell(values.get(f"{case}_{figure}")) for figure in ("ms", "floor_ms", "ratio")]
        others = [cell(values.get(f"{case}_{figure}"), forms.get(figure, "{:.3f}")) for figure in ("spread", *forms)]
        lines.append((name, *times, values[f"{case}_ratio"]["required"], *others))
    groups = {}
    for row in rows:
        for kind, words in EXACTNESS.items():
            if row["required"] and row["case"].startswith(f"{figures.GPU_PREFIX}{kind}_"):
                quantity = next(name for name in ("grad_hidden", "grad_weight", "loss", "of_plan") if name in row["case"])
                groups.setdefault(f"{words}: {quantity.replace('of_plan', 'of the plan')}", []).append(row)
    bounds = []
    for name, group in groups.items():
        worst = max(group, key=lambda row: float(row["value"]) / float(row["required"]))
        bounds.append((name, str(len(group)), f"{cell(worst, '{:.2g}')} {worst['unit']}", f"{float(worst['required']):.3g}"))
    return [*markdown(header, lines), *markdown(("quantity", "figures", "worst", "at most"), bounds)]


def matched(rows, pattern):
    """{(case, way): {(work, figure): row}} of the rows whose names a pattern matches; the page's cases and ways alone."""
    found = {}
    for row in rows:
        match = pattern.fullmatch(row["case"])
        names = match.groupdict() if match else {}
        way = names.get("way", "headwater")
        if match and way in SHOWN and not names["case"].startswith(LEFT_OUT):
            found.setdefault((names["case"], way), {})[names.get("work"), names["figure"]] = row
    return found


def peers_tables(rows):
    """A table for each work, and one of peak memory: a line per case, a column per way."""
    found = matched(rows, PEER)
    cases = list(dict.fromkeys(case for case, way in found if way != "headwater"))
    wanted = {name: [(work, "ratio") for work in works] for name, works in WORKS.items()}
    wanted["peak MiB"] = [("anew", "peak_mib"), ("fp32", "peak_mib")]
    lines = []
    for name, keys in wanted.items():

        def value(case, way, keys=keys):
            return next((found[case, way][key] for key in keys if key in found.get((case, way), {})), None)

        ways = [way for way in SHOWN if any(value(case, way) for case in cases)]
        form = "{:.0f}" if name == "peak MiB" else "{:.3f}"
        body = [(case, *(cell(value(case, way), form) for way in ways)) for case in cases if any(value(case, way) for way in ways)]
        lines += markdown((name, *ways), body)
    return lines


def tau_table(rows):
    """Times with a gradient resolution over the products, and over the exact gradient's time in the run."""
    header = ("case", "exact", *(f"2^-{tau}" for tau in RESOLUTIONS), *(f"2^-{tau}, to exact" for tau in RESOLUTIONS))
    lines = []
    for (case, _), found in matched(rows, TAU).items():
        keys = [("fp32", "ratio"), *((f"tau_2_{tau}", figure) for figure in ("ratio", "over_exact") for tau in RESOLUTIONS)]
        if keys[1] in found:
            if found[keys[0]]["commit"] != found[keys[1]]["commit"]:
                del found[keys[0]]
            lines.append((case, *(cell(found.get(key)) for key in keys)))
    return markdown(header, lines)


def errors_table(rows):
    """Errors against fp64 on a real model's rows."""
    quantities = ("grad_hidden", "grad_weight", "loss")
    lines = []
    found = sorted(matched(rows, ERROR).items(), key=lambda entry: (entry[0][0], SHOWN.index(entry[0][1])))
    for (case, way), errors in found:
        lines.append((case, way, *(cell(errors.get((None, quantity)), "{:.2e}") for quantity in quantities)))
    return markdown(("SmolLM2-135M's rows, error against fp64", "way", *quantities), lines)


def cpu_table(rows):
    values = {row["case"]: row for row in rows}
    lines = [(words, cell(values[case]), values[case]["required"]) for case, words in CPU.items()]
    return markdown(("figure", "ratio", "at most"), lines)


def write_tables(rows, page):
    """Puts the tables between the page's marks, each behind the machines and commits of its figures."""
    gpu = [row for row in rows if row["case"].startswith(figures.GPU_PREFIX)]
    engine = [row for row in gpu if not row["case"].startswith(PEERS_PREFIX)]
    of = {
        MARK: (engine_tables, engine),
        PEERS_MARK: (peers_tables, [row for row in gpu if PEER.fullmatch(row["case"])]),
        TAU_MARK: (tau_table, [row for row in gpu if "_headwater_tau_" in row["case"]]),
        ERRORS_MARK: (errors_table, [row for row in gpu if ERROR.fullmatch(row["case"])]),
        CPU_MARK: (cpu_table, [row for row in rows if row["case"] in CPU]),
    }
    for mark, (lines_of, own) in of.items():
        lines = lines_of(gpu if mark == TAU_MARK else own)
        figures.write_block(page, mark, [figures.origin(own), "", *lines[:-1]])


def draw(rows, options):
    """Bars of time over the floor: the engine's, with what is required, and those of others that add into fp32."""
    values = {row["case"]: row for row in rows if row["case"].startswith(figures.GPU_PREFIX)}
    names = cases_of(values)
    series = {"headwater": figures.GPU_PREFIX + "{}_ratio", **{way: f"{PEERS_PREFIX}{{}}_{way}_fp32_ratio" for way in DRAWN}}
    height = 0.8 / len(series)
    label = "time over the bare matrix products (one small micro-batch: over the bytes that must move); black: required"
    with plots.bars(options.plot, names, (11, 0.6 * len(names) + 2), label) as axes:
        for number, (way, form) in enumerate(series.items()):
            drawn = [
                (index, float(values[form.format(name)]["value"]))
                for index, name in enumerate(names)
                if form.format(name) in values
            ]
            if drawn:
                places = [index + (number - (len(series) - 1) / 2) * height for index, _ in drawn]
                axes.barh(places, [ratio for _, ratio in drawn], height, label=way)
        for index, name in enumerate(names):
            required = values[f"{figures.GPU_PREFIX}{name}_ratio"]["required"]
            if required:
                axes.plot([float(required)] * 2, [index - 0.45, index + 0.45], color="black", linewidth=1)
        axes.set_xlim(0, 1.6)
        axes.legend(loc="lower right")


def write(rows, options):
    write_tables(rows, options.page)
    figures.verdict(rows)


if __name__ == "__main__":
    plots.main(__doc__, "engine", figures.GPU_PREFIX, write, draw)
