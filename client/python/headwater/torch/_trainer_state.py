"""The trainer's own part of a checkpoint: files beside those that the server writes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Protocol

import torch

from headwater._errors import NotFoundError, invalid_argument
from headwater._types import check_integer


class StateStore(Protocol):
    """Where `TrainingLoop` puts the trainer's own state. `TrainerState` is one; a framework's checkpoints can be another.

    Attributes:
        every_rank: whether each rank saves a part of its own; otherwise rank 0 saves, and all load the same.
    """

    every_rank: bool

    def save(self, step: int) -> None:
        """Keeps the state in which `step` begins; a second time replaces the first. Complete or not there at all."""

    def load(self, step: int) -> None:
        """Brings that state back."""

    def steps(self) -> list[int]:
        """The steps that can be loaded."""


class TrainerState:
    """Files `step-{step}.pt` in a directory, each with the `state_dict()` of some objects. Atomic, and on disk when `save` returns.

    Args:
        directory: made if it is not there. All ranks must see it.
        rank: None for a state that all ranks have alike: rank 0 writes it. A number for a state of each rank's own.
        keep: number of files that stay; older ones go when a new one is complete. None: all. The server's checkpoints stay anyway.
        objects: model, optimizer, scheduler, ...: whatever has state_dict() and load_state_dict().
    """

    def __init__(self, directory: str | os.PathLike[str], *, rank: int | None = None, keep: int | None = None, **objects: Any):
        if not objects:
            raise invalid_argument("MISSING_FIELD", "name the objects to keep: model=model, optimizer=optimizer", field="objects")
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise invalid_argument(
                    "INVALID_FIELD", f"{name} has no state_dict() and load_state_dict(): {type(value).__name__}", field=name
                )
        self._directory = Path(directory)
        self._keep = None if keep is None else check_integer(keep, "keep", low=1)
        self._objects = objects
        self.every_rank = rank is not None
        self._suffix = "" if rank is None else f".rank-{check_integer(rank, 'rank')}"
        self._pattern = re.compile(rf"step-(\d+){re.escape(self._suffix)}\.pt")

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step}{self._suffix}.pt"

    def save(self, step: int) -> None:
        """Writes the state in which `step` begins."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._path(check_integer(step, "step"))
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        with unfinished.open("wb") as file:
            torch.save({name: value.state_dict() for name, value in self._objects.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        for old in self.steps()[: -self._keep] if self._keep else ():
            self._path(old).unlink(missing_ok=True)

    def load(self, step: int) -> None:
        """Reads the state in which `step` begins into the objects.

        Raises:
            NotFoundError: it was not saved.
        """
        path = self._path(step)
        if not path.exists():
            raise NotFoundError(f"there is no {path}; there are the steps {self.steps()}", reason="CHECKPOINT_NOT_FOUND")
        states = torch.load(path, map_location="cpu")
        for name, value in self._objects.items():
            value.load_state_dict(states[name])

    def steps(self) -> list[int]:
        """The steps that were saved, ascending."""
        names = self._directory.iterdir() if self._directory.is_dir() else ()
        return sorted(int(match[1]) for path in names if (match := self._pattern.fullmatch(path.name)))
