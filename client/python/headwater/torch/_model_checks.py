"""Whether a head is the one that a model computes its loss with: by a forward, by a batch, by the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headwater._errors import must_be, refused
from headwater._head import Head
from headwater._loss._requests import DEFAULT_IGNORE_INDEX
from headwater._model_files._torch_modules import OutputLayer
from headwater.torch import _forward_check, _model_config
from headwater.torch._forward_check import CannotRun, HeadOptions

_OPTIONS = ("softcap", "logit_scale", "valid_vocab_size")
_ROWS = "the losses take the rows that reach the layer, which the model has not scaled or capped itself"
# Rows of a batch whose logits are made at once.
_CHUNK_ROWS = 256


@dataclass(frozen=True)
class Checked:
    """The means of comparison for a model."""

    by: str  # "forward", "batch", "config" or "nothing"
    reason: str  # one sentence
    warning: str = ""  # a warning for the caller; empty if there is none


def hints_of(configs: Sequence[Any]) -> list[_model_config.Asked]:
    """The hints about its logits in a model's configurations. A model and the one inside it may have parts of them in common."""
    return list({(hint.option, hint.shown): hint for config in configs for hint in _model_config.asked(config)}.values())


def check_model(
    model: torch.nn.Module, layer: OutputLayer, options: HeadOptions, named: Mapping[str, Any], *, by_batch: bool
) -> Checked:
    """The head with these options makes the model's logits of its layer's rows, as far as that can be seen here.

    Args:
        named: the options that the caller has passed.
        by_batch: a batch will be compared; where the model cannot run by itself, nothing is said of its configuration.
    Raises:
        InvalidArgumentError: `INVALID_COMBINATION`: it does not; with the option to pass.
    """
    model = _forward_check.unwrapped(model)
    configs = _forward_check.configs(model, layer)
    hints = hints_of(configs)
    try:
        forward = _forward_check.run(model, layer)
    except CannotRun as error:
        why = f"the model was not run: {error}"
        if by_batch:
            return Checked("batch", f"the loss of check= is the head's; {why}")
        if not configs:
            # Other models than language models of the usual form are not warned of: nothing can be expected to run them.
            warning = f"{why}; and it has no config. Nothing says that the head is the model's: pass check=batch"
            return Checked("nothing", f"{why}; and it has no config", warning if _forward_check.takes_token_ids(model) else "")
        _check_configuration(model, layer, hints, named)
        padded = _padded(configs, layer, named)
        warning = f"{why}. Only its config was looked at{padded}; pass check=batch to compare losses"
        return Checked("config", f"{why}; its config asks for nothing else{padded}", warning)
    return _check_forward(forward, layer, options, hints, list(_model_config.logit_buffers(model)))


def _check_forward(
    forward: _forward_check.Forward,
    layer: OutputLayer,
    options: HeadOptions,
    hints: Sequence[_model_config.Asked],
    buffers: Sequence[str],
) -> Checked:
    body = forward.body
    if forward.same(options):
        if body is None:
            return Checked("forward", "the model makes the same logits of its layer's rows")
        how = "computes them from others" if body.factor is None else f"multiplies them by {body.factor:.6g}"
        exact = next((hint.shown for hint in hints if hint.rows and body.explained_by(hint.wanted)), None)
        other = "" if body.factor is None else f", or pass logit_scale={exact or f'{body.factor:.6g}'} for those of {body.name}"
        warning = (
            f"the rows that reach the layer are not those that {body.name} returns: the model {how} in between. Give the losses "
            f"the rows that reach the layer{other}"
        )
        reason = f"the model makes the same logits of the rows that reach its layer, not of those of {body.name}"
        return Checked("forward", reason, warning)
    if body is not None and body.factor is not None and forward.same(options, of_body=True):
        return Checked("forward", f"the model makes the same logits of the rows of {body.name}")
    gap, ratio = forward.difference(options)
    what = (
        "the model's logits are not those that the head would make of its layer's rows: in one small forward log-probabilities "
        f"differ by up to {gap:.3g}, {ratio:.3g} times what rounding explains"
    )
    found = _forward_check.fitting(forward, options, hints)
    entries = ", ".join(f"{hint.where}={hint.value!r}" for hint in hints)
    said = f"; its config has {entries}" if entries else ""
    if found is not None:
        wanted = ", ".join(f"{name}={text}" for name, text in found[1].items())
        raise refused(f"{what}. Pass {wanted}; {_ROWS}{said}", next(iter(found[1])), actual=f"{gap:.6g}")
    if buffers:
        said += f"; it adds {', '.join(buffers)}: put that into the layer's bias, or attach a layer that has it"
    if layer.module is None and layer.bias is None:
        said += "; if the layer has a bias, attach the layer and not its weight"
    columns = f", has {forward.logits.shape[1]} columns" if forward.logits.shape[1] != layer.weight.shape[0] else ""
    raise refused(
        f"{what}. No softcap=, logit_scale= or valid_vocab_size= that was tried makes them equal: the model does something else "
        f"behind the layer{columns}{said}",
        "model",
        actual=f"{gap:.6g}",
    )


def _check_configuration(
    model: torch.nn.Module, layer: OutputLayer, hints: Sequence[_model_config.Asked], named: Mapping[str, Any]
) -> None:
    for hint in hints:
        if hint.option == "valid_vocab_size" and hint.wanted >= layer.weight.shape[0]:
            continue
        if (hint.option in named) if hint.option else any(option in named for option in _OPTIONS):
            continue
        has = f"the model's config has {hint.where}={hint.value!r}"
        if not hint.option:
            raise refused(
                f"{has}, which may change its logits in a way that is not known here: pass softcap= or logit_scale= as the model "
                "does it (logit_scale=1.0 if it does nothing), or check=batch",
                "logit_scale",
                key=hint.where,
                actual=hint.value,
            )
        before = (
            " for rows of the model's body, or logit_scale=1.0 for rows that reach the layer"
            if hint.rows
            else f", or another {hint.option}= if the model does something else; {_ROWS}"
        )
        raise refused(
            f"{has}, which the layer alone does not do: pass {hint.option}={hint.shown}{before}",
            hint.option,
            key=hint.where,
            actual=hint.value,
        )
    for name in _model_config.logit_buffers(model):
        raise refused(
            f"the model adds {name} to its logits, which is not zero, and the layer alone does not: put it into the layer's bias",
            "model",
            key=name,
        )


def _padded(configs: Sequence[Any], layer: OutputLayer, named: Mapping[str, Any]) -> str:
    sizes = [
        size
        for config in configs
        for _, level in _model_config.levels(config)
        if isinstance(size := _model_config.entry(level, "vocab_size"), int)
    ]
    rows = layer.weight.shape[0]
    if not sizes or max(sizes) >= rows or "valid_vocab_size" in named:
        return ""
    return f"; it has vocab_size={max(sizes)}, the layer {rows} rows: if the others are padding, pass valid_vocab_size={max(sizes)}"


# ---- a batch of the user's -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchLoss:
    """The model's own loss of a batch, and the rows that reached its layer."""

    rows: torch.Tensor  # (num_tokens, hidden_size)
    targets: torch.Tensor  # (num_tokens,)
    loss: float
    allowed: float  # difference that rounding explains


def loss_of_batch(model: torch.nn.Module | None, layer: OutputLayer, batch: Any) -> BatchLoss:
    """Runs `model(**batch)` without gradients.

    Raises:
        InvalidArgumentError: `INVALID_FIELD`: the batch is not one; `INVALID_COMBINATION`: the loss is not of the kind.
    """
    if not isinstance(batch, Mapping) or not isinstance(labels := batch.get("labels"), torch.Tensor):
        raise must_be("check", 'a mapping of the model\'s inputs with "labels"', type(batch))
    if model is None:
        raise refused("check= runs the model: pass model=, too", "check")
    model = _forward_check.unwrapped(model)
    module = _forward_check.layer_in(model, layer)
    if module is None:
        raise refused("check= needs a model that calls the layer: no torch.nn.Linear of it has the layer's weight", "check")
    came: list[torch.Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, arguments: came.append(arguments[0]))
    try:
        with _forward_check.undisturbed(model):
            output = model(**batch)
    finally:
        hook.remove()
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        loss = output[0] if isinstance(output, (tuple, list)) else output
    rows = next((rows for rows in came if tuple(rows.shape[:-1]) == tuple(labels.shape)), None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise refused("check= compares losses: the model returns none for the batch", "check")
    if rows is None:
        shapes = ", ".join(str(tuple(rows.shape)) for rows in came) or "none"
        raise refused(
            f"check= cannot compare: for labels of shape {tuple(labels.shape)} the rows that reach the layer are {shapes}", "check"
        )
    value = float(loss)
    epsilon = _forward_check._epsilon(rows, layer.weight)
    allowed = max(epsilon, 1e-5) * max(1.0, abs(value))
    logits = _forward_check.logits_of(output, labels.numel())
    if logits is not None:
        logits = logits.float().view(*labels.shape, -1)
        shifted, plain = _cross_entropy(logits[:, :-1], labels[:, 1:]), _cross_entropy(logits, labels)
        if not abs(shifted - value) <= allowed:
            kind = (
                "it is the cross entropy without a shift: give the losses targets without a shift, too, and leave check= out"
                if abs(plain - value) <= allowed
                else "it may have further parts, of a router say: turn them off for the check"
            )
            raise refused(
                f"the model's loss is not the shifted cross entropy of its logits: it is {value:.7g}, the latter {shifted:.7g}; "
                f"{kind}",
                "check",
            )
    return BatchLoss(rows[:, :-1].reshape(-1, rows.shape[-1]), labels[:, 1:].reshape(-1), value, allowed)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> float:
    rows, targets = logits.flatten(0, -2), labels.to(logits.device).flatten()
    return float(torch.nn.functional.cross_entropy(rows, targets, ignore_index=DEFAULT_IGNORE_INDEX, reduction=reduction))


def check_batch(batch: BatchLoss, head: Head | None, layer: OutputLayer, options: HeadOptions, timeout_s: float | None) -> None:
    """The head's loss of the batch is the model's.

    Args:
        head: None: its weight is not the layer's (any more); the loss of a head with the layer's weight is computed here.
    """
    if head is not None:
        result = head.cross_entropy(batch.rows, batch.targets, backward=False, timeout_s=timeout_s)
        loss = result.loss_sum / result.target_weight_sum if result.target_weight_sum else 0.0
    else:
        total = 0.0
        for rows, targets in zip(batch.rows.split(_CHUNK_ROWS), batch.targets.split(_CHUNK_ROWS), strict=True):
            output = _forward_check.products(rows.to(layer.weight.device), layer.weight)
            logits = options.logits(output if layer.bias is None else output + layer.bias.detach().float())
            total += _cross_entropy(logits, targets, reduction="sum")
        loss = total / max(1, int((batch.targets != DEFAULT_IGNORE_INDEX).sum()))
    if not abs(loss - batch.loss) <= batch.allowed:
        raise refused(
            f"the model's loss of the batch is {batch.loss:.7g}, the head's {loss:.7g}; rounding explains {batch.allowed:.2g}. "
            "Options or weights of the head are not the model's",
            "check",
            expected=batch.loss,
            actual=loss,
        )
