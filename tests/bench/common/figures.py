"""The CSV files of measured figures: case,value,unit,sense,required,machine,commit.

    figures.py TARGET.csv SOURCE.csv...     # puts the sources' figures into the target

A case is a file's key: a figure that is taken again replaces the older one where it stands.
"""

import csv
import os
import pathlib
import re
import sys

HEADER = ("case", "value", "unit", "sense", "required", "machine", "commit")
GPU_PREFIX = "cuda_"  # of the cases that are taken on a GPU
# The unit of each value that trainers report by these names.
UNITS = {
    "tokens_per_second": "tokens/s",
    "step_ms": "ms",
    "spread": "(max-min)/median",
    "peak_mib": "MiB",
    "trainer_peak_mib": "MiB",
    "server_planned_mib": "MiB",
    "device_mib": "MiB of all processes",
    "beside_mib": "MiB of server and contexts",
}


def processor():
    """The processor as it calls itself, and the cores that this process may use."""
    found = re.search(r"^model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return f"{found[1] if found else os.uname().machine}, {len(os.sched_getaffinity(0))} cores"


def prefix_of(machine):
    """The beginning of the cases of a machine, as runs.machine_name() calls it."""
    return GPU_PREFIX if "NVIDIA" in machine else "cpu_"


def read(path):
    """The rows of a file as dictionaries, in their order; none if there is no file."""
    if not pathlib.Path(path).exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != HEADER:
            raise ValueError(f"{path}: expected the columns {','.join(HEADER)}")
        return list(reader)


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
    """Puts rows into a file, whose folder it makes."""
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    merged = {row["case"]: row for row in read(path)}
    merged.update((row["case"], row) for row in rows)
    write(path, merged.values())


def row(case, value, unit, machine, commit, at_most=None):
    """A row; `at_most` is what is required of the value."""
    required = {"sense": "", "required": ""} if at_most is None else {"sense": "le", "required": f"{at_most:g}"}
    return {"case": case, "value": f"{value:.10g}", "unit": unit, **required, "machine": machine, "commit": commit}


class Table:
    """Adds rows of one machine and commit to `rows`, or a list of its own; `prefix` begins the name of each case."""

    def __init__(self, machine, commit, prefix="", rows=None, show=False):
        self.rows = [] if rows is None else rows
        self._origin, self._prefix, self._show = (machine, commit), prefix, show

    def add(self, case, value, unit, at_most=None):
        self.rows.append(row(self._prefix + case, value, unit, *self._origin, at_most))
        if self._show:
            show(self.rows[-1:])

    def add_all(self, result, *names, before=""):
        """Adds those of the values that UNITS knows, or only some names, which the result may lack."""
        for name in names or UNITS:
            if name in result:
                self.add(before + name, result[name], UNITS[name])


def is_missed(figure):
    """Whether a figure is over what is required of it; NaN is."""
    return figure["required"] != "" and not float(figure["value"]) <= float(figure["required"])


def show(rows):
    for row in rows:
        required = f", at most {row['required']}" if row["required"] else ""
        print(f"{row['case']}: {float(row['value']):.6g} {row['unit']}{required}", flush=True)


def verdict(rows, failed=()):
    """Prints what failed, and the figures that miss what is required of them; the exit status."""
    missed = [f"{row['case']} is {row['value']}, required at most {row['required']}" for row in rows if is_missed(row)]
    for line in (*failed, *missed):
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed or missed else 0


def origin(rows):
    """Where figures come from, in a line: the machine of most of them first."""
    commits = {}
    for row in rows:
        commits.setdefault(row["machine"], []).append(row["commit"])
    machines = sorted(commits.items(), key=lambda entry: -len(entry[1]))
    return " ".join(f"Machine: {machine}. Commit: {', '.join(sorted(set(own)))}." for machine, own in machines)


def markdown(header, rows):
    """Lines of a table of cells, and an empty one behind it."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return [lines[0], "|" + "---|" * len(header), *lines[1:], ""]


def cell(row, form="{:.3f}", absent=""):
    """A figure as tables show it; `absent` where there is no row."""
    return absent if row is None else form.format(float(row["value"])) + " **missed**" * is_missed(row)


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
