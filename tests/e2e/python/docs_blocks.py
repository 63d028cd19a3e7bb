"""The blocks of code in the pages, and what a page shows of a program's output."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PRINTED_ADDRESS = '"localhost:50051"'
_BLOCK = re.compile(r"^```(python|cpp)\n(.*?)^```\n(?:(?:(?!```).)*?^```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"-?\d+\.\d+")
_TOLERANCE = 2e-3  # BLAS libraries add in different orders, and training amplifies that
# Pages with programs that import one of these are run by tests/frameworks.
_FRAMEWORK = re.compile(r"^\s*(?:from|import) (?:accelerate|lightning|peft|transformers|trl)\b", re.MULTILINE)


def pages(*, of_frameworks: bool) -> list[Path]:
    """README and the pages below docs: those whose programs need a framework, or the others."""
    found = [ROOT / "README.md", ROOT / "client/python/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        page for page in found if any(output and _FRAMEWORK.search(text) for _, _, text, output in blocks_of(page)) == of_frameworks
    ]


def blocks_of(page: Path) -> list[tuple[Path, str, str, str]]:
    """Page, language, text and the output that the page shows, or "", of each block."""
    return [(page, *found) for found in _BLOCK.findall(page.read_text())]


def check_output(printed: str, shown: str) -> None:
    """They are equal but for the last digits of numbers."""
    assert _NUMBER.sub("#", printed) == _NUMBER.sub("#", shown)
    expected = [float(number) for number in _NUMBER.findall(shown)]
    assert [float(number) for number in _NUMBER.findall(printed)] == pytest.approx(expected, rel=_TOLERANCE, abs=_TOLERANCE)
