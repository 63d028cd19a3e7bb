"""The common parts of the programs that draw a benchmark's figures."""

import argparse
import contextlib
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[3]


def parse_arguments(doc, name):
    """--figures, --plot and --page, by default NAME.csv, NAME.svg and NAME.md of docs/benchmarks."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=pathlib.Path, default=ROOT / f"docs/benchmarks/{name}.csv")
    parser.add_argument("--plot", default=str(ROOT / f"docs/benchmarks/{name}.svg"))
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / f"docs/benchmarks/{name}.md")
    return parser.parse_args()


@contextlib.contextmanager
def bars(plot, names, size, label):
    """Axes for a horizontal bar of each name, and a line at 1; written to the file at the end."""
    import matplotlib

    is_svg = str(plot).endswith(".svg")
    matplotlib.use("svg" if is_svg else "agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size)
    yield axes
    axes.axvline(1, color="grey", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    figure.tight_layout()
    figure.savefig(plot, metadata={"Date": None} if is_svg else None)
