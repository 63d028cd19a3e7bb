#!/usr/bin/env python3
"""Writes the study's pages from what was measured: study.csv, the plots, docs/study/results.md and the slides.

    tests/bench/study/report.py [--docs FOLDER] [--smoke] [SOURCE.csv]...

Sources are the study.csv of `run` and of exactness.py, and the peers.csv of tests/bench/peers/run with the case of SmolLM2. Their
rows are put into FOLDER/benchmarks/study.csv. All else is made from this file alone: without a source the pages are written again.
A point without a figure stands there as "not measured", and one without memory as "out of memory". Ways, sizes and sections without
any figure are left out, and named. Every number of a table or a sentence is a row of the file, and a sentence that lacks a row is
left out. FOLDER is docs, and has study/index.md. --smoke is for
the figures of `run --smoke`. Exits 1 if a bound is missed.
"""

import argparse
import dataclasses
import functools
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import drawings
import figures
from points import COMPARED, ERROR_WAYS, LABELS, QUANTITIES, WAYS, Point, all_points, smoke_points

ROOT = Path(__file__).resolve().parents[3]
MARK = "<!-- results -->"
NONE, OUT = "not measured", "out of memory"
# A point's measures: (column, name of the row, form).
MEASURES = (
    ("step, ms", "step_ms", "{:,.1f}"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("trainer's peak, MiB", "trainer_peak_mib", "{:,.0f}"),
    ("server's plan, MiB", "server_planned_mib", "{:,.0f}"),
    ("card, all processes, MiB", "card0_peak_mib", "{:,.0f}"),
    ("second card, MiB", "card1_peak_mib", "{:,.0f}"),
)
# Heading, parts, plots and what a reader should know.
SECTIONS = (
    ("By micro-batch", ("batches",), ("memory_by_batch", "throughput"),
     "The 1B model without activation checkpointing. *Trainer* is what PyTorch allocated on the trainer's "
     "GPU. *Card* is all that this GPU held: the trainer, the server beside it, and the CUDA context of each."),
    ("By context", ("contexts", "long"), ("memory_by_context",),
     "The 1B model, one sequence, with activation checkpointing."),
    ("On a part of the card", ("cap24",), (),
     "The 1B model, one sequence, with activation checkpointing. Trainer and server share the part, contexts included. For the "
     "longest context FSDP2 keeps the body's parameters, gradients and optimizer state on the CPU, in every way."),
    ("The loss alone", ("loss",), (),
     "No body: the rows are random numbers, so that the head is all there is. Headwater's step has the head's AdamW as well. The "
     "other ways drop the gradient, and hold no optimizer state."),
    ("The parts of the head one by one", ("ablation",), ("ablation",),
     "One thing moves at a time. First the logits leave the trainer, and its optimizer keeps the weight. The weight's gradient and "
     "the new weight then cross the host's memory in each step, which takes most of its time. Then weight, gradient and optimizer "
     "state follow; the server adds gradients in fp32. Finally the server dithers the gradient."),
    ("Vocabulary", ("vocabularies",), (), "The 1B model with smaller and larger heads."),
    ("Accumulation", ("accumulation",), (), "The 1B model; a step of one micro-batch and of several."),
    ("Liger's kernels one by one", ("liger",), (), "Liger's four kernels alone and together, and its body with Headwater's head."),
    ("3B model", ("3b",), (), "With activation checkpointing."),
    ("Medusa's heads", ("medusa",), (),
     "The 1B model with its own head and Medusa's extra ones, with activation checkpointing. An extra head is a residual block and "
     "a last layer. Each head predicts one token further ahead, and the loss is their sum. One server holds all heads."),
    ("Offloaded body", ("offload",), (),
     "FSDP2 keeps the body's parameters, gradients and optimizer state on the CPU, with activation checkpointing. The host's "
     "processors take most of a step's time, and hosts differ. Headwater's loop also takes the norm of the body's gradient there, "
     "as clipping does."),
    ("Two ranks under FSDP2", ("fsdp",), (),
     "The 3B model in the conditions of Liger's README: FSDP, this batch on each rank, and activation checkpointing. Each rank has "
     "a GPU of the machine with two; the server is on the first one. Tokens a second are those of all ranks. The trainer's peak is "
     "the larger rank's."),
    ("A second GPU", ("second_gpu",), (),
     "The server beside the trainer on its GPU, and on a GPU of its own, on the machine with two."),
)  # fmt: skip
CONTEXT_BOUNDS = ("long", "cap24")  # parts whose points must run
ERROR_BOUND = 0.2  # of grad_hidden: Headwater's error / a peer's
PEER_ERROR = re.compile(
    r"(?P<prefix>\w+?_)peers_smollm2_n\d+_h\d+_v\d+_(?P<way>\w+?)_(?P<quantity>loss|grad_hidden|grad_weight)_error"
)


def study_rows(rows):
    """The study's rows of a file; the peers' errors on the real model get the study's names, and ratios with their bound."""
    kept, errors = [], {}
    names = {peer: way for way, peer in ERROR_WAYS.items()}
    for row in rows:
        match = PEER_ERROR.fullmatch(row["case"])
        if match and match["way"] in names:
            case = f"{match['prefix']}study_smollm2_{names[match['way']]}_{match['quantity']}_error"
            kept.append(row | {"case": case, "sense": "", "required": ""})
            errors[match["prefix"], names[match["way"]], match["quantity"]] = row
        elif "study_" in row["case"]:
            kept.append(row)
    for (prefix, way, quantity), peer in errors.items():
        ours = errors.get((prefix, "headwater", quantity))
        if ours and way in ("eager", "liger") and quantity == "grad_hidden":
            case = f"{prefix}study_smollm2_headwater_grad_hidden_of_{way}"
            ratio = float(ours["value"]) / float(peer["value"])
            kept.append(figures.row(case, ratio, "x the peer's error", ours["machine"], ours["commit"], ERROR_BOUND))
    return kept


class Study:
    """The rows of one kind of device: those whose cases begin with `prefix`."""

    def __init__(self, rows, prefix: str):
        self.rows = [row for row in rows if row["case"].startswith(f"{prefix}study_")]
        self.by_case = {row["case"][len(prefix) + len("study_") :]: row for row in self.rows}
        self.row = self.by_case.get

    def value(self, case: str) -> float | None:
        """A figure, or None."""
        row = self.row(case)
        return None if row is None else float(row["value"])

    def ran_out(self, point: Point) -> bool:
        return self.value(f"{point.name}_out_of_memory") == 1

    def figure(self, point: Point, measure: str):
        """The row of a point's measure; None where it ran out of memory or has none."""
        return None if self.ran_out(point) else self.row(f"{point.name}_{measure}")

    def is_measured(self, point: Point) -> bool:
        """Whether the point ran, to its end or out of memory."""
        return self.row(f"{point.name}_out_of_memory") is not None


cell = functools.partial(figures.cell, absent=NONE)


def cap(point):
    """The memory that a point may take, and where its body is, in words."""
    return (f" within {point.cap_gib} GiB" if point.cap_gib else "") + (" with the body offloaded" if point.offload else "")


def sizes(point):
    """The sizes of a point in words."""
    words = [f"{point.batch} x {point.context} tokens"]
    words += [f"{point.accumulation} micro-batches"] if point.accumulation > 1 else []
    words += [f"{point.extra_heads} extra heads"] if point.extra_heads else []
    words += [f"{point.ranks} ranks"] if point.ranks > 1 else []
    return ", ".join([*words, f"V {point.vocab}{cap(point)}"])


def joined(words):
    """A list in a sentence."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


class Pages:
    """The pages of one study."""

    def __init__(self, study, points, drawn):
        self.study, self.points, self.drawn = study, points, drawn

    def of(self, *parts, ways=tuple(WAYS)):
        """The points of some parts, and ways."""
        return [point for point in self.points if point.part in parts and point.way in ways]

    def say(self, template, *cases):
        """The template's sentence with the cases' figures, or nothing where one is absent."""
        values = [self.study.value(case) for case in cases]
        return [] if None in values else [template.format(*values)]

    def origin(self):
        """Where the figures come from, and how far they spread."""
        if not self.study.rows:
            return "Nothing is measured yet."
        said = figures.origin(self.study.rows) + " Times are medians of a few steps."
        if spread := self.worst(r"\w+_spread"):
            said += f" The largest spread of a point, (max-min)/median, is {cell(spread, '{:.2g}')}, of `{spread['case']}`."
        return said

    def plot(self, name):
        return [f"![{drawings.PLOTS[name][1]}]({name}.svg)", ""] if name in self.drawn else []

    def point_cell(self, point, measure, form):
        """A point's measure; why there is none; empty where the way has no such measure."""
        row = self.study.figure(point, measure)
        if row is not None:
            spread = self.study.figure(point, "spread")
            # A single step has no spread.
            once = measure in ("step_ms", "tokens_per_second") and spread is not None and float(spread["value"]) == 0
            return "" if measure == "server_planned_mib" and float(row["value"]) == 0 else cell(row, form) + once * " (one step)"
        if self.study.ran_out(point):
            return OUT
        return "" if self.study.is_measured(point) else NONE

    def points_table(self, points):
        """A line per point. Columns without a figure are left out, and so are the sizes where all points have the same."""
        lines = []
        for point in points:
            cells = [self.point_cell(point, *rest) for _, *rest in MEASURES]
            if cells[0] in (NONE, OUT):
                cells[1:] = [""] * len(cells[1:])
            lines.append([sizes(point), LABELS[point.way], *cells])
        header = ["sequences x tokens", "way", *(words for words, *_ in MEASURES)]
        several = len({line[0] for line in lines}) > 1
        kept = [index for index in range(len(header)) if (index > 0 or several) and any(line[index] for line in lines)]
        said = [] if several else [f"Each step has {lines[0][0]}.", ""]
        return [*said, *figures.markdown([header[index] for index in kept], [[line[index] for index in kept] for line in lines])]

    def bounds(self):
        """The figures that the study must show: (words, the figure as the page shows it, its bound)."""
        lines = []
        for point in self.of("loss", ways=["headwater"]):
            for words, measure in (("the trainer's peak", "peak_of_eager"), ("the whole card's peak", "card_peak_of_eager")):
                row = self.study.row(f"{point.name}_{measure}")
                lines.append(self.bound(f"The loss alone, {sizes(point)}: {words}", row, "{:.3g}"))
        for point in self.of(*CONTEXT_BOUNDS, ways=["headwater"]):
            row = self.study.row(f"{point.name}_out_of_memory")
            shown = NONE if row is None else f"{OUT} **missed**" if figures.is_missed(row) else "runs"
            lines.append((f"{point.context} tokens of context{cap(point)}", shown, "runs"))
        for way in ("eager", "liger"):
            words = f"SmolLM2-135M: error of `grad_hidden`, to that of {LABELS[way]}"
            lines.append(self.bound(words, self.study.row(f"smollm2_headwater_grad_hidden_of_{way}"), "{:.3g}"))
        for quantity in QUANTITIES:
            lines.append(self.bound(f"Accumulation: `{quantity}`, worst", self.worst(rf"exact_a\d+_{quantity}"), "{:.1e}"))
        worst = self.worst(r"\w+_first_loss_to_eager")
        return [*lines, self.bound("First loss, to PyTorch's, worst of all points", worst, "{:.1e}")]

    def bound(self, words, row, form):
        """A line of bounds()."""
        return words, cell(row, form) + (f" {row['unit']}" if row else ""), row["required"] if row else ""

    def worst(self, pattern):
        """The row with the largest value of the cases that match, or None."""
        rows = [row for case, row in self.study.by_case.items() if re.fullmatch(pattern, case)]
        return max(rows, key=lambda row: float(row["value"]), default=None)

    def long_contexts(self):
        """A sentence for each of the longest contexts: with which ways it runs, and with which not."""
        said, groups = [], {}
        for point in self.of(*CONTEXT_BOUNDS):
            groups.setdefault(f"{point.context} tokens of context{cap(point)}", []).append(point)
        for words, own in groups.items():
            out = [LABELS[point.way] for point in own if self.study.ran_out(point)]
            ran = [LABELS[point.way] for point in own if self.study.is_measured(point) and not self.study.ran_out(point)]
            outcomes = [f"{fate} {joined(ways)}" for ways, fate in ((ran, "run with"), (out, "run out of memory with")) if ways]
            said += [f"{words} {', and '.join(outcomes)}."] if outcomes else []
        return said

    def conclusions(self):
        """The findings in sentences, each made of figures."""
        said = []
        for point in self.of("loss", ways=["headwater"]):
            said += self.say(
                f"The loss alone, {sizes(point)}: the trainer's peak is {{:.3f}} x PyTorch eager's, "
                "and the whole card's {:.3f} x.",
                f"{point.name}_peak_of_eager",
                f"{point.name}_card_peak_of_eager",
            )
        said += self.long_contexts()
        batches = [point for point in self.of("batches") if self.study.figure(point, "tokens_per_second")]
        remote = max((point.batch for point in batches if point.way == "headwater"), default=0)
        largest = [point for point in batches if point.batch == remote and point.way in COMPARED]
        rates = {LABELS[point.way]: self.study.figure(point, "tokens_per_second") for point in largest}
        each = [f"{words} {cell(row, '{:,.0f}')}" for words, row in rates.items()]
        said += [f"Tokens a second at {sizes(largest[0])}: {', '.join(each)}."] if each else []
        for point in batches:
            if point.way == "headwater" and point.batch == 4:
                names = dataclasses.replace(point, way="liger").name, point.name
                said += self.say(
                    f"Against a fused loss, at {sizes(point)}: Liger's trainer peaks at {{:,.0f}} MiB, Headwater's at {{:,.0f}}. "
                    "The whole card holds {:,.0f} and {:,.0f}.",
                    *(f"{name}_{measure}" for measure in ("trainer_peak_mib", "card0_peak_mib") for name in names),
                )
        for point in self.of("medusa", "fsdp"):
            said += self.say(
                f"{point.model.upper()} model, {sizes(point)}: {LABELS[point.way]} peaks at {{:.2f}} x PyTorch eager's, "
                "at {:.2f} x its tokens a second.",
                f"{point.name}_peak_of_eager",
                f"{point.name}_rate_of_eager",
            )
        said += self.say(
            "On rows of SmolLM2-135M, the error of `grad_hidden` against fp64 is {:.2e}. "
            "PyTorch eager's is {:.2e}, Liger's {:.2e}.",
            *(f"smollm2_{way}_grad_hidden_error" for way in ("headwater", "eager", "liger")),
        )
        return said + ([f"Not measured: {joined(self.unmeasured())}."] if self.study.rows and self.unmeasured() else [])

    def unmeasured(self):
        """The headings of SECTIONS that have points, but none that was measured."""
        sections = {heading: self.of(*parts) for heading, parts, *_ in SECTIONS}
        return [heading for heading, own in sections.items() if own and not any(map(self.study.is_measured, own))]

    def errors(self):
        """Errors on the real model's rows."""
        body = [
            [LABELS[way], *(cell(self.study.row(f"smollm2_{way}_{quantity}_error"), "{:.2e}") for quantity in QUANTITIES)]
            for way in ERROR_WAYS
        ]
        return figures.markdown(["way", *QUANTITIES], body)

    def exactness(self):
        """Relative differences of a step in so many micro-batches; then those of training for some cycles."""
        body = [
            [str(count), *(cell(self.study.row(f"exact_a{count}_{quantity}"), "{:.1e}") for quantity in QUANTITIES)]
            for count in (1, 4, 16, 64)
        ]
        lines = figures.markdown(["micro-batches", *QUANTITIES], body)
        kinds = {
            "largest_gap": "loss of a micro-batch, largest",
            "variance": "variance of the losses",
            "weight": "weight at the end",
        }
        body = [[words, cell(self.study.row(f"exact_cycles_{kind}"), "{:.1e}")] for kind, words in kinds.items()]
        return [*lines, *figures.markdown(["after cycles of accumulation and AdamW", "relative difference"], body)]

    def results(self):
        lines = [
            "# Results", "",
            "This page is written by `tests/bench/study/report.py` from [study.csv](../benchmarks/study.csv). "
            "[study.json](../benchmarks/study.json) has the losses of each point. [index.md](index.md) says why the head matters, "
            "and [method.md](method.md) how each figure is taken. [slides.md](slides.md) is the short form. One command measures "
            "all of it, with SmolLM2-135M as a file, and writes the pages:", "",
            "    tests/bench/study/run --build BUNDLE --output FOLDER --commit NAME --model MODEL.gguf --docs docs", "",
            "If it stops at its time limit, run it again: it continues. The sections on two GPUs need a machine that has them.", "",
            self.origin(), "",
            "## In short", "",
            *(f"- {sentence}" for sentence in self.conclusions() or ["Not measured."]), "",
            "## What must hold", "", *figures.markdown(["figure", "measured", "at most"], self.bounds()),
            "## The ways", "",
            *figures.markdown(["way", "is"], [WAYS[way] for way in WAYS if any(point.way == way for point in self.points)]),
        ]  # fmt: skip
        without = self.unmeasured()
        for heading, parts, names, words in SECTIONS:
            own = self.of(*parts)
            measured = [point for point in own if self.study.is_measured(point)]
            if not measured:
                continue
            lines += [f"## {heading}", "", words, ""]
            for name in names:
                lines += self.plot(name)
            ways, columns = {point.way for point in measured}, {sizes(point) for point in measured}
            shown = sorted((point for point in own if point.way in ways and sizes(point) in columns), key=lambda point: point.rows)
            lines += self.points_table(shown)
            absent = dict.fromkeys(LABELS[point.way] for point in own if point.way not in ways)
            lines += [f"Not measured: {joined(absent)}.", ""] if absent else []
        for heading, prefix, words, body in (
            ("Errors against fp64 on a real model", "smollm2_",
             "Rows of SmolLM2-135M, a real model. Its file has the weights in four bits, and the last layer in eight. Errors are "
             "‖difference‖ / ‖reference‖. On random weights neither dithering nor a peer's filter can be judged.",
             [*self.plot("errors"), *self.errors()]),
            ("Exactness of accumulation", "exact_",
             "An fp32 head, and rows of which a twelfth is ignored. The loss is compared with PyTorch's, with sums in fp64. "
             "Gradients are compared with fp64 throughout.", self.exactness()),
        ):  # fmt: skip
            if any(case.startswith(prefix) for case in self.study.by_case):
                lines += [f"## {heading}", "", words, "", *body]
            else:
                without.append(heading)
        lines += ["## Not measured", "", *(f"- {heading}" for heading in without), ""] if without else []
        return "\n".join(lines).rstrip() + "\n"

    def slides(self, index):
        """The deck: the background's sections by the first sentence of each paragraph, then the results."""
        slides = [[index.partition("\n")[0], "", self.origin()]]
        for heading, points in background(index):
            slides += [[f"# {heading}", "", *(f"- {point}" for point in points)]]
        for name in self.drawn:
            slides += [[f"# {drawings.PLOTS[name][1]}", "", *self.plot(name)[:1]]]
        slides += [["# In short", "", *(f"- {sentence}" for sentence in self.conclusions() or ["Not measured."])]]
        slides += [["# What must hold", "", *figures.markdown(["figure", "measured", "at most"], self.bounds())[:-1]]]
        front = ["---", "marp: true", "paginate: true", 'style: "section { font-size: 24px } table { font-size: 17px }"', "---", ""]
        return "\n".join([*front, "\n\n---\n\n".join("\n".join(slide) for slide in slides)]) + "\n"


def background(index):
    """[(heading, first sentences)] of the sections of the study's first page, without tables."""
    found = []
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\n|\n(?=- )", text)]
        points = [
            re.split(r"(?:(?<=[.!?])|(?<=[.!?]\*\*))\s+(?=[A-Z*`\[])", paragraph.removeprefix("- "))[0]
            for paragraph in paragraphs
            if paragraph and not paragraph.startswith(("|", "```", "<!--"))
        ]
        found.append((heading.strip(), points))
    return found


def draw(study, points, folder):
    """The names of the plots that could be drawn; an older one without figures is removed."""
    files = {name: folder / f"{name}.svg" for name in drawings.PLOTS}
    for name, path in files.items():
        path.unlink(missing_ok=True)
        drawings.PLOTS[name][0](study, points, path)
    return [name for name, path in files.items() if path.exists()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path, metavar="SOURCE.csv")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="default: the checkout's docs")
    parser.add_argument("--smoke", action="store_true", help="the figures are those of `run --smoke`")
    options = parser.parse_args()
    target, folder = options.docs / "benchmarks/study.csv", options.docs / "study"
    if missing := [str(source) for source in options.sources if not source.exists()]:
        parser.error(f"no such file: {', '.join(missing)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    for source in options.sources:
        figures.merge(target, study_rows(figures.read(source)))
    points = smoke_points() if options.smoke else all_points()
    study = Study(figures.read(target), "cpu_" if options.smoke else figures.GPU_PREFIX)
    pages = Pages(study, points, draw(study, points, folder))
    (folder / "results.md").write_text(pages.results(), encoding="utf-8")
    words = "The figures: [results.md](results.md), and [slides.md](slides.md), the short form of all pages. "
    figures.write_block(folder / "index.md", MARK, [words + pages.origin()])
    (folder / "slides.md").write_text(pages.slides((folder / "index.md").read_text(encoding="utf-8")), encoding="utf-8")
    return figures.verdict(study.rows)


if __name__ == "__main__":
    sys.exit(main())
