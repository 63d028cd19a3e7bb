"""The plots of the study, as SVG: lines by batch and context, bars of the ablation, errors against fp64. Needs matplotlib."""

from __future__ import annotations

import matplotlib
from measured import ERROR_WAYS, QUANTITIES, Study
from points import COMPARED, LABELS, Point

matplotlib.use("svg")
from matplotlib import pyplot

# Okabe and Ito's colours, distinct without red and green. Headwater alone is warm, and drawn thicker.
COLOURS = {
    "eager": "#000000",
    "compile": "#7f7f7f",
    "trl": "#CC79A7",
    "liger": "#0072B2",
    "cce": "#009E73",
    "headwater": "#D55E00",
}
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 24,
    "svg.fonttype": "none",
    "svg.hashsalt": "headwater",
}
HALO = {"facecolor": "white", "edgecolor": "none", "pad": 1}
MIB_IN_GIB = 1024
LABEL_GAP = 0.062  # between two labels, of the axes' height


def spread(places: dict[str, float]) -> dict[str, float]:
    """Heights of labels that are LABEL_GAP apart at least, as near to their lines' as that allows."""
    names = sorted(places, key=places.get)
    heights = [places[name] for name in names]
    for _ in range(200):
        moved = False
        for low in range(len(heights) - 1):
            lacking = LABEL_GAP - (heights[low + 1] - heights[low])
            if lacking > 1e-6:
                heights[low] -= lacking / 2
                heights[low + 1] += lacking / 2
                moved = True
        if heights:
            heights[0], heights[-1] = max(heights[0], 0.0), min(heights[-1], 1.0)
        if not moved:
            break
    return dict(zip(names, heights, strict=True))


def lines(axes, study: Study, columns: list[tuple[str, list[Point]]], measure: str, divisor: float) -> tuple[dict, dict]:
    """Draws a line per way over the columns (label, points). The ends of lines by way; the ways out of memory by column."""
    ends, crosses = {}, {}
    for way in COMPARED:
        found = []
        for place, (_, points) in enumerate(columns):
            point = next((point for point in points if point.way == way), None)
            if point and study.ran_out(point):
                crosses.setdefault(place, []).append(way)
            elif point and (row := study.figure(point, measure)):
                found.append((place, float(row["value"]) / divisor))
        if found:
            width = 2.6 if way == "headwater" else 1.4
            axes.plot(*zip(*found, strict=True), color=COLOURS[way], linewidth=width, marker="o", markersize=3.5, zorder=3)
            ends[way] = found[-1]
    axes.set_xticks(range(len(columns)), [label for label, _ in columns])
    axes.set_xlim(-0.2, len(columns) - 0.8)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    return ends, crosses


def name_lines(axes, ends: dict, crosses: dict) -> None:
    """Names the lines at the right, and marks above the axes where ways ran out of memory."""
    top, last = axes.get_ylim()[1], axes.get_xlim()[1]
    heights = spread({way: value / top for way, (_, value) in ends.items()})
    for way, height in heights.items():
        weight = "bold" if way == "headwater" else "normal"
        arrow = {"arrowstyle": "-", "color": COLOURS[way], "linewidth": 0.6, "alpha": 0.6, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            LABELS[way], ends[way], (last + 0.1, height * top), color=COLOURS[way], weight=weight, va="center",
            annotation_clip=False, arrowprops=arrow,
        )  # fmt: skip
    above = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "va": "center", "annotation_clip": False}
    for place, ways in crosses.items():
        for number, way in enumerate(ways):
            shift = 8 * (number - (len(ways) - 1) / 2)
            axes.annotate("×", (place, 1.06), (shift, 0), color=COLOURS[way], ha="center", fontsize=13, **above)
    if crosses:
        axes.annotate("× out of memory", (last + 0.1, 1.06), (0, 0), color="#555555", fontsize=9, **above)


def columns_of(points: list[Point], *parts: str, by: str) -> list[tuple[str, list[Point]]]:
    """[(label, points)] of the parts' points by one of their sizes."""
    found = {}
    for point in points:
        if point.part in parts:
            found.setdefault(getattr(point, by), []).append(point)
    return [(f"{size // 1024}k" if by == "context" and size >= 1024 else str(size), own) for size, own in sorted(found.items())]


def line_plot(study: Study, path, unit: str, panels) -> bool:
    """Panels (title, x label, columns, measure, divisor) beside each other. Whether there was anything to draw."""
    with pyplot.rc_context(STYLE):
        figure, every = pyplot.subplots(1, len(panels), figsize=(10.5, 4.2), sharey=True)
        drawn = []
        for axes, (title, x_label, *content) in zip(every, panels, strict=True):
            drawn.append(lines(axes, study, *content))
            axes.set_title(title)
            axes.set_xlabel(x_label)
            axes.tick_params(labelleft=True)
        every[0].set_ylim(bottom=0)
        every[0].set_ylabel(unit)
        for axes, found in zip(every, drawn, strict=True):
            name_lines(axes, *found)
        return save(figure, path, any(ends for ends, _ in drawn), left=0.06, right=0.86, wspace=0.55)


def save(figure, path, drawn: bool, **margins) -> bool:
    """Writes a figure that has content."""
    if drawn:
        figure.subplots_adjust(**{"left": 0.07, "bottom": 0.13, "top": 0.85} | margins)
        figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return drawn


def memory_plot(study: Study, path, columns, x_label: str) -> bool:
    """The trainer's memory, and that of the card with the server's."""
    panels = [
        ("Trainer's peak", x_label, columns, "trainer_peak_mib", MIB_IN_GIB),
        ("The whole card: trainer, server and contexts", x_label, columns, "card0_peak_mib", MIB_IN_GIB),
    ]
    return line_plot(study, path, "GiB", panels)


def memory_by_batch(study: Study, points: list[Point], path) -> bool:
    return memory_plot(study, path, columns_of(points, "batches", by="batch"), "sequences in the micro-batch")


def memory_by_context(study: Study, points: list[Point], path) -> bool:
    return memory_plot(study, path, columns_of(points, "contexts", "long", by="context"), "tokens of the one sequence")


def throughput(study: Study, points: list[Point], path) -> bool:
    batches, contexts = columns_of(points, "batches", by="batch"), columns_of(points, "contexts", "long", by="context")
    panels = [
        ("By micro-batch", "sequences in the micro-batch", batches, "tokens_per_second", 1000),
        ("By context, with activation checkpointing", "tokens of the one sequence", contexts, "tokens_per_second", 1000),
    ]
    return line_plot(study, path, "thousand tokens a second", panels)


def ablation(study: Study, points: list[Point], path) -> bool:
    """Bars: the trainer's peak and the rest of the card's; time of a step."""
    own = [point for point in points if point.part == "ablation" and study.figure(point, "step_ms")]
    if not own:
        return False
    with pyplot.rc_context(STYLE | {"axes.titlepad": 10}):
        figure, (memory, time) = pyplot.subplots(1, 2, figsize=(10.5, 0.55 * max(len(own), 2) + 1.5), sharey=True)
        for place, point in enumerate(own):
            colour = COLOURS["eager"] if point.way == "eager" else COLOURS["headwater"]
            peak = study.figure(point, "trainer_peak_mib")
            card = study.figure(point, "card0_peak_mib")
            for row, alpha in ((card, 0.25), (peak, 1)):
                if row:
                    value = float(row["value"]) / MIB_IN_GIB
                    memory.barh(place, value, 0.62, color=colour, alpha=alpha, linewidth=0)
                    inside = {"ha": "right", "color": "white"} if row is peak else {"ha": "left", "color": "#333333"}
                    memory.text(value, place, f" {value:.1f} ", va="center", **inside)
            value = float(study.figure(point, "step_ms")["value"])
            time.barh(place, value, 0.62, color=colour, linewidth=0)
            time.text(value, place, f" {value:.0f}", va="center", color="#333333")
        memory.set_yticks(range(len(own)), [LABELS[point.way] for point in own])
        memory.set_ylim(len(own) - 0.5, -0.5)
        memory.set_title("Memory: trainer's peak (dark), whole card (pale)")
        memory.set_xlabel("GiB")
        time.set_title("Time of a step")
        time.set_xlabel("ms")
        for axes in (memory, time):
            axes.margins(x=0.12)
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0)
        height = figure.get_size_inches()[1]
        return save(figure, path, True, left=0.23, right=0.97, wspace=0.08, bottom=0.62 / height, top=1 - 0.4 / height)


def errors(study: Study, points: list[Point], path) -> bool:
    """Points on a logarithmic axis: relative error against fp64 by way, nearest first."""
    ways = [way for way in ERROR_WAYS if study.value(f"smollm2_{way}_grad_hidden_error")]
    if not ways:
        return False
    ways.sort(key=lambda way: study.value(f"smollm2_{way}_grad_hidden_error"))
    with pyplot.rc_context(STYLE | {"axes.titlepad": 10}):
        figure, every = pyplot.subplots(1, len(QUANTITIES), figsize=(10.5, 0.42 * max(len(ways), 2) + 1.5), sharey=True)
        for axes, quantity in zip(every, QUANTITIES, strict=True):
            for place, way in enumerate(ways):
                value = study.value(f"smollm2_{way}_{quantity}_error")
                if value:
                    colour = COLOURS.get(way, COLOURS["headwater"])
                    axes.plot(value, place, "o", color=colour, markersize=7)
                    label = {"textcoords": "offset points", "va": "center", "color": "#333333"}
                    axes.annotate(f"{value:.1e}", (value, place), (8, 0), bbox=HALO, **label)
            axes.set_xscale("log")
            axes.minorticks_off()
            found = [value for way in ways if (value := study.value(f"smollm2_{way}_{quantity}_error"))]
            if found:
                axes.set_xlim(min(found) / 3, max(found) * 15)
            axes.set_title(quantity)
            axes.set_xlabel("relative error")
            axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0)
        every[0].set_yticks(range(len(ways)), [LABELS[way] for way in ways])
        every[0].set_ylim(len(ways) - 0.5, -0.5)
        height = figure.get_size_inches()[1]
        return save(figure, path, True, left=0.16, right=0.98, wspace=0.12, bottom=0.62 / height, top=1 - 0.4 / height)


# Name of the file: (function, the words for a reader who does not see it).
PLOTS = {
    "memory_by_batch": (memory_by_batch, "Peak memory of trainer and card by micro-batch"),
    "memory_by_context": (memory_by_context, "Peak memory of trainer and card by context"),
    "throughput": (throughput, "Tokens a second by micro-batch and by context"),
    "ablation": (ablation, "Memory and time of a step, as parts of the head move to the server"),
    "errors": (errors, "Relative errors against fp64 on rows of SmolLM2-135M"),
}
