"""Servers, waits and programs for the tests of deployment and of monitoring."""

import contextlib
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "e2e/python"))

import headwaterd
from expectations import eventually as eventually

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


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
