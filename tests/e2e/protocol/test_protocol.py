"""Each case of recovery and retries, with both clients."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))  # scripted_server

import recovery_cases  # noqa: F401 fills the table
import retry_cases  # noqa: F401
from case_table import CASES
from exchange import Driver, Exchange


@pytest.fixture(scope="module")
def drivers():
    """Client processes by language."""
    running = {}
    yield running
    for driver in running.values():
        driver.kill()


@pytest.mark.parametrize("language", ["cpp", "python"])
@pytest.mark.parametrize("case", CASES)
def test_exchange(drivers, language, case):
    driver = drivers.get(language)
    if driver is None:
        driver = drivers[language] = Driver(language)
    try:
        Exchange(driver).run(CASES[case])
    except BaseException:
        drivers.pop(language).kill()  # in a state that nobody knows
        raise
