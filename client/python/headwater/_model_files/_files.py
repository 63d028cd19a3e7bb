"""Files that are complete or not there, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a file to write, which takes the place of `path` when it is complete and on the disk."""
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")  # with its end, which some writers look at
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, unfinished)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)  # a full disk needs the room
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def replace_file(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Has `write` write a file that takes the place of `path`."""
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        write(file)
