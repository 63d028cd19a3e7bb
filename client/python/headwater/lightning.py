"""Lightning: a model's last layer on a server, under the Trainer of `lightning` or of `pytorch_lightning`.

    trainer = lightning.Trainer(callbacks=[HeadwaterCallback(HeadwaterConfig(server="localhost:50051"))], gradient_clip_val=1.0)
    trainer.fit(module, loader)               # module.model is a model of transformers; its forward with labels has no logits

    class Module(HeadwaterMixin, lightning.LightningModule):      # a network of one's own
        headwater = HeadwaterConfig(server="localhost:50051")
        def get_output_embeddings(self): return self.lm_head
        def training_step(self, batch, index): return self.remote_loss(self.body(batch.inputs), batch.targets)

Neither package is imported here, and no class of theirs is inherited: both call their callbacks by name. Tested with Lightning 2.6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headwater._errors import option_refused
from headwater._loss._requests import DEFAULT_IGNORE_INDEX
from headwater.torch._joint_step import JointStep
from headwater.torch._optimizers import follow_optimizer, known_optimizer
from headwater.torch._remote_head import HeadwaterConfig, RemoteHead, attach_remote

__all__ = ["HeadwaterCallback", "HeadwaterConfig", "HeadwaterMixin", "RemoteHead"]

# Strategies of the Trainer that are supported. Others shard the body, or step inside of backward.
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


class HeadwaterCallback:
    """Trains with a remote head: its loss, joint clipping, steps, checkpoints, and the trained weight in Lightning's saved files.

    In `fit` the model that has the output layer is attached; it is the module itself (`HeadwaterMixin`), or the one model of
    transformers in it. Afterwards the layer is the module's again, with the trained weight.

    The head's step closes with the optimizer's, with the same learning rate; gradients are clipped by the norm of body and head
    together. Each checkpoint of Lightning's has one of the head's on the server, to which `fit(ckpt_path=...)` goes back.

    Args:
        config: which head. None: the server of the environment, and a head of the model's name.

    Attributes:
        remote: the head and the layer, in `fit`; otherwise None.
        joint: the joint step that closes the head's steps, from the beginning of the training on; otherwise None.
    """

    # By these a Trainer finds the state of a callback, which this one has none of: it is on the server.
    state_key = _legacy_state_key = "headwater.lightning.HeadwaterCallback"

    def __init__(self, config: HeadwaterConfig | None = None):
        self.config = HeadwaterConfig() if config is None else config
        self.remote: RemoteHead | None = None
        self.joint: JointStep | None = None
        self._prefix = ""  # of the layer's model in the module's state dict
        self._undo: list[Callable[[], Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # a hook that there is nothing to do for
            return _nothing
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning's name; there is nothing to load."""

    # ---- the beginning and the end of `fit` -------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._detach()  # a `fit` that an exception has ended
        name, model = _model_of(pl_module)
        self._prefix = f"{name}." if name else ""
        optimizer = known_optimizer(model, self.config)  # Lightning makes its own later
        if model is pl_module:
            self.remote = attach_remote(model, self.config, optimizer=optimizer)
        else:
            from headwater.transformers import attach_remote_head

            self.remote = attach_remote_head(model, self.config, optimizer=optimizer)
        self._undo.append(self.remote.detach)
        try:
            self._check(trainer, pl_module)
        except BaseException:
            self._detach()
            raise
        if self.remote.trained:
            pl_module.configure_gradient_clipping = self._clip
            self._undo.append(lambda: vars(pl_module).pop("configure_gradient_clipping"))

    def _check(self, trainer: Any, pl_module: Any) -> None:
        """Refuses settings that a head cannot follow."""
        assert self.remote is not None
        strategy = type(trainer.strategy).__name__
        if strategy not in _STRATEGIES:
            raise option_refused("strategy", f"{strategy} is not supported: one device, or DDP")
        if not self.remote.trained:
            return
        if not pl_module.automatic_optimization:
            raise option_refused(
                "automatic_optimization", "the module steps by itself: close the head with headwater.torch.TrainingLoop"
            )
        if trainer.gradient_clip_algorithm not in (None, "norm"):
            raise option_refused("gradient_clip_algorithm", "body and head are clipped by their norm together")
        clipping = type(pl_module).configure_gradient_clipping
        if not clipping.__module__.startswith(("lightning.pytorch.", "pytorch_lightning.")):
            raise option_refused("configure_gradient_clipping", f"{clipping.__qualname__} would clip the body without the head")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        remote = self.remote
        assert remote is not None
        if len(trainer.optimizers) != 1:
            raise option_refused(
                "configure_optimizers", f"the head's step closes with that of one optimizer, not {len(trainer.optimizers)}"
            )
        optimizer = trainer.optimizers[0]
        follow_optimizer(remote, optimizer)
        # The optimizer would run the closure, which computes the last loss, between its hooks: it is run before them.
        hook = optimizer.register_step_pre_hook(_run_closure)
        self._undo.append(hook.remove)
        self.joint = JointStep(
            [remote],
            optimizer,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            gradient_factor=1.0 / trainer.world_size,
        )
        self._undo.append(self.joint.close)
        self.joint.begin(trainer.global_step)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._detach()

    def _detach(self) -> None:
        while self._undo:
            self._undo.pop()()
        self.remote = self.joint = None

    # ---- a step -----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert self.joint is not None
        self.joint.settle()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and not trainer.fit_loop._should_accumulate():
            assert self.joint is not None
            self.joint.prepare()  # Lightning unscales next

    def _clip(self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: Any = None) -> None:
        if self.joint is None:  # a tuner leaves other callbacks out
            raise option_refused(
                "lr_find, scale_batch_size", "they train the module and take it back to its beginning, but not the head"
            )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.joint.clip(gradient_clip_val, lambda: torch.nn.utils.clip_grad_norm_(parameters, float("inf")))

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.joint is not None and self.remote is not None:
            self.joint.save(trainer.global_step)
            self.remote.update_state_dict(checkpoint["state_dict"], self._prefix)


def _nothing(*_: Any, **__: Any) -> None:
    """A hook that does nothing."""


def _run_closure(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the closure of `optimizer.step(closure)`, and gives the optimizer its result in its place."""
    closure = kwargs["closure"] if "closure" in kwargs else args[1] if len(args) > 1 else None
    if closure is None:
        return None
    result = closure()
    return (optimizer,), {"closure": lambda: result}


def _model_of(pl_module: Any) -> tuple[str, torch.nn.Module]:
    """The module that names its output layer, and its own name in the LightningModule: "" for that one itself."""
    if hasattr(pl_module, "get_output_embeddings"):
        return "", pl_module
    found = [(name, module) for name, module in pl_module.named_modules() if hasattr(module, "get_output_embeddings")]
    outermost = [(name, module) for name, module in found if not any(name.startswith(f"{other}.") for other, _ in found)]
    if len(outermost) != 1:
        names = ", ".join(name for name, _ in outermost) or "none"
        raise option_refused(
            "get_output_embeddings",
            f"one model in {type(pl_module).__name__} must name its output layer by this method, and {names} do: define it on the "
            "module itself, which is a HeadwaterMixin then",
        )
    return outermost[0]


def _local_loss(
    module: Any, hidden: torch.Tensor, targets: torch.Tensor, token_weights: Any, divisor: float | None
) -> torch.Tensor:
    """The head's result, computed by the local layer."""
    config = module.headwater or HeadwaterConfig()
    for option in ("softcap", "logit_scale", "valid_vocab_size", "z_loss"):
        if getattr(config, option):
            raise option_refused(option, "outside of fit the layer computes the loss here, which does without it")
    logits = module.get_output_embeddings()(hidden).float()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=config.label_smoothing
    )
    weights = (targets.flatten() != DEFAULT_IGNORE_INDEX).float()
    if token_weights is not None:
        weights = weights * token_weights.flatten()
    total = weights.sum() if divisor is None else divisor
    return (losses * weights).sum() / total if total else losses.sum() * 0


class HeadwaterMixin:
    """The base of a LightningModule with a network of its own, whose last layer a head replaces.

    `class Module(HeadwaterMixin, LightningModule)` defines `get_output_embeddings()`, which returns the layer, and takes its loss
    from `remote_loss`. It brings its `HeadwaterCallback`; in a Trainer's list there is none.

    Attributes:
        headwater: a `HeadwaterConfig`, of the class or the object.
    """

    headwater: HeadwaterConfig | None = None

    def configure_callbacks(self) -> list[Any]:
        self._headwater_callback = HeadwaterCallback(self.headwater)
        return [*super().configure_callbacks(), self._headwater_callback]  # type: ignore[misc]

    def remote_loss(
        self, hidden: torch.Tensor, targets: torch.Tensor, *, token_weights: Any = None, num_items_in_batch: float | None = None
    ) -> torch.Tensor:
        """The head's cross entropy, () float32: `RemoteHead.loss` with the same arguments; outside of `fit` by the layer here."""
        callback: HeadwaterCallback | None = getattr(self, "_headwater_callback", None)
        remote = None if callback is None else callback.remote
        if remote is None:
            return _local_loss(self, hidden, targets, token_weights, num_items_in_batch)
        return remote.loss(hidden, targets, token_weights=token_weights, num_items_in_batch=num_items_in_batch)
