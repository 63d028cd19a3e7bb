"""The blocks of code in the pages, and what a page shows of a program's output."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
PRINTED_ADDRESS = '"localhost:50051"'
_BLOCK = re.compile(r"^```(python|cpp)\n(.*?)^```\n(?:(?:(?!```).)*?^```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"-?\d+\.\d+")
_TOLERANCE = 2e-3  # BLAS libraries add in different orders, and training amplifies that
# Pages with programs that import one of these are run by tests/frameworks, in the environment of that name.
_FRAMEWORKS = {
    name: re.compile(rf"^\s*(?:from|import) (?:{modules})\b", re.MULTILINE)
    for name, modules in {"newest": "accelerate|lightning|peft|transformers|trl", "jax": "flax|jax|optax"}.items()
}


def environment_of(page: Path) -> str | None:
    """The environment of tests/frameworks that the page's programs need, or None."""
    programs = [text for _, _, text, output in blocks_of(page) if output]
    return next((name for name, imports in _FRAMEWORKS.items() if any(map(imports.search, programs))), None)


def pages(environment: str | None) -> list[Path]:
    """README and the pages below docs whose programs need this environment of tests/frameworks; None: those that need none."""
    found = [ROOT / "README.md", ROOT / "client/python/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if environment_of(page) == environment]


def blocks_of(page: Path) -> list[tuple[Path, str, str, str]]:
    """Page, language, text and the output that the page shows, or "", of each block."""
    return [(page, *found) for found in _BLOCK.findall(page.read_text())]


def check_output(printed: str, shown: str) -> None:
    """They are equal but for the last digits of numbers."""
    assert _NUMBER.sub("#", printed) == _NUMBER.sub("#", shown)
    expected = [float(number) for number in _NUMBER.findall(shown)]
    assert [float(number) for number in _NUMBER.findall(printed)] == pytest.approx(expected, rel=_TOLERANCE, abs=_TOLERANCE)
