"""The programs of README and guides run as printed, and print what the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import running_server

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
PRINTED_ADDRESS = '"localhost:50051"'
NUMBER = re.compile(r"-?\d+\.\d+")
TOLERANCE = 2e-3  # BLAS libraries add in different orders, and training amplifies that


def programs(page: Path) -> list[tuple[str, str]]:
    """Each whole program of a page, with the output that the page shows for it."""
    return re.findall(r"```python\n((?:(?!```).)*?)```\n(?:(?!```).)*?```text\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_print_what_the_page_shows(page):
    found = programs(page)
    assert found, "a page for users has a program and its output"
    for program, output in found:
        with running_server() as server:
            assert PRINTED_ADDRESS in program
            done = subprocess.run(
                [sys.executable, "-W", "error::UserWarning", "-c", program.replace(PRINTED_ADDRESS, repr(server.address))],
                capture_output=True,
                text=True,
                timeout=300,
            )
        assert done.returncode == 0, done.stderr
        assert NUMBER.sub("#", done.stdout) == NUMBER.sub("#", output)
        assert [float(n) for n in NUMBER.findall(done.stdout)] == pytest.approx(
            [float(n) for n in NUMBER.findall(output)], rel=TOLERANCE, abs=TOLERANCE
        )
