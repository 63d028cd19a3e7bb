"""A headwaterd for a test, of the build that HEADWATER_BUILD_DIR names."""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

START_TIMEOUT_S = 60


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


def start_server(
    arguments: list[str], port_file: Path, log: Path, binary: Path | None = None, out: str = os.devnull
) -> subprocess.Popen:
    """Starts headwaterd with these flags, of which one names the port file, and waits until it listens."""
    with open(out, "wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen([binary or program("headwaterd"), *arguments], stdout=stdout, stderr=stderr)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not port_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            pytest.fail(f"headwaterd did not get ready: {log.read_text()}", pytrace=False)
        time.sleep(0.02)
    return process


@contextlib.contextmanager
def running_server(*flags: str):
    """The address of a server with the CPU engine, which must end in an orderly way."""
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        folder = Path(name)
        address, ready = f"unix:{folder}/s", folder / "ready"
        own = [f"--listen_addresses={address}", f"--port_file={ready}", "--metrics_address=", "--engine=cpu"]
        process = start_server([*own, "--log_level=warning", *flags], ready, folder / "log")
        try:
            yield address
        finally:
            process.terminate()
            try:
                process.wait(START_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
