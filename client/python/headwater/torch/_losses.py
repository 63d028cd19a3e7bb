"""Loss modules with the argument names of PyTorch's and Liger's, and their functional forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from headwater import _arrays
from headwater._errors import invalid_argument
from headwater._head import Head
from headwater._terms import JOIN, DivergenceOptions, HardLossOptions, spread
from headwater._types import LossResult, check_factor, check_number
from headwater.torch._autograd import Contribution, Outcome, RemoteLoss, ScalarOutcome, TokenOutcome, in_checkpoint_recompute
from headwater.torch._micro_batches import MicroBatchSource, source_of
from headwater.torch._rows import tensor_of

F = TypeVar("F", bound=Callable[..., Any])


def _outside_graphs(function: F) -> F:
    """`function`, which torch.compile leaves as it is: it asks a server, and keeps count of what it has asked for."""
    try:
        disable = getattr(getattr(torch, "compiler", None), "disable", None)
        if disable is None:
            from torch._dynamo import disable  # as PyTorch 2.0 has it
        outside: F = disable(function)
    except Exception:  # a PyTorch without a compiler, or with a part of one
        return function
    return outside


@dataclasses.dataclass(eq=False, kw_only=True)
class _Settings(HardLossOptions):
    """Arguments that both losses take."""

    weight: Any = None
    reduction: str = "mean"
    loss_scale: float | None = None
    grad_hidden_scale: float = 1.0
    num_items_in_batch: float | None = None
    micro_batch_source: MicroBatchSource | None = None
    timeout_s: float | None = None


@dataclasses.dataclass(eq=False)
class _CrossEntropySettings(_Settings):
    """Arguments of `CrossEntropyLoss`."""

    head: Head


@dataclasses.dataclass(eq=False)
class _JsdSettings(_Settings, DivergenceOptions):
    """Arguments of `JSDLoss`."""

    head: Head
    teacher: Head
    _: dataclasses.KW_ONLY
    temperature: float = 1.0
    teacher_temperature: float | None = None


class _Loss(torch.nn.Module):
    """What both losses share: reduction, scales, ids, and the way into autograd. Has no parameters."""

    def __init__(self, settings: _CrossEntropySettings | _JsdSettings):
        super().__init__()
        head, reduction = settings.head, settings.reduction
        if not isinstance(head, Head):
            raise invalid_argument("INVALID_FIELD", f"head must be a headwater.Head, got {type(head).__name__}", field="head")
        if reduction not in ("mean", "sum", "none"):
            raise invalid_argument(
                "INVALID_FIELD", f'reduction must be "mean", "sum" or "none", got {reduction!r}', field="reduction"
            )
        if reduction == "none" and settings.loss_scale is not None:
            raise invalid_argument(
                "INVALID_COMBINATION",
                'reduction="none" has an upstream gradient for each token, which no single loss_scale declares',
                field="loss_scale",
            )
        self.head = head
        self.reduction = reduction
        self.weight = None if settings.weight is None else tensor_of(settings.weight, "weight")
        self.ignore_index = settings.ignore_index
        self.label_smoothing = settings.label_smoothing
        self.z_loss = settings.z_loss
        self.loss_scale = None if settings.loss_scale is None else check_factor(settings.loss_scale, "loss_scale")
        self.grad_hidden_scale = check_factor(settings.grad_hidden_scale, "grad_hidden_scale")
        self.num_items_in_batch = settings.num_items_in_batch
        self._source = settings.micro_batch_source
        self._timeout_s = settings.timeout_s

    @property
    def micro_batch_source(self) -> MicroBatchSource:
        """Where this loss draws its ids."""
        return source_of(self.head) if self._source is None else self._source

    @property
    def micro_batches(self) -> list[int]:
        """Ids that this process has drawn in the head's open step: `expected_micro_batches` where it is the only trainer."""
        return self.micro_batch_source.ids(self.head)

    def _options(self) -> dict[str, Any]:
        """Options of every call of the head's."""
        return {
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "class_weights": self.weight,
            "timeout_s": self._timeout_s,
        }

    def extra_repr(self) -> str:
        return f"{self.head!r}, reduction={self.reduction!r}, ignore_index={self.ignore_index}"

    def _loss(
        self,
        hidden: torch.Tensor,
        run: Callable[..., LossResult],
        num_items_in_batch: float | None,
        targets: torch.Tensor | None,
        token_weights: torch.Tensor | None,
        class_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs `run(hidden, **keywords of a loss call)` in the mode that autograd asks for."""
        head = self.head
        items = self.num_items_in_batch if num_items_in_batch is None else num_items_in_batch
        if items is not None:
            items = check_number(items, "num_items_in_batch", low=0)
            if self.reduction != "mean":
                raise invalid_argument(
                    "INVALID_COMBINATION",
                    f'num_items_in_batch divides a mean; reduction="{self.reduction}" has none',
                    field="num_items_in_batch",
                )
        outputs: dict[str, Any] = {"outputs": ("token_loss",)} if self.reduction == "none" else {}

        def finish(result: LossResult, **rest: Any) -> Outcome:
            rest = {"contribution": None, "grad_hidden_scale": 1.0, "recomputed": False, **rest}
            if self.reduction == "none":
                losses = torch.from_numpy(np.array(result.token_loss))
                if token_weights is not None:
                    losses = losses * token_weights.detach().float().cpu()
                ignored = None if targets is None else targets.detach() == self.ignore_index
                return TokenOutcome(result, losses, hidden.shape[:-1], ignored, **rest)
            divisor = 1.0 if self.reduction == "sum" else result.target_weight_sum if items is None else items
            return ScalarOutcome(result, divisor, declared_scale=self.loss_scale, **rest)

        rows = hidden.reshape(-1, hidden.shape[-1])
        if items == 0 and self._divisor(rows.shape[0], targets, None if token_weights is None else token_weights.abs(), None):
            raise invalid_argument(
                "INVALID_FIELD",
                "num_items_in_batch is 0, which is right where no token takes part, and this micro-batch has tokens that do; pass "
                "their number over all micro-batches of the step",
                field="num_items_in_batch",
            )
        contributes = torch.is_grad_enabled() and head.spec.trainable
        wants_grad_hidden = torch.is_grad_enabled() and hidden.requires_grad
        if not (contributes or wants_grad_hidden):
            return finish(run(rows, backward=False, **outputs)).value(hidden.device)

        anchor = torch.zeros((), device="cpu", requires_grad=True) if contributes else None
        if in_checkpoint_recompute():
            return RemoteLoss.apply(hidden, anchor, finish(run(rows, backward=False, **outputs), recomputed=True))

        contribution = Contribution(head, self.micro_batch_source, self._timeout_s) if contributes else None
        keywords: dict[str, Any] = {"return_grad_hidden": wants_grad_hidden, **outputs}
        if contribution is not None:
            keywords.update(step=contribution.key.step, micro_batch=contribution.micro_batch, attempt=contribution.attempt)
        if self.loss_scale is not None:
            total = 1.0
            if self.reduction == "mean":
                total = self._divisor(rows.shape[0], targets, token_weights, class_weights) if items is None else items
            keywords.update(
                loss_scale=self.loss_scale / total if total else 0.0, grad_hidden_scale=self.grad_hidden_scale, commit="eager"
            )
        elif contribution is not None:
            # Where other losses have all slots until their backward, the server holds the rows instead of the gradient. To wait for
            # a slot would be to wait for this process's own backward.
            keywords.update(commit="explicit", late_token_factors=self.reduction == "none", allow_held=head.spec.staging_slots > 0)
        try:
            result = run(rows, **keywords)
            if contribution is not None and self.loss_scale is None:
                contribution.staged(result, late=self.reduction == "none")
        except BaseException as error:
            if contribution is not None:
                contribution.failed(error)
            raise
        outcome = finish(result, contribution=contribution, grad_hidden_scale=self.grad_hidden_scale)
        return RemoteLoss.apply(hidden, anchor, outcome)

    def _divisor(
        self, row_count: int, targets: torch.Tensor | None, token_weights: torch.Tensor | None, class_weights: torch.Tensor | None
    ) -> float:
        """The mean's divisor from the arguments alone, in fp64: what the server answers as `target_weight_sum`."""
        weights = torch.ones(row_count, dtype=torch.float64, device="cpu")  # whatever the default device is
        if token_weights is not None:
            weights = token_weights.detach().double().cpu()
        if targets is not None:
            ids = targets.detach().cpu().long()
            valid = ids != self.ignore_index
            weights = weights * valid
            if class_weights is not None:
                weights = weights * class_weights.detach().double().cpu()[ids.clamp(0, class_weights.numel() - 1)]
        return float(weights.sum())


def _flat(values: Any, hidden: torch.Tensor, name: str) -> torch.Tensor | None:
    """(...) beside hidden (..., hidden_size), as (num_tokens,)."""
    if values is None:
        return None
    values = tensor_of(values, name)
    _check_transforms(values, name)
    if values.requires_grad and torch.is_grad_enabled():
        raise invalid_argument(
            "INVALID_COMBINATION",
            f'{name} requires a gradient, but gets none: detach it, or multiply the loss of reduction="none" by it',
            field=name,
        )
    _arrays.check_shape(tuple(values.shape), tuple(hidden.shape[:-1]), name)
    return values.reshape(-1)


def _teacher_rows(hidden: torch.Tensor, teacher_hidden: Any) -> torch.Tensor:
    """(num_tokens, hidden_size of the teacher), beside hidden (..., hidden_size); of what `Head.jsd` takes, too."""
    if not isinstance(teacher_hidden, torch.Tensor):
        teacher_hidden = _arrays.to_torch(_arrays.from_any(teacher_hidden, "teacher_hidden"))
    _check_hidden(teacher_hidden, "teacher_hidden")
    if teacher_hidden.requires_grad and torch.is_grad_enabled():
        raise invalid_argument(
            "INVALID_COMBINATION",
            "teacher_hidden requires a gradient, but the teacher gets none: detach it",
            field="teacher_hidden",
        )
    _arrays.check_shape(tuple(teacher_hidden.shape[:-1]), tuple(hidden.shape[:-1]), "teacher_hidden (without its last dimension)")
    return teacher_hidden.reshape(-1, teacher_hidden.shape[-1])


def _check_hidden(hidden: Any, name: str) -> None:
    if not isinstance(hidden, torch.Tensor) or hidden.dim() < 1:
        raise invalid_argument("INVALID_FIELD", f"{name} must be a torch tensor of shape (..., hidden_size)", field=name)
    _check_transforms(hidden, name)
    _arrays.dense_tensor(hidden, name)


def _check_transforms(values: torch.Tensor, name: str) -> None:
    """The tensor holds values, which a server can be sent, and not what torch.func or forward-mode AD put in their place."""
    functorch = getattr(torch._C, "_functorch", None)
    wrapped = functorch is not None and (functorch.is_gradtrackingtensor(values) or functorch.is_batchedtensor(values))
    if wrapped or torch.autograd.forward_ad.unpack_dual(values).tangent is not None:
        raise invalid_argument(
            "INVALID_COMBINATION",
            f"{name} is under a transform of torch.func (grad, vmap, jvp, ...) or forward-mode AD, which losses of headwater.torch "
            "have none of: use loss.backward() or torch.autograd.grad",
            field=name,
        )


class CrossEntropyLoss(_Loss):
    """Cross entropy of a remote head: `torch.nn.CrossEntropyLoss` applied to `hidden @ head.weight.T`, without the logits.

    With gradients on, and a trainable head, forward takes a staging slot until backward, or the end of the graph (`del loss`).
    Where other losses have them all, the server holds the rows of this one (HELD): a third more work, and one RuntimeWarning for
    each head. `create_head(..., staging_slots=n)` has a slot for each of n losses before one backward. A loss that is only looked
    at belongs under torch.no_grad(). Backward may be run once, without create_graph=True, and
    adds to the head's gradient also where it is torch.autograd.grad or has inputs=. Any upstream gradient is right: a scaled loss,
    a sum of losses, a GradScaler, a division by accumulation steps. torch.compile goes around it: a model that has it inside is
    compiled before and behind it.

    Args:
        head: a `headwater.Head`. `head.step` is the step that contributions go to.
        weight: (vocab_size,) class weights, >= 0, as torch.nn.CrossEntropyLoss has them.
        reduction: "mean" divides by the sum of token weights x class weights of the targets of the valid tokens (their number,
            without weights); 0 valid tokens give 0. "sum". "none" gives a loss for each token, 0 for ignored ones, and backward
            takes any upstream gradient (masks, advantages, sequence means): the server holds the rows until then, and computes the
            head's gradient at backward, a third more work than "mean" and "sum".
        ignore_index: target value of tokens that take no part.
        label_smoothing: in [0, 1).
        z_loss: >= 0, coefficient of lse^2.
        loss_scale: declares the upstream gradient up front: the contribution is added at forward (no staging slot, no second call),
            and backward with any other upstream gradient is an error. None: any upstream gradient.
        grad_hidden_scale: multiplies grad_hidden alone; world_size where the framework averages gradients of the trunk and the loss
            is divided by the tokens of all ranks. docs/concepts.md has the table.
        num_items_in_batch: divisor of "mean" instead of this micro-batch's own, >= 0; also an argument of each call. 0 is for a
            step in which no token takes part: the loss is 0.
        micro_batch_source: where ids come from. None: one source for each head, with torch.distributed's rank and world size.
        timeout_s: bound of each call, in seconds. None: the client's.
    """

    @spread(_CrossEntropySettings)
    def __init__(self, settings: _CrossEntropySettings):
        super().__init__(settings)

    @_outside_graphs
    def forward(
        self, hidden: torch.Tensor, targets: Any, *, token_weights: Any = None, num_items_in_batch: float | None = None
    ) -> torch.Tensor:
        """The loss, float32 on `hidden`'s device: a scalar, or (...) with reduction="none", token weights included.

        Args:
            hidden: (..., hidden_size), float32, float16 or bfloat16, after the model's final norm.
            targets: (...) vocabulary ids or `ignore_index`, aligned with `hidden` (nothing is shifted).
            token_weights: (...) finite, any sign.
            num_items_in_batch: divisor of "mean" for this call.
        """
        _check_hidden(hidden, "hidden")
        flat_targets = _flat(targets, hidden, "targets")
        flat_weights = _flat(token_weights, hidden, "token_weights")

        def run(rows: torch.Tensor, **keywords: Any) -> LossResult:
            return self.head.cross_entropy(
                rows,
                flat_targets,
                token_weights=flat_weights,
                **self._options(),
                **keywords,
            )

        return self._loss(hidden, run, num_items_in_batch, flat_targets, flat_weights, self.weight)


class JSDLoss(_Loss):
    """Generalized Jensen-Shannon divergence to a teacher's remote head over the full vocabulary; see `Head.jsd` for the formula.

    Gradients go to `hidden` and the student's head, never to the teacher. Everything else is as in `CrossEntropyLoss`.

    Args:
        head: the student's head.
        teacher: the teacher's head, of the same client.
        beta: in [0, 1]; 0 is KL(teacher || student), 1 is KL(student || teacher).
        temperature: > 0, of the student, and of the teacher unless `teacher_temperature` is given. No factor of its square.
        hard_loss_weight: in [0, 1], share of the cross entropy with `targets`.
        label_smoothing, z_loss, weight: options of that cross entropy.
        truncate_to_common: allow vocabularies of different sizes.
    "mean" divides by the sum of token weights of the valid tokens (times class weights of the targets, if there are any).
    """

    @spread(_JsdSettings)
    def __init__(self, settings: _JsdSettings):
        super().__init__(settings)
        self.teacher = settings.teacher
        temperature = settings.temperature
        self._divergence = {
            "beta": settings.beta,
            "student_temperature": temperature,
            "teacher_temperature": temperature if settings.teacher_temperature is None else settings.teacher_temperature,
            "hard_loss_weight": settings.hard_loss_weight,
            "truncate_to_common": settings.truncate_to_common,
        }

    @_outside_graphs
    def forward(
        self,
        hidden: torch.Tensor,
        teacher_hidden: Any,
        targets: Any = None,
        *,
        token_weights: Any = None,
        num_items_in_batch: float | None = None,
        join_key: str | None = None,
        total_rows: int | None = None,
        row_indices: Any = None,
        teacher_dtype: Any = None,
    ) -> torch.Tensor:
        """The divergence, float32 on `hidden`'s device: a scalar, or (...) with reduction="none", token weights included.

        Args:
            hidden: (..., hidden_size) of the student.
            teacher_hidden: (..., hidden_size of the teacher), a tensor without gradient or an array (numpy.memmap, ml_dtypes, ...);
                or `headwater.JOIN`: another stream brings them.
            targets: (...) for the hard loss, and for `ignore_index`.
            token_weights: (...) finite, any sign.
            num_items_in_batch: divisor of "mean" for this call.
            join_key, total_rows, row_indices, teacher_dtype: with JOIN, as in `Head.jsd`; row_indices is (...), one for each token.
                Activation checkpointing would ask for the rows twice: keep the loss out of what is computed again.
        """
        _check_hidden(hidden, "hidden")
        if teacher_hidden is not JOIN:
            teacher_hidden = _teacher_rows(hidden, teacher_hidden)
        flat_targets = _flat(targets, hidden, "targets")
        flat_weights = _flat(token_weights, hidden, "token_weights")
        join = {
            "join_key": join_key,
            "total_rows": total_rows,
            "row_indices": _flat(row_indices, hidden, "row_indices"),
            "teacher_dtype": teacher_dtype,
        }

        def run(rows: torch.Tensor, **keywords: Any) -> LossResult:
            return self.head.jsd(
                rows,
                self.teacher,
                teacher_hidden,
                **join,
                targets=flat_targets,
                token_weights=flat_weights,
                **self._divergence,
                **self._options(),
                **keywords,
            )

        return self._loss(hidden, run, num_items_in_batch, flat_targets, flat_weights, self.weight)


@_outside_graphs
def cross_entropy(head: Head, hidden: torch.Tensor, targets: Any, *, token_weights: Any = None, **options: Any) -> torch.Tensor:
    """Functional form of `CrossEntropyLoss`: `options` are its arguments."""
    return CrossEntropyLoss(head, **options)(hidden, targets, token_weights=token_weights)


@_outside_graphs
def jsd(
    head: Head,
    hidden: torch.Tensor,
    teacher: Head,
    teacher_hidden: Any,
    targets: Any = None,
    *,
    token_weights: Any = None,
    join_key: str | None = None,
    total_rows: int | None = None,
    row_indices: Any = None,
    teacher_dtype: Any = None,
    **options: Any,
) -> torch.Tensor:
    """Functional form of `JSDLoss`: `options` are its arguments."""
    return JSDLoss(head, teacher, **options)(
        hidden,
        teacher_hidden,
        targets,
        token_weights=token_weights,
        join_key=join_key,
        total_rows=total_rows,
        row_indices=row_indices,
        teacher_dtype=teacher_dtype,
    )
