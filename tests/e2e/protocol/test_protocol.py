"""Each case of recovery and retries with the C++ client, whose core makes Python's calls, too."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))  # scripted_server

import recovery_cases  # noqa: F401 fills the table
import retry_cases  # noqa: F401
from exchange import CASES, Driver, Exchange


@pytest.fixture(scope="module")
def running():
    """The client's process, if one runs."""
    drivers = []
    yield drivers
    for driver in drivers:
        driver.kill()


@pytest.mark.parametrize("case", CASES)
def test_exchange(running, case):
    if not running:
        running.append(Driver())
    try:
        Exchange(running[0]).run(CASES[case])
    except BaseException:
        running.pop().kill()  # in a state that nobody knows
        raise
