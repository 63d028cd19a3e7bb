#!/usr/bin/env python3
"""Draws the GPU's figures of docs/benchmarks/engine.csv, and writes their tables into docs/benchmarks/engine.md.

    tests/bench/engine/plot.py [--figures FILE.csv] [--plot FILE.svg] [--page FILE.md]

The plot needs matplotlib; --plot '' leaves it out.
"""

import argparse
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
import figures

ROOT = pathlib.Path(__file__).resolve().parents[3]
MARK = "<!-- gpu figures -->"
PEERS_MARK = "<!-- peers -->"
PEERS_PREFIX = figures.GPU_PREFIX + "peers_"
PEER = re.compile(
    rf"{PEERS_PREFIX}(?P<case>.+_v\d+)_(?P<way>.+)_(?P<work>anew|first|bf16|fp32|tau_2_\d+)_(?P<figure>ms|ratio|peak_mib)"
)
ERROR = re.compile(
    rf"{PEERS_PREFIX}(?P<case>smollm2.*)_n\d+_h\d+_v\d+_(?P<way>.+)_(?:anew|bf16|fp32)_(?P<figure>loss|grad_hidden|grad_weight)_error"
)
DRAWN = ("torch_compile", "torch_compile_addmm", "liger_sm90", "quack")
# What the page's tables have of the ways and the cases; the file has all.
SHOWN = ("headwater", "torch_eager", "torch_compile", "torch_compile_addmm", "liger_sm90_addmm", "liger_chunked", "quack", "cce")
LEFT_OUT = ("trained_shuffled", "trained_n8192", "ce_n8192_h2048")


def cases_of(values):
    """The engine's cases, in the file's order: those with a ratio that is no peer's."""
    suffix = "_ratio"
    names = [case[len(figures.GPU_PREFIX) : -len(suffix)] for case in values if case.endswith(suffix)]
    return [name for name in names if not name.endswith("_burst") and not name.startswith("peers_")]


def table_of(rows):
    """The engine's cases, and every other figure that something is required of, in Markdown."""
    values = {row["case"]: row for row in rows}

    def value(case, form="{:.3f}"):
        return form.format(float(values[case]["value"])) if case in values else ""

    lines = ["| case | ms | floor ms | ratio | required | spread | burst | MHz | W |", "|---|---|---|---|---|---|---|---|---|"]
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
        lines.append("| " + " | ".join(cells) + " |")
    shown = {f"{figures.GPU_PREFIX}{name}_ratio" for name in cases_of(values)}
    return lines + summary_of([row for row in rows if row["required"] and row["case"] not in shown])


def peers_table_of(rows):
    """Times by what becomes of grad_weight, what is required of Headwater beside them, and errors on the real model's rows."""
    cells, errors = {}, {}
    for row in rows:
        match = PEER.fullmatch(row["case"]) or ERROR.fullmatch(row["case"])
        if match is None or match["way"] not in SHOWN:
            continue
        if match.re is PEER and not match["case"].startswith(LEFT_OUT):
            key = match["case"], match["way"]
            cells.setdefault(key, {})[match["work"], match["figure"]] = float(row["value"])
        elif match.re is ERROR:
            errors.setdefault((match["case"], match["way"]), {})[match["figure"]] = float(row["value"])

    def time(found, work):
        if (work, "ms") not in found:
            return ""
        ratio = found.get((work, "ratio"))
        return f"{found[work, 'ms']:.2f}" + (f" ({ratio:.3f})" if ratio else "")

    lines = ["| case | way | made anew | added, bf16 | added, fp32 | peak MiB |", "|---|---|---|---|---|---|"]
    cases = list(dict.fromkeys(case for case, _ in cells))
    for (case, way), found in sorted(cells.items(), key=lambda cell: (cases.index(cell[0][0]), SHOWN.index(cell[0][1]))):
        if not any(figure == "ms" for _, figure in found):
            continue
        anew = time(found, "first" if way == "headwater" else "anew")
        peak = found.get(("anew", "peak_mib"), found.get(("fp32", "peak_mib")))
        memory = "" if peak is None else f"{peak:.0f}"
        lines.append(f"| {case} | {way} | {anew} | {time(found, 'bf16')} | {time(found, 'fp32')} | {memory} |")
        for work in (work for work, figure in found if figure == "ms" and work.startswith("tau")):
            lines.append(f"| {case} | {way}, tau 2^-{work.rpartition('_')[2]} | | | {time(found, work)} | |")
    if errors:
        lines += [
            "",
            "| SmolLM2-135M's rows, error against fp64 | way | grad_hidden | grad_weight | loss |",
            "|---|---|---|---|---|",
        ]
        for (case, way), found in sorted(errors.items(), key=lambda error: (error[0][0], SHOWN.index(error[0][1]))):
            values = [f"{found[figure]:.2e}" if figure in found else "" for figure in ("grad_hidden", "grad_weight", "loss")]
            lines.append(f"| {case} | {way} | {' | '.join(values)} |")
    return lines


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


def write_tables(rows, page):
    """Puts the tables between the page's marks."""
    engine = [row for row in rows if not row["case"].startswith(PEERS_PREFIX)]
    others = [row for row in rows if row["case"].startswith(PEERS_PREFIX)]
    figures.write_block(page, MARK, [figures.origin(engine), "", *table_of(engine)])
    bounds = summary_of([row for row in others if row["required"]])
    figures.write_block(page, PEERS_MARK, [figures.origin(others), "", *peers_table_of(others), *bounds])


def draw(rows, plot):
    """Bars of time over the floor: the engine's, with what is required, and those of others that add into fp32."""
    import matplotlib

    matplotlib.use("svg" if str(plot).endswith(".svg") else "agg")
    from matplotlib import pyplot

    values = {row["case"]: row for row in rows}
    names = cases_of(values)
    series = {"headwater": figures.GPU_PREFIX + "{}_ratio", **{way: f"{PEERS_PREFIX}{{}}_{way}_fp32_ratio" for way in DRAWN}}
    figure, axes = pyplot.subplots(figsize=(11, 0.6 * len(names) + 2))
    height = 0.8 / len(series)
    for number, (label, form) in enumerate(series.items()):
        drawn = [
            (index, float(values[form.format(name)]["value"])) for index, name in enumerate(names) if form.format(name) in values
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
    axes.set_xlim(0, 1.6)
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
    write_tables(rows, options.page)
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
