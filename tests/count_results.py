"""Counts test results: prints "PASSED FAILED SKIPPED" for the JUnit files of one stage of tests/run.

    count_results.py --pytest FILE...     the reports of pytest --junitxml
    count_results.py --gtest FILE         the report of one GoogleTest program; one that left none, or has no test, has failed
    count_results.py --ctest FILE DIR     the report of ctest --output-junit, and the folder with the GoogleTest programs' own

ctest knows programs, GoogleTest cases. Cases are counted, but for those called DISABLED_Child..., which others run in a process of
their own; a program that failed without a failed case (a crash, a sanitizer's report, a time limit) counts as one failure more.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


def count_pytest(report: Path) -> Counter:
    """Counts of a pytest report: errors are failures, expected failures are passes."""
    counts = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def count_gtest(report: Path) -> Counter:
    """Counts of one GoogleTest program; all zero if it left no complete report."""
    counts = Counter()
    try:
        root = ElementTree.parse(report).getroot()
    except (FileNotFoundError, ElementTree.ParseError):
        return counts
    for case in root.iter("testcase"):
        if case.get("name", "").startswith("DISABLED_Child"):
            continue
        if case.find("failure") is not None:
            counts["failed"] += 1
        elif case.get("status") == "notrun" or case.get("result") == "skipped" or case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def count_ctest(report: Path, folder: Path) -> Counter:
    """Counts of a ctest run whose GoogleTest programs wrote `folder`/<test name>.xml."""
    total = Counter()
    for entry in ElementTree.parse(report).iter("testcase"):
        counts = count_gtest(folder / f"{entry.get('name')}.xml")
        status = entry.get("status")
        if status == "run" and not counts:
            counts["passed"] += 1  # not a GoogleTest program
        elif status in ("notrun", "disabled"):
            counts["failed" if status == "notrun" else "skipped"] += 1
        elif status == "fail" and not counts["failed"]:
            counts["failed"] += 1
        total += counts
    return total


def main() -> int:
    match sys.argv[1:]:
        case ["--pytest", *reports] if reports:
            counts = sum((count_pytest(Path(report)) for report in reports), Counter())
        case ["--gtest", report]:
            counts = count_gtest(Path(report)) or Counter(failed=1)
        case ["--ctest", report, folder]:
            counts = count_ctest(Path(report), Path(folder))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    print(counts["passed"], counts["failed"], counts["skipped"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
