"""Loss modules with the argument names of PyTorch's and Liger's, and their functional forms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from headwater import _arrays
from headwater._errors import MicroBatchConflictError, invalid_argument, must_be, refused
from headwater._head import Head
from headwater._loss._contributions import Contribution, found_no_slot, warn_of_held
from headwater._loss._micro_batches import MicroBatchSource, source_of
from headwater._loss._requests import TOKEN_OUTPUTS, check_choice
from headwater._loss._terms import (
    JOIN,
    JOIN_OPTIONS,
    DivergenceOptions,
    HardLossOptions,
    PlainCrossEntropyOptions,
    TopKTeacher,
    spread,
)
from headwater._types import LossResult, check_factor, check_integer, check_number
from headwater.torch._autograd import (
    Outcome,
    RecomputedOutcome,
    RemoteLoss,
    ScalarOutcome,
    SecondCall,
    TokenOutcome,
    TwoCallOutcome,
    in_checkpoint_recompute,
)
from headwater.torch._rows import tensor_of

F = TypeVar("F", bound=Callable[..., Any])


def _outside_graphs(function: F) -> F:
    """`function`, which torch.compile leaves as it is: it asks a server, and counts its calls."""
    try:
        disable = getattr(getattr(torch, "compiler", None), "disable", None)
        if disable is None:
            from torch._dynamo import disable  # as PyTorch 2.0 has it
        outside: F = disable(function)
    except Exception:  # a PyTorch without a compiler, or with a part of one
        return function
    return outside


class LossOutputs(NamedTuple):
    """The result of a loss with `outputs=` or `differentiable=`; fields that were not asked for are None.

    Per-token fields have the shape (...) of the targets, and are float32 unless they say otherwise. Ignored tokens have 0.
    """

    loss: torch.Tensor  # as without outputs
    token_loss: torch.Tensor | None = None  # nats, before token weights
    lse: torch.Tensor | None = None  # log-sum-exp of the logits
    target_log_probability: torch.Tensor | None = None  # without smoothing and weights
    entropy: torch.Tensor | None = None  # nats
    argmax: torch.Tensor | None = None  # int64 vocabulary id; -1 for ignored tokens
    mean_logits: torch.Tensor | None = None  # mean of the logits over the valid vocabulary
    log_sum_sq_probs: torch.Tensor | None = None  # ln of the sum of squared probabilities
    soft_loss: torch.Tensor | None = None  # the divergence's part of `loss`, a scalar
    hard_loss: torch.Tensor | None = None  # the cross entropy's part without z-loss, a scalar
    z_loss: torch.Tensor | None = None  # the z-loss's part, a scalar


_PARTS = ("soft_loss", "hard_loss", "z_loss")
_DIFFERENTIABLE = ("loss", "entropy", "lse")


@dataclasses.dataclass(eq=False, kw_only=True)
class _Settings(HardLossOptions):
    """Arguments that both losses take."""

    weight: Any = None
    reduction: str = "mean"
    loss_scale: float | None = None
    grad_hidden_scale: float = 1.0
    gradient_resolution: float = 0.0
    num_items_in_batch: float | None = None
    outputs: Sequence[str] = ()
    micro_batch_source: MicroBatchSource | None = None
    timeout_s: float | None = None


@dataclasses.dataclass(eq=False)
class _CrossEntropySettings(_Settings, PlainCrossEntropyOptions):
    """Arguments of `CrossEntropyLoss`."""

    head: Head
    _: dataclasses.KW_ONLY
    z_loss_divisor: str = "weights"
    shift: int = 0
    differentiable: Sequence[str] = ("loss",)


@dataclasses.dataclass(eq=False)
class _JsdSettings(_Settings, DivergenceOptions):
    """Arguments of `JSDLoss`."""

    head: Head
    teacher: Head | None = None
    _: dataclasses.KW_ONLY
    temperature: float = 1.0
    teacher_temperature: float | None = None


@dataclasses.dataclass(slots=True)
class _Call:
    """One forward: the computation and its rows."""

    hidden: torch.Tensor  # (..., hidden_size)
    targets: torch.Tensor | None  # (num_tokens,)
    token_weights: torch.Tensor | None  # (num_tokens,)
    class_weights: torch.Tensor | None  # in the mean's divisor
    ignore_index: int
    teacher: Head | None = None
    teacher_hidden: torch.Tensor | None = None
    comes_once: bool = False  # whether rows of another stream take part, which one call alone gets
    run: Callable[..., LossResult] = dataclasses.field(init=False)  # `run(rows, token_weights=..., **keywords of a loss call)`
    rows: torch.Tensor = dataclasses.field(init=False)  # (num_tokens, hidden_size)
    ignored: torch.Tensor | None = dataclasses.field(init=False)  # (num_tokens,) bool; None: no token is ignored
    items: float | None = None  # the mean's divisor if the caller has named it
    contribution: Contribution | None = None  # its contribution to the head's step
    wants_grad_hidden: bool = False

    def __post_init__(self) -> None:
        self.rows = self.hidden.reshape(-1, self.hidden.shape[-1])
        self.ignored = None if self.targets is None else self.targets.detach() == self.ignore_index


class _Loss(torch.nn.Module):
    """The common part of both losses: reduction, scales, outputs, ids, and the way into autograd. Has no parameters."""

    differentiable: tuple[str, ...] = ("loss",)
    ignore_index: int
    z_loss: float
    _loss_options: ClassVar[type] = HardLossOptions  # each is an attribute, and goes into every call of the head's

    def __init__(self, settings: _CrossEntropySettings | _JsdSettings):
        super().__init__()
        head, reduction = settings.head, settings.reduction
        if not isinstance(head, Head):
            raise must_be("head", "a headwater.Head", type(head))
        check_choice(reduction, "reduction", ("mean", "sum", "none"))
        if reduction == "none" and settings.loss_scale is not None:
            raise refused(
                'reduction="none" has an upstream gradient for each token, which no single loss_scale declares', "loss_scale"
            )
        self.head = head
        self.reduction = reduction
        self.weight = None if settings.weight is None else tensor_of(settings.weight, "weight")
        for option in dataclasses.fields(self._loss_options):
            setattr(self, option.name, getattr(settings, option.name))
        self.loss_scale = None if settings.loss_scale is None else check_factor(settings.loss_scale, "loss_scale")
        self.grad_hidden_scale = check_factor(settings.grad_hidden_scale, "grad_hidden_scale")
        self.gradient_resolution = check_number(settings.gradient_resolution, "gradient_resolution")
        if self.gradient_resolution != 0 and not head.spec.trainable:
            raise refused("gradient_resolution is for heads that are trained; this one is frozen", "gradient_resolution")
        self.num_items_in_batch = settings.num_items_in_batch
        self.outputs = _names(settings.outputs, "outputs", (*TOKEN_OUTPUTS, *_PARTS))
        if reduction == "none" and (parts := [name for name in self.outputs if name in _PARTS]):
            raise refused(
                f'outputs: {parts[0]} is a part of a sum or mean; with reduction="none" there are "token_loss" and "lse"', "outputs"
            )
        self._source = settings.micro_batch_source
        self._timeout_s = settings.timeout_s
        self._had_vector = False  # whether an upstream gradient was no single number; the next ones will not be, either

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
            **{option.name: getattr(self, option.name) for option in dataclasses.fields(self._loss_options)},
            "class_weights": self.weight,
            "timeout_s": self._timeout_s,
        }

    def _call_of(self, hidden: torch.Tensor, targets: Any, token_weights: Any) -> _Call:
        """The computation of these rows, still without its `run`."""
        _check_hidden(hidden, "hidden")
        flat_targets, flat_weights = _flat(targets, hidden, "targets"), _flat(token_weights, hidden, "token_weights")
        return _Call(hidden, flat_targets, flat_weights, self.weight, self.ignore_index)

    def extra_repr(self) -> str:
        return f"{self.head!r}, reduction={self.reduction!r}, ignore_index={self.ignore_index}"

    def _loss(self, call: _Call, num_items_in_batch: float | None) -> torch.Tensor | LossOutputs:
        """Makes the call in the mode that autograd asks for."""
        call.items = self._items(call, num_items_in_batch)
        contributes = torch.is_grad_enabled() and self.head.spec.trainable
        call.wants_grad_hidden = torch.is_grad_enabled() and call.hidden.requires_grad
        asked = [name for name in TOKEN_OUTPUTS if name in {*self.outputs, *self.differentiable}]
        if self.reduction == "none":
            asked = list(dict.fromkeys((*asked, "token_loss")))
        run = functools.partial(call.run, call.rows, outputs=asked)
        outcome: Outcome | None = None
        if not (contributes or call.wants_grad_hidden):
            result = run(token_weights=call.token_weights, backward=False)
        elif in_checkpoint_recompute():
            result = run(token_weights=call.token_weights, backward=False)
            outcome = RecomputedOutcome()
        else:
            call.contribution = Contribution(self.head, self.micro_batch_source, self._timeout_s) if contributes else None
            try:
                result, outcome = self._with_gradients(call, run)
            except BaseException:
                if call.contribution is not None:
                    call.contribution.drop()
                raise
        values = self._values(result, call)
        if outcome is not None:
            anchor = torch.zeros((), device="cpu", requires_grad=True) if contributes else None
            tracked = tuple(values[name] for name in self.differentiable)
            values.update(zip(self.differentiable, RemoteLoss.apply(call.hidden, anchor, outcome, tracked), strict=True))
        if not self.outputs and self.differentiable == ("loss",):
            return values["loss"]
        return LossOutputs(**values)

    def _items(self, call: _Call, num_items_in_batch: float | None) -> float | None:
        """The mean's divisor if the caller has named it."""
        items = self.num_items_in_batch if num_items_in_batch is None else num_items_in_batch
        if items is None:
            return None
        items = check_number(items, "num_items_in_batch", low=0)
        if self.reduction != "mean":
            raise refused(f'num_items_in_batch divides a mean; reduction="{self.reduction}" has none', "num_items_in_batch")
        if items == 0 and _weight_sum(call, None if call.token_weights is None else call.token_weights.abs(), None):
            raise invalid_argument(
                "INVALID_FIELD",
                "num_items_in_batch is 0, which is right where no token takes part, and this micro-batch has tokens that do; pass "
                "their number over all micro-batches of the step",
                field="num_items_in_batch",
            )
        return items

    def _takes_two_calls(self, call: _Call) -> bool:
        if self.differentiable != ("loss",):
            return True
        return (
            self.reduction == "none"
            and call.contribution is not None
            and not call.comes_once
            and (self._had_vector or not self.head.spec.staging_slots)
        )

    def _with_gradients(self, call: _Call, run: Callable[..., LossResult]) -> tuple[LossResult, Outcome]:
        """Computes losses and outputs, and how backward differentiates them."""
        if not self._takes_two_calls(call):
            try:
                return self._in_one_call(call, run)
            except MicroBatchConflictError:
                # A process that is gone may have added it by a second call. So does this one, and adds nothing.
                if self.reduction != "none" or call.comes_once:
                    raise
        result = run(token_weights=call.token_weights, backward=False)
        return result, TwoCallOutcome(
            self._second_call(call),
            self.differentiable,
            None if self.reduction == "none" else _inverse(self._divisor(result, call)),
            call.ignored,
        )

    def _second_call(self, call: _Call) -> SecondCall:
        keywords = {
            "return_grad_hidden": call.wants_grad_hidden,
            "grad_hidden_scale": self.grad_hidden_scale,
            "gradient_resolution": self.gradient_resolution,
        }
        others = [] if call.teacher_hidden is None else [call.teacher_hidden]
        heads = [self.head] if call.teacher is None else [self.head, call.teacher]
        return SecondCall(call.contribution, call.run, call.rows, call.token_weights, others, heads, keywords)

    def _in_one_call(self, call: _Call, run: Callable[..., LossResult]) -> tuple[LossResult, Outcome]:
        """Computes gradients at forward."""
        contribution, items = call.contribution, call.items
        late = self.reduction == "none" and call.comes_once
        keywords: dict[str, Any] = {
            "token_weights": call.token_weights,
            "return_grad_hidden": call.wants_grad_hidden,
            "gradient_resolution": self.gradient_resolution,
        }
        if self.loss_scale is not None:
            total = 1.0
            if self.reduction == "mean":
                total = _weight_sum(call, call.token_weights, call.class_weights) if items is None else items
            keywords.update(loss_scale=self.loss_scale * _inverse(total), grad_hidden_scale=self.grad_hidden_scale, commit="eager")
        elif contribution is not None:
            # Where other losses have all slots until their backward, the server holds the rows instead of the gradient. To wait for
            # a slot would be to wait for this process's own backward.
            keywords.update(commit="explicit", late_token_factors=late, allow_held=self.head.spec.staging_slots > 0)
        run = functools.partial(run, **keywords)
        result = run() if contribution is None else contribution.submit(run)
        if contribution is not None and self.loss_scale is not None:
            contribution.added()
        elif contribution is not None:
            contribution.staged(result)
            if not late and found_no_slot(self.head, result.form):
                if self.reduction == "none":
                    self._had_vector = True  # two calls need no slot
                else:
                    warn_of_held(self.head)
        if self.reduction != "none":
            factor = _inverse(self._divisor(result, call))
            return result, ScalarOutcome(result.grad_hidden, contribution, self.grad_hidden_scale, factor, self.loss_scale)
        has_second = contribution is not None and not late
        second_call = self._second_call(call) if has_second else None
        on_vector = functools.partial(setattr, self, "_had_vector", True)
        return result, TokenOutcome(result.grad_hidden, contribution, self.grad_hidden_scale, call.ignored, second_call, on_vector)

    def _divisor(self, result: LossResult, call: _Call) -> float:
        """The divisor of a sum or a mean."""
        return 1.0 if self.reduction == "sum" else result.target_weight_sum if call.items is None else call.items

    def _values(self, result: LossResult, call: _Call) -> dict[str, torch.Tensor]:
        """The loss and the outputs that were asked for, without a graph."""
        shape, device = call.hidden.shape[:-1], call.hidden.device
        values: dict[str, torch.Tensor] = {}
        for name in TOKEN_OUTPUTS:
            if name in self.outputs or name in self.differentiable:
                values[name] = torch.from_numpy(np.array(getattr(result, name))).reshape(shape).to(device)
        if "argmax" in values:
            values["argmax"] = values["argmax"].long()
        if self.reduction == "none":
            losses = torch.from_numpy(np.array(result.token_loss))
            if call.token_weights is not None:
                losses = losses * call.token_weights.detach().float().cpu()
            return {"loss": losses.reshape(shape).to(device), **values}
        divisor = self._divisor(result, call)
        for name in ("loss", *(name for name in _PARTS if name in self.outputs)):
            value = getattr(result, f"{name}_sum") / divisor if divisor else 0.0
            values[name] = torch.tensor(value, dtype=torch.float32, device=device)
        return values


def _inverse(divisor: float) -> float:
    """No valid token: loss and gradients are 0, not 0 / 0."""
    return 1.0 / divisor if divisor else 0.0


def _names(names: Any, argument: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Names, each once, all of them known."""
    names = (names,) if isinstance(names, str) else tuple(names)
    return tuple(dict.fromkeys(check_choice(name, argument, known) for name in names))


def _weight_sum(call: _Call, token_weights: torch.Tensor | None, class_weights: torch.Tensor | None) -> float:
    """Sum over valid tokens from the arguments alone, in fp64, equal to the server's `target_weight_sum`."""
    weights = torch.ones(call.rows.shape[0], dtype=torch.float64, device="cpu")  # whatever the default device is
    if token_weights is not None:
        weights = token_weights.detach().double().cpu()
    if call.ignored is not None and call.targets is not None:
        weights = weights * ~call.ignored.cpu()
        if class_weights is not None:
            ids = call.targets.detach().cpu().long()
            weights = weights * class_weights.detach().double().cpu()[ids.clamp(0, class_weights.numel() - 1)]
    return float(weights.sum())


def _flat(values: Any, hidden: torch.Tensor, name: str) -> torch.Tensor | None:
    """(...) beside hidden (..., hidden_size), as (num_tokens,)."""
    if values is None:
        return None
    values = tensor_of(values, name)
    _check_transforms(values, name)
    if values.requires_grad and torch.is_grad_enabled():
        raise refused(f'{name} requires a gradient, but gets none: detach it, or multiply the loss of reduction="none" by it', name)
    _arrays.check_shape(tuple(values.shape), tuple(hidden.shape[:-1]), name)
    return values.reshape(-1)


def _shifted(values: Any, shift: int, fill: int, name: str) -> Any:
    """(..., n), moved left by `shift` along its last dimension, and filled up."""
    if values is None or shift == 0:
        return values
    values = tensor_of(values, name)
    return torch.nn.functional.pad(values, (0, shift), value=fill)[..., shift:]


def _teacher_rows(hidden: torch.Tensor, teacher_hidden: Any) -> torch.Tensor:
    """(num_tokens, hidden_size of the teacher), beside hidden (..., hidden_size); also of the other inputs of `Head.jsd`."""
    if not isinstance(teacher_hidden, torch.Tensor):
        teacher_hidden = _arrays.to_torch(_arrays.from_any(teacher_hidden, "teacher_hidden"))
    _check_hidden(teacher_hidden, "teacher_hidden")
    if teacher_hidden.requires_grad and torch.is_grad_enabled():
        raise refused("teacher_hidden requires a gradient, but the teacher gets none: detach it", "teacher_hidden")
    _arrays.check_shape(tuple(teacher_hidden.shape[:-1]), tuple(hidden.shape[:-1]), "teacher_hidden (without its last dimension)")
    return teacher_hidden.reshape(-1, teacher_hidden.shape[-1])


def _top_k(hidden: torch.Tensor, teacher: TopKTeacher) -> TopKTeacher:
    """(num_tokens, k) each, beside hidden (..., hidden_size); copies, which a second call sends again."""

    def flat(values: Any, name: str) -> np.ndarray:
        array = np.array(_arrays.numbers(values, name))
        _arrays.check_shape(array.shape[:-1], tuple(hidden.shape[:-1]), f"{name} (without its last dimension)")
        return array.reshape(-1, array.shape[-1])

    return TopKTeacher(flat(teacher.ids, "ids"), flat(teacher.log_probs, "log_probs"))


def _check_hidden(hidden: Any, name: str) -> None:
    if not isinstance(hidden, torch.Tensor) or hidden.dim() < 1:
        raise invalid_argument("INVALID_FIELD", f"{name} must be a torch tensor of shape (..., hidden_size)", field=name)
    _check_transforms(hidden, name)
    _arrays.dense_tensor(hidden, name)


def _check_transforms(values: torch.Tensor, name: str) -> None:
    """The tensor holds values, which can be sent to a server, and not the replacements of torch.func or forward-mode AD."""
    functorch = getattr(torch._C, "_functorch", None)
    wrapped = functorch is not None and (functorch.is_gradtrackingtensor(values) or functorch.is_batchedtensor(values))
    if wrapped or torch.autograd.forward_ad.unpack_dual(values).tangent is not None:
        raise refused(
            f"{name} is under a transform of torch.func (grad, vmap, jvp, ...) or forward-mode AD, which losses of headwater.torch "
            "have none of: use loss.backward() or torch.autograd.grad",
            name,
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

    Two calls replace one where the upstream gradient is no single number. Forward computes losses and outputs, and leaves nothing
    on the server. Backward sends the rows again, with a factor for each token and output. That is a third more work, and takes no
    slot, whatever the number of losses before one backward. The rows must stay as they are until backward, and the step open.
    `differentiable` with "entropy" or "lse" always takes two calls. With reduction="none" it takes one as long as the upstream
    gradients of its tokens are equal (`losses.sum()`, a mean). After the first backward with unequal ones this object takes two.

    Args:
        head: a `headwater.Head`. `head.step` is the step that contributions go to.
        weight: (vocab_size,) class weights, finite, as torch.nn.CrossEntropyLoss has them.
        reduction: "mean" divides by the sum of token weights x class weights of the targets of the valid tokens (without weights,
            their number). 0 valid tokens give 0. "sum". "none" gives a loss for each token, 0 for ignored ones, and backward takes
            any upstream gradient (masks, advantages, sequence means).
        ignore_index: target value of tokens that take no part.
        label_smoothing: in [0, 1].
        z_loss: >= 0, coefficient of lse^2.
        z_loss_divisor: of a "mean" with class weights. "weights" divides the z-loss like the rest; "tokens" divides it by the
            number of valid tokens (the sum of their token weights), as Liger does. num_items_in_batch divides both.
        temperature: > 0, divides the logits in the loss and in all outputs. May be set between calls: `loss_fn.temperature = 0.7`.
        token_scaling: multiplies each token's loss by the probability of its target, as a constant (DFT).
        shift: k >= 0 (True is 1): the row of position t predicts `targets[..., t + k]`. The last k positions of each sequence take
            no part; token weights belong to the targets, and move with them. Losses and outputs stay aligned with `hidden`.
        outputs: names of fields of `LossOutputs`, which forward then returns, from the same pass. They carry no gradient.
        differentiable: among "loss", "entropy" and "lse": those that carry a gradient. The latter two are outputs then, and vectors
            whatever `reduction` is; they take any upstream gradients.
        loss_scale: declares the upstream gradient up front. The contribution is added at forward (no staging slot, no second call),
            and backward with any other upstream gradient is an error. None: any upstream gradient.
        grad_hidden_scale: multiplies grad_hidden alone; world_size where the framework averages gradients of the trunk and the loss
            is divided by the tokens of all ranks. docs/concepts.md has the table.
        gradient_resolution: as in `Head.cross_entropy`: small entries of the gradient are rounded at random. 0: exact.
        num_items_in_batch: divisor of "mean" instead of this micro-batch's own, >= 0; also an argument of each call. 0 is for a
            step in which no token takes part: the loss is 0.
        micro_batch_source: where ids come from. None: one source for each head, with torch.distributed's rank and world size.
        timeout_s: bound of each call, in seconds. None: the client's.
    """

    _loss_options = PlainCrossEntropyOptions

    @spread(_CrossEntropySettings)
    def __init__(self, settings: _CrossEntropySettings):
        super().__init__(settings)
        self.shift = check_integer(int(settings.shift) if isinstance(settings.shift, bool) else settings.shift, "shift")
        self.differentiable = _names(settings.differentiable, "differentiable", _DIFFERENTIABLE)
        self.z_loss_divisor = check_choice(settings.z_loss_divisor, "z_loss_divisor", ("weights", "tokens"))
        if not self.differentiable:
            raise invalid_argument(
                "INVALID_FIELD", "differentiable names nothing: call the loss under no_grad", field="differentiable"
            )
        if self.loss_scale is not None and self.differentiable != ("loss",):
            raise refused("loss_scale declares the upstream gradient of a loss alone", "loss_scale")
        if self.gradient_resolution != 0 and self.differentiable != ("loss",):
            raise refused("gradient_resolution is of a loss's gradient alone", "gradient_resolution")
        if self.z_loss_divisor == "tokens" and self.reduction != "mean":
            raise refused(f'z_loss_divisor divides a mean; reduction="{self.reduction}" has none', "z_loss_divisor")

    @_outside_graphs
    def forward(
        self, hidden: torch.Tensor, targets: Any, *, token_weights: Any = None, num_items_in_batch: float | None = None
    ) -> torch.Tensor | LossOutputs:
        """The loss, float32 on `hidden`'s device: a scalar, or (...) with reduction="none", token weights included.

        Args:
            hidden: (..., hidden_size), float32, float16 or bfloat16, after the model's final norm.
            targets: (...) vocabulary ids or `ignore_index`, aligned with `hidden` except for `shift`.
            token_weights: (...) finite, any sign; aligned with `targets`.
            num_items_in_batch: divisor of "mean" for this call.
        Returns:
            The loss, or `LossOutputs` with `outputs` or `differentiable`.
        """
        shifted_weights = _shifted(token_weights, self.shift, 0, "token_weights")
        call = self._call_of(hidden, _shifted(targets, self.shift, self.ignore_index, "targets"), shifted_weights)
        options = self._options()
        items = self.num_items_in_batch if num_items_in_batch is None else num_items_in_batch
        if self.z_loss_divisor == "tokens" and self.weight is not None and items is None:
            tokens = _weight_sum(call, call.token_weights, None)
            ratio = _weight_sum(call, call.token_weights, self.weight) * _inverse(tokens)
            # The negative of all class weights makes the same mean, and has a divisor > 0.
            options.update(z_loss=self.z_loss * abs(ratio), class_weights=self.weight if ratio >= 0 else -self.weight)
            call.class_weights = options["class_weights"]
        call.run = functools.partial(self.head.cross_entropy, targets=call.targets, **options)
        return self._loss(call, num_items_in_batch)


class JSDLoss(_Loss):
    """Generalized Jensen-Shannon divergence to a teacher's remote head over the full vocabulary; see `Head.jsd` for the formula.

    Gradients go to `hidden` and the student's head, never to the teacher. Everything else is as in `CrossEntropyLoss`. The second
    of two calls sends the teacher's rows again, too. Rows of another stream (`JOIN`) come once: the server holds them instead.

    Args:
        head: the student's head.
        teacher: the teacher's head, of the same client. None where each call brings a `headwater.TopKTeacher`: with beta=0.
        beta: in [0, 1]; 0 is KL(teacher || student), 1 is KL(student || teacher).
        temperature: > 0, of the student, and of the teacher unless `teacher_temperature` is given. No factor of its square.
        hard_loss_weight: in [0, 1], share of the cross entropy with `targets`.
        label_smoothing, z_loss, weight: options of that cross entropy.
        outputs: names of fields of `LossOutputs`, which forward then returns. Per-token ones but the loss are the student's,
            without temperature.
        truncate_to_common: allow vocabularies of different sizes.
    "mean" divides by the sum of token weights of the valid tokens (times class weights of the targets, if there are any).
    """

    @spread(_JsdSettings)
    def __init__(self, settings: _JsdSettings):
        super().__init__(settings)
        self.teacher = settings.teacher
        temperature = settings.temperature
        self._teacher_temperature = settings.teacher_temperature
        self._divergence = {
            **{option.name: getattr(settings, option.name) for option in dataclasses.fields(DivergenceOptions)},
            "student_temperature": temperature,
            "teacher_temperature": temperature if settings.teacher_temperature is None else settings.teacher_temperature,
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
    ) -> torch.Tensor | LossOutputs:
        """The divergence, float32 on `hidden`'s device: a scalar, or (...) with reduction="none", token weights included.

        Args:
            hidden: (..., hidden_size) of the student.
            teacher_hidden: (..., hidden_size of the teacher), a tensor without gradient or an array (numpy.memmap, ml_dtypes, ...);
                or `headwater.JOIN`: another stream brings them. Without a teacher's head a `headwater.TopKTeacher`, with ids and
                log_probs of (..., k).
            targets: (...) for the hard loss, and for `ignore_index`.
            token_weights: (...) finite, any sign.
            num_items_in_batch: divisor of "mean" for this call.
            join_key, total_rows, row_indices, teacher_dtype: with JOIN, as in `Head.jsd`; row_indices is (...), one for each token.
                Activation checkpointing would ask for the rows twice: keep the loss out of the recomputed part.
        """
        call = self._call_of(hidden, targets, token_weights)
        teacher: Head | TopKTeacher | None = self.teacher
        divergence = self._divergence
        if isinstance(teacher_hidden, TopKTeacher):
            if teacher is not None:
                raise refused("teacher must be None: a TopKTeacher needs no head", "teacher")
            teacher, teacher_hidden = _top_k(hidden, teacher_hidden), None
            if self._teacher_temperature is None:  # `temperature` is the student's alone
                divergence = {**divergence, "teacher_temperature": 1.0}
        elif teacher_hidden is not JOIN:
            teacher_hidden = call.teacher_hidden = _teacher_rows(hidden, teacher_hidden)
        call.teacher, call.comes_once = self.teacher, teacher_hidden is JOIN
        call.run = functools.partial(
            self.head.jsd,
            teacher=teacher,
            teacher_hidden=teacher_hidden,
            join_key=join_key,
            total_rows=total_rows,
            row_indices=_flat(row_indices, hidden, "row_indices"),
            teacher_dtype=teacher_dtype,
            targets=call.targets,
            **divergence,
            **self._options(),
        )
        return self._loss(call, num_items_in_batch)


@_outside_graphs
def cross_entropy(
    head: Head, hidden: torch.Tensor, targets: Any, *, token_weights: Any = None, **options: Any
) -> torch.Tensor | LossOutputs:
    """Functional form of `CrossEntropyLoss`: `options` are its arguments."""
    return CrossEntropyLoss(head, **options)(hidden, targets, token_weights=token_weights)


@_outside_graphs
def jsd(
    head: Head,
    hidden: torch.Tensor,
    teacher: Head | None,
    teacher_hidden: Any,
    targets: Any = None,
    *,
    token_weights: Any = None,
    **options: Any,
) -> torch.Tensor | LossOutputs:
    """Functional form of `JSDLoss`: `options` are its arguments, and those of its forward that belong to `JOIN`."""
    join = {name: options.pop(name) for name in JOIN_OPTIONS if name in options}
    return JSDLoss(head, teacher, **options)(hidden, teacher_hidden, targets, token_weights=token_weights, **join)
