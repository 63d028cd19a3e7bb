"""The patch of a model: its forward runs as it is, but the rows that reach its last layer go to the head."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.utils import ModelOutput

from headwater._errors import HeadwaterError, refused
from headwater._loss._requests import DEFAULT_IGNORE_INDEX
from headwater._types import SGD, AdamW
from headwater.torch import _forward_check
from headwater.torch._joint_step import JointStep
from headwater.torch._layer_rows import only_rows, rows_of
from headwater.torch._remote_head import HeadwaterConfig, RemoteHead, attach_remote

_refused = functools.partial(refused, field="model")
_ATTRIBUTE = "_headwater_patch"
# Losses of transformers that are a head's, and whether labels are those of the next token.
_SHIFTED = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}


@dataclass
class HeadwaterCausalLMOutput(ModelOutput):
    """The output of a patched model for a batch with labels.

    Attributes:
        loss: () float32, with whatever the model adds to it (a router's loss).
        logits: None.
        predicted_tokens: (batch, context) int64, the most probable token behind each position; without gradients only.
        token_accuracy, entropy: () float32, mean over the tokens with a target; with gradients, if `HeadwaterConfig.outputs` has
            them. Entropy in nats.
        aux_loss, hidden_states, attentions: as the model returns them.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    hidden_states: Any = None
    attentions: Any = None


class Patch:
    """The changes to one model, and their removal.

    Attributes:
        remote: the head and the layer.
        owner: the outermost model of transformers around the layer, whose forward is patched.
        joint: the joint step that closes the head's steps, while a trainer trains.
        sums: of the outputs that `config.outputs` names, over the tokens of training losses, and the tokens' count; until they are
            logged.
    """

    def __init__(self, remote: RemoteHead):
        self.remote = remote
        self.joint: JointStep | None = None
        inner = _forward_check.unwrapped(remote.model)
        around = [inner, *_forward_check.ancestors(inner, remote.layer)]
        models = list(dict.fromkeys(module for module in around if isinstance(module, transformers.PreTrainedModel)))
        if not models:
            raise _refused(f"{type(inner).__name__} is no model of transformers: use headwater.torch.attach in a loop of your own")
        self.owner = models[0]
        self._undo: list[tuple[torch.nn.Module, str, Any]] = []
        self._rows: list[torch.Tensor] = []  # that have reached the layer in a forward with labels, until the loss takes them
        self._output: dict[str, torch.Tensor] = {}
        self.sums: dict[str, Any] = {}
        self._is_shifted = self._loss_kind(models)
        self._forward = self._current_forward()
        self._signature = inspect.signature(type(self.owner).forward)
        self._install(inner, models)

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        other = object.__new__(Patch)
        memo[id(self)] = other
        for name, value in vars(self).items():
            # The copy is another model, which no trainer trains yet.
            setattr(other, name, None if name == "joint" else copy.deepcopy(value, memo))
        return other

    # ---- what is patched --------------------------------------------------------------------------------------------

    def _loss_kind(self, models: list[Any]) -> bool:
        """Whether labels are those of the next token."""
        for model in models:
            if "_loss_function" in vars(model):
                raise _refused(f"{type(model).__name__} has a loss_function of its own, which the head would replace: remove it")
        name = getattr(self.owner.loss_function, "__name__", "")
        if name not in _SHIFTED:
            raise _refused(f"{type(self.owner).__name__} computes its loss by {name}, which is no cross entropy of a head")
        return _SHIFTED[name]

    def _current_forward(self) -> Callable[..., Any]:
        own = vars(self.owner).get("forward")
        if own is None:
            return type(self.owner).forward
        # Another hook, of accelerate for example, has patched the instance: it stays around the model.
        return lambda _, *args, **kwargs: own(*args, **kwargs)

    def _set(self, module: torch.nn.Module, name: str, value: Any) -> None:
        self._undo.append((module, name, vars(module).get(name)))
        vars(module)[name] = value

    def _install(self, inner: torch.nn.Module, models: list[Any]) -> None:
        def forward(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return vars(model)[_ATTRIBUTE].forward(model, *args, **kwargs)

        # With the signature, which trainers look at, but without __wrapped__, along which accelerate takes patches off.
        functools.update_wrapper(forward, type(self.owner).forward)
        del forward.__wrapped__  # type: ignore[attr-defined]
        forward.__signature__ = self._signature  # type: ignore[attr-defined]
        self._set(self.owner, _ATTRIBUTE, self)
        self._set(self.owner, "forward", types.MethodType(forward, self.owner))
        layer = self.remote.layer
        self._set(layer, _ATTRIBUTE, self)
        self._set(layer, "forward", types.MethodType(_layer_forward, layer))
        for model in models:
            self._set(model, "_loss_function", self.loss)
        for model in dict.fromkeys((inner, self.owner)):
            self._set(model, "save_pretrained", types.MethodType(_save_pretrained, model))
        self._set(self.owner, "resize_token_embeddings", self._refuse_resize)
        self.remote.unpatch = self._unpatch

    def _unpatch(self) -> None:
        for module, name, before in reversed(self._undo):
            if before is None:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = before
        self._undo = []

    def _refuse_resize(self, *_: Any, **__: Any) -> Any:
        raise _refused("resize_token_embeddings would change the size of the head: resize first, then attach")

    # ---- forward ----------------------------------------------------------------------------------------------------

    def forward(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The model's forward: with labels the loss comes from the head, without them nothing is changed."""
        labels = kwargs.get("labels")
        if labels is None and args:
            labels = self._signature.bind_partial(model, *args, **kwargs).arguments.get("labels")
        if labels is None:
            return self._forward(model, *args, **kwargs)
        self._output = {}
        with rows_of(self.remote.layer, False) as self._rows:
            output = self._forward(model, *args, **kwargs)
        if isinstance(output, tuple):
            return output[:1]  # the loss, without the placeholder for logits
        named = {name: getattr(output, name, None) for name in ("loss", "aux_loss", "hidden_states", "attentions")}
        return HeadwaterCausalLMOutput(**named, **self._output)

    def loss(
        self,
        logits: Any = None,
        labels: torch.Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = DEFAULT_IGNORE_INDEX,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """The replacement of `model.loss_function`: mean over the tokens, or their sum by `num_items_in_batch`."""
        rows = only_rows(self._rows)
        self._rows.clear()
        targets = labels if shift_labels is None else shift_labels
        assert targets is not None
        if shift_labels is None and self._is_shifted:
            targets = torch.nn.functional.pad(targets, (0, 1), value=ignore_index)[..., 1:]
        if targets.shape != rows.shape[:-1]:
            targets = self._aligned(targets, rows)
        targets = targets.to(rows.device)
        if ignore_index != DEFAULT_IGNORE_INDEX:
            targets = targets.masked_fill(targets == ignore_index, DEFAULT_IGNORE_INDEX)
        items = None if num_items_in_batch is None else float(num_items_in_batch)
        if not torch.is_grad_enabled():
            return self._evaluate(rows, targets, items)
        if self.joint is not None:
            self.joint.settle()
        self.remote.count_loss()
        result = self.remote.loss_fn(rows, targets, num_items_in_batch=items)
        if not self.remote.config.outputs:
            return result  # type: ignore[no-any-return]
        self._log(result, targets)
        return result.loss  # type: ignore[no-any-return]

    def _log(self, result: Any, targets: torch.Tensor) -> None:
        """Keeps the means over this batch's tokens, for the output, and their sums, for the log."""
        valid = targets != DEFAULT_IGNORE_INDEX
        count = valid.sum()
        for name in self.remote.config.outputs:
            values = result.argmax == targets if name == "token_accuracy" else result.entropy
            total = values[valid].double().sum()
            self._output[name] = (total / count.clamp(min=1)).float()
            self.sums[name] = self.sums.get(name, 0.0) + total
        self.sums["count"] = self.sums.get("count", 0.0) + count

    def _aligned(self, targets: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Targets of the last rows of each sequence, where `logits_to_keep` has left the others out."""
        if targets.dim() == rows.dim() - 1 and targets.shape[0] == rows.shape[0] and targets.shape[1] > rows.shape[1]:
            return targets[:, -rows.shape[1] :]
        if targets.numel() == rows[..., 0].numel():
            return targets.reshape(rows.shape[:-1])
        raise _refused(f"labels of shape {tuple(targets.shape)} do not belong to rows of shape {tuple(rows.shape)}", field="labels")

    def _evaluate(self, rows: torch.Tensor, targets: torch.Tensor, items: float | None) -> torch.Tensor:
        """The loss without gradients, and the tokens that the model would say at every position."""
        remote, config = self.remote, self.remote.config
        flat = targets.reshape(-1)
        valid = flat != DEFAULT_IGNORE_INDEX
        # An ignored row has no output: it takes part with weight 0.
        result = remote.head.cross_entropy(
            rows.detach().reshape(-1, rows.shape[-1]),
            flat.masked_fill(~valid, 0),
            token_weights=valid.float(),
            outputs=("argmax",),
            backward=False,
            **config.loss_options,
        )
        tokens = torch.as_tensor(result.argmax, dtype=torch.int64).reshape(targets.shape)
        self._output["predicted_tokens"] = tokens.to(rows.device)
        divisor = result.target_weight_sum if items is None else items
        return torch.tensor(result.loss_sum / divisor if divisor else 0.0, dtype=torch.float32, device=rows.device)


def _layer_forward(layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    vars(layer)[_ATTRIBUTE].remote.check_current("a forward without labels")
    return type(layer).forward(layer, hidden)  # type: ignore[no-any-return]


def _save_pretrained(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """`save_pretrained` of a patched model: with the weight that was trained."""
    patch = patch_of(model)
    if patch is not None and kwargs.get("is_main_process", True):
        if kwargs.get("state_dict") is not None:
            patch.remote.update_state_dict(kwargs["state_dict"])
        else:
            patch.remote.pull_weight()
    return type(model).save_pretrained(model, save_directory, *args, **kwargs)


def patch_of(model: torch.nn.Module) -> Patch | None:
    """The patch that `attach_remote_head` has made of a model, under any wrapper; None without one."""
    return next((patch for module in model.modules() if (patch := vars(module).get(_ATTRIBUTE)) is not None), None)


def attach_remote_head(
    model: torch.nn.Module, config: HeadwaterConfig | None = None, *, optimizer: AdamW | SGD | None = None
) -> RemoteHead:
    """Patches a model, so that its forward with labels has its loss from a remote head; before accelerate prepares it.

    The model's own forward runs, whatever it does. The rows that reach its last layer go to the head, whose loss replaces the one
    that the model would compute of logits: `HeadwaterCausalLMOutput`. Without labels the model is as it was. One small batch is
    compared before and after, where the model runs on token ids.

    A loop of one's own closes the head's steps: `headwater.torch.TrainingLoop(remote.head, ...)`, or the calls of `Head`.

    Args:
        model: of transformers, or wrapped (PEFT).
        config: which head. None: the server of the environment, and a head of the model's name.
        optimizer: the optimizer for `config.optimizer="auto"`. None: `headwater.AdamW()`.
    Returns:
        The head and the layer; `remote.head` is the result of `headwater.torch.attach`.
    Raises:
        InvalidArgumentError: the model's loss is not that of a head, or `headwater.torch.attach` refuses the model.
    """
    if patch_of(model) is not None:
        raise _refused(f"{type(model).__name__} has a remote head already: detach_remote_head(model) takes it off")
    inner = _forward_check.unwrapped(model)
    remote = attach_remote(model, config or HeadwaterConfig(), optimizer=optimizer)
    stock = _small_batch(inner, remote)
    try:
        Patch(remote)
        if stock is not None:
            _compare(inner, remote, *stock)
    except BaseException:
        remote.detach()
        if remote.head.created:
            with contextlib.suppress(HeadwaterError):
                remote.head.delete(force=True)
        raise
    return remote


def _small_batch(model: torch.nn.Module, remote: RemoteHead) -> tuple[dict[str, torch.Tensor], float, float] | None:
    """A batch, the model's own loss of it, and how far from that rounding may lead.

    None where the model does not run on ids alone, or the head has other weights.
    """
    if remote.trained and not remote.head.created:
        return None
    layer = remote.layer
    configs = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    size = min(remote.head.spec.valid_vocab_size or layer.out_features, layer.out_features)
    ids = _forward_check._token_ids(size, configs).to(layer.weight.device)
    labels = ids.clone()
    labels[0, :2] = DEFAULT_IGNORE_INDEX
    batch = {"input_ids": ids, "labels": labels}
    try:
        with _forward_check.undisturbed(model):
            output = model(**batch)
        loss, epsilon = float(output.loss), _forward_check._epsilon(layer.weight, output.logits)
    except Exception:
        return None
    return batch, loss, max(epsilon, 1e-5) * max(1.0, abs(loss))


def _compare(model: torch.nn.Module, remote: RemoteHead, batch: dict[str, torch.Tensor], stock: float, allowed: float) -> None:
    config = remote.config
    is_cut = config.valid_vocab_size is not None and config.valid_vocab_size < remote.layer.out_features
    if config.label_smoothing or config.z_loss or is_cut:
        return  # not the model's own loss
    try:
        with _forward_check.undisturbed(model):
            loss = float(model(**batch).loss)
    except HeadwaterError:
        raise
    except Exception as error:
        what = " ".join(str(error).split())[:200]
        raise _refused(
            f"{type(model).__name__} does something of its own between its output layer and its loss, which fails without logits: "
            f"{type(error).__name__}: {what}"
        ) from error
    if not abs(loss - stock) <= allowed:
        raise _refused(
            f"{type(model).__name__} computes another loss than the head: {stock:.7g} for a small batch, the head {loss:.7g}"
        )


def detach_remote_head(model: torch.nn.Module) -> None:
    """Undoes `attach_remote_head`: the model computes its own loss again, with the trained weight. The head stays on the server."""
    _patched(model).remote.detach()


def _patched(model: torch.nn.Module) -> Patch:
    patch = patch_of(model)
    if patch is None:
        raise _refused(f"{type(model).__name__} has no remote head")
    return patch


@contextlib.contextmanager
def local_lm_head(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Lets a patched model compute logits here, with the head's weight as it is now: for generate, predictions, state_dict().

    with headwater.transformers.local_lm_head(model):
        model.generate(...)

    The weight is downloaded where the server has trained it since the last time.
    """
    _patched(model).remote.pull_weight()
    yield model
