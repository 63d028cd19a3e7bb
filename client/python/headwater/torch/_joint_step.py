"""Steps of heads that close together with those of a torch optimizer which a framework's trainer calls."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from headwater._clipping import clip_factor, not_finite
from headwater._errors import FailedPreconditionError, HeadwaterError, NotFoundError, invalid_argument, refused
from headwater._head import Head
from headwater._types import SealResult, check_max_grad_norm
from headwater.torch import _gradients
from headwater.torch._remote_head import RemoteHead
from headwater.torch._training_loop import TrainingLoop


def only_makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step makes an optimizer's state alone: torch.distributed.checkpoint makes it of zeros, at a rate of 0."""
    if any(float(group.get("lr", 1.0)) != 0 for group in optimizer.param_groups):
        return False
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None]
    return not any(bool((grad.to_local() if hasattr(grad, "to_local") else grad).any()) for grad in gradients)


class JointStep:
    """Closes the steps of heads when the optimizer of a framework steps; a body and its heads step together, or none of them.

        joint = JointStep([remote], optimizer, parameters=model.parameters(), gradient_factor=1 / world_size)
        joint.begin(step)
        while ...:
            losses, backward                                  # remote.loss_fn, remote.count_loss()
            norm = joint.clip(max_norm, body_norm)            # instead of clipping the body's gradients
            optimizer.step()                                  # its hooks close the heads' steps
            joint.settle()

    `clip` seals the heads, so that their gradients are complete. The optimizer's pre hook applies the heads' optimizers with the
    learning rate of its group. If the server cannot, the exception comes before the body has moved. Its post hook sends the weights
    that the optimizer owns. A GradScaler that skips the step calls neither: `settle` discards the heads' gradients then.

    Heads that are frozen have no steps: that their loss is called is all that is looked at.

    Args:
        heads: of this trainer.
        optimizer: the torch optimizer, or a framework's wrapper around it.
        parameters: of the body, whose gradients are clipped. None: those of the optimizer.
        scaler: the framework's torch.amp.GradScaler, or None.
        gradient_factor: multiplies the heads' gradients: 1 / world_size where the framework averages over ranks.

    Attributes:
        steps_applied: number of steps that were applied.
        skipped: number of steps that were discarded, for a GradScaler found an overflow.
        last_norm: norm of the last step's gradients, of body and heads; None before the first `clip`.
    """

    def __init__(
        self,
        heads: Sequence[RemoteHead],
        optimizer: torch.optim.Optimizer,
        *,
        parameters: Iterable[torch.Tensor] | None = None,
        scaler: Any = None,
        gradient_factor: float = 1.0,
    ):
        self._heads = list(heads)
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner
        self._optimizer = optimizer
        self._scaler = scaler if scaler is not None and getattr(scaler, "is_enabled", lambda: True)() else None
        self._gradient_factor = gradient_factor
        self._trained = [remote for remote in self._heads if remote.trained]
        self._parameters = None if parameters is None else list(parameters)
        self._loop: TrainingLoop | None = None
        self._seals: list[SealResult] | None = None  # of the step that is about to close
        self._step = 0  # its number
        self._offset = 0  # a head's step, less the trainer's
        self._is_prepared = False
        self._scale = 1.0
        self._max_grad_norm: float | None = None
        self._body_norm_squared = 0.0
        self._losses = self._count_losses()
        self.steps_applied = self.skipped = 0
        self.last_norm: float | None = None
        self._check_groups()
        self._hooks = self._register_hooks()

    def _register_hooks(self) -> list[Any]:
        return [
            self._optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            self._optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    def _check_groups(self) -> None:
        if isinstance(self._optimizer, torch.optim.LBFGS):
            raise refused("LBFGS computes several losses in a step: a head has one", "optimizer")
        groups = self._optimizer.param_groups
        for remote in self._trained:
            group = remote.config.param_group
            if group is not None and not 0 <= group < len(groups):
                raise invalid_argument(
                    "INVALID_FIELD", f"param_group is {group}, but the optimizer has {len(groups)} groups", field="param_group"
                )
            if group is None and remote.served and len({float(group["lr"]) for group in groups}) > 1:
                raise refused(
                    "the optimizer's groups have different learning rates: pass param_group= of the one whose rate the head has",
                    "param_group",
                )

    def close(self) -> None:
        """Takes the hooks off the optimizer; a step that was sealed and not closed is discarded."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._seals, self._is_prepared = None, False

    def _count_losses(self) -> int:
        return sum(remote.losses for remote in self._heads)

    # ---- the end of a step ------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Seals the heads, and brings the gradients of weights that the optimizer owns. Idempotent.

        Under a GradScaler it must come before the gradients are unscaled: an overflow of a head is put among the body's there.

        Raises:
            FailedPreconditionError: no loss was computed since the last step. `NON_FINITE_GRADIENT`, without a scaler.
        """
        if self._is_prepared:
            return
        self._check_losses()
        self._is_prepared = True
        if self._loop is None:
            return
        loop = self._loop
        self._scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        expected = [loop._expected(index, None, allow_empty=False) for index in range(len(loop._heads))]
        self._step = loop.open_step
        self._seals = loop._seal(expected, listed=False)
        self._max_grad_norm, self._body_norm_squared = None, 0.0
        for head in loop._trainer_owned:
            # Its gradient has the scaler's scale on it, as the body's has.
            head.pull_gradient(self._gradient_factor, **loop._timeout)
        loop._barrier()  # rank 0 must not close the step before all have their parts of it
        if not self._seals_are_finite():
            self._overflow()

    def _seals_are_finite(self) -> bool:
        return not any(seal.non_finite_count or not math.isfinite(seal.gradient_norm_squared) for seal in self._seals or ())

    def _overflow(self) -> None:
        if self._scaler is None:
            raise self._not_finite()
        # The scaler finds it where it looks: in the gradients that it unscales.
        gradients = (parameter.grad for parameter in self._body() if parameter.grad is not None)
        gradient = next(gradients, None)
        if gradient is None:
            raise self._not_finite()
        gradient.fill_(math.inf)

    def _not_finite(self) -> HeadwaterError:
        return not_finite(self._trained[0].head.step, "")

    def _check_losses(self) -> None:
        if self._count_losses() == self._losses:
            names = ", ".join(remote.head.name for remote in self._heads)
            raise FailedPreconditionError(
                f"the optimizer is about to step, but no loss of {names} was computed since its last step: something else computes "
                "the loss (a compute_loss of your own, a fused loss that replaced the model's forward, a batch without labels)",
                reason="MISSING_FIELD",
                metadata={"field": "loss"},
            )
        self._losses = self._count_losses()

    def _body(self) -> list[torch.Tensor]:
        if self._parameters is not None:
            return self._parameters
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def clip(self, max_norm: float | None, body_norm: Callable[[], Any]) -> float:
        """Clips the gradients of body and heads by their norm together, and returns it as it was before.

        Args:
            max_norm: >= 0. None, 0, inf: no clipping.
            body_norm: returns the norm of the body's gradients over all ranks, unscaled, and changes nothing but to unscale them.
        Raises:
            FailedPreconditionError: as `prepare`.
        """
        self.prepare()
        body = float(body_norm())
        factor = self._gradient_factor / self._scale
        served = self._served_norms(factor)
        norm = math.sqrt(math.fsum([body**2, *served])) if math.isfinite(body) else math.nan
        self.last_norm = norm
        if not math.isfinite(norm):
            if self._scaler is None and self._loop is not None:
                raise self._not_finite()
            return norm
        self._max_grad_norm, self._body_norm_squared = check_max_grad_norm(max_norm), body**2
        if self._max_grad_norm is not None:
            _gradients.multiply(self._body(), clip_factor(norm, self._max_grad_norm))
        return norm

    def _served_norms(self, factor: float) -> list[float]:
        if self._loop is None or self._seals is None:
            return []
        return self._loop._served_norms(self._seals, factor)

    def _before_step(self) -> None:
        if not self._hooks:
            return
        if not self._is_prepared and self._count_losses() == self._losses and only_makes_state(self._optimizer):
            return
        self.prepare()
        if self._loop is None or self._overflow_found():
            return
        factor = self._gradient_factor / self._scale
        if self._loop.rank == 0:
            self._loop._max_grad_norm = self._max_grad_norm
            self._loop._apply(self._learning_rate(), factor, [self._body_norm_squared, *self._served_norms(factor)])

    def _learning_rate(self) -> float:
        groups = self._optimizer.param_groups
        rates = {float(groups[remote.config.param_group or 0]["lr"]) for remote in self._trained if remote.served}
        if len(rates) > 1:
            raise refused("heads of one trainer have one param_group", "param_group")
        return rates.pop() if rates else 0.0

    def _overflow_found(self) -> bool:
        """A fused optimizer is called although the scaler has found an overflow, and looks itself."""
        found = getattr(self._optimizer, "found_inf", None)
        return found is not None and bool(found > 0)

    def _after_step(self) -> None:
        if self._overflow_found():
            self.settle()
            return
        self._is_prepared = False
        if self._loop is None or self._seals is None or not self._hooks:
            return
        loop = self._loop
        if loop.rank == 0:
            for head in loop._trainer_owned:
                head.push_weight(**loop._timeout)
        loop._follow(self._step)
        self._seals = None
        self.steps_applied += 1

    def settle(self) -> None:
        """Discards the heads' gradients if they were sealed, and the optimizer has not stepped."""
        self._is_prepared = False
        if self._seals is None or self._loop is None:
            return
        self._seals = None
        self._loop._discard()
        self.skipped += 1

    # ---- where training begins, and checkpoints ---------------------------------------------------------------------

    def begin(self, step: int | None = None) -> None:
        """Brings the heads to where the trainer is, whose own state is loaded. Call it first, and whenever the training begins.

        A head that the server trains is taken at this step, or restored from its checkpoint of it. After an earlier training in
        this process, it continues from there, with its optimizer's state if the torch optimizer is the same one. Where the
        optimizer owns the weight, the head is given the model's.

        Args:
            step: number of steps that the trainer has made. None: the heads stand where they should.
        Raises:
            StepMismatchError: a head is at another step, and has no checkpoint of this one.
        """
        goes_on = step == 0 and all(remote.has_trained for remote in self._trained)
        for remote in self._trained:
            if goes_on and remote.served and remote.optimizer is not self._optimizer:
                remote.recreate()
            remote.optimizer = self._optimizer
        if self._trained:
            heads: list[Head] = [remote.head for remote in self._trained]
            self._loop = TrainingLoop(heads, self._optimizer, parameters=self._body(), gradient_factor=self._gradient_factor)
        self._bring_all(lambda remote: self._bring(remote, None if goes_on else step))
        for remote in self._trained:
            remote.head._confirm()
        self._offset = 0 if self._loop is None or step is None else self._loop.open_step - step
        self._seals, self._is_prepared = None, False
        self._losses = self._count_losses()

    def _bring_all(self, bring: Callable[[RemoteHead], Any]) -> None:
        """Rank 0 brings each head to a step, and the other ranks adopt it."""
        if self._loop is None:
            return
        if self._loop.rank == 0:
            for remote in self._trained:
                bring(remote)
        self._loop._barrier()
        if self._loop.rank:
            for remote in self._trained:
                remote.head._adopt(remote.head.info())

    def _bring(self, remote: RemoteHead, step: int | None) -> None:
        head = remote.head
        if not remote.served:
            head.take()
            remote.push_weight()  # the framework may have loaded a checkpoint since the head was attached
            return
        info = head.info()
        if step is None or (info.open_step == step and info.state in ("READY", "RESTORED")):
            was_current = remote.is_current
            head.take()
            remote._layer_has = (head.epoch, head.step) if was_current else None
            return
        head._adopt(info)
        if not self._restored(remote, step):
            head._check_step(step, head._timeout(None))  # says where it stands, and which checkpoints it has

    @staticmethod
    def _restored(remote: RemoteHead, step: int) -> bool:
        """Restores the head's checkpoint of a step; False if there is none."""
        try:
            remote.head.restore(remote.config.checkpoint_name.format(step=step))
        except HeadwaterError as error:
            if not isinstance(error, NotFoundError) and error.reason != "STORAGE_NOT_CONFIGURED":
                raise
            return False
        return True

    def save(self, step: int) -> None:
        """Writes the heads' checkpoints. Before the framework's own, so that each of those has its counterpart.

        A head whose weight the optimizer owns is saved where the server has a folder: a client that replays starts from there.

        Raises:
            FailedPreconditionError: a head is at another step; `STORAGE_NOT_CONFIGURED`: the server has no folder for checkpoints.
        """
        self.check_step(step)
        if self._loop is not None and self._loop.rank == 0:
            for remote in self._trained:
                self._save(remote, step)

    @staticmethod
    def _save(remote: RemoteHead, step: int) -> None:
        try:
            remote.head.save(remote.config.checkpoint_name.format(step=step), overwrite=True)
        except HeadwaterError as error:
            if remote.served or error.reason != "STORAGE_NOT_CONFIGURED":
                raise

    def check_step(self, step: int) -> None:
        """Raises an error where a head that the server trains has not closed as many steps as the trainer."""
        for remote in self._trained:
            if remote.served and remote.head.step != step + self._offset:
                raise FailedPreconditionError(
                    f"the trainer is at step {step}, {remote.head.name} at {(remote.head.step or 0) - self._offset}: something "
                    "else closes its steps, or the trainer steps another optimizer",
                    reason="STEP_MISMATCH",
                    metadata={"openStep": str(remote.head.step), "step": str(step)},
                )

    def restore(self, step: int) -> None:
        """Gives the heads the state of the framework's checkpoint: their own of the same step, or else the weight in the model."""
        self._bring_all(lambda remote: (remote.served and self._restored(remote, step)) or remote.push_weight())
        for remote in self._trained:
            remote._layer_has = remote.head.epoch, remote.head.step


class WrappedStep(JointStep):
    """A `JointStep` for an engine that clips, steps and clears the gradients itself: methods of it are called from within ours.

    An overflow of a head is found in the norm that the engine is given: it has no gradients to put it among.
    """

    def _overflow(self) -> None:
        if self._scaler is None:
            raise self._not_finite()


class Wrapped:
    """A method of one object, or a function of a module, that another one is called around, until `remove`."""

    def __init__(self, target: Any, name: str, around: Callable[..., Any]):
        original = getattr(target, name)
        self._target, self._name = target, name
        self._own = vars(target).get(name)  # None: the method is its class's

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(target, name, wrapped)

    def remove(self) -> None:
        if self._own is None:
            vars(self._target).pop(self._name, None)
        else:
            setattr(self._target, self._name, self._own)
