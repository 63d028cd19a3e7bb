"""The trainer's own part of a checkpoint: files beside those that the server writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from headwater._errors import invalid_argument
from headwater._recovery import StateFiles
from headwater._types import check_integer


class TrainerState(StateFiles):
    """Files `step-{step}.pt` in a directory, each with the `state_dict()` of some objects. Atomic, and on disk when `save` returns.

    Args:
        directory: made if it is not there. All ranks must see it, unless each has a state of its own.
        rank: None for a state that all ranks have alike: rank 0 writes it. A number for a state of each rank's own: all do so.
        keep: number of files that stay, >= 2, as of `StateFiles`. None: all.
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
        self._objects = objects
        suffix = "" if rank is None else f".rank-{check_integer(rank, 'rank')}"
        super().__init__(directory, save=self._save_objects, load=self._load_objects, suffix=f"{suffix}.pt", keep=keep)
        self.every_rank = rank is not None

    def _save_objects(self, path: Path) -> None:
        torch.save({name: value.state_dict() for name, value in self._objects.items()}, path)

    def _load_objects(self, path: Path) -> None:
        # The state of an optimizer, scheduler or generator may be any object; the file is the trainer's own.
        states = torch.load(path, map_location="cpu", weights_only=False)
        for name, value in self._objects.items():
            value.load_state_dict(states[name])
