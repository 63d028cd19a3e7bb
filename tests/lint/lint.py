"""The common parts of the checks: the checkout, its Markdown pages, and how a check ends."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blank(match: re.Match) -> str:
    """As many line ends as the match had, so that line numbers stay right."""
    return "\n" * match.group().count("\n")


def pages() -> list[Path]:
    return [page for page in sorted(ROOT.rglob("*.md")) if not {"build", ".git", ".venv"} & set(page.relative_to(ROOT).parts)]


def finish(name: str, checked: str, errors: list[str]) -> int:
    """Prints the errors; the exit status."""
    for error in errors:
        print(error, file=sys.stderr)
    print(f"{name}: {checked}, {len(errors)} errors")
    return 1 if errors else 0
