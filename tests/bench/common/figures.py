"""The CSV files of measured figures: case,value,unit,sense,required,machine,commit.

    figures.py TARGET.csv SOURCE.csv...     # puts the sources' figures into the target

A case is a file's key: a figure that is taken again replaces the older one where it stands.
"""

import csv
import pathlib
import sys

HEADER = ("case", "value", "unit", "sense", "required", "machine", "commit")
GPU_PREFIX = "cuda_"  # of the cases that are taken on a GPU


def read(path):
    """The rows of a file as dictionaries, in their order; none if there is no file."""
    path = pathlib.Path(path)
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if tuple(row) != HEADER:
            raise ValueError(f"{path}: expected the columns {','.join(HEADER)}")
    return rows


def write(path, rows):
    """Replaces a file."""
    path = pathlib.Path(path)
    following = path.with_name(path.name + ".next")
    with open(following, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, HEADER, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    following.replace(path)


def merge(path, rows):
    """Puts rows into a file."""
    merged = {row["case"]: row for row in read(path)}
    merged.update((row["case"], row) for row in rows)
    write(path, merged.values())


def row(case, value, unit, machine, commit, at_most=None):
    """A row; `at_most` is what is required of the value."""
    required = {"sense": "", "required": ""} if at_most is None else {"sense": "le", "required": f"{at_most:g}"}
    return {"case": case, "value": f"{value:.10g}", "unit": unit, **required, "machine": machine, "commit": commit}


def is_missed(figure):
    """Whether a figure is over what is required of it; NaN is."""
    return figure["required"] != "" and not float(figure["value"]) <= float(figure["required"])


def origin(rows):
    """Where figures come from, in a line."""
    commits = {}
    for row in rows:
        commits.setdefault(row["machine"], {})[row["commit"]] = None
    return " ".join(f"Machine: {machine}. Commit: {', '.join(sorted(own))}." for machine, own in sorted(commits.items()))


def write_block(page, mark, lines):
    """Replaces what stands between the two lines `mark` of a page."""
    page = pathlib.Path(page)
    head, first, rest = page.read_text(encoding="utf-8").partition(mark)
    if not first or mark not in rest:
        raise SystemExit(f"{page} has no two lines {mark}")
    page.write_text(head + "\n".join((mark, *lines, mark)) + rest.partition(mark)[2], encoding="utf-8")


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    for source in sys.argv[2:]:
        merge(sys.argv[1], read(source))


if __name__ == "__main__":
    main()
