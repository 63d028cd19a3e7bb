"""`TrainingLoop`: the work between backward and the next step, for one trainer or many, in a few lines."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headwater._clipping import clip_factor, not_finite
from headwater._errors import FailedPreconditionError, invalid_argument, must_be, refused
from headwater._head import Head, _check_expected
from headwater._loss._micro_batches import MicroBatchSource, distributed_place
from headwater._loss._requests import Expected, check_bool
from headwater._recovery import Meeting, StateStore, follow, patiently
from headwater._types import (
    SealResult,
    StepTotals,
    check_factor,
    check_integer,
    check_max_grad_norm,
    check_not_negative,
    check_number,
)
from headwater.torch import _gradients
from headwater.torch._attach import ModuleHead

# Name of the one checkpoint of a frozen head.
_FROZEN_CHECKPOINT = "weights"


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step."""

    step: int  # its number
    applied: bool  # False: its gradient was not finite, and nothing has changed
    learning_rate: float
    global_grad_norm: float  # of body and heads, before clipping, with gradient_factor
    clip_factor: float  # in (0, 1]; already applied everywhere
    totals: tuple[StepTotals, ...]  # of each trainable head, in order
    checkpoint: str | None = None  # that was written after it


class TrainingLoop:
    """Closes steps, keeps checkpoints and finds back to them.

        head = headwater.torch.attach(client, "student", model.lm_head, model=model, optimizer=headwater.AdamW())
        state = headwater.torch.TrainerState("checkpoints", model=model.body, optimizer=optimizer)
        loop = headwater.torch.TrainingLoop(head, optimizer, state=state, checkpoint_every=100, max_grad_norm=1.0)
        loss_fn = headwater.torch.CrossEntropyLoss(head)

        def train_step(step):
            for inputs, targets in micro_batches(step):
                loop.backward(loss_fn(model.body(inputs), targets) / MICRO_BATCHES)

        loop.run(train_step, 1000, learning_rate=1e-3)

    `run` is `for step in range(loop.resume(), 1000): train_step(step); loop.step(learning_rate=1e-3)`, which goes back to a
    checkpoint when the server was lost, if there is a `state` that can.

    `step` counts the micro-batches that the loss functions of the heads have drawn, seals them, and clips by the norm of body and
    heads together. Then it applies the heads' optimizers and the body's, and saves due checkpoints. Weights that this trainer owns
    or shares with a head (`attach`) are moved both ways.

    Several trainers: each makes a loop with its rank, and all call the same methods. The body's gradients must have been reduced
    (DDP) before `step`. Rank 0 alone closes steps and writes checkpoints; the others follow after a barrier.

    After an error the step is not closed by halves: `step` is refused until `resume` has brought all back to a checkpoint. With
    `StepLostError` (the server was started again) that is what to call; with `connect(replay=True)` the client mostly spares it.

    Args:
        heads: those that this trainer trains, as `attach`, `Client.create_head` or `Client.head` made them. Frozen ones among them
            (teachers) are only kept and followed over restarts.
        optimizer: the body's torch optimizer, or None if only heads are trained. It must hold the weights that the trainer owns,
            and must not hold one that a head's optimizer owns.
        parameters: the body's parameters, for norm and clipping, to which those of heads that the trainer owns are added. None:
            those of `optimizer`.
        scaler: torch.amp.GradScaler. A step whose gradient overflows is skipped on all sides; the scale grows with steps in which
            the body has gradients.
        max_grad_norm: >= 0; clips by the global norm. None, 0, inf: no clipping.
        gradient_factor: multiplies the heads' gradients; 1 / world_size where each rank's loss is a mean of its own and the
            framework averages. docs/concepts.md has the table.
        state: the store of the trainer's own state: a `TrainerState`, or an object with its methods. None: the trainer keeps it
            itself.
        checkpoint_every: number of steps between checkpoints; the beginning is saved as well. None: only by `save_checkpoint`.
        checkpoint_name: of the head's checkpoints, with {step}.
        rank, world_size: of this trainer among those that submit. None: those of torch.distributed, 0 and 1 without it.
        barrier: called without arguments; returns when all ranks have called it. None: torch.distributed.barrier.
        shared_gradients: "reduced" if each rank has the same gradient of a tied embedding (DDP has averaged it): rank 0 adds it.
            "partial" if each has its own part: each adds it. The parts must add up to the gradient that the body's reduction would
            give: where that averages, divide them by world_size first. None: "reduced" if torch.distributed is initialised.
        body_norm_squared: returns the squared norm of the body's gradients, unscaled, where `parameters` are a part of them (FSDP).
        timeout_s: bound of each call, in seconds. None: the client's.
    """

    def __init__(
        self,
        heads: Head | Sequence[Head],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        parameters: Iterable[torch.Tensor] | None = None,
        scaler: Any = None,
        max_grad_norm: float | None = None,
        gradient_factor: float = 1.0,
        state: StateStore | None = None,
        checkpoint_every: int | None = None,
        checkpoint_name: str = "step-{step}",
        rank: int | None = None,
        world_size: int | None = None,
        barrier: Callable[[], Any] | None = None,
        shared_gradients: str | None = None,
        body_norm_squared: Callable[[], float] | None = None,
        timeout_s: float | None = None,
    ):
        given = [heads] if isinstance(heads, Head) else list(heads)
        self._heads = [head for head in given if head.spec.trainable]
        self._frozen = [head for head in given if not head.spec.trainable]
        if not self._heads:
            raise refused("a training loop needs a trainable head", "heads")
        self._optimizer = optimizer
        held = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        body = held if parameters is None else list(parameters)
        self._shared = [head for head in self._heads if isinstance(head, ModuleHead) and head.tied == "server"]
        self._trainer_owned = [head for head in self._heads if isinstance(head, ModuleHead) and head.owner == "trainer"]
        self._served = [head for head in self._heads if head not in self._trainer_owned]
        _check_owners(self._served, self._shared, self._trainer_owned, held, body)
        # A head that the trainer owns has its gradient brought here, and is clipped as the body is.
        owned = [p for head in self._trainer_owned for p in (head.weight_parameter, head.bias_parameter) if p is not None]
        self._parameters = list({id(parameter): parameter for parameter in (*body, *owned)}.values())
        self._scaler = scaler if scaler is not None and getattr(scaler, "is_enabled", lambda: True)() else None
        self._max_grad_norm = check_max_grad_norm(max_grad_norm)
        self._gradient_factor = check_factor(gradient_factor, "gradient_factor", nonzero=True)
        self._state = state
        self._every = None if checkpoint_every is None else check_integer(checkpoint_every, "checkpoint_every", low=1)
        sources = [MicroBatchSource(rank, world_size) for _ in self._heads]
        self._each_rank = sources[0].world_size > 1 and state is not None and state.every_rank
        self._meeting = Meeting(self._heads, state, checkpoint_name, timeout_s, each_rank=self._each_rank)
        self._timeout = {"timeout_s": timeout_s}
        self._body_norm_squared = body_norm_squared
        for head, source in zip(self._heads, sources, strict=True):
            head._micro_batch_source = source
        self._sources = sources
        self.rank, self.world_size = sources[0].rank, sources[0].world_size
        distributed = distributed_place()[1] > 1
        self._barrier = barrier if barrier is not None else torch.distributed.barrier if distributed else _alone
        if self.world_size > 1 and self._barrier is _alone:
            raise invalid_argument("MISSING_FIELD", f"{self.world_size} trainers need a barrier", field="barrier")
        if shared_gradients not in (None, "reduced", "partial"):
            raise must_be("shared_gradients", '"reduced" or "partial"', shared_gradients)
        reduced = distributed if shared_gradients is None else shared_gradients == "reduced"
        if self._trainer_owned and self.world_size > 1 and shared_gradients == "partial":
            raise refused(
                "a weight that the trainers own is updated by each of them alike: reduce its gradient first", "shared_gradients"
            )
        # Ranks that add the gradient of a tied embedding, and how many contributions each makes of it.
        self._adding_ranks = range(1 if reduced else self.world_size)
        self._parts = [head.gradient_parts(**self._timeout) for head in self._shared]
        self._failure: BaseException | None = None
        self._unscaled = False  # whether the scaler has unscaled the body's gradients, and was not updated since
        self._begun = False  # whether `resume` has brought this loop to a step before

    @property
    def open_step(self) -> int:
        """The step that micro-batches go to now."""
        step = self._heads[0].step
        assert step is not None  # it is trainable
        return step

    def run(
        self,
        train_step: Callable[[int], Any],
        steps: int,
        *,
        learning_rate: float | Callable[[int], float] | None = None,
        on_step: Callable[[StepOutcome], Any] | None = None,
        patience_s: float = 600.0,
    ) -> None:
        """Resumes, and trains until step `steps` is open. When the server was lost, goes back to the newest step that all have.

        `train_step` must do the same for the same step whenever it is called. With several trainers a lost server is raised in each
        of them, because they must go back together: start them again. It is raised without `state`, too, unless only heads are
        trained. The heads may come back at another step than the body's, and nothing here moves the body to theirs. Load its state
        of the step that `resume` returns then, and call `run` again.

        Args:
            train_step: called with the step: submits its micro-batches and calls `backward`. The step is closed afterwards.
            learning_rate: as in `step`, or a function that gives it for a step.
            on_step: called with the outcome of each step.
            patience_s: how long the server may be away, in seconds, each time.
        Raises:
            FailedPreconditionError: as `resume` and `step`. `STEP_MISMATCH`, called again without `state`: the heads are at another
                step than the body, or the body's step has ended half-way.
            StepLostError, UnavailableError: after several setbacks in a row, or when the server stays away.
        """

        def advance(step: int) -> None:
            train_step(step)
            outcome = self.step(learning_rate(step) if callable(learning_rate) else learning_rate)
            if on_step is not None:
                on_step(outcome)

        goes_back = self._state is not None or (self._optimizer is None and not self._parameters)
        if self.world_size == 1 and goes_back:
            follow(self.resume, advance, lambda: self.open_step, steps, patience_s)
            return
        check_integer(steps, "steps")
        patience_s = check_number(patience_s, "patience_s", low=0) if self.world_size == 1 else 0.0
        patiently(self.resume if goes_back else self._resume_as_it_is, patience_s)
        while self.open_step < steps:
            advance(self.open_step)

    def _resume_as_it_is(self) -> int:
        """Resumes with a body that has no state to load: only where the heads are at its step."""
        if self._begun:
            opened = [head.info(**self._timeout).open_step for head in self._heads]
            half_way = self._failure is not None and not self._refused_as_not_finite
            if half_way or any(step != self.open_step for step in opened):
                at = f"has ended a step half-way ({self._failure})" if half_way else f"is at step {self.open_step}"
                heads = ", ".join(f"{head.name} at step {step}" for head, step in zip(self._heads, opened, strict=True))
                raise FailedPreconditionError(
                    f"without state= the body cannot be brought to another step: it {at}, {heads}. Call resume(), and load the "
                    "body's own state of the step that it returns",
                    reason="STEP_MISMATCH",
                    metadata={"openStep": str(opened[0]), "trainerSteps": "" if half_way else str(self.open_step)},
                )
        return self._resume(None, take=True)

    @property
    def _refused_as_not_finite(self) -> bool:
        """Whether `step` has refused to close the step, and has changed nothing."""
        return getattr(self._failure, "reason", "") == "NON_FINITE_GRADIENT"

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, scaled by the GradScaler if there is one."""
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    # ---- the end of a step ------------------------------------------------------------------------------------------

    def step(
        self,
        learning_rate: float | None = None,
        *,
        expected_micro_batches: Expected | None = None,
        allow_empty: bool = False,
    ) -> StepOutcome:
        """Closes the step: every head's and the body's weights are updated once, or none of them.

        Args:
            learning_rate: of the heads' optimizers. None: that of the torch optimizer's first group.
            expected_micro_batches: n for the ids 0 ... n-1 of all ranks together, or the list of them. Dropped ids, and the
                gradients that the loop adds itself, are not counted. None: those that this process has drawn; with several ranks,
                each must have drawn as many and dropped none.
            allow_empty: close a step without any micro-batch, too, as `Head.apply_optimizer_step` has it. False: it is refused,
                and `skip` closes it.
        Raises:
            InvalidArgumentError: `MISSING_FIELD`: a head has no micro-batch in this step, and `allow_empty` is not set.
            FailedPreconditionError: `NON_FINITE_GRADIENT`, without a scaler: nothing has changed; `skip` closes the step.
                `MICRO_BATCH_MISSING` and the like: a micro-batch was not backed through.
            StepLostError: the server was started again in mid-step: `resume`.
        """
        self._check_sound()
        allow_empty = check_bool(allow_empty, "allow_empty")
        rate = self._learning_rate(learning_rate)
        expected = [self._expected(index, expected_micro_batches, allow_empty) for index in range(len(self._heads))]
        step = self.open_step
        seals = self._seal(expected, listed=expected_micro_batches is not None)
        try:
            outcome = self._close(step, rate, seals)
        except BaseException as error:
            self._failure = error
            raise
        if self._every is not None and self.open_step % self._every == 0:
            outcome = dataclasses.replace(outcome, checkpoint=self.save_checkpoint())
        return outcome

    def skip(self) -> None:
        """Closes the step with all weights unchanged; also one that `step` has refused because its gradient is not finite."""
        if self._refused_as_not_finite:
            self._failure = None
        self._check_sound()
        self._barrier()
        self._discard()

    def _check_sound(self) -> None:
        if self._failure is not None:
            advice = "skip() closes it" if self._refused_as_not_finite else "call resume()"
            raise FailedPreconditionError(
                f"step {self.open_step} was not closed ({self._failure}); {advice}", reason="INVALID_COMBINATION"
            ) from self._failure

    def _learning_rate(self, given: float | None) -> float:
        if given is not None:
            return check_not_negative(given, "learning_rate")
        if self._optimizer is None:
            raise invalid_argument("MISSING_FIELD", "learning_rate is required without a torch optimizer", field="learning_rate")
        return float(self._optimizer.param_groups[0]["lr"])

    def _expected(self, index: int, given: Expected | None, allow_empty: bool) -> list[int]:
        """Ids of the micro-batches of all ranks, ascending."""
        head, source = self._heads[index], self._sources[index]
        if given is not None:
            checked = _check_expected(given)
            ids = list(range(checked)) if isinstance(checked, int) else sorted(checked)
        else:
            ids = own = source.ids(head)
        if not ids and not allow_empty:
            raise invalid_argument(
                "MISSING_FIELD",
                f"no micro-batch was submitted to {head.name} in step {head.step}; skip() closes a step without any",
                field="expected_micro_batches",
            )
        if given is not None:
            return ids
        if self.world_size == 1:
            return own
        if len(own) != source.count(head) or own != list(range(self.rank, len(own) * self.world_size, self.world_size)):
            raise invalid_argument(
                "MISSING_FIELD",
                f"rank {self.rank} has dropped micro-batches of step {head.step}; say which there are",
                field="expected_micro_batches",
                actual=own,
            )
        return list(range(len(own) * self.world_size))

    def _seal(self, expected: list[list[int]], *, listed: bool) -> list[SealResult]:
        """Adds this trainer's part of tied weights' gradients, and seals every head."""
        # Ranks do not know which ids the others have drawn and dropped. If drops are possible (ids were given), the server names
        # them once all ranks have come to the barrier. The seal waits for ids that ranks add after that.
        asks = listed and self.world_size > 1
        if asks:
            for head in self._shared:
                head.step_state(**self._timeout)  # answered when micro-batches abandoned here are discarded
            self._barrier()
        for head, parts in zip(self._shared, self._parts, strict=True):
            self._add_shared_gradient(
                head, parts, expected[self._heads.index(head)], _dropped(head, self._timeout) if asks else set()
            )
        if not asks:
            self._barrier()
        # Every rank asks; the first one seals, and all get the same answer.
        return [
            head.seal(expected_micro_batches=ids, wait=self.world_size > 1, **self._timeout)
            for head, ids in zip(self._heads, expected, strict=True)
        ]

    def _close(self, step: int, rate: float, seals: list[SealResult]) -> StepOutcome:
        """The rest of the step once the heads are sealed."""
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        gradient_factor = self._gradient_factor / scale
        if self._scaler is not None and self._optimizer is not None and any(p.grad is not None for p in self._parameters):
            self._scaler.unscale_(self._optimizer)
            self._unscaled = True
        for head in self._trainer_owned:
            head.pull_gradient(gradient_factor, **self._timeout)
        norms = self._norms_squared(seals, gradient_factor)
        total = math.fsum(norms) if all(map(math.isfinite, norms)) else math.nan
        finite = math.isfinite(total) and not any(seal.non_finite_count for seal in seals)
        # Rank 0 must not close the step before all have their parts of it.
        self._barrier()
        norm = math.sqrt(total) if finite else math.nan
        outcome = StepOutcome(step, finite, rate, norm, 1.0, tuple(seal.totals for seal in seals))
        if not finite:
            if self._scaler is None:
                raise not_finite(step, "; skip() closes the step")
            self._discard()
            self._set_scale(scale * self._scaler.get_backoff_factor())
            grown = getattr(self._scaler, "_growth_tracker", None)
            if isinstance(grown, torch.Tensor):
                grown.zero_()  # steps without overflow since the last one: a scale that is set leaves them as they are
            return outcome
        factor = clip_factor(norm, self._max_grad_norm)
        self._meeting.has_moved = True
        if self.rank == 0:
            self._apply(rate, gradient_factor, norms)
        self._step_body(factor)
        if self.rank == 0:
            for head in self._trainer_owned:
                head.push_weight(**self._timeout)
        self._follow(step)
        return dataclasses.replace(outcome, clip_factor=factor)

    def _add_shared_gradient(self, head: ModuleHead, parts: int, ids: list[int], dropped: set[int]) -> None:
        """The trainer's own part of a tied weight's gradient; appends its ids to the expected ones."""
        base = ids[-1] + 1 if ids else 0
        if self.world_size == 1:  # an id that was dropped is not free: its discard stays
            base = max(base, self._sources[self._heads.index(head)].count(head))
        free = (id_ for id_ in itertools.count(base) if id_ not in dropped)
        added = list(itertools.islice(free, len(self._adding_ranks) * parts))
        if self.rank in self._adding_ranks:
            # The head will multiply it by gradient_factor / scale as everything else, but only the scaler's scale is on it.
            own = added[self.rank * parts : (self.rank + 1) * parts]
            head._push_gradient(own, 1.0 / self._gradient_factor, **self._timeout)
        ids.extend(added)

    def _norms_squared(self, seals: list[SealResult], gradient_factor: float) -> list[float]:
        """The squared norms of the body's gradient, with the weights that it owns, and of each served head's."""
        body = _gradients.norm_squared(self._parameters) if self._body_norm_squared is None else self._body_norm_squared()
        return [body, *self._served_norms(seals, gradient_factor)]

    def _served_norms(self, seals: list[SealResult], gradient_factor: float) -> list[float]:
        pairs = zip(self._heads, seals, strict=True)
        return [seal.gradient_norm_squared * gradient_factor**2 for head, seal in pairs if head in self._served]

    def _apply(self, rate: float, gradient_factor: float, norms: list[float]) -> None:
        for index, head in enumerate(self._served, start=1):
            others = math.fsum(norm for place, norm in enumerate(norms) if place != index)
            head.apply_optimizer_step(
                learning_rate=rate,
                gradient_factor=gradient_factor,
                max_grad_norm=self._max_grad_norm,
                other_grad_norm_squared=others,
                allow_empty=True,  # `step` has refused an empty one
                **self._timeout,
            )

    def _step_body(self, clip_factor: float) -> None:
        _gradients.multiply(self._parameters, clip_factor)
        if self._unscaled:
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self._unscaled = False
        elif self._optimizer is not None:
            # The scaler's step is not used: backward has left no gradients for it, and it would unscale those of `pull_gradient`.
            self._optimizer.step()
        self._forget_gradients()

    def _set_scale(self, scale: float) -> None:
        """Gives the scaler this scale; its unscaled state is forgotten."""
        self._scaler.update(scale)
        self._unscaled = False

    def _discard(self) -> None:
        """Closes the step on all sides with nothing changed."""
        step = self.open_step
        if self.rank == 0:
            try:
                for head in self._heads:
                    head.discard_gradient(**self._timeout)
            except BaseException as error:
                if any(head.step != step for head in self._heads):  # another try would discard the next step of those
                    self._failure = error
                raise
        self._forget_gradients()
        self._follow(step, weights_changed=False)

    def _forget_gradients(self) -> None:
        _gradients.forget(self._parameters)
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        _gradients.forget(head.weight_parameter for head in self._shared if head.weight_parameter is not None)

    def _follow(self, step: int, *, weights_changed: bool = True) -> None:
        """The step is closed, or rank 0 is about to: the next one is open."""
        for head in self._heads:
            head.step = step + 1
        if self._shared and weights_changed:
            self._barrier()
            for head in self._shared:
                head.pull_weight(**self._timeout)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> str:
        """Saves heads and trainer as they are at the beginning of the open step; returns the checkpoint's name.

        The trainer's state first: a head's checkpoint is there only if the state that belongs to it is.
        """
        self._check_sound()
        step = self.open_step
        if self._state is not None and (self.rank == 0 or self._state.every_rank):
            self._state.save(step)
        self._barrier()
        return self._meeting.save(step) if self.rank == 0 else self._meeting.name(step)

    def resume(self, step: int | None = None, *, take: bool = True) -> int:
        """Brings heads and trainer to the newest step that both have, and returns it. Call it first, and after errors.

        In a new run nothing is brought back, and heads that the trainer owns get the weight of their layers. If the server or this
        trainer was restarted, heads at another step than the trainer are set back to the checkpoint of the trainer's step. Every
        head is taken: calls of an earlier process are fenced off from then on, and the open step's contributions are dropped.
        Without `state`, the trainer loads its own state of the step that is returned. Where each rank has its own state, a step
        counts as common if the heads' checkpoint of it exists, because that is written last.

        Args:
            step: the step to go to; from then on this loop passes later states by that it has not saved since. They stay, and to a
                process that is started again they are the newest: remove them. None: the newest one.
            take: False joins the open step of a run whose other trainers continue: one rank that was restarted. Its micro-batches
                are submitted again, and those that had been added before are not added again. The trainer's state of that very step
                must be there.
        Raises:
            FailedPreconditionError: `STEP_MISMATCH`: heads and trainer have no step in common. Heads at their first step count as
                the beginning only if this loop has not trained from there, or has a state of it.
        """
        target = self._resume(step, take=take)
        for head in self._heads:
            head._confirm()
        return target

    def _resume(self, step: int | None, *, take: bool) -> int:
        if take:
            if self.rank == 0:
                target = self._meeting.bring_heads_back(step)
                self._begin_with_own_weights(target)
            self._barrier()
        if not (take and self.rank == 0):
            for head in self._heads:
                head._adopt(head.info(**self._timeout))
            target = self.open_step
            if any(head.step != target for head in self._heads) or step not in (None, target):
                raise self._meeting.nothing_in_common([head.step for head in self._heads], step)
        for head in self._frozen:
            head._adopt(head.info(**self._timeout))
        fresh = self._meeting.load_state(target)
        for head, source in zip(self._heads, self._sources, strict=True):
            source.begin_again(target, None if take else self._attempts(head), head=head)
        for head in self._shared:
            head.pull_weight(**self._timeout)
        self._forget_gradients()
        if self._unscaled:
            # The step that failed had come as far as this; a scaler unscales only once between two updates.
            self._set_scale(self._scaler.get_scale())
        self._failure, self._begun = None, True
        if take and self._every is not None:
            if self.rank == 0:
                self._save_frozen()
            # Some ranks of an earlier process may have saved the beginning and others not: those have loaded it, but all save it.
            if fresh or (self._each_rank and target == self._heads[0].spec.initial_step):
                self.save_checkpoint()
            self._barrier()
        return target

    def _begin_with_own_weights(self, step: int) -> None:
        """At the beginning of a run, a head that was attached to may have the weight of an earlier one: it gets the trainer's."""
        stored = self._begun if self._state is None else self._meeting.has_moved or step in self._state.steps()
        if step == self._heads[0].spec.initial_step and not stored:
            for head in self._trainer_owned:
                head.set_weight(head.weight_parameter, head.bias_parameter, **self._timeout)

    def _attempts(self, head: Head) -> dict[int, int]:
        """The attempts with which a restarted process submits micro-batches of the open step again.

        One that was committed is repeated as it was, and adds nothing; undecided ones of an earlier process are superseded.
        """
        known = head.step_state(**self._timeout).open.micro_batches.values()
        return {entry.micro_batch: entry.attempt + (entry.state != "COMMITTED") for entry in known}

    def _save_frozen(self) -> None:
        """Frozen heads do not change: one checkpoint brings them back after any restart."""
        for head in self._frozen:
            head.save(_FROZEN_CHECKPOINT, overwrite=True, **self._timeout)


def _dropped(head: Head, timeout: dict[str, Any]) -> set[int]:
    """Ids of the open step that were dropped, or will be.

    The result is the same whenever a rank asks: ids that others add meanwhile are neither. It differs if the server comes back in
    between, because each rank repeats its own discards. A rank that asks before may take an id that was dropped, and the step is
    refused.
    """
    known = head.step_state(**timeout).open.micro_batches.items()
    return {id_ for id_, entry in known if entry.state in ("STAGED", "DISCARDED")}


def _alone() -> None:
    """The barrier of a single trainer."""


def _check_owners(
    served: Sequence[Head],
    shared: Sequence[ModuleHead],
    trainer_owned: Sequence[ModuleHead],
    held: Sequence[torch.Tensor],
    body: Sequence[torch.Tensor],
) -> None:
    """Every weight is updated by exactly one optimizer."""
    for head in served:
        if head.spec.optimizer is None:
            raise refused(
                f'{head.name} has no optimizer: create it with optimizer=headwater.AdamW(), or attach it with optimizer="torch"',
                "heads",
            )
    for head in shared:
        if any(parameter is head.weight_parameter or parameter is head.bias_parameter for parameter in (*held, *body)):
            raise refused(
                f"the weight of {head.name} is updated by the head's optimizer: leave it out of the torch optimizer", "optimizer"
            )
    for head in trainer_owned:
        for parameter in (head.weight_parameter, head.bias_parameter):
            if parameter is not None and not any(parameter is other for other in held):
                raise refused(
                    f"{head.name} is owned by the trainer: its weight and bias must be among the torch optimizer's parameters",
                    "optimizer",
                )
