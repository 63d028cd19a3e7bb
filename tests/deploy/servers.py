"""Servers, waits and programs for the tests of deployment and of monitoring."""

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# The server's start and end are those of the end-to-end tests. By path, because several files are called conftest.
_spec = importlib.util.spec_from_file_location("e2e_conftest", Path(__file__).parents[1] / "e2e/python/conftest.py")
_e2e = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_e2e)
Server, START_TIMEOUT_S = _e2e.Server, _e2e.START_TIMEOUT_S


@contextlib.contextmanager
def running_server(*flags: str, **process):
    """A server with the CPU engine, which must end in an orderly way."""
    with _e2e.running_server("--engine=cpu", *flags, **process) as server:
        yield server
        server.process.terminate()
        server.process.wait(START_TIMEOUT_S)


def program(name: str) -> str:
    path = os.path.join(os.environ.get("HEADWATER_BUILD_DIR", ""), "bin", name)
    if not os.access(path, os.X_OK):
        pytest.fail(f"set HEADWATER_BUILD_DIR to a build with bin/{name}", pytrace=False)
    return path


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> Any:
    """Returns the first true value of `condition`, whose OSErrors count as false."""
    deadline = time.monotonic() + timeout_s
    last = None
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
        except OSError as error:
            last = error
        time.sleep(0.02)
    raise TimeoutError(f"waited {timeout_s} s for {what}; last: {last}")


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
