#!/usr/bin/env python3
"""Writes a report of fuzz runs as rows for docs/benchmarks/trust.csv.

figures.py REPORT COMMIT OUTPUT.csv     # REPORT: of the last tests/fuzz/run --report
"""

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
    rows = []

    def add(case: str, value: object, unit: str, sense: str = "", required: object = "") -> None:
        row = (case, str(value), unit, sense, str(required), machine(), commit)
        rows.append(dict(zip(figures.HEADER, row, strict=True)))

    for line in pathlib.Path(report).read_text(encoding="utf-8").splitlines():
        target, *pairs = line.split()
        values = dict(pair.split("=") for pair in pairs)
        unit = "sequences" if target == SEQUENCES else "executions"
        add(f"fuzz_{target}_{unit}", values["in_all"], unit, "ge", REQUIRED.get(target, REQUIRED_OF_A_PARSER))
        if values["planted"] != "-":
            add(f"fuzz_{target}_planted_bug_found_after", values["planted"], unit)
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
