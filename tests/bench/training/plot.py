#!/usr/bin/env python3
"""Draws the training benchmark's curves and rows' changes as an SVG, and writes its table into the page. Needs matplotlib.

    tests/bench/training/plot.py [--figures training.csv] [--plot training.svg] [--page training.md]

The curves are those of training.json beside the figures.
"""

import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
import figures
import plots
import runs

MARK = "<!-- figures -->"
# The study's colours and style; a coarser resolution is paler.
WAYS = {
    "exact": ("exact", "#000000"),
    "tau_12": ("2⁻¹²", "#8c2d04"),
    "tau_10": ("2⁻¹⁰", "#D55E00"),
    "tau_8": ("2⁻⁸", "#fd8d3c"),
    "tau_6": ("2⁻⁶", "#fdbe85"),
    "torch": ("PyTorch", "#7f7f7f"),
    "cce": ("CCE, which drops", "#009E73"),
}
NAMES = {
    "smollm2": "SmolLM2-135M",
    "smollm2_8k": "SmolLM2-135M, 8192 tokens a step",
    "scratch": "65 million random weights",
    "adamw": "AdamW",
    "sgd": "SGD",
}
SMOOTHED = 10  # points of the curve
COLUMNS = {
    "held_out_all": "held-out loss",
    "held_out_all_gap": "− exact",
    "held_out_gap_of_seeds": "of seeds' spread",
    "held_out_rare_gap": "rare targets − exact",
    "held_out_seldom_gap": "seldom targets − exact",
    "rare_rows_median": "rare rows, median",
    "rare_rows_sums": "rare rows, sums",
    "unseen_rows_sums": "unseen rows, sums",
}


def families_of(options):
    """{(model, optimizer): {way: {seed: result}}}, in the order of the models, optimizers and ways."""
    found, results = {}, runs.read_results(options.figures.with_suffix(".json"))
    for name, entry in results.items():
        model, optimizer, way, seed = name.split("/")
        if model in NAMES and "failed" not in entry["result"]:
            found.setdefault((model, optimizer), {}).setdefault(way, {})[seed] = entry["result"]
    if not found:
        raise SystemExit(f"{options.figures.with_suffix('.json')} has no results")
    order = [*NAMES]
    return {key: found[key] for key in sorted(found, key=lambda key: [order.index(part) for part in key])}


def table_of(families, rows):
    """Lines of Markdown: a table for each model and optimizer."""
    values = {row["case"]: row for row in rows}
    lines = []
    for family, ways in families.items():
        body = []
        for way in (way for way in WAYS if way in ways):
            case = figures.GPU_PREFIX + "_".join(("training", *family, way, ""))
            cells = [figures.cell(values.get(case + name)) for name in COLUMNS]
            body.append([WAYS[way][0], str(len(ways[way])), *cells])
        lines += ["", f"**{', '.join(NAMES[part] for part in family)}**", ""]
        lines += figures.markdown(["gradient", "seeds", *COLUMNS.values()], body)[:-1]
    return lines


def curve_of(results, base=None):
    """(steps, smoothed loss) as the mean over seeds, of the difference to `base` where it is given."""
    seeds = sorted(results.keys() & base.keys()) if base else sorted(results)
    if not seeds:
        return [], []
    steps = [step for step, _ in results[seeds[0]]["curve"]]
    means = []
    for place in range(len(steps)):
        own = [results[seed]["curve"][place][1] - (base[seed]["curve"][place][1] if base else 0) for seed in seeds]
        means.append(statistics.mean(own))
    smoothed = [statistics.mean(means[max(0, place + 1 - SMOOTHED) : place + 1]) for place in range(len(means))]
    return steps[SMOOTHED - 1 :], smoothed[SMOOTHED - 1 :]


def draw(rows, options):
    """A row for each model and optimizer: losses, differences to exact, changes of rare rows."""
    families = families_of(options)
    values = {row["case"]: float(row["value"]) for row in rows}
    with plots.panels(options.plot, (12, 3.2 * len(families)), len(families), 3, squeeze=False) as (figure, every):
        for (curves, differences, changes), (family, ways) in zip(every, families.items(), strict=True):
            shown = [way for way in WAYS if way in ways]
            for way in shown:
                style = {"label": WAYS[way][0], "color": WAYS[way][1], "linewidth": 1.2}
                curves.plot(*curve_of(ways[way]), **style)
                if way != "exact":
                    differences.plot(*curve_of(ways[way], ways.get("exact", {})), **style)
            curves.set_title(", ".join(NAMES[part] for part in family))
            curves.set_ylabel("training loss, nats")
            differences.set_title("minus exact, same seeds")
            differences.axhline(0, color="black", linewidth=0.8)
            for axes in (curves, differences):
                axes.set_xlabel("step")
                axes.grid(axis="y", **plots.GRID)
            case = figures.GPU_PREFIX + "_".join(("training", *family, ""))
            others = [way for way in shown if f"{case}{way}_rare_rows_sums" in values]
            for place, way in enumerate(others):
                ratio = values[f"{case}{way}_rare_rows_sums"]
                changes.barh(place, ratio, 0.62, color=WAYS[way][1])
                changes.text(ratio, place, f" {ratio:.2f}", va="center", color=plots.TEXT_COLOUR)
            plots.name_rows(changes, [WAYS[way][0] for way in others])
            changes.axvline(1, color="grey", linewidth=0.8, linestyle="--")
            changes.set_title("change of rare rows over exact's")
            changes.margins(x=0.15)
        every[0][0].legend(frameon=False, fontsize=8)
        figure.tight_layout()


def write(rows, options):
    figures.write_block(options.page, MARK, [figures.origin(rows), *table_of(families_of(options), rows)])


if __name__ == "__main__":
    plots.main(__doc__, "training", figures.GPU_PREFIX, write, draw)
