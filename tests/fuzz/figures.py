#!/usr/bin/env python3
"""Writes a report of fuzz runs as rows for docs/benchmarks/trust.csv.

figures.py REPORT COMMIT OUTPUT.csv     # REPORT: what the last tests/fuzz/run has printed
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "bench" / "common"))

import figures  # noqa: E402


def main() -> None:
    report, commit, output = sys.argv[1:]
    machine = figures.processor()
    rows = []
    for line in pathlib.Path(report).read_text(encoding="utf-8").splitlines():
        target, *pairs = line.split()
        values = dict(pair.split("=") for pair in pairs)
        unit, required = ("sequences", 200000) if target == "rpc_sequence" else ("executions", 5000000)
        for case, key, measure in (
            (unit, "in_all", unit),
            ("planted_bug_found_after", "planted", unit),
            ("edges", "edges", "edges"),
            ("features", "features", "features"),
            ("lines", "lines", "% of its sources' lines"),
        ):
            if values[key] != "-":
                rows.append(figures.row(f"fuzz_{target}_{case}", float(values[key].rstrip("%")), measure, machine, commit))
            if key == "in_all":
                rows[-1] |= {"sense": "ge", "required": str(required)}
    figures.write(output, sorted(rows, key=lambda row: row["case"]))


if __name__ == "__main__":
    main()
