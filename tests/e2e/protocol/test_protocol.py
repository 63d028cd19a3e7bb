"""Each case of recovery and retries with the C++ client; with Python's those that use something of it that no earlier one does."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))  # scripted_server

import recovery_cases  # noqa: F401 fills the table
import retry_cases  # noqa: F401
from case_table import CASES
from exchange import Driver, Exchange


def uses(script):
    """What a script asks of the client: operations with the names of their options, and what comes of them."""
    found = set()
    for line in filter(None, map(str.strip, script.splitlines())):
        if line[0] not in "!?":
            operation, _, outcome = line.partition("->")
            operation, *words = operation.split()
            if operation == "start":
                found.add(operation)
                operation, *words = words[1:]
            options = [word.partition("=")[0] for word in words if not word.isdigit()]
            found.add((operation, *options, outcome.split()[0].partition("=")[0] if outcome else ""))
    return found


def runs():
    """Language and case. Python's calls go through the core of the C++ client, which is what decides."""
    yield from (("cpp", case) for case in CASES)
    seen = set()
    for case, script in CASES.items():
        if new := uses(script) - seen:
            seen |= new
            yield "python", case


@pytest.fixture(scope="module")
def drivers():
    """Client processes by language."""
    running = {}
    yield running
    for driver in running.values():
        driver.kill()


@pytest.mark.parametrize(("language", "case"), runs())
def test_exchange(drivers, language, case):
    driver = drivers.get(language)
    if driver is None:
        driver = drivers[language] = Driver(language)
    try:
        Exchange(driver).run(CASES[case])
    except BaseException:
        drivers.pop(language).kill()  # in a state that nobody knows
        raise
