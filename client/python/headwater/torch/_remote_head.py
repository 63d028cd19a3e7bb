"""A model's last layer that a head stands in for, under the trainer of a framework."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import re
import threading
import warnings
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headwater._client import DEFAULT_TIMEOUT_S, Client
from headwater._connect import connect
from headwater._errors import FailedPreconditionError, NotFoundError, invalid_argument, refused
from headwater._loss._micro_batches import distributed_place
from headwater._model_files._torch_modules import OutputLayer, output_layer, sharing
from headwater._types import SGD, AdamW
from headwater.torch import _forward_check, _model_checks, _model_config
from headwater.torch._attach import ModuleHead, attach
from headwater.torch._losses import CrossEntropyLoss

SERVER_VARIABLE, TOKEN_VARIABLE = "HEADWATER_SERVER", "HEADWATER_TOKEN_FILE"
_LOCAL = "local"
_OPTIONS = ("softcap", "logit_scale", "valid_vocab_size")
# The figures logged besides the loss, with the output of a loss behind each.
LOGGED = {"token_accuracy": "argmax", "entropy": "entropy"}


@dataclass(frozen=True, kw_only=True)
class HeadwaterConfig:
    """Which head stands in for a model's last layer, and how it is trained.

    Attributes:
        server: `host:port`, `unix:/path`, or "local" for a server of this process's own. None: the environment's HEADWATER_SERVER.
        token_file: file with the token that the server asks for. None: the environment's HEADWATER_TOKEN_FILE, else no token.
        head: its name; a run that continues names the same one. Empty: made of the model's name.
        trainable: whether the head is trained. "auto": if the layer's weight requires a gradient, which it does not under LoRA.
        tied: "auto" or "trainer": a weight that is the embedding's, too, is updated by the framework's optimizer. None: the weight
            is not tied although the model's config says so.
        optimizer: of a head that is trained: `headwater.AdamW`, `headwater.SGD`, or "auto" for one with the framework's settings:
            the server updates the weight. "torch": the framework's optimizer does, and weight and gradient cross the wire at each
            step.
        if_exists: "attach" to a head of this name, "replace" it, or "fail".
        checkpoint_name: of the head's checkpoints, with {step}.
        checkpoint_dir: where a "local" server writes them. None: a Trainer's output folder has them.
        softcap, logit_scale, valid_vocab_size: as in `Client.create_head`. None: the values that one small forward of the model
            shows.
        label_smoothing, z_loss: of the loss, as in `CrossEntropyLoss`.
        outputs: logged beside the loss: "token_accuracy", "entropy".
        param_group: index of the torch optimizer's group whose learning rate the head has. None: all groups have the same one.
        dtype: as in `Client.create_head`.
        staging_slots: as in `Client.create_head`. None: one for each rank, or those that the head has already.
        timeout_s: bound of each call, in seconds. None: the client's.
        replay: follow a server that was started again, as in `connect`.
        client: an open client, instead of `server`.
    """

    server: str | None = None
    token_file: str | os.PathLike[str] | None = None
    head: str = ""
    trainable: bool | str = "auto"
    tied: str | None = "auto"
    optimizer: AdamW | SGD | str = "auto"
    if_exists: str = "attach"
    checkpoint_name: str = "step-{step}"
    checkpoint_dir: str | os.PathLike[str] | None = None
    softcap: float | None = None
    logit_scale: float | None = None
    valid_vocab_size: int | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    outputs: tuple[str, ...] = ()
    param_group: int | None = None
    dtype: Any = None
    staging_slots: int | None = None
    timeout_s: float | None = None
    replay: bool = True
    client: Client | None = None

    def __post_init__(self) -> None:
        if self.trainable not in (True, False, "auto"):
            raise refused(f'trainable must be True, False or "auto", got {self.trainable!r}', "trainable")
        if self.tied == "server":
            raise refused(
                'tied="server" takes the embedding out of the framework\'s optimizer: use tied="trainer", or a loop of your own '
                "with headwater.torch.TrainingLoop",
                "tied",
            )
        if self.tied not in (None, "auto", "trainer"):
            raise refused(f'tied must be "auto", "trainer" or None, got {self.tied!r}', "tied")
        if not isinstance(self.optimizer, (AdamW, SGD)) and self.optimizer not in ("auto", "torch"):
            raise refused(
                f'optimizer must be headwater.AdamW(...), headwater.SGD(...), "auto" or "torch", got {self.optimizer!r}',
                "optimizer",
            )
        for output in self.outputs:
            if output not in LOGGED:
                raise refused(f"outputs may have {', '.join(LOGGED)}; got {output!r}", "outputs")
        if "{step}" not in self.checkpoint_name:
            raise refused(f"checkpoint_name must contain {{step}}, got {self.checkpoint_name!r}", "checkpoint_name")

    @property
    def logit_options(self) -> dict[str, Any]:
        """softcap, logit_scale and valid_vocab_size, where they are given."""
        return {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}

    @property
    def loss_options(self) -> dict[str, Any]:
        """The options of every loss of the head."""
        return {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss, "timeout_s": self.timeout_s}

    def connect(self) -> Client:
        """The client of the server: one for each server and process, which stays open."""
        if self.client is not None:
            return self.client
        server = self.server or os.environ.get(SERVER_VARIABLE)
        if not server:
            raise invalid_argument(
                "MISSING_FIELD",
                f"name the server: HeadwaterConfig(server=...), or the environment variable {SERVER_VARIABLE}",
                field="server",
            )
        token_file = self.token_file or os.environ.get(TOKEN_VARIABLE)
        token = None if token_file is None else Path(token_file).read_text().strip()
        timeout_s = DEFAULT_TIMEOUT_S if self.timeout_s is None else self.timeout_s
        key = os.getpid(), server, token, str(self.checkpoint_dir), self.replay, timeout_s
        with _lock:
            if key not in _clients:
                if server == _LOCAL:
                    from headwater import local

                    _clients[key] = local.connect(checkpoint_dir=self.checkpoint_dir, timeout_s=timeout_s)
                else:
                    _clients[key] = connect(server, token=token, replay=self.replay, timeout_s=timeout_s)
            return _clients[key]


_lock = threading.Lock()
_clients: dict[tuple[Any, ...], Client] = {}


@atexit.register
def _close_clients() -> None:
    """Ends their sessions, which the server would otherwise wait for."""
    for client in _clients.values():
        client.close()


class RemoteHead:
    """A model's last layer, and the head that computes its losses. Made by `attach_remote`.

    The layer stays in the model: it computes logits where they are asked for, and is saved with the model. Where the server
    updates the weight, the layer's becomes stale at each step, and `pull_weight` brings the head's.

    Attributes:
        model: as given to `attach_remote`.
        layer: the torch.nn.Linear.
        layer_name: its name among the modules of the model without what is wrapped around it, `lm_head`.
        head: the result of `attach`. Another one after `recreate`.
        losses: number of losses that were computed for training.
        has_trained: whether one was since the head was attached.
        unpatch: removes the head's patches from the model.
        optimizer: the torch optimizer with which it was trained last.
    """

    def __init__(self, model: torch.nn.Module, layer: torch.nn.Linear, config: HeadwaterConfig, options: dict[str, Any]):
        self.model = model
        self.layer = layer
        inner = _forward_check.unwrapped(model)
        self.layer_name = next(name for name, module in inner.named_modules() if module is layer)
        self.config = config
        self._options = options
        self.losses = 0
        self.unpatch: Callable[[], Any] = _nothing
        self.optimizer: torch.optim.Optimizer | None = None
        self._required_gradients = {name: p.requires_grad for name, p in layer.named_parameters()}
        self.head = self._attach(config.if_exists)

    def _attach(self, if_exists: str) -> ModuleHead:
        for name, parameter in self.layer.named_parameters():
            parameter.requires_grad_(self._required_gradients[name])
        with warnings.catch_warnings():
            # The rows that reach the layer are those that the head is given.
            warnings.filterwarnings("ignore", message="headwater.torch.attach: the rows that reach the layer")
            head = attach(module=self.layer, model=self.model, if_exists=if_exists, **self._options)
        self._loss_fn: CrossEntropyLoss | None = None
        self.has_trained = False
        if head.owner == "server":
            self.layer.requires_grad_(False)
        # Which of the head's weights the layer has; None: other ones.
        self._layer_has = (head.epoch, head.step) if head.created else None
        return head

    @property
    def trained(self) -> bool:
        return self.head.spec.trainable

    @property
    def served(self) -> bool:
        """Whether the server's optimizer updates the weight."""
        return self.head.owner == "server"

    @property
    def loss_fn(self) -> CrossEntropyLoss:
        """The loss with the configuration's options: mean over the tokens. With `config.outputs` it returns `LossOutputs`."""
        if self._loss_fn is None:
            config = self.config
            outputs = tuple(LOGGED[name] for name in config.outputs)
            self._loss_fn = CrossEntropyLoss(self.head, outputs=outputs, **config.loss_options)
        return self._loss_fn

    def count_loss(self) -> None:
        """A loss of the head was computed for training; the joint step asks for it."""
        self.losses += 1
        self.has_trained = True

    def loss(
        self, hidden: torch.Tensor, targets: torch.Tensor, *, token_weights: Any = None, num_items_in_batch: float | None = None
    ) -> torch.Tensor:
        """The head's cross entropy for a network of one's own, as of `headwater.torch.CrossEntropyLoss` with `reduction="mean"`.

        Args:
            hidden: (..., hidden_size), the inputs of the layer.
            targets: (...) ids of the vocabulary or -100, aligned with `hidden` (nothing is shifted).
            token_weights: (...) finite.
            num_items_in_batch: divisor instead of the sum of the weights of this batch's tokens.
        """
        if torch.is_grad_enabled():
            self.count_loss()
        return self.loss_fn(hidden, targets, token_weights=token_weights, num_items_in_batch=num_items_in_batch)

    def recreate(self) -> None:
        """Creates the head again with its present weights, at its first step: another training begins."""
        self.pull_weight()
        rank, _ = distributed_place()
        with _gathered(self.layer):
            if rank == 0:
                self.head = self._attach("replace")
            _barrier()
            if rank:
                self.head = self._attach("attach")

    # ---- the layer's weight -----------------------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether the layer has the head's weight."""
        return not self.served or self._layer_has == (self.head.epoch, self.head.step)

    def pull_weight(self) -> None:
        """Gives the layer the head's weight and bias, if it has others. Where ranks share the layer, all of them call it."""
        if self.is_current:
            return
        is_partitioned = _is_partitioned(self.layer)
        with _gathered(self.layer, modifier_rank=0):  # which gives the others theirs
            if not is_partitioned or distributed_place()[0] == 0:
                for name, parameter in self.layer.named_parameters():
                    self._download(name, parameter.detach())
        self._layer_has = self.head.epoch, self.head.step

    def push_weight(self) -> None:
        """Gives the head the layer's weight and bias: a checkpoint was loaded into the model."""
        if _is_partitioned(self.layer):
            raise FailedPreconditionError(
                f"the server has no checkpoint of {self.head.name} that belongs to the trainer's, and ZeRO-3 has partitioned the "
                "weight that the model has: start from the saved model",
                reason="INVALID_COMBINATION",
            )
        bias = self.layer.bias
        self.head.set_weight(self.layer.weight.detach(), None if bias is None else bias.detach(), timeout_s=self.config.timeout_s)
        self._layer_has = self.head.epoch, self.head.step

    def _download(self, name: str, into: torch.Tensor) -> None:
        values = self.head._fetch(name, into.dtype, self.config.timeout_s)
        if hasattr(into, "device_mesh"):  # FSDP2 has sharded it: each rank takes its part
            from torch.distributed.tensor import distribute_tensor

            sharded = distribute_tensor(values.to(into.device), into.device_mesh, into.placements, src_data_rank=None)
            into, values = into.to_local(), sharded.to_local()
        into.copy_(values)

    def update_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str = "") -> None:
        """Puts the trained weight and bias into a state dict of the model, on the CPU, in the dtype that they have there."""
        if self.is_current:
            return
        for name, _ in self.layer.named_parameters():
            key = f"{prefix}{self.layer_name}.{name}"
            if key in state_dict:
                values = torch.empty(state_dict[key].shape, dtype=state_dict[key].dtype, device="cpu")
                self._download(name, values)
                state_dict[key] = values

    def check_current(self, what: str) -> None:
        """Refuses `what` where the layer would compute with a stale weight."""
        if not self.is_current:
            raise FailedPreconditionError(
                f"{what} needs logits, which {self.layer_name} computes here, but the server has trained its weight since: wrap "
                "the call in `with headwater.transformers.local_lm_head(model):`, which brings the weight",
                reason="INVALID_COMBINATION",
            )

    def detach(self) -> None:
        """Gives the layer back to the model: with the weight that was trained, and trainable as before. The head stays."""
        self.pull_weight()
        for name, parameter in self.layer.named_parameters():
            parameter.requires_grad_(self._required_gradients[name])
        self.unpatch()


def _nothing() -> None:
    """The removal for a model that is not patched."""


def attach_remote(model: torch.nn.Module, config: HeadwaterConfig, *, optimizer: AdamW | SGD | None = None) -> RemoteHead:
    """Attaches the last layer of a model to a head, with the options that the model itself shows.

    Args:
        model: a model with get_output_embeddings(), or one that is wrapped around it (PEFT, DistributedDataParallel).
        config: which head, and how.
        optimizer: the optimizer for `config.optimizer="auto"`. None: `headwater.AdamW()`.
    Raises:
        InvalidArgumentError: models that `headwater.torch.attach` refuses; a model without an output layer.
    """
    found = _output_layer(model)
    with _gathered(found):
        return _attach_layer(model, output_layer(found), config, optimizer)


def _attach_layer(model: torch.nn.Module, layer: OutputLayer, config: HeadwaterConfig, optimizer: AdamW | SGD | None) -> RemoteHead:
    assert isinstance(layer.module, torch.nn.Linear)
    trainable = layer.weight.requires_grad if config.trainable == "auto" else bool(config.trainable)
    others = sharing(model, layer)
    rank, world_size = distributed_place()
    client, name = config.connect(), config.head or _name_of(model)
    options: dict[str, Any] = {
        **_head_options(model, layer, config),
        "client": client,
        "name": name,
        "trainable": trainable,
        "dtype": config.dtype,
        "staging_slots": config.staging_slots or (_staging_slots(client, name, config, world_size) if trainable else None),
        "timeout_s": config.timeout_s,
    }
    if not trainable:
        options["tied"] = False if config.tied is None else None
    elif others and config.tied is not None:
        if isinstance(config.optimizer, (AdamW, SGD)):
            raise refused(
                f"the layer's weight is {others[0].name}, too, which the framework's optimizer updates: leave optimizer= out",
                "optimizer",
            )
        options["tied"] = "trainer"
    elif config.tied == "trainer":
        raise refused('tied="trainer", but nothing else in the model uses the weight of its output layer', "tied")
    else:
        options["tied"] = False if config.tied is None else None
        options["optimizer"] = config.optimizer if config.optimizer != "auto" else optimizer or AdamW()
    if rank == 0:
        remote = RemoteHead(model, layer.module, config, options)
        _barrier()
        return remote
    _barrier()
    # To the other ranks the head is there.
    return RemoteHead(model, layer.module, replace(config, if_exists="attach"), options)


def _is_partitioned(layer: torch.nn.Module) -> bool:
    """Whether each rank has a part of the weight, as DeepSpeed's ZeRO-3 does it."""
    return any(hasattr(parameter, "ds_id") for parameter in layer.parameters())


def _gathered(layer: torch.nn.Module, modifier_rank: int | None = None) -> contextlib.AbstractContextManager[Any]:
    """While it lasts, every rank has the whole weight of a layer, also under ZeRO-3. All ranks enter and leave it.

    Args:
        modifier_rank: whose changes stay. None: there are none.
    """
    if not _is_partitioned(layer):
        return contextlib.nullcontext()
    zero = importlib.import_module("deepspeed").zero
    return zero.GatheredParameters(list(layer.parameters()), modifier_rank=modifier_rank)  # type: ignore[no-any-return]


def _staging_slots(client: Client, name: str, config: HeadwaterConfig, world_size: int) -> int | None:
    """One for each rank, whose loss waits for its backward. A head that another number of ranks has made keeps its own."""
    if config.if_exists == "attach":
        with contextlib.suppress(NotFoundError):
            return client.head(name).spec.staging_slots
    return world_size


def _barrier() -> None:
    if distributed_place()[1] > 1:
        torch.distributed.barrier()


def _output_layer(model: torch.nn.Module) -> torch.nn.Module:
    inner = _forward_check.unwrapped(model)
    layer = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if not isinstance(layer, torch.nn.Module):
        raise refused(f"{type(inner).__name__} has no output layer that get_output_embeddings() names", "model")
    return layer


def _name_of(model: torch.nn.Module) -> str:
    """`smollm2-135m-instruct`, or the class's name."""
    config = getattr(_forward_check.unwrapped(model), "config", None)
    name = Path(str(getattr(config, "name_or_path", "") or "")).name or type(_forward_check.unwrapped(model)).__name__
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower())[:64].strip("._-") or "model"


def _head_options(model: torch.nn.Module, layer: OutputLayer, config: HeadwaterConfig) -> dict[str, Any]:
    """softcap, logit_scale and valid_vocab_size: those that are given, others as the model does it."""
    given = config.logit_options
    inner = _forward_check.unwrapped(model)
    hints = _model_checks.hints_of(_forward_check.configs(inner, layer))
    made = _forward_check.HeadOptions(given.get("softcap"), given.get("logit_scale", 1.0), given.get("valid_vocab_size"))
    try:
        forward = _forward_check.run(inner, layer)
    except _forward_check.CannotRun:
        # Where nothing can be seen, the config is believed; `attach` warns of it, and refuses unknown options.
        return {**_said(hints), **given}
    if forward.same(made):
        return given
    found = _forward_check.fitting(forward, made, hints)
    if found is None:
        return given  # `attach` reports the error
    return {**{name: value for name in _OPTIONS if (value := getattr(found[0], name)) != getattr(made, name)}, **given}


def _said(hints: list[_model_config.Asked]) -> dict[str, Any]:
    """A config's hints about the logits, as options for the rows that reach the layer."""
    return {
        hint.option: 1.0 if hint.rows else hint.wanted for hint in hints if hint.option and (hint.rows or hint.wanted is not None)
    }
