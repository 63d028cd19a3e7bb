"""The programs of Headwater: `headwaterd`, the server, and `headwaterctl`, its command line."""

import os
import signal
import sys
from pathlib import Path

PROGRAMS = ("headwaterd", "headwaterctl")


def binary(name: str) -> str:
    """Path of the program `name`, one of PROGRAMS. Raises ValueError for another name."""
    if name not in PROGRAMS:
        raise ValueError(f"name: expected one of {', '.join(PROGRAMS)}, got {name!r}")
    return str(Path(__file__).resolve().parent / "bin" / name)


def _become(name: str) -> None:
    """Turns this process into the program, so that its PID, its signals and its exit status are the program's own."""
    # Python ignores these, and a program would inherit that.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    os.execv(binary(name), [name, *sys.argv[1:]])


def headwaterd() -> None:
    """Entry point of the script of this name."""
    _become("headwaterd")


def headwaterctl() -> None:
    """Entry point of the script of this name."""
    _become("headwaterctl")
