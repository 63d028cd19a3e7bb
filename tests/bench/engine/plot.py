#!/usr/bin/env python3
"""Draws the GPU's figures of docs/benchmarks/engine.csv, and writes their table into docs/benchmarks/engine.md.

    tests/bench/engine/plot.py [--figures FILE.csv] [--plot FILE.svg] [--page FILE.md]

The plot needs matplotlib; --plot '' leaves it out.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
import figures

ROOT = pathlib.Path(__file__).resolve().parents[3]
MARK = "<!-- gpu figures -->"
PEERS = ("torch_eager", "torch_compile", "liger", "liger_fp32", "quack")


def cases_of(values):
    """The engine's cases, in the file's order: those with a ratio that is no peer's."""
    suffix = "_ratio"
    names = [case[len(figures.GPU_PREFIX) : -len(suffix)] for case in values if case.endswith(suffix)]
    return [name for name in names if not name.endswith((*PEERS, "_burst"))]


def table_of(rows):
    """The engine's cases, and every other figure that something is required of, in Markdown."""
    values = {row["case"]: row for row in rows}

    def value(case, form="{:.3f}"):
        return form.format(float(values[case]["value"])) if case in values else ""

    lines = [
        "| case | ms | floor ms | ratio | required | spread | burst | MHz | W | " + " | ".join(PEERS) + " |",
        "|---|---|---|---|---|---|---|---|---|" + "---|" * len(PEERS),
    ]
    for name in cases_of(values):
        case = figures.GPU_PREFIX + name
        mark = " **missed**" if figures.is_missed(values[f"{case}_ratio"]) else ""
        cells = [
            name,
            value(f"{case}_ms"),
            value(f"{case}_floor_ms"),
            value(f"{case}_ratio") + mark,
            values[f"{case}_ratio"]["required"],
            value(f"{case}_spread"),
            value(f"{case}_burst_ratio"),
            value(f"{case}_sm_mhz", "{:.0f}"),
            value(f"{case}_watts", "{:.0f}"),
        ]
        for peer in PEERS:
            ratio, peak = value(f"{case}_{peer}_ratio", "{:.2f}"), value(f"{case}_{peer}_peak_mib", "{:.0f}")
            cells.append(f"{ratio} ({peak})" if ratio else "")
        lines.append("| " + " | ".join(cells) + " |")
    shown = {f"{figures.GPU_PREFIX}{name}_ratio" for name in cases_of(values)}
    return lines + summary_of([row for row in rows if row["required"] and row["case"] not in shown])


def summary_of(rows):
    """Groups of many figures: how near the worst comes to what is required, and every one that misses it."""
    groups = {}
    for row in rows:
        words = row["case"].split("_")
        kind = "_".join(words[: 3 if words[1] == "exactness" else 2])
        quantity = "_".join(words[-2:])
        groups.setdefault((kind, quantity), []).append(row)
    if not groups:
        return []
    lines = ["", "| figures | number | worst | at most | case |", "|---|---|---|---|---|"]
    for (kind, quantity), group in groups.items():
        worst = max(group, key=lambda row: float(row["value"]) / float(row["required"]))
        for row in [worst, *(row for row in group if figures.is_missed(row) and row is not worst)]:
            mark = " **missed**" if figures.is_missed(row) else ""
            value = f"{float(row['value']):.4g} {row['unit']}{mark}"
            lines.append(f"| {kind}: {quantity} | {len(group)} | {value} | {row['required']} | {row['case']} |")
    return lines


def write_table(rows, page):
    """Puts the table between the page's marks."""
    figures.write_block(page, MARK, [figures.origin(rows), "", *table_of(rows)])


def draw(rows, plot):
    """Bars of time over the floor: the engine's, with what is required, and the peers'."""
    import matplotlib

    matplotlib.use("svg" if str(plot).endswith(".svg") else "agg")
    from matplotlib import pyplot

    values = {row["case"]: row for row in rows}
    names = cases_of(values)
    series = {"headwater": "ratio", **{peer: f"{peer}_ratio" for peer in PEERS}}
    figure, axes = pyplot.subplots(figsize=(11, 0.6 * len(names) + 2))
    height = 0.8 / len(series)
    for number, (label, suffix) in enumerate(series.items()):
        drawn = [
            (index, float(values[f"{figures.GPU_PREFIX}{name}_{suffix}"]["value"]))
            for index, name in enumerate(names)
            if f"{figures.GPU_PREFIX}{name}_{suffix}" in values
        ]
        if drawn:
            places = [index + (number - (len(series) - 1) / 2) * height for index, _ in drawn]
            axes.barh(places, [ratio for _, ratio in drawn], height, label=label)
    for index, name in enumerate(names):
        required = values[f"{figures.GPU_PREFIX}{name}_ratio"]["required"]
        if required:
            axes.plot([float(required)] * 2, [index - 0.45, index + 0.45], color="black", linewidth=1)
    axes.axvline(1, color="grey", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("time over the bare matrix products (one small micro-batch: over the bytes that must move); black: required")
    axes.set_xlim(0, 4)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(plot, metadata={"Date": None} if str(plot).endswith(".svg") else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=pathlib.Path, default=ROOT / "docs/benchmarks/engine.csv")
    parser.add_argument("--plot", default=str(ROOT / "docs/benchmarks/engine.svg"))
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "docs/benchmarks/engine.md")
    options = parser.parse_args()
    rows = [row for row in figures.read(options.figures) if row["case"].startswith(figures.GPU_PREFIX)]
    if not rows:
        raise SystemExit(f"{options.figures} has no figures of a GPU")
    write_table(rows, options.page)
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
