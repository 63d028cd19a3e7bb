"""A layer whose weight a head trains, in the place of an optimizer that a framework steps without asking the loss."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from headwater._errors import option_refused
from headwater._loss._micro_batches import distributed_place
from headwater._model_files._torch_modules import live_modules
from headwater._types import SGD, AdamW
from headwater.torch._joint_step import JointStep, Wrapped
from headwater.torch._optimizers import optimizer_like
from headwater.torch._remote_head import HeadwaterConfig, RemoteHead, attach_remote


class TrainedLayer:
    """A trained head of a layer, whose step closes with the optimizer's, and whose checkpoints are written with the optimizer's.

    The layer gets the trained weight whenever its `state_dict` is asked for.

    Args:
        weight: (vocab_size, hidden_size) of the layer; a DTensor that all ranks have parts of, too.
        bias: (vocab_size,) or None.
        config: which head.
        users: the modules that have the weight: the layer, and an embedding that it is tied to.
        joint_of: makes the joint step that closes the head's steps.
        optimizers: the torch optimizers that train the body, whose state is saved.
        like: settings of the optimizer of the head, if the configuration names none.

    Attributes:
        remote: the head and the layer.
        joint: the joint step that closes the head's steps.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        config: HeadwaterConfig,
        *,
        users: list[torch.nn.Module],
        joint_of: Callable[[RemoteHead], JointStep],
        optimizers: list[torch.optim.Optimizer],
        like: AdamW | SGD | None,
    ):
        layer = _layer_of(weight, bias, trains_here=config.optimizer == "torch" or len(users) > 1)
        self.remote = attach_remote(_Model(layer, users), config, optimizer=like)
        if self.remote.served:  # the tensors to bring the trained ones to
            layer.weight, layer.bias = weight, bias
        self._weight = weight
        self._undo: list[Callable[[], Any]] = [self.remote.pull_weight]
        self.joint = joint_of(self.remote)
        self._undo.append(self.joint.close)
        try:
            self.joint.begin(_steps_made(optimizers))
        except BaseException:
            self.joint.close()
            raise
        for module in users:
            self._undo.append(module.register_state_dict_pre_hook(lambda *_: self.remote.pull_weight()).remove)
        for optimizer in optimizers:
            self._undo.append(optimizer.register_state_dict_pre_hook(lambda *_: self._save()).remove)
            if self.remote.served:
                optimizer.state.pop(weight, None)
                self._undo.append(optimizer.register_state_dict_post_hook(self._complete).remove)

    def _save(self) -> None:
        self.joint.save(self.remote.head.step or 0)
        self.remote.pull_weight()

    def _complete(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Gives a saved state the weight's part, all zeros: who loads it makes an optimizer that has one first.

        Here the optimizer has none: the weight gets no gradient.
        """
        optimizer.state.pop(self._weight, None)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        index = next((index for index, parameter in enumerate(held) if parameter is self._weight), None)
        example = next(iter(optimizer.state.items()), None)
        if index is None or example is None:
            return
        parameter, state = example
        state_dict["state"][index] = {
            name: torch.zeros_like(self._weight, dtype=value.dtype)
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape
            else value
            for name, value in state.items()
        }

    def wrap_clipping(self, module: ModuleType, name: str, clip: Callable[..., Any]) -> None:
        """Puts `clip(self, original, *args, **kwargs)` in the place of a framework's function, until `detach`."""
        self._undo.append(Wrapped(module, name, functools.partial(clip, self)).remove)

    def clip(self, parameters: list[torch.Tensor], max_norm: float | None, clip_body: Callable[[Any], Any]) -> Any:
        """Clips the body and the head by their norm together, and returns that; parameters of another training without the head.

        Args:
            clip_body: clips the parameters' gradients by a norm, and returns theirs: () float.
        """
        own = {id(parameter) for parameter in self.joint._body()}
        if max_norm is None or not any(id(parameter) in own for parameter in parameters):
            return clip_body(max_norm)
        came: list[torch.Tensor] = []

        def norm() -> torch.Tensor:
            came.append(clip_body(math.inf))
            return came[0]

        total = self.joint.clip(max_norm, norm)
        return torch.full_like(came[0], total)

    def detach(self) -> None:
        """Gives the layer the trained weight, and takes all hooks off. The head stays."""
        while self._undo:
            self._undo.pop()()


class _Model(torch.nn.Module):
    """A layer, and the other users of its weight: all that is known of a model here."""

    def __init__(self, layer: torch.nn.Linear, users: list[torch.nn.Module]):
        super().__init__()
        self.lm_head = layer
        self.embeddings = torch.nn.ModuleList(module for module in users if isinstance(module, torch.nn.Embedding))

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head


def _layer_of(weight: torch.Tensor, bias: torch.Tensor | None, *, trains_here: bool) -> torch.nn.Linear:
    """A torch.nn.Linear of these tensors: of themselves if an optimizer still uses them here, else of their values."""
    vocab_size, hidden_size = weight.shape
    layer = torch.nn.Linear(hidden_size, vocab_size, bias=bias is not None, device="meta")
    if trains_here:
        if hasattr(weight, "device_mesh"):
            raise option_refused(
                "tied, optimizer", "a weight that the framework's optimizer updates and FSDP shards is not supported: untie it"
            )
        layer.weight, layer.bias = weight, bias
    else:
        layer.weight = torch.nn.Parameter(whole(weight.detach()))
        layer.bias = None if bias is None else torch.nn.Parameter(whole(bias.detach()))
    return layer


def users_of(weight: torch.Tensor) -> list[torch.nn.Module]:
    """The modules of this process that have a weight."""
    return [module for module in live_modules() if any(own is weight for own in module._parameters.values())]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which this rank may have a part only; all ranks call it then."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _steps_made(optimizers: list[torch.optim.Optimizer]) -> int:
    """Number of steps that the optimizers have made, by their own count: 0 for those that do not count, as SGD."""
    states = [state for optimizer in optimizers for state in (*optimizer.state.values(), *optimizer.param_groups)]
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def live(kind: Callable[[type], bool]) -> Iterator[Any]:
    """Objects of this process whose type is of a kind, which something still refers to."""
    gc.collect()
    return (thing for thing in gc.get_objects() if kind(type(thing)))


def train_with_holder(
    weight: torch.Tensor, bias: torch.Tensor | None, config: HeadwaterConfig, *, gradient_factor: float
) -> TrainedLayer:
    """A head that is trained like the layer's weight in its torch optimizer, which continues without it.

    Raises:
        InvalidArgumentError: no optimizer has the weight, or several; ranks that do not have it; models that `attach` refuses.
    """
    users = users_of(weight)
    weight, bias = _sharded(weight, bias)
    _check_ranks(weight)
    holders = [optimizer for optimizer in live(lambda kind: issubclass(kind, torch.optim.Optimizer)) if _holds(optimizer, weight)]
    parts = [len(optimizer.optimizers) for optimizer in holders if hasattr(optimizer, "optimizers")]  # torchtitan's container
    single = [optimizer for optimizer in holders if not hasattr(optimizer, "optimizers")]
    if len(single) != 1 or any(count > 1 for count in parts):
        raise option_refused(
            "optimizer",
            f"the head's step closes with that of one optimizer, and {len(single)} hold the layer's weight"
            + (f" among {max(parts)} that step one after another" if parts else "")
            + ": train it and the body by one, or freeze it",
        )
    optimizer = single[0]
    if config.param_group is None:
        owner = next(index for index, group in enumerate(optimizer.param_groups) if any(own is weight for own in group["params"]))
        config = replace(config, param_group=owner)
    like = optimizer_like(optimizer, weight, config.param_group) if config.optimizer == "auto" else None
    return TrainedLayer(
        weight,
        bias,
        config,
        users=users,
        joint_of=lambda remote: JointStep([remote], optimizer, gradient_factor=gradient_factor),
        optimizers=[optimizer],
        like=like,
    )


def _holds(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> bool:
    return any(own is weight for group in getattr(optimizer, "param_groups", ()) for own in group["params"])


def _sharded(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The parameters as the optimizer has them: between forward and backward FSDP2 puts whole ones in their place."""
    layer = next((module for module in live_modules() if module._parameters.get("weight") is weight), None)
    units = [unit for unit in live_modules() if isinstance(unit, FSDPModule) and any(part is layer for part in unit.modules())]
    if layer is None or not units or hasattr(weight, "device_mesh"):
        return weight, bias
    unit = min(units, key=lambda unit: sum(1 for _ in unit.modules()))  # the innermost one has it
    unit.reshard()
    sharded = layer._parameters["weight"], layer._parameters.get("bias")
    unit.unshard()  # backward continues with the former weights
    assert sharded[0] is not None
    return sharded


def _check_ranks(weight: torch.Tensor) -> None:
    world_size = distributed_place()[1]
    mesh = getattr(weight, "device_mesh", None)
    names, ranks = ((), 1) if mesh is None else (mesh.mesh_dim_names or (), mesh.size())
    if "tp" in names or ranks != world_size:
        raise option_refused(
            "parallelism",
            f"{ranks} of {world_size} ranks share the layer ({', '.join(names) or 'not sharded'}): with a trained head all do by "
            "FSDP2, without tensor or pipeline parallelism and DistributedDataParallel",
        )
