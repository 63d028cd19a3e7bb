"""Servers, waits and programs for the tests of deployment and of monitoring."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "e2e/python"))

import headwaterd

Server, START_TIMEOUT_S = headwaterd.Server, headwaterd.START_TIMEOUT_S


@contextlib.contextmanager
def running_server(*flags: str, **process):
    """A server with the CPU engine, which must end in an orderly way."""
    with headwaterd.running_server("--engine=cpu", *flags, **process) as server:
        yield server
        server.process.terminate()
        server.process.wait(START_TIMEOUT_S)


def program(name: str) -> str:
    return os.path.join(os.environ["HEADWATER_BUILD_DIR"], "bin", name)


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
