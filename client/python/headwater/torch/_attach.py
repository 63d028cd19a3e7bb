"""A model's last layer as a head, and who owns its weight."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headwater import _arrays
from headwater._client import Client
from headwater._errors import HeadwaterError, must_be, refused
from headwater._head import Head
from headwater._model_files._torch_modules import OutputLayer, embedding_of, output_layer, sharing
from headwater._types import SGD, AdamW, HeadInfo, HeadSpec
from headwater.torch import _forward_check, _model_checks, _model_config

_FLOWS = (
    "tied=\"trainer\" (PyTorch's optimizer owns the weight: at the end of a step the head's gradient is added to that of the "
    "embedding, and the new weight is sent to the head) or tied=\"server\" (the head's optimizer owns it: the embedding's gradient "
    "is sent to the head, and the new weight comes back)"
)


class ModuleHead(Head):
    """A head that was made from a layer of this process, and may share its weight. Made by `attach`.

    `TrainingLoop` calls the methods below at the end of a step; loops of one's own call them between `seal` and the next step.

    Attributes:
        owner: the side that updates the weight: "server" (the head's optimizer), "trainer" (PyTorch's), or "" for a head that is
            not trained or only accumulates.
        tied: None, "trainer" or "server".
        weight_parameter, bias_parameter: the layer's tensors where this process still needs them (owner "trainer", or tied).
            Otherwise None, and the layer may be deleted.
        checked: how `attach` has compared the model with the head. "forward": by one small forward of the model; "batch": by the
            losses of `check=`, where the model does not run by itself. "config": by its configuration alone; "nothing": not at all.
        checked_reason: a sentence that says why.
    """

    def __init__(
        self,
        head: Head,
        info: HeadInfo,
        layer: OutputLayer | None,
        *,
        owner: str,
        tied: str | None,
        checked: _model_checks.Checked,
    ):
        super().__init__(head._backend, info, created=head.created)
        self.owner, self.tied = owner, tied
        self.weight_parameter = None if layer is None else layer.weight
        self.bias_parameter = None if layer is None else layer.bias
        self.checked, self.checked_reason = checked.by, checked.reason

    def pull_gradient(self, gradient_factor: float = 1.0, *, timeout_s: float | None = None) -> None:
        """Adds the sealed step's accumulated gradient, times `gradient_factor`, to `.grad` of the trainer's own weight and bias.

        Added in fp32 and rounded to the parameter's dtype once.
        """
        weight, bias = self._trainer_owned()
        if bias is None:
            gradients = [(weight, self.gradient(gradient_factor=gradient_factor, timeout_s=timeout_s))]
        else:
            both = self.gradient(bias=True, gradient_factor=gradient_factor, timeout_s=timeout_s)
            gradients = list(zip((weight, bias), both, strict=True))
        for parameter, values in gradients:
            gradient = torch.from_numpy(values if values.flags.writeable else values.copy()).to(parameter.device)
            if parameter.grad is not None:
                gradient += dense(parameter.grad).float()
            parameter.grad = gradient.to(parameter.dtype)

    def push_weight(self, *, timeout_s: float | None = None) -> HeadInfo:
        """Closes the sealed step with the trainer's own weight and bias. Only one of several trainers calls it."""
        weight, bias = self._trainer_owned()
        return self.replace_weight(weight, bias, timeout_s=timeout_s)

    def push_gradient(self, first_micro_batch: int, parts: int, factor: float = 1.0, *, timeout_s: float | None = None) -> None:
        """Adds `factor` times `.grad` of the tied parameter to the open step, as the contributions `first_micro_batch` and on.

        A parameter without a gradient adds zeros, so that the ids are the same every time. `.grad` stays.

        Args:
            parts: number of contributions, see `gradient_parts`.
        """
        self._push_gradient(range(first_micro_batch, first_micro_batch + parts), factor, timeout_s=timeout_s)

    def _push_gradient(self, micro_batches: Sequence[int], factor: float, *, timeout_s: float | None) -> None:
        parameter = self._server_tied()
        rows = -(-parameter.shape[0] // len(micro_batches))
        gradient = None if parameter.grad is None else dense(parameter.grad)
        for part, micro_batch in enumerate(micro_batches):
            start = part * rows
            values = torch.zeros(1, parameter.shape[1], device="cpu") if gradient is None else gradient[start : start + rows]
            self.add_gradient(values, micro_batch=micro_batch, row_start=start, factor=factor, timeout_s=timeout_s)

    def gradient_parts(self, *, timeout_s: float | None = None) -> int:
        """Number of contributions that the gradient of the whole weight takes, within the server's limit on one."""
        parameter = self._server_tied()
        limit = self._backend.server_info(self._timeout(timeout_s)).limits.get(_GRADIENT_LIMIT, 0)
        bytes_of_row = 4 * parameter.shape[1]
        rows = max(1, limit // bytes_of_row) if limit else parameter.shape[0]
        parts = -(-parameter.shape[0] // rows)
        # Parts of equal size, except the last one, and as few of them as that takes.
        return -(-parameter.shape[0] // -(-parameter.shape[0] // parts))

    def pull_weight(self, *, timeout_s: float | None = None) -> None:
        """Downloads the weight into the tied parameter, and the bias beside it, in place. float32 ones get the master weights."""
        for name, parameter in (("weight", self._server_tied()), ("bias", self.bias_parameter)):
            if parameter is not None:
                parameter.detach().copy_(self._fetch(name, parameter.dtype, timeout_s))

    def _fetch(self, name: str, dtype: torch.dtype, timeout_s: float | None) -> torch.Tensor:
        """The "weight" or "bias", on the CPU, to be rounded to `dtype`."""
        wanted = None if _arrays.data_type_name(dtype) == self.spec.data_type else _arrays.FLOAT32
        values = (self.weight if name == "weight" else self.bias)(dtype=wanted, timeout_s=timeout_s)
        return _arrays.to_torch(_arrays.from_any(values, name))

    def _trainer_owned(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.owner != "trainer" or self.weight_parameter is None:
            raise refused(f"{self.name} is not owned by the trainer's optimizer", "owner")
        return self.weight_parameter, self.bias_parameter

    def _server_tied(self) -> torch.Tensor:
        if self.tied != "server" or self.weight_parameter is None:
            raise refused(f'{self.name} is not tied="server"', "tied")
        return self.weight_parameter


# Bytes of rows that one contribution may have, by the name of the server's limit.
_GRADIENT_LIMIT = "max_micro_batch_bytes"


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a plain tensor; that of an Embedding with sparse=True is not one."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def attach(
    client: Client,
    name: str,
    module: torch.nn.Module | torch.nn.Parameter,
    *,
    model: torch.nn.Module | None = None,
    tied: str | bool | None = None,
    optimizer: AdamW | SGD | str | None = None,
    trainable: bool = True,
    check: Mapping[str, Any] | None = None,
    if_exists: str = "attach",
    **options: Any,
) -> ModuleHead:
    """Makes a head of a model's last layer, or finds the one that was made before.

    The owner of the weight:
        optimizer=headwater.AdamW(...): the server. The layer can be deleted; nothing of the head stays here.
        optimizer="torch": this trainer. A torch optimizer holds the layer's parameters; the head serves them and accumulates.
        tied="trainer": the same, for a weight that is also the input embedding.
        tied="server", optimizer=headwater.AdamW(...): the server, for a weight that is also the input embedding; take the
            parameter out of the torch optimizer.
        trainable=False: nobody. A teacher, or a head below a LoRA body.
        none of these: nobody, but gradients are accumulated (`Head.gradient`).

    Args:
        client: of `headwater.connect` or `headwater.local.connect`.
        name: of the head.
        module: the model's torch.nn.Linear, or its weight alone.
        model: the model that the layer belongs to. `attach` looks there for a second use of the weight, and compares the model with
            the head. One small forward, without gradients and in evaluation mode, shows which logits the model makes of rows that
            enter the layer. Where the model does not run by itself, `attach` reads its `config` alone, and warns. Nothing of the
            model changes. None: `attach` finds a torch.nn.Embedding with the same weight, and does not compare logits.
        tied: None, "trainer" or "server". False: the weight is not tied although the model's config says tie_word_embeddings.
        optimizer: see above.
        trainable: whether gradients are accumulated.
        check: inputs of the model with "labels". `model(**check)` runs once without gradients, and its loss is compared with the
            head's for the rows that reach the layer. The loss must be the cross entropy with labels shifted by one.
        if_exists: "attach", "fail" or "replace", as in `Client.create_head`. An existing head keeps its own weight; with
            optimizer="torch", `TrainingLoop.resume` gives it the layer's at the beginning of a run.
        options: those of `Client.create_head`: softcap, logit_scale, valid_vocab_size, dtype, staging_slots, expected_step,
            timeout_s, ...
    Returns:
        The head. `created` says whether it is new, `checked` how the model was compared.
    Raises:
        InvalidArgumentError (a ValueError): (a ValueError) LoRA on the head, a quantised or reparametrised layer; a weight that is
            shared without `tied`, or `tied` for one that is not. Also a model whose logits or loss are not the head's, with the
            option to pass. A head that this call has created is deleted then. Also the errors of `Client.create_head`.
    """
    layer = output_layer(module)
    tied, untied = (None, True) if tied is False else (tied, False)
    owner = _owner(tied, optimizer, trainable)
    _check_sharing(model, layer, tied, trainable)
    if model is not None and trainable and tied is None and not untied:
        _check_tied_config(model, layer)
    wanted = {option: options[option] for option in ("softcap", "logit_scale", "valid_vocab_size") if option in options}
    spec = HeadSpec(*layer.weight.shape, **wanted)  # refuses values that are no numbers
    made = _forward_check.HeadOptions(spec.softcap, spec.logit_scale, spec.valid_vocab_size)
    checked = _model_checks.Checked("nothing", "no model= was given")
    if model is not None:
        checked = _model_checks.check_model(model, layer, made, options, by_batch=check is not None)
    if checked.warning:
        warnings.warn(f"headwater.torch.attach: {checked.warning}", stacklevel=2)
    batch = None if check is None else _model_checks.loss_of_batch(model, layer, check)
    keeps = owner == "trainer" or tied is not None
    if keeps:
        _check_kept(layer, tied)
    head = client.create_head(
        name,
        layer.weight.detach(),  # other uses of it were looked for
        layer.bias,
        trainable=trainable,
        optimizer=None if isinstance(optimizer, str) else optimizer,
        if_exists=if_exists,
        **options,
    )
    timeout_s = options.get("timeout_s")
    info = head.info(timeout_s=timeout_s)
    # A trained head is ahead of the layer's weight; a head that the trainer owns receives the layer's weight.
    fresh = head.created or (owner != "trainer" and info.open_step in (None, info.spec.initial_step))
    try:
        if batch is not None:
            _model_checks.check_batch(batch, head if fresh else None, layer, made, timeout_s)
    except BaseException:
        if head.created:
            with contextlib.suppress(HeadwaterError):
                head.delete(force=True, timeout_s=timeout_s)
        raise
    return ModuleHead(head, info, layer if keeps else None, owner=owner, tied=tied, checked=checked)


def _owner(tied: Any, optimizer: Any, trainable: bool) -> str:
    """The owner of the weight; see `ModuleHead.owner`."""
    if tied not in (None, "trainer", "server"):
        raise must_be("tied", 'None, False, "trainer" or "server"', tied)
    if isinstance(optimizer, str) and optimizer != "torch":
        raise must_be("optimizer", 'headwater.AdamW, headwater.SGD, "torch" or None', optimizer)
    if not trainable:
        if tied is not None or optimizer is not None:
            raise refused("a frozen head (trainable=False) takes neither tied= nor optimizer=", "trainable")
        return ""
    if tied == "trainer":
        if optimizer not in (None, "torch"):
            raise refused('tied="trainer" leaves the weight to PyTorch\'s optimizer: the head takes none', "optimizer")
        return "trainer"
    if tied == "server":
        if not isinstance(optimizer, (AdamW, SGD)):
            raise refused('tied="server" needs the head\'s optimizer: headwater.AdamW(...) or headwater.SGD(...)', "optimizer")
        return "server"
    return "trainer" if optimizer == "torch" else "" if optimizer is None else "server"


def _check_sharing(model: torch.nn.Module | None, layer: OutputLayer, tied: Any, trainable: bool) -> None:
    if model is None:
        if tied is None and trainable and (embedding := embedding_of(layer.weight)) is not None:
            raise refused(
                f"the head's weight is that of a torch.nn.Embedding({embedding.num_embeddings}, {embedding.embedding_dim}) of this "
                f"process: two optimizers would each change half of it. Pass model=, and {_FLOWS}",
                "tied",
            )
        return
    others = sharing(model, layer)
    # A weight that was given alone is found in its own layer, too: one use is no sharing, unless it is the embedding.
    if layer.module is None and others and not any(isinstance(m, torch.nn.Embedding) for m in _users(model, layer)):
        others = others[1:]
    names = ", ".join(other.name for other in others)
    if tied is None:
        if not trainable:
            others = [other for other in others if other.tensor.requires_grad]
        if others:
            why = f"the head's weight shares its memory with {names}"
            if not trainable:
                raise refused(f"{why}, which is trained: a frozen head would stay behind. Freeze it, or use {_FLOWS}", "tied")
            raise refused(f"{why}: two optimizers would each change half of it. Use {_FLOWS}", "tied")
        return
    if not others:
        raise refused(f'tied="{tied}", but nothing else in the model uses the head\'s weight', "tied")
    for other in others:
        if other.tensor is not layer.weight:
            raise refused(
                f"{other.name} shares memory with the head's weight, but is another Parameter with a gradient of its own: "
                "make both one Parameter (lm_head.weight = embedding.weight)",
                "tied",
            )


def _check_tied_config(model: torch.nn.Module, layer: OutputLayer) -> None:
    """The model's config does not call a weight tied that is not."""
    inner = _forward_check.unwrapped(model)
    module = _forward_check.layer_in(inner, layer)
    around = [] if module is None else _forward_check.ancestors(inner, module)
    # The innermost: a configuration of another part of the model speaks of its own layers.
    owner = next((owner for owner in reversed(around) if getattr(owner, "config", None) is not None), None)
    if owner is None or not getattr(owner, "_tied_weights_keys", True):
        return
    if _model_config.entry(owner.config, "tie_word_embeddings") is True:
        raise refused(
            "the model's config has tie_word_embeddings=True, but the head's weight is no Embedding's: save_pretrained may leave "
            "it out, and from_pretrained would tie it again. Tie it (lm_head.weight = embedding.weight) and pass tied=, or set "
            "config.tie_word_embeddings=False, or pass tied=False to leave it so",
            "tied",
        )


def _users(model: torch.nn.Module, layer: OutputLayer) -> list[torch.nn.Module]:
    return [module for module in model.modules() if any(parameter is layer.weight for parameter in module._parameters.values())]


def _check_kept(layer: OutputLayer, tied: str | None) -> None:
    """The layer's tensors can be trained here."""
    for name, tensor in (("weight", layer.weight), ("bias", layer.bias)):
        if tensor is not None and not (isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad):
            raise refused(f"the {name} must be a Parameter that requires a gradient, for this trainer still uses it", "module")
