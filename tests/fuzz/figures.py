#!/usr/bin/env python3
"""Writes the figures of all fuzz runs of this build folder as rows for docs/benchmarks/trust.csv.

    figures.py REPORT COMMIT OUTPUT.csv     # REPORT: of the last tests/fuzz/run --report

Executions are sums over the runs in build/fuzz-runs.csv; edges, features and lines are the report's.
"""

import csv
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "bench" / "common"))

import figures  # noqa: E402

SEQUENCES = "rpc_sequence"
REQUIRED = {SEQUENCES: 200000}
REQUIRED_OF_A_PARSER = 5000000


def machine() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return "unknown"


def main() -> int:
    report, commit, output = sys.argv[1:]
    with open(ROOT / "build" / "fuzz-runs.csv", newline="", encoding="utf-8") as file:
        runs = list(csv.DictReader(file))
    executions, planted = {}, {}
    for run in runs:
        if run["planted"] == "false":
            executions[run["target"]] = executions.get(run["target"], 0) + int(run["executions"])
        elif run["status"] != "0":
            planted[run["target"]] = int(run["executions"])
    rows = []

    def add(case: str, value: object, unit: str, sense: str = "", required: object = "") -> None:
        row = (case, str(value), unit, sense, str(required), machine(), commit)
        rows.append(dict(zip(figures.HEADER, row, strict=True)))

    for target in sorted(executions):
        unit = "sequences" if target == SEQUENCES else "executions"
        add(f"fuzz_{target}_{unit}", executions[target], unit, "ge", REQUIRED.get(target, REQUIRED_OF_A_PARSER))
        if target in planted:
            add(f"fuzz_{target}_planted_bug_found_after", planted[target], unit)
    for line in pathlib.Path(report).read_text(encoding="utf-8").splitlines():
        target, *pairs = line.split()
        values = dict(pair.split("=") for pair in pairs)
        for key in ("edges", "features"):
            if values[key] != "-":
                add(f"fuzz_{target}_{key}", values[key], key)
        if values["lines"] != "-":
            add(f"fuzz_{target}_lines", values["lines"].rstrip("%"), "% of its sources' lines")
    rows.sort(key=lambda row: row["case"])
    figures.write(output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
