"""TRL's fused LM head over a remote one: `model(..., labels=..., fused_lm_head=True)` without logits."""

from __future__ import annotations

import functools
import importlib.metadata
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

try:
    from trl.trainer.utils import FusedCausalLMOutput
except ImportError as error:
    raise ImportError(
        f"headwater.trl needs TRL 1.16 or newer, which has a fused LM head; {importlib.metadata.version('trl')} is installed"
    ) from error

from headwater._errors import invalid_argument, must_be, refused
from headwater._head import Head
from headwater._types import check_number
from headwater.torch import CrossEntropyLoss
from headwater.torch._layer_rows import only_rows, rows_of
from headwater.torch._remote_head import RemoteHead

IGNORED = -100
# The outputs of a call by TRL's names, with the names of `CrossEntropyLoss`. "log_probs" is the loss itself.
_OUTPUTS = {
    "log_probs": None,
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logits",
    "is_top1": "argmax",
}
_DIFFERENTIABLE = {"log_probs": "loss", "entropy": "entropy"}


def add_fused_lm_head(
    model: torch.nn.Module,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: Sequence[str] = ("log_probs",),
    *,
    head: Head | RemoteHead,
    differentiable: Sequence[str] | None = None,
) -> Callable[[], None]:
    """Gives a model TRL's fused LM head, over a remote one: `model(..., labels=labels, fused_lm_head=True)`.

    The arguments are TRL's, and so are the fields of the `trl.trainer.utils.FusedCausalLMOutput`. They are a loss, and (batch,
    tokens - 1) values of each token, 0 where the label is -100. Only rows with a label are sent. Without `fused_lm_head=True` the
    forward is the one that the model had, with its own layer.

    TRL's trainers add TRL's own head in their constructor: call this after it, or let `setup_trainer` do so.

    Args:
        model: a causal language model of transformers: of a PeftModel, `get_base_model()`.
        temperature: > 0, divides the logits, in every field.
        cast_lm_head_to_fp32: send the rows in float32, outside autocast. The head computes in float32 of the rows that it gets.
        outputs: fields among "log_probs", "entropy", "log_sum_sq_probs", "mean_logits" and "is_top1"; others are None.
        head: made of the model's output layer, by `headwater.torch.attach` or `headwater.transformers.attach_remote_head`.
        differentiable: those of "log_probs" and "entropy" that carry a gradient. None: all of them that are in `outputs`, as in
            TRL. An entropy that is only logged costs less without.
    Returns:
        The undo: a function that gives the model the forward back that it had.
    Raises:
        InvalidArgumentError: an output that there is not.
    """
    if not isinstance(head, (Head, RemoteHead)):
        raise must_be("head", "a headwater.Head", type(head))
    for name in (*outputs, *(differentiable or ())):
        if name not in _OUTPUTS:
            raise invalid_argument("INVALID_FIELD", f"outputs must be among {', '.join(_OUTPUTS)}; got {name!r}", field="outputs")
    computed_here = {"log_probs", *outputs}
    wanted = [name for name in _DIFFERENTIABLE if name in (computed_here if differentiable is None else differentiable)]
    if not wanted or not computed_here.issuperset(differentiable or ()):
        raise refused(
            f'differentiable must be among "log_probs" and "entropy", and in outputs; got {differentiable!r}', "differentiable"
        )
    asked = [name for name in _OUTPUTS if name in outputs and name != "log_probs"]
    remote = head if isinstance(head, RemoteHead) else None
    loss_fn = CrossEntropyLoss(
        head if remote is None else remote.head,
        reduction="none",
        ignore_index=IGNORED,
        temperature=check_number(temperature, "temperature", low=0, low_open=True),
        outputs=tuple(_OUTPUTS[name] for name in asked),
        differentiable=tuple(_DIFFERENTIABLE[name] for name in wanted),
    )
    original = model.forward

    # With the model's own signature, which `generate` and `Trainer` look at.
    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return original(*args, **kwargs, **{name: value for name, value in given.items() if value is not None})
        config = self.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        with rows_of(self.get_output_embeddings(), cast_lm_head_to_fp32) as came:
            answer = original(*args, **{**kwargs, "use_cache": False})
        hidden = only_rows(came)
        targets, rows = (labels[:, 1:], hidden[:, :-1]) if shift_labels is None else (shift_labels, hidden)  # type: ignore[index]
        targets = targets.to(hidden.device)
        mask = targets != IGNORED
        rows, targets = labelled(mask, rows, targets)
        if remote is not None and torch.is_grad_enabled():
            remote.count_loss()
        computed = loss_fn(rows, targets)

        def field(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(mask.shape).masked_scatter(mask, values)

        fields = {name: field(_value(name, computed, targets)) for name in asked}
        log_probs = field(-(computed.loss if asked else computed))
        loss = -log_probs.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        aux_loss = None
        if kwargs.get("output_router_logits"):
            aux_loss = answer.aux_loss
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
        return FusedCausalLMOutput(loss=loss, log_probs=log_probs, label_mask=mask, aux_loss=aux_loss, **fields)

    model.forward = types.MethodType(forward, model)

    def undo() -> None:
        model.forward = original

    return undo


def _value(name: str, computed: Any, targets: torch.Tensor) -> torch.Tensor:
    values = getattr(computed, _OUTPUTS[name] or "")
    return values == targets if name == "is_top1" else values


def labelled(mask: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (num_rows, hidden_size) and targets (num_rows,) of (..., hidden_size) and (...) where the mask (...) is set.

    Where it is nowhere set: one row of zeros, and the ignored target. A micro-batch without a label must contribute, too: every
    rank draws as many ids in a step, and backward must reach the body.
    """
    if bool(mask.any()):
        return rows[mask], targets[mask]
    return rows.reshape(-1)[:0].sum().expand(1, rows.shape[-1]), targets.new_full((1,), IGNORED)
