"""accelerate: a model's last layer on a server, in a training loop of one's own.

    model, optimizer, loader, scheduler = headwater.accelerate.prepare(
        accelerator, model, optimizer, loader, scheduler, config=HeadwaterConfig(server="localhost:50051"))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)         # no logits
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)     # by the norm of body and head together
            optimizer.step()                                  # closes the head's step, too
            scheduler.step()
            optimizer.zero_grad()
    accelerator.save_state(folder)                            # and a checkpoint of the head's

Tested with accelerate 1.10 and 1.15.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from headwater._errors import option_refused
from headwater.torch._joint_step import JointStep, Wrapped
from headwater.torch._optimizers import matching_optimizer, optimizer_like
from headwater.torch._remote_head import HeadwaterConfig, RemoteHead, _output_layer, attach_remote

__all__ = ["HeadwaterConfig", "Prepared", "prepare", "prepared"]

_ATTRIBUTE = "_headwater"
# The supported ways to distribute, by accelerate's names.
_DISTRIBUTED = ("NO", "MULTI_CPU", "MULTI_GPU")


class Prepared:
    """The hooks of `prepare` in an Accelerator, and their removal.

    Attributes:
        remote: the head and the layer.
        joint: the joint step that closes the head's steps.
    """

    def __init__(self, accelerator: Any, remote: RemoteHead, optimizer: Any):
        self.remote = remote
        self._accelerator = accelerator
        self.joint = JointStep([remote], optimizer, scaler=accelerator.scaler, gradient_factor=1.0 / accelerator.num_processes)
        self.joint.begin(None)
        self._hooks = [Wrapped(optimizer, "step", self._close), accelerator.register_save_state_pre_hook(self._save)]
        if remote.trained:
            self._hooks.append(Wrapped(accelerator, "clip_grad_norm_", self._clip))
            self._hooks.append(Wrapped(accelerator, "clip_grad_value_", self._refuse_value))
        accelerator.register_for_checkpointing(self)
        setattr(accelerator, _ATTRIBUTE, self)

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        """The head's cross entropy, for a network of one's own: `RemoteHead.loss` with the same arguments."""
        return self.remote.loss(hidden, targets, **options)

    # ---- a step -----------------------------------------------------------------------------------------------------

    def _clip(self, clip: Callable[..., Any], parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        if norm_type != 2:
            raise option_refused("norm_type", f"body and head have a norm of 2 together, not {norm_type}")
        if not self._accelerator.sync_gradients:
            raise option_refused("clip_grad_norm_", "the step's gradients are not complete: clip `if accelerator.sync_gradients`")
        kept = list(parameters)
        self.joint.prepare()  # before anything is unscaled
        norm = self.joint.clip(max_norm, lambda: clip(kept, float("inf")))
        return torch.tensor(norm, device=self._accelerator.device)

    def _refuse_value(self, *_: Any, **__: Any) -> Any:
        raise option_refused("clip_grad_value_", "body and head are clipped by their norm together: use clip_grad_norm_")

    def _close(self, step: Callable[[], Any], closure: Any = None) -> Any:
        if closure is not None:
            raise option_refused("closure", "compute the loss before the step")
        if not self._accelerator.sync_gradients:
            return step()
        self.joint.prepare()
        result = step()
        self.joint.settle()
        return result

    # ---- checkpoints, as accelerate asks for them -------------------------------------------------------------------

    def _save(self, models: list[torch.nn.Module], weights: list[Any], output_dir: Any) -> None:
        if self.remote.head.step is not None:
            self.joint.save(self.remote.head.step)
        for state_dict in weights:
            self.remote.update_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """The head's step: its checkpoint on the server has that in its name."""
        return {"head": self.remote.head.name, "step": self.remote.head.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Brings the head to the step of a state that accelerate has loaded.

        Raises:
            StepMismatchError: the server has no checkpoint of it.
        """
        if self.remote.trained:
            self.remote.has_trained = False  # step 0 is this state's, not the beginning of another training
            self.joint.begin(state_dict["step"])

    def undo(self) -> None:
        """Takes the hooks off; the model has the trained weight then, and computes its logits itself."""
        self.joint.close()
        for hook in self._hooks:
            hook.remove()
        delattr(self._accelerator, _ATTRIBUTE)
        self._accelerator._custom_objects.remove(self)
        self.remote.detach()


def prepare(accelerator: Any, *objects: Any, config: HeadwaterConfig | None = None) -> tuple[Any, ...]:
    """`accelerator.prepare(*objects)` with the last layer of the model among them on a server.

    Losses of a model of transformers come from the head then. A network of one's own has `get_output_embeddings()`, which names the
    layer, and takes its loss from `prepared(accelerator).loss`. The head's step closes with the optimizer's, with the same learning
    rate; `accelerator.clip_grad_norm_` clips by the norm of body and head together. `save_state` and `load_state` also save and
    restore a checkpoint of the head on the server. A loss is the mean over a process's own tokens, as accelerate averages
    processes.

    Args:
        accelerator: an `accelerate.Accelerator`.
        objects: as of `accelerator.prepare`: one model, one optimizer, and any other objects, in any order.
        config: which head. None: the server of the environment, and a head of the model's name.
    Returns:
        The result of `accelerator.prepare`.
    Raises:
        InvalidArgumentError: several models or optimizers; DeepSpeed, FSDP and the like; models that `headwater.torch.attach`
            refuses.
    """
    if hasattr(accelerator, _ATTRIBUTE):
        raise option_refused("accelerator", "it has a head already; `prepared(accelerator).undo()` takes it off")
    model = _only(objects, torch.nn.Module, "model")
    optimizer = _only(objects, torch.optim.Optimizer, "optimizer")
    config = HeadwaterConfig() if config is None else config
    remote = _attach(model, config, optimizer)
    try:
        distributed = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        if distributed not in _DISTRIBUTED:
            raise option_refused("distributed_type", f"{distributed} is not supported: one process, or DistributedDataParallel")
        made = accelerator.prepare(*objects)
        Prepared(accelerator, remote, made[objects.index(optimizer)])
    except BaseException:
        remote.detach()
        raise
    return made  # type: ignore[no-any-return]


def prepared(accelerator: Any) -> Prepared:
    """The result of `prepare` for an Accelerator."""
    if not hasattr(accelerator, _ATTRIBUTE):
        raise option_refused("accelerator", "headwater.accelerate.prepare has not seen it")
    return getattr(accelerator, _ATTRIBUTE)  # type: ignore[no-any-return]


def _only(objects: tuple[Any, ...], kind: type, what: str) -> Any:
    found = [value for value in objects if isinstance(value, kind)]
    if len(found) != 1:
        raise option_refused(what, f"expected one {what}, got {len(found)}")
    return found[0]


def _attach(model: torch.nn.Module, config: HeadwaterConfig, optimizer: torch.optim.Optimizer) -> RemoteHead:
    weight, is_auto = _output_layer(model).weight, config.optimizer == "auto"
    wanted = matching_optimizer(optimizer, weight, config.param_group) if is_auto else None
    transformers = sys.modules.get("transformers")  # a model of theirs has imported it
    if transformers is not None and any(isinstance(module, transformers.PreTrainedModel) for module in model.modules()):
        from headwater.transformers import attach_remote_head

        remote = attach_remote_head(model, config, optimizer=wanted)
    else:
        remote = attach_remote(model, config, optimizer=wanted)
    if remote.served and is_auto and wanted is None:
        remote.detach()
        if remote.head.created:
            remote.head.delete(force=True)
        optimizer_like(optimizer, weight, config.param_group)  # refuses it
    return remote
