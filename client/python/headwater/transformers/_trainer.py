"""`setup_trainer`: the work of a Trainer for a remote head, hooked into the existing Trainer."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from headwater._errors import FailedPreconditionError, option_refused
from headwater._types import SGD, AdamW
from headwater.torch._joint_step import JointStep, Wrapped
from headwater.torch._optimizers import matching_optimizer
from headwater.torch._remote_head import HeadwaterConfig, RemoteHead, _output_layer
from headwater.torch._zero_step import ZeroStep
from headwater.transformers._patch import attach_remote_head, patch_of

_ADAMW = ("adamw_torch", "adamw_torch_fused")
_INFINITY = float("inf")


class HeadwaterCallback(transformers.TrainerCallback):
    """Trains with a remote head: `Trainer(..., callbacks=[HeadwaterCallback(config)])` is `setup_trainer(trainer, config)`.

    Args:
        config: which head. None: the server of the environment, and a head of the model's name.

    Attributes:
        remote: the head and the layer, once the Trainer is made.
        joint: the joint step that closes the head's steps; None outside of `train`.
    """

    def __init__(self, config: HeadwaterConfig | None = None):
        self.config = config or HeadwaterConfig()
        self.remote: RemoteHead | None = None
        self.joint: JointStep | None = None
        self._trainer: Any = None
        self._wrapped: list[Wrapped] = []

    def install(self, trainer: Any, remote: RemoteHead | None = None) -> HeadwaterCallback:
        """Hooks the Trainer, whose first callback this is then if it was none, and patches its model.

        Args:
            remote: of a model that is patched already.
        """
        _refuse_unsupported(trainer)
        if remote is None:
            patch = patch_of(trainer.model)
            remote = attach(trainer, trainer.model, self.config) if patch is None else patch.remote
        self.remote, self._trainer = remote, trainer
        _refuse_fsdp(trainer, remote)
        _refuse_deepspeed(trainer, remote)
        self.wrap(trainer, "_save_checkpoint", self._save_checkpoint)
        if trainer.is_deepspeed_enabled:
            pass  # its engine clips, by the norm that `ZeroStep` gives it, and reports it to the Trainer
        elif hasattr(trainer, "_get_grad_norm"):
            norm_of = trainer._get_grad_norm
            self.wrap(trainer, "_clip_grad_norm", lambda _, model: self._clip(trainer.args.max_grad_norm, lambda: norm_of(model)))
            self.wrap(trainer, "_get_grad_norm", self._norm)
        else:  # before transformers 5, the Trainer asks accelerate alone
            self.wrap(trainer.accelerator, "clip_grad_norm_", self._clip_parameters)
        if self not in trainer.callback_handler.callbacks:
            trainer.callback_handler.callbacks.insert(0, self)
        return self

    def wrap(self, target: Any, name: str, around: Callable[..., Any]) -> None:
        """Has `around(method, *args)` called in the place of a method, until `undo`."""
        self._wrapped.append(Wrapped(target, name, around))

    def undo(self) -> None:
        """Takes the hooks off the Trainer; `detach_remote_head(model)` does so with the model's."""
        self._stop()
        for wrapped in self._wrapped:
            wrapped.remove()
        self._wrapped = []
        if self._trainer is not None:
            self._trainer.remove_callback(self)

    # ---- what the Trainer calls -------------------------------------------------------------------------------------

    def _clip(self, max_norm: float | None, body_norm: Callable[[], Any]) -> float:
        assert self.joint is not None
        return self.joint.clip(max_norm, body_norm)

    def _norm(self, norm_of: Callable[..., Any], model: Any, grad_norm: Any = None) -> Any:
        return norm_of(model, grad_norm) if grad_norm is not None else self._clip(None, lambda: norm_of(model))

    def _clip_parameters(self, clip: Callable[..., Any], parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        kept = list(parameters)
        return torch.tensor(self._clip(max_norm, lambda: clip(kept, _INFINITY, norm_type)))

    def _save_checkpoint(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.joint is not None and self.remote is not None:
            self.joint.save(self._trainer.state.global_step)
            if self._trainer.is_fsdp_enabled or self._trainer.is_deepspeed_enabled:
                self.remote.pull_weight()  # their checkpoints do not go through save_pretrained
        return save(*args, **kwargs)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.install(_calling_trainer(self))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        remote = self.remote
        assert remote is not None
        self._stop()
        if remote.served:
            _check_decay(remote)
        accelerator = self._trainer.accelerator
        factor = 1.0 / accelerator.num_processes
        if self._trainer.is_deepspeed_enabled:
            self.joint = ZeroStep([remote], self._trainer.deepspeed.optimizer, gradient_factor=factor)
        else:
            self.joint = JointStep(
                [remote],
                optimizer,
                parameters=[parameter for parameter in self._trainer.model.parameters() if parameter.requires_grad],
                scaler=getattr(accelerator, "scaler", None),
                gradient_factor=factor,
            )
        self.joint.begin(state.global_step)
        if (patch := patch_of(self._trainer.model)) is not None:
            patch.joint = self.joint
        if remote.trained and str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
            self.joint.save(state.global_step)  # a server that cannot says so now

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.joint is not None and not self._trainer.is_deepspeed_enabled:  # whose step is done by now
            self.joint.prepare()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.joint is not None:
            self.joint.settle()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.joint is not None:
            self.joint.check_step(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        patch = patch_of(self._trainer.model)
        if patch is None or not patch.sums or "loss" not in (logs or {}):
            return
        sums = {name: float(value) for name, value in patch.sums.items()}
        patch.sums.clear()
        # Means over this rank's tokens.
        means = {name: total / max(sums["count"], 1.0) for name, total in sums.items() if name != "count"}
        logs.update(means)
        state.log_history[-1].update(means)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.joint is not None and self.remote is not None
        best = state.best_model_checkpoint
        if args.load_best_model_at_end and best is not None:
            self.joint.restore(int(Path(best).name.rpartition("-")[2]))
        self._stop()
        self.remote.pull_weight()  # a model that was trained is one that can be used

    def _stop(self) -> None:
        if self.joint is not None:
            self.joint.close()
        self.joint = None
        if self._trainer is not None and (patch := patch_of(self._trainer.model)) is not None:
            patch.joint = None


def setup_trainer(trainer: Any, config: HeadwaterConfig | None = None) -> Any:
    """Makes a Trainer train with a remote head: its loss, clipping, steps, checkpoints and saved files.

    Call it after the Trainer was made, before anything else of it. The head's step closes with the optimizer's, with the same
    learning rate; gradients are clipped by the norm of body and head together. Each checkpoint of the Trainer's has one of the
    head's on the server, and a whole model in it, with the trained weight.

    Args:
        trainer: a transformers.Trainer; one of TRL's goes to `headwater.trl.setup_trainer`.
        config: which head. None: the server of the environment, and a head of the model's name.
    Returns:
        The `HeadwaterCallback`, which is one of the Trainer's now; its `undo` takes the hooks off.
    Raises:
        InvalidArgumentError: an option of the Trainer's that is not supported; the message begins with its name. Also the errors of
            `attach_remote_head`.
    """
    if any(cls.__module__.partition(".")[0] == "trl" for cls in type(trainer).__mro__):
        return importlib.import_module("headwater.trl").setup_trainer(trainer, config)
    return HeadwaterCallback(config).install(trainer)


def _calling_trainer(callback: HeadwaterCallback) -> Any:
    """The Trainer under construction, which passes its callbacks everything but itself."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        trainer = frame.f_locals.get("self")
        handler = getattr(trainer, "callback_handler", None)
        if isinstance(trainer, transformers.Trainer) and any(other is callback for other in handler.callbacks):
            return trainer
        frame = frame.f_back
    raise FailedPreconditionError("HeadwaterCallback must be among the callbacks of a Trainer", reason="INVALID_COMBINATION")


def attach(trainer: Any, model: torch.nn.Module, config: HeadwaterConfig) -> RemoteHead:
    """The head of a Trainer's model, with the Trainer's optimizer for "auto", and a local server's checkpoints beside its own."""
    if config.checkpoint_dir is None:
        config = dataclasses.replace(config, checkpoint_dir=os.path.join(trainer.args.output_dir, "headwater"))
    return attach_remote_head(model, config, optimizer=optimizer_of(trainer) if config.optimizer == "auto" else None)


# ---- what is refused -------------------------------------------------------------------------------------------------------


def _refuse_unsupported(trainer: Any) -> None:
    args = trainer.args
    if not isinstance(trainer, transformers.Trainer):
        raise option_refused("trainer", f"expected a transformers.Trainer, got {type(trainer).__name__}")
    if args.n_gpu > 1:
        raise option_refused("n_gpu", "DataParallel copies the model in each step; start one process for each GPU (torchrun)")
    if trainer.label_smoother is not None:
        raise option_refused("label_smoothing_factor", "it needs logits; pass HeadwaterConfig(label_smoothing=...)")
    # TRL has a word there, which only says that the loss is scaled.
    if trainer.compute_loss_func is not None and not isinstance(trainer.compute_loss_func, str):
        raise option_refused("compute_loss_func", "it needs logits; the head computes the loss")
    if trainer.preprocess_logits_for_metrics is not None:
        raise option_refused(
            "preprocess_logits_for_metrics", "there are no logits: predictions are the most probable tokens already; leave it out"
        )
    if trainer.model_init is not None:
        raise option_refused("model_init", "the Trainer makes another model in train(); pass model=")
    if getattr(args, "use_liger_kernel", False):
        raise option_refused("use_liger_kernel", "it replaces the forward that the head patches; leave it out")
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("cp", "sp", "tp"):
        if getattr(parallelism, f"{name}_size", 1) not in (None, 1):
            raise option_refused(f"parallelism_config.{name}_size", "rows of one sequence on several ranks are not supported")
    if trainer.is_deepspeed_enabled:
        _refuse_deepspeed_options(trainer.accelerator.state.deepspeed_plugin)
    prompt = [
        name for name, peft in getattr(trainer.model, "peft_config", {}).items() if getattr(peft, "is_prompt_learning", False)
    ]
    if prompt:
        raise option_refused("peft_config", f"{prompt[0]} puts virtual tokens before the labels, which is not supported")


def _refuse_fsdp(trainer: Any, remote: RemoteHead) -> None:
    if not (remote.trained and trainer.is_fsdp_enabled):
        return
    if not getattr(trainer.accelerator, "is_fsdp2", False):
        raise option_refused("fsdp_config", "version 1 is not supported with a head that is trained; version 2 is")
    if not remote.served:
        raise option_refused("fsdp", 'it shards the weight that the Trainer\'s optimizer owns (tied, or optimizer="torch")')
    if "FULL" not in str(trainer.accelerator.state.fsdp_plugin.state_dict_type):
        raise option_refused("fsdp_config", "state_dict_type must be FULL_STATE_DICT, so that a checkpoint has the head's weight")


def _refuse_deepspeed_options(plugin: Any) -> None:
    if plugin.zero_stage not in (1, 2, 3):
        raise option_refused(
            "deepspeed.zero_optimization.stage",
            f"{plugin.zero_stage} is not supported: set 1, 2 or 3, or leave deepspeed out (DDP)",
        )
    options = plugin.deepspeed_config
    if options.get("tensor_parallel", {}).get("autotp_size", 1) not in (None, 0, 1):
        raise option_refused("deepspeed.tensor_parallel.autotp_size", "rows of one sequence on several ranks are not supported")
    if options["zero_optimization"].get("zenflow"):
        raise option_refused("deepspeed.zero_optimization.zenflow", "it steps a part of the body at other times: leave it out")


def _refuse_deepspeed(trainer: Any, remote: RemoteHead) -> None:
    if not (remote.trained and trainer.is_deepspeed_enabled):
        return
    if not remote.served:
        raise option_refused(
            "deepspeed", 'it partitions the weight that the Trainer\'s optimizer owns (tied, or optimizer="torch")'
        )
    plugin = trainer.accelerator.state.deepspeed_plugin
    kind = plugin.deepspeed_config.get("optimizer", {}).get("type", "AdamW")
    if remote.config.optimizer == "auto" and kind != "AdamW":
        raise option_refused(
            "deepspeed.optimizer.type",
            f"{kind} is none that a head has: use AdamW, or pass HeadwaterConfig(optimizer=headwater.AdamW(...))",
        )
    if plugin.zero_stage == 3 and not plugin.zero3_save_16bit_model:
        raise option_refused(
            "deepspeed.zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "set it to true, so that a saved model has the head's weight",
        )


def optimizer_of(trainer: Any) -> AdamW | SGD:
    """The Trainer's optimizer, as the server has it."""
    args, made = trainer.args, trainer.optimizer
    weight = _output_layer(trainer.model).weight
    if made is not None:
        if (matching := matching_optimizer(made, weight)) is not None:
            return matching
        name = f"optimizers={type(made).__name__}"
    elif trainer.optimizer_cls_and_kwargs is not None:
        name = "optimizer_cls_and_kwargs"
    else:
        optim = str(getattr(args.optim, "value", args.optim))
        if optim in _ADAMW:
            return AdamW(beta1=args.adam_beta1, beta2=args.adam_beta2, epsilon=args.adam_epsilon, weight_decay=args.weight_decay)
        if optim == "sgd":
            return SGD(weight_decay=args.weight_decay)
        name = f"optim={optim}"
    if not weight.requires_grad:
        return AdamW()  # a frozen head has none
    raise option_refused(
        "optim",
        f'{name} is none that a head has: pass HeadwaterConfig(optimizer=headwater.AdamW(...)) or SGD, or optimizer="torch", with '
        "which the Trainer's optimizer updates the head's weight, too",
    )


def _check_decay(remote: RemoteHead) -> None:
    spec = remote.head.spec
    if spec.has_bias and spec.optimizer is not None and spec.optimizer.weight_decay and remote.config.optimizer == "auto":
        raise option_refused(
            "weight_decay",
            f"{remote.layer_name} has a bias, which the Trainer does not decay and a head's optimizer does: pass "
            'HeadwaterConfig(optimizer="torch"), or one of headwater\'s with the decay that you want',
        )
