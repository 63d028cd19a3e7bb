"""The plots of the study, as SVG: lines by batch and context, bars of the ablation, errors against fp64. Needs matplotlib."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import plots
from points import COMPARED, ERROR_WAYS, LABELS, QUANTITIES, Point

# Okabe and Ito's colours, distinct without red and green. Headwater alone is warm, and drawn thicker.
COLOURS = {
    "eager": "#000000",
    "compile": "#7f7f7f",
    "trl": "#CC79A7",
    "liger": "#0072B2",
    "cce": "#009E73",
    "headwater": "#D55E00",
}
HALO = {"facecolor": "white", "edgecolor": "none", "pad": 1}
MIB_IN_GIB = 1024
# An axis of line plots: its name, the point's size, the parts.
BATCHES = ("sequences in the micro-batch", "batch", ("batches",))
CONTEXTS = ("tokens of the one sequence", "context", ("contexts", "long"))


def draw_lines(axes, study, columns: dict[str, list[Point]], measure: str, divisor: float) -> None:
    """Draws a line per way over the columns, and a mark above those where it ran out of memory."""
    crosses: dict[int, list[str]] = {}
    for way in COMPARED:
        found = []
        for place, points in enumerate(columns.values()):
            point = next((point for point in points if point.way == way), None)
            if point and study.ran_out(point):
                crosses.setdefault(place, []).append(way)
            elif point and (row := study.figure(point, measure)):
                found.append((place, float(row["value"]) / divisor))
        if found:
            style = {"color": COLOURS[way], "linewidth": 2.6 if way == "headwater" else 1.4, "label": LABELS[way]}
            axes.plot(*zip(*found, strict=True), marker="o", markersize=3.5, zorder=3, **style)
    above = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "va": "center", "annotation_clip": False}
    for place, ways in crosses.items():
        for number, way in enumerate(ways):
            shift = 8 * (number - (len(ways) - 1) / 2)
            axes.annotate("×", (place, 1.06), (shift, 0), color=COLOURS[way], ha="center", fontsize=13, **above)
    if crosses:
        axes.annotate("× out of memory", (len(columns) - 0.7, 1.06), (0, 0), color="#555555", fontsize=9, **above)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_xlim(-0.2, len(columns) - 0.8)
    axes.grid(axis="y", **plots.GRID)


def columns_of(points: list[Point], by: str, parts: tuple[str, ...]) -> dict[str, list[Point]]:
    """The parts' points by one of their sizes, as it is written."""
    found: dict[int, list[Point]] = {}
    for point in points:
        if point.part in parts:
            found.setdefault(getattr(point, by), []).append(point)
    return {f"{size // 1024}k" if by == "context" and size >= 1024 else str(size): own for size, own in sorted(found.items())}


def lines(unit: str, divisor: float, *panels) -> Callable:
    """The function of a plot: panels (title, BATCHES or CONTEXTS, measure) beside each other."""
    return lambda study, points, path: draw_panels(study, points, path, unit, divisor, panels)


def draw_panels(study, points: list[Point], path, unit: str, divisor: float, panels) -> None:
    with plots.panels(path, (10.5, 4.2), 1, len(panels), {"axes.titlepad": 24}, sharey=True) as (figure, every):
        legend = {}
        for axes, (title, (label, *sizes), measure) in zip(every, panels, strict=True):
            draw_lines(axes, study, columns_of(points, *sizes), measure, divisor)
            legend |= {line.get_label(): line for line in axes.get_lines()}
            axes.set_title(title)
            axes.set_xlabel(label)
            axes.tick_params(labelleft=True)
        every[0].set_ylim(bottom=0)
        every[0].set_ylabel(unit)
        figure.legend(legend.values(), legend, loc="center right", frameon=False)
        figure.subplots_adjust(left=0.06, right=0.84, wspace=0.3, bottom=0.13, top=0.85)


def memory(sizes):
    """The trainer's memory, and that of the card with the server's, by one of the sizes."""
    trainer = ("Trainer's peak", sizes, "trainer_peak_mib")
    return lines("GiB", MIB_IN_GIB, trainer, ("The whole card: trainer, server and contexts", sizes, "card0_peak_mib"))


throughput = lines(
    "thousand tokens a second",
    1000,
    ("By micro-batch", BATCHES, "tokens_per_second"),
    ("By context, with activation checkpointing", CONTEXTS, "tokens_per_second"),
)


def lay_out(figure, every, names: list[str], **margins) -> None:
    """Names the rows of panels that have no axis at the left."""
    plots.name_rows(every[0], names)
    for axes in every:
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    height = figure.get_size_inches()[1]
    figure.subplots_adjust(**margins, bottom=0.62 / height, top=1 - 0.4 / height)


def ablation(study, points: list[Point], path) -> None:
    """Bars: the trainer's peak and the rest of the card's; time of a step."""
    own = [point for point in points if point.part == "ablation" and study.figure(point, "step_ms")]
    if not own:
        return
    size = (10.5, 0.55 * max(len(own), 2) + 1.5)
    with plots.panels(path, size, 1, 2, {"axes.titlepad": 10}, sharey=True) as (figure, (memory, time)):
        for place, point in enumerate(own):
            colour = COLOURS["eager"] if point.way == "eager" else COLOURS["headwater"]
            inside, beside = {"ha": "right", "color": "white"}, {"ha": "left", "color": plots.TEXT_COLOUR}
            for measure, alpha, where in (("card0_peak_mib", 0.25, beside), ("trainer_peak_mib", 1, inside)):
                if row := study.figure(point, measure):
                    value = float(row["value"]) / MIB_IN_GIB
                    memory.barh(place, value, 0.62, color=colour, alpha=alpha, linewidth=0)
                    memory.text(value, place, f" {value:.1f} ", va="center", **where)
            value = float(study.figure(point, "step_ms")["value"])
            time.barh(place, value, 0.62, color=colour, linewidth=0)
            time.text(value, place, f" {value:.0f}", va="center", color=plots.TEXT_COLOUR)
        memory.set_title("Memory: trainer's peak (dark), whole card (pale)")
        memory.set_xlabel("GiB")
        time.set_title("Time of a step")
        time.set_xlabel("ms")
        for axes in (memory, time):
            axes.margins(x=0.12)
        lay_out(figure, (memory, time), [LABELS[point.way] for point in own], left=0.23, right=0.97, wspace=0.08)


def errors(study, points: list[Point], path) -> None:
    """Points on a logarithmic axis: relative error against fp64 by way, nearest first."""
    values = {way: study.value(f"smollm2_{way}_grad_hidden_error") for way in ERROR_WAYS}
    ways = sorted((way for way in values if values[way]), key=values.get)
    if not ways:
        return
    size = (10.5, 0.42 * max(len(ways), 2) + 1.5)
    with plots.panels(path, size, 1, len(QUANTITIES), {"axes.titlepad": 10}, sharey=True) as (figure, every):
        for axes, quantity in zip(every, QUANTITIES, strict=True):
            found = {place: study.value(f"smollm2_{way}_{quantity}_error") for place, way in enumerate(ways)}
            found = {place: value for place, value in found.items() if value}
            for place, value in found.items():
                axes.plot(value, place, "o", color=COLOURS.get(ways[place], COLOURS["headwater"]), markersize=7)
                label = {"textcoords": "offset points", "va": "center", "color": plots.TEXT_COLOUR}
                axes.annotate(f"{value:.1e}", (value, place), (8, 0), bbox=HALO, **label)
            axes.set_xscale("log")
            axes.minorticks_off()
            if found:
                axes.set_xlim(min(found.values()) / 3, max(found.values()) * 15)
            axes.set_title(quantity)
            axes.set_xlabel("relative error")
            axes.grid(axis="y", **plots.GRID)
        lay_out(figure, every, [LABELS[way] for way in ways], left=0.16, right=0.98, wspace=0.12)


# Name of the file: (function, the words for a reader who does not see it).
PLOTS = {
    "memory_by_batch": (memory(BATCHES), "Peak memory of trainer and card by micro-batch"),
    "memory_by_context": (memory(CONTEXTS), "Peak memory of trainer and card by context"),
    "throughput": (throughput, "Tokens a second by micro-batch and by context"),
    "ablation": (ablation, "Memory and time of a step, as parts of the head move to the server"),
    "errors": (errors, "Relative errors against fp64 on rows of SmolLM2-135M"),
}
