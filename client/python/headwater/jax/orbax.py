"""Orbax handlers: the head's checkpoint beside the trainer's, saved, restored and removed with it.

Orbax 0.12 (orbax.checkpoint.CheckpointManager):

    manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), head=headwater.jax.orbax.HeadSave(head)))
    restored = manager.restore(step, args=ocp.args.Composite(state=..., head=headwater.jax.orbax.HeadRestore(head)))

Its interface v1 (orbax.checkpoint.v1.training.Checkpointer), once this module is imported:

    checkpointer.save_checkpointables(step, {"state": state, "head": head})
    checkpointer.load_checkpointables(step, {"state": abstract_state, "head": head})

The server keeps the weights. Orbax's folder has a small file that names the head, its checkpoint and its step. A save takes the
head's checkpoint at once, also where Orbax writes the arrays in the background. Both are of the same step whatever is applied next.
When Orbax has removed a step (max_to_keep, a preservation policy, `delete`), the head's checkpoint of it is deleted on the server.
That happens at once, or with the next save where the server could not be reached. A process that is killed between the two saves
leaves a head's checkpoint without a step, which `Head.delete_checkpoint` removes. Call all of it on every process, as Orbax wants
it; the first one makes the calls to the server.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import threading
import uuid
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import v1

from headwater._errors import FailedPreconditionError, HeadwaterError, must_be, refused
from headwater._head import Head

_FILE = "headwater.json"
# The suffix of unfinished folders of Orbax behind the final name.
_UNFINISHED = re.compile(re.escape(ocp.utils.TMP_DIR_SUFFIX) + r"[^/]*")
# jax.monitoring's event of a step that Orbax has removed, by whichever of its deleters.
_DELETED = re.compile("/checkpoint_manager/.*checkpoint_deleter/duration")

_Write = Callable[[Any], None]  # writes the file into the folder that it is given

_logger = logging.getLogger("headwater")


@dataclasses.dataclass(frozen=True)
class HeadCheckpoint:
    """The description of a head in Orbax's folder."""

    head: str  # its name
    checkpoint: str  # the name of its checkpoint on the server
    step: int  # the one that a restored head opens; 0 for a frozen head


@dataclasses.dataclass
class _Folder:
    """A folder of Orbax that has, or will have, the file of a head's checkpoint."""

    final: epath.Path  # under its final name
    unfinished: epath.Path | None = None  # under the name that it has until Orbax has finished the step; None: it has
    is_written: bool = True  # whether the file is there, and with it the unfinished folder

    def is_gone(self) -> bool:
        """Whether Orbax has removed the step."""
        if self.unfinished is not None and (not self.is_written or self.unfinished.parent.exists()):
            return False
        return not (self.final / _FILE).exists()


class _Saved:
    """The checkpoints of one head that belong to folders in one folder of Orbax's steps."""

    def __init__(self, head: Head, steps: epath.Path):
        self._head = weakref.ref(head)
        self._steps = steps
        self._folders: dict[str, _Folder] = {}  # by checkpoint
        self._lock = threading.Lock()  # Orbax removes steps in threads of its own

    def save(self, head: Head, unfinished: epath.Path, final: epath.Path) -> _Write:
        """Saves the head as that of a folder, which Orbax is about to make."""
        with self._lock:
            if not self._folders:
                self._folders = self._find(head, final.name)
            for folder in self._folders.values():
                folder.unfinished = None  # Orbax has finished the last save, or has failed to
        self.remove_orphans()
        # A name without a number at its end is no series, of which the server would keep some. It is never used again: a folder
        # that was moved or copied still names the checkpoint that was saved with it.
        name = f"orbax-{head.step or 0}-{uuid.uuid4().hex}h"
        new = _Folder(final, unfinished, is_written=False)
        with self._lock:
            self._folders[name] = new
        head.save(name, overwrite=True)
        record = HeadCheckpoint(head.name, name, head.step or 0)

        def write(folder: Any) -> None:
            (folder / _FILE).write_text(json.dumps(dataclasses.asdict(record)))
            new.is_written = True

        return write

    def _find(self, head: Head, item: str) -> dict[str, _Folder]:
        """The folders that an earlier process has saved here."""
        found = {file.parent: _read(file.parent) for file in self._steps.glob(f"*/{item}/{_FILE}")}
        return {record.checkpoint: _Folder(final) for final, record in found.items() if record.head == head.name}

    def remove_orphans(self) -> None:
        """Deletes the head's checkpoints whose folders are gone."""
        with self._lock:
            folders = dict(self._folders)
        for name, folder in folders.items():
            if folder.is_gone():
                self._delete(name)

    def _delete(self, name: str) -> None:
        head = self._head()
        if head is None:
            return
        try:
            head.delete_checkpoint(name)
        except HeadwaterError as error:
            _logger.warning("checkpoint %s of %s is deleted with the next save: %s", name, head.name, error)
        else:
            with self._lock:
                self._folders.pop(name, None)


_saved: weakref.WeakKeyDictionary[Head, dict[epath.Path, _Saved]] = weakref.WeakKeyDictionary()


def _on_event(event: str, _: float, **__: Any) -> None:
    if _DELETED.search(event):
        for places in list(_saved.values()):
            for saved in list(places.values()):
                saved.remove_orphans()


jax.monitoring.register_event_duration_secs_listener(_on_event)


def _save(head: Head, unfinished: Any) -> _Write:
    """Saves the head now, for an unfinished folder; returns the function that writes the file into it."""
    if not isinstance(head, Head):
        raise must_be("head", "a headwater.Head", type(head))
    if jax.process_index():
        return lambda _: None
    final = epath.Path(_UNFINISHED.sub("", str(unfinished)))
    steps = final.parent.parent
    return _saved.setdefault(head, {}).setdefault(steps, _Saved(head, steps)).save(head, epath.Path(unfinished), final)


def _restore(head: Head | None, folder: Any) -> Head:
    """Brings the head to the checkpoint of a folder, on all processes."""
    found = _read(folder)
    if not isinstance(head, Head):
        raise must_be("head", f"the headwater.Head of {found.head} that is to be restored", type(head))
    if found.head != head.name:
        raise refused(f"{folder} has the checkpoint of {found.head}, not of {head.name}", "head")
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            head.restore(found.checkpoint)
        except Exception as error:
            failure = error
    # If the first process has failed, it comes here, too: the others would wait for it.
    has_failed = jax.process_count() > 1 and multihost_utils.process_allgather(np.bool_(failure is not None)).any()
    if failure is not None:
        raise failure
    if has_failed:
        raise FailedPreconditionError(
            f"process 0 could not restore {head.name} from {found.checkpoint}; the error is raised there", reason="STEP_MISMATCH"
        )
    if jax.process_index():
        head._adopt(head.info())
    return head


def _read(folder: Any) -> HeadCheckpoint:
    return HeadCheckpoint(**json.loads((folder / _FILE).read_text()))


# ---- Orbax 0.12 -------------------------------------------------------------------------------------------------------------


class HeadHandler(ocp.AsyncCheckpointHandler):
    """Orbax 0.12's handler of `HeadSave` and `HeadRestore`, which Orbax makes itself where an item is saved with these."""

    async def async_save(self, directory: Any, args: HeadSave) -> Any:
        """Saves the head now; its file is written in the background."""
        write = _save(args.head, directory)

        async def in_background() -> None:
            write(directory)

        return [ocp.future.CommitFutureAwaitingContractedSignals(in_background(), name="headwater_head_save")]

    def save(self, directory: Any, args: HeadSave) -> None:
        """Saves the head and its file now."""
        _save(args.head, directory)(directory)

    def restore(self, directory: Any, args: HeadRestore) -> Head:
        """Restores the head, and returns it."""
        return _restore(args.head, directory)

    def metadata(self, directory: Any) -> HeadCheckpoint:
        """Which checkpoint it is; asks no server."""
        return _read(directory)


@ocp.args.register_with_handler(HeadHandler, for_save=True)
@dataclasses.dataclass
class HeadSave(ocp.args.CheckpointArgs):
    """Saves a head as it is at the beginning of its open step."""

    head: Head


@ocp.args.register_with_handler(HeadHandler, for_restore=True)
@dataclasses.dataclass
class HeadRestore(ocp.args.CheckpointArgs):
    """Restores a head of the name that was saved: a new epoch, the step of the checkpoint, nothing accumulated."""

    head: Head


async def _at_once(head: Head) -> Head:
    return head


# ---- its interface v1 -------------------------------------------------------------------------------------------------------


@v1.handlers.register_handler
class HeadCheckpointableHandler:
    """Orbax v1's CheckpointableHandler of a `headwater.Head`, which is loaded into the head that is given as its abstract form."""

    async def save(self, directory: Any, checkpointable: Head) -> Awaitable[None]:
        """Saves the head now; its file is written in the background."""
        return self._in_background(_save(checkpointable, directory.path), directory)

    async def _in_background(self, write: _Write, directory: Any) -> None:
        write(await directory.await_creation())

    async def load(self, directory: Any, abstract_checkpointable: Head | None = None) -> Awaitable[Head]:
        """Restores the head that is given, and returns it."""
        # Not in the background, where Orbax says of every error that the handler is the wrong one.
        return _at_once(_restore(abstract_checkpointable, directory))

    async def metadata(self, directory: Any) -> HeadCheckpoint:
        """Which checkpoint it is; asks no server."""
        return _read(directory)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Heads are."""
        return isinstance(checkpointable, Head)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Heads are."""
        return isinstance(abstract_checkpointable, (Head, HeadCheckpoint))
