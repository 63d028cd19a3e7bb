"""Recovery of trainer and heads after either was restarted: the newest step that both have, and the loop around it."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headwater._errors import (
    ClientClosedError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    HeadwaterError,
    NotFoundError,
    StepLostError,
    UnavailableError,
    is_restarting,
    must_be,
    refused,
)
from headwater._head import Head
from headwater._model_files._files import replacing
from headwater._types import check_integer, check_number

R = TypeVar("R")

_logger = logging.getLogger("headwater")

# How often in a row a run may fall back without getting any further than it has been.
_MAX_SETBACKS = 8
# Time before the next try, in seconds: at first, and at most.
_RETRY_S = 0.2
_MAX_RETRY_S = 5.0


class StateStore(Protocol):
    """Where the trainer's own state is put. `StateFiles` and `headwater.torch.TrainerState` are; a framework's checkpoints can be.

    Attributes:
        every_rank: whether each rank saves a part of its own, which the others need not see; otherwise rank 0 saves, and all load
            the same.
    """

    every_rank: bool

    def save(self, step: int) -> None:
        """Keeps the state in which `step` begins; a second time replaces the first. Complete or not there at all."""

    def load(self, step: int) -> None:
        """Brings that state back."""

    def steps(self) -> list[int]:
        """The steps that can be loaded."""


class StateFiles:
    """Files `step-{step}{suffix}` in a directory. Each is complete or not there, and on the disk when `save` returns.

    One process at a time saves files of one suffix: unfinished files of another one are removed.

    Args:
        directory: made if it is not there. All ranks that load from it must see it.
        save: called with the path of a file to write.
        load: called with the path of a file to read.
        suffix: of the files' names.
        keep: number of files that stay, >= 2: the newest may be of a step that the server has not saved yet. Older ones go when a
            new one is complete. None: all. At least as many as the server keeps (`--keep_checkpoints`), so that each of its
            checkpoints has a counterpart.
    """

    every_rank = False

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save: Callable[[Path], Any],
        load: Callable[[Path], Any],
        suffix: str = "",
        keep: int | None = None,
    ):
        self._directory = Path(directory)
        self._write, self._read = save, load
        self._suffix = suffix
        self._keep = None if keep is None else check_integer(keep, "keep", low=2)
        self._pattern = re.compile(rf"step-(\d+){re.escape(suffix)}")
        self._unfinished = re.compile(rf"\.\d+\.step-\d+{re.escape(suffix)}")

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step}{self._suffix}"

    def save(self, step: int) -> None:
        """Writes the state in which `step` begins."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._path(check_integer(step, "step"))
        for left in self._directory.iterdir():  # by a process that was killed as it wrote: no other process writes these
            if self._unfinished.fullmatch(left.name):
                left.unlink(missing_ok=True)
        with replacing(path) as unfinished:
            self._write(unfinished)
        others = [old for old in self.steps() if old != step]
        for old in others[: max(len(others) - self._keep + 1, 0)] if self._keep else ():
            self._path(old).unlink(missing_ok=True)

    def load(self, step: int) -> None:
        """Reads the state in which `step` begins.

        Raises:
            NotFoundError: it was not saved.
        """
        path = self._path(step)
        if not path.exists():
            raise NotFoundError(f"there is no {path}; there are the steps {self.steps()}", reason="CHECKPOINT_NOT_FOUND")
        self._read(path)

    def steps(self) -> list[int]:
        """The steps that were saved, ascending."""
        names = self._directory.iterdir() if self._directory.is_dir() else ()
        return sorted(int(match[1]) for path in names if (match := self._pattern.fullmatch(path.name)))


class Meeting:
    """Brings trainable heads and the trainer's state to a step that all of them have.

    Args:
        heads: those that are trained; all are at the same step.
        state: the trainer's; None: it has none of its own, or loads it itself.
        checkpoint_name: of the heads' checkpoints, with {step}.
        each_rank: whether the state that is seen here is that of one rank of several, and says nothing of the others'.

    Attributes:
        has_moved: whether the trainer is not where a run begins any more: then nothing but a state of that step takes it there.
    """

    def __init__(
        self,
        heads: Sequence[Head],
        state: StateStore | None,
        checkpoint_name: str,
        timeout_s: float | None,
        *,
        each_rank: bool = False,
    ):
        if not isinstance(checkpoint_name, str) or "{step}" not in checkpoint_name:
            raise must_be("checkpoint_name", "a string with {step}", checkpoint_name, "INVALID_NAME")
        self._heads = heads
        self._state = state
        self._name = checkpoint_name
        self._each_rank = each_rank
        self._timeout: dict[str, Any] = {"timeout_s": timeout_s}
        self.has_moved = False
        self._checkpoints: dict[str, str] = {}  # by head: the server's list of its checkpoints
        self._newest: int | None = None  # later states are of a course that was left, by going back to a given step

    def name(self, step: int) -> str:
        """The checkpoint of a step."""
        return self._name.format(step=step)

    def bring_heads_back(self, step: int | None) -> int:
        """Takes all heads at the newest step that the trainer has too, or at the one that is given. Which one."""
        infos = [head.info(**self._timeout) for head in self._heads]
        steps = [info.open_step for info in infos]
        if step is not None:
            candidates = [check_integer(step, "step")]
        else:
            known = [] if self._state is None else self._state.steps()
            candidates = sorted((at for at in known if self._newest is None or at <= self._newest), reverse=True)
            begins = all(info.open_step == head.spec.initial_step for head, info in zip(self._heads, infos, strict=True))
            if not candidates and len(set(steps)) == 1 and (self._state is None or (begins and not self.has_moved)):
                candidates = [int(steps[0] or 0)]
        for candidate in candidates:
            if all(self._bring_to(head, candidate, is_asked_for=step is not None) for head in self._heads):
                self._newest = candidate if step is not None else self._newest
                return candidate
        raise self.nothing_in_common(steps, step)

    def _bring_to(self, head: Head, step: int, *, is_asked_for: bool) -> bool:
        """Takes the head at the beginning of a step; False if it has no whole checkpoint of it."""
        info = head.info(**self._timeout)  # as it is now: an earlier attempt that failed may have moved it
        # Ranks that died while they saved have left only some parts. The head's checkpoint is written when all parts are, so it is
        # required even if the head exists. At the beginning of a run a rank may lack its part, so it is not required there.
        at_the_beginning = step == head.spec.initial_step
        as_it_is = not self._each_rank or is_asked_for or at_the_beginning or info.restored_checkpoint == self.name(step)
        if as_it_is and info.open_step == step and info.state in ("READY", "RESTORED"):
            head.take(**self._timeout)
            return head.step == step
        head._adopt(info)
        try:
            head.restore(self.name(step), **self._timeout)
        except NotFoundError as error:
            self._checkpoints[head.name] = error.metadata.get("checkpoints", "")
            return False
        except DataLossError as error:
            _logger.warning("checkpoint %s of %s is passed over: %s", self.name(step), head.name, error)
            return False
        return head.step == step

    def load_state(self, step: int) -> bool:
        """Brings the trainer's state back. Whether this is the beginning of a run, with nothing to load.

        Raises:
            FailedPreconditionError: `STEP_MISMATCH`: the trainer has no state of that step. The first step is no beginning of a run
                if the trainer has already trained from it.
        """
        if self._state is None:
            return step == self._heads[0].spec.initial_step
        if step in self._state.steps():
            self.has_moved = True
            self._state.load(step)
            return False
        if step == self._heads[0].spec.initial_step and not self.has_moved:
            return True
        raise self.nothing_in_common([step], step)

    def nothing_in_common(self, steps: Sequence[int | None], wanted: int | None) -> HeadwaterError:
        """The error that lists the steps of each side."""
        own = "unknown" if self._state is None else self._state.steps()
        gone_on = ", and it has gone on since the run began" if self.has_moved and not own else ""
        heads = [
            f"{head.name} at step {step}" + (f" with checkpoints {known}" if (known := self._checkpoints.get(head.name)) else "")
            for head, step in zip(self._heads, steps, strict=False)
        ]
        return FailedPreconditionError(
            f"heads and trainer have no step in common{'' if wanted is None else f' with step {wanted}'}: {', '.join(heads)}; the "
            f"trainer's checkpoints are of {own}{gone_on}. Restore a head by name, or delete it to begin again",
            reason="STEP_MISMATCH",
            metadata={
                "openStep": str(steps[0]),
                "checkpoints": self._checkpoints.get(self._heads[0].name, ""),
                "trainerSteps": ",".join(map(str, own)) if self._state is not None else "",
            },
        )

    def save(self, step: int) -> str:
        """Saves the heads as the checkpoint of their open step; the trainer's state is there already."""
        for head in self._heads:
            head.save(self.name(step), overwrite=True, **self._timeout)
        self._newest = None if self._newest is None else max(self._newest, step)
        return self.name(step)


def follow(
    resume: Callable[[], int], advance: Callable[[int], Any], position: Callable[[], int], steps: int, patience_s: float
) -> None:
    """Calls `advance(step)` until step `steps` is open, and goes back to the step that `resume` returns when the server was
    lost."""
    check_integer(steps, "steps")
    check_number(patience_s, "patience_s", low=0)
    step = patiently(resume, patience_s)
    furthest, setbacks = step, 0
    failures, since = 0, 0.0  # since a step was closed, and when the first was
    while step < steps:
        try:
            advance(step)
            if position() <= step:
                raise FailedPreconditionError(
                    f"step {step} was not closed: step {position()} is open", reason="INVALID_COMBINATION"
                )
            step, failures = position(), 0
            if step > furthest:
                furthest, setbacks = step, 0
        except HeadwaterError as error:
            if not _is_recoverable(error):
                raise
            failures += 1
            if failures == 1:
                since = time.monotonic()
            is_away = isinstance(error, UnavailableError) or is_restarting(error)
            # A server that is away is one setback, however often it is found to be.
            setbacks += failures == 1 or not is_away
            if setbacks > _MAX_SETBACKS or (is_away and time.monotonic() - since > patience_s):
                raise
            # Not every connection of a client comes back at the same moment.
            time.sleep(min(_RETRY_S * 2.0 ** min(failures - 1, 10), _MAX_RETRY_S))
            lost, step = step, patiently(resume, patience_s)
            _logger.warning("step %d was lost, continuing from step %d: %s", lost, step, error)


def _is_recoverable(error: HeadwaterError) -> bool:
    """Whether a training run survives the error: the server was away, and has come back or will."""
    if isinstance(error, ClientClosedError):
        return False
    return isinstance(error, (StepLostError, UnavailableError, DeadlineExceededError)) or is_restarting(error)


def patiently(call: Callable[[], R], patience_s: float) -> R:
    """The result of a call, repeated until the server answers."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except HeadwaterError as error:
            if not _is_recoverable(error) or time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)


def train(
    heads: Head | Sequence[Head],
    train_step: Callable[[int], Any],
    steps: int,
    *,
    state: StateStore,
    checkpoint_every: int,
    checkpoint_name: str = "step-{step}",
    patience_s: float = 600.0,
    timeout_s: float | None = None,
) -> None:
    """Trains until step `steps` is open, whatever happens to the server or to this process in between. For one trainer.

        state = headwater.StateFiles("checkpoints", save=model.save, load=model.load)
        headwater.train(head, train_step, 1000, state=state, checkpoint_every=100)

    It begins at the newest step that both the heads and the trainer have saved, or in a new run at the head's first step. It saves
    both under one name when it is due, the trainer's state first: a head's checkpoint then always has a matching state. When the
    server was started again and the steps since cannot be replayed (`connect(replay=True)` does), all go back to such a step. So
    `train_step` must do the same for the same step whenever it is called.

    `headwater.torch.TrainingLoop.run` is this for torch, with optimizers, clipping, GradScaler and tied weights.

    Args:
        heads: trainable ones, all at the same step. They are taken: an earlier process's calls are fenced off.
        train_step: called with the step; submits its micro-batches and closes it (`apply_optimizer_step`, `replace_weight`,
            `discard_gradient`), for all heads.
        state: where the trainer's own state is kept.
        checkpoint_every: number of steps between checkpoints; the beginning is saved as well.
        checkpoint_name: of the heads' checkpoints, with {step}.
        patience_s: how long the server may be away, in seconds, each time.
        timeout_s: bound of each call that this function makes, in seconds. None: the client's.
    Raises:
        FailedPreconditionError: `STEP_MISMATCH`: heads and trainer have no step in common. Nothing is guessed.
        StepLostError, UnavailableError: after several setbacks in a row, or when the server stays away.
    """
    trained = [heads] if isinstance(heads, Head) else list(heads)
    if not trained or any(not head.spec.trainable for head in trained):
        raise refused("train needs trainable heads", "heads")
    every = check_integer(checkpoint_every, "checkpoint_every", low=1)
    meeting = Meeting(trained, state, checkpoint_name, timeout_s)

    def position() -> int:
        opened = {head.step for head in trained}
        if len(opened) != 1:
            raise FailedPreconditionError(
                f"train_step must close the step of every head: they are at {sorted(map(str, opened))}",
                reason="INVALID_COMBINATION",
            )
        return int(opened.pop() or 0)

    def save(step: int) -> None:
        state.save(step)
        meeting.save(step)

    def resume() -> int:
        step = meeting.bring_heads_back(None)
        if meeting.load_state(step):
            save(step)
        for head in trained:
            head._confirm()
        return step

    def advance(step: int) -> None:
        meeting.has_moved = True
        train_step(step)
        if position() > step and position() % every == 0:
            save(position())

    follow(resume, advance, position, steps, patience_s)
