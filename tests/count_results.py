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


def outcome(case: ElementTree.Element) -> str:
    """Errors are failures, expected failures are passes."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    if case.get("status") == "notrun" or case.get("result") == "skipped" or case.find("skipped") is not None:
        return "skipped"
    return "passed"


def count(report: Path) -> Counter:
    """Counts of a report."""
    cases = ElementTree.parse(report).iter("testcase")
    return Counter(outcome(case) for case in cases if not case.get("name", "").startswith("DISABLED_Child"))


def count_gtest(report: Path) -> Counter:
    """Counts of one GoogleTest program; all zero if it left no complete report."""
    try:
        return count(report)
    except (FileNotFoundError, ElementTree.ParseError):
        return Counter()


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
            counts = sum((count(Path(report)) for report in reports), Counter())
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
