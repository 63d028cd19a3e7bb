"""The common parts of the programs that draw a benchmark's figures."""

import argparse
import contextlib
import pathlib

import figures

ROOT = pathlib.Path(__file__).resolve().parents[3]
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "svg.fonttype": "none",
    "svg.hashsalt": "headwater",
}
GRID = {"color": "#e5e5e5", "linewidth": 0.8}
TEXT_COLOUR = "#333333"


def main(doc, name, prefix, write, draw):
    """write(rows, options) puts a benchmark's figures into --page, and draw(rows, options) draws them into --plot.

    The files are NAME.md, NAME.svg and, for --figures, NAME.csv of docs/benchmarks. Cases of the figures that are needed begin with
    the prefix.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=pathlib.Path, default=ROOT / f"docs/benchmarks/{name}.csv")
    parser.add_argument("--plot", default=str(ROOT / f"docs/benchmarks/{name}.svg"))
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / f"docs/benchmarks/{name}.md")
    options = parser.parse_args()
    rows = figures.read(options.figures)
    if not any(row["case"].startswith(prefix) for row in rows):
        raise SystemExit(f"{options.figures} has no figures of a GPU")
    write(rows, options)
    if options.plot:
        draw(rows, options)


@contextlib.contextmanager
def bars(plot, names, size, label):
    """Axes for a horizontal bar of each name, and a line at 1; written to the file at the end."""
    with panels(plot, size, 1, 1) as (figure, axes):
        yield axes
        axes.axvline(1, color="grey", linewidth=0.8, linestyle="--")
        name_rows(axes, names)
        axes.set_xlabel(label)
        figure.tight_layout()


@contextlib.contextmanager
def panels(plot, size, rows, columns, style=None, **options):
    """A figure and its axes in the common style, and others; written to the file, an SVG, at the end if anything was drawn."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE | (style or {})):
        figure, every = pyplot.subplots(rows, columns, figsize=size, **options)
        yield figure, every
        if any(axes.has_data() for axes in figure.axes):
            figure.savefig(plot, metadata={"Date": None})
        pyplot.close(figure)


def name_rows(axes, names):
    """Names the rows of a panel, the first at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
