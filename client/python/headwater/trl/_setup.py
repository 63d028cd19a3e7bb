"""TRL's trainers over remote heads: the fields that each of them reads, and unsupported settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import is_peft_model

from headwater._errors import refused
from headwater.torch._remote_head import HeadwaterConfig, RemoteHead
from headwater.transformers import HeadwaterCallback, attach_remote_head, detach_remote_head
from headwater.transformers._trainer import attach
from headwater.trl._fused_head import add_fused_lm_head

# Fields that each trainer's own loss reads, by the trainer's class.
_OUTPUTS: dict[str, tuple[str, ...]] = {
    "SFTTrainer": ("log_probs", "entropy", "is_top1"),
    "DPOTrainer": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "KTOTrainer": ("log_probs", "entropy", "mean_logits"),
    "GRPOTrainer": ("log_probs", "entropy"),
    "RLOOTrainer": ("log_probs", "entropy"),
}
# Other trainers of TRL, and the reasons against them.
_REASONS = {
    "DistillationTrainer": "use headwater.trl.RemoteDistillationTrainer instead",
    "RewardTrainer": "it trains a score, and has no language model's output layer",
}
_READS_LOGITS = "it is not one of the trainers that read TRL's fused LM head; those are " + ", ".join(_OUTPUTS)


def kind_of(trainer: Any) -> str:
    """The stable trainer of TRL whose loss this one computes: that of the first class of TRL's that it inherits from.

    Raises:
        InvalidArgumentError: another one; the message says why.
    """
    cls = next((cls for cls in type(trainer).__mro__ if cls.__module__.partition(".")[0] == "trl"), None)
    if cls is None:
        raise refused(f"{type(trainer).__name__} is no trainer of TRL: use headwater.transformers.setup_trainer", "trainer")
    if cls.__name__ not in _OUTPUTS or not cls.__module__.startswith("trl.trainer."):
        reason = _REASONS.get(cls.__name__, _READS_LOGITS)
        raise refused(f"{cls.__module__}.{cls.__qualname__} cannot train over a remote head: {reason}", "trainer")
    return cls.__name__


def check_options(trainer: Any, kind: str) -> None:
    """Raises for options of TRL's that need logits, by their names."""
    args = trainer.args
    if kind == "SFTTrainer" and trainer.compute_loss_func is not None:
        raise refused(
            "compute_loss_func needs logits, which a remote head does not build: override compute_loss in a subclass",
            "compute_loss_func",
        )
    if args.label_smoothing_factor and getattr(args, "loss_type", "") == "nll":
        raise refused("label_smoothing_factor needs logits in TRL, which a remote head does not build", "label_smoothing_factor")
    for option in ("compute_metrics", "preprocess_logits_for_metrics"):
        if getattr(trainer, option) is not None:
            raise refused(
                f"{option} needs logits, which a remote head does not build. TRL logs entropy and mean_token_accuracy without them",
                option,
            )


def check_trained(trainer: Any, remote: RemoteHead) -> None:
    """Raises for settings that a trained head does not support."""
    if remote.trained and getattr(trainer.args, "sync_ref_model", False):
        raise refused(
            "sync_ref_model mixes the trained weights into the reference model, whose head is another one on the server: leave it "
            "out, or train the body alone (HeadwaterConfig(trainable=False))",
            "sync_ref_model",
        )


def setup_trainer(trainer: Any, config: HeadwaterConfig | None = None) -> HeadwaterCallback:
    """Gives a trainer of TRL a remote head, and a frozen one beside it for its reference model.

        trainer = DPOTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
        setup_trainer(trainer, HeadwaterConfig(server="localhost:50051", head="policy"))
        trainer.train()

    Call it after the constructor, which adds TRL's own head, and before `train`. Everything else is as
    `headwater.transformers.setup_trainer` has it: steps, clipping of body and head together, logs, checkpoints, resuming.

    Args:
        trainer: an SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer or RLOOTrainer, or a subclass of one's own.
    Raises:
        InvalidArgumentError: another trainer of TRL, or an option that cannot work over a remote head; the message names it.
    """
    kind = kind_of(trainer)
    check_options(trainer, kind)
    model = base_model(trainer, trainer.model)
    remote = attach(trainer, model, config or HeadwaterConfig())
    try:
        check_trained(trainer, remote)
        callback = train_with(trainer, remote)
    except BaseException:
        detach_remote_head(model)
        raise
    reference = attach_reference(trainer, remote)
    options: dict[str, Any] = {
        "temperature": trainer.temperature if kind in ("GRPOTrainer", "RLOOTrainer") else 1.0,
        "cast_lm_head_to_fp32": bool(getattr(trainer.args, "cast_lm_head_to_fp32", False)),
    }
    outputs = _OUTPUTS[kind]
    if getattr(trainer, "use_weighting", False):
        outputs += ("log_sum_sq_probs",)
    differentiable = ("log_probs", "entropy") if getattr(trainer, "_entropy_bonus_enabled", False) else ("log_probs",)
    add_fused_lm_head(model, outputs=outputs, differentiable=differentiable, head=remote, **options)
    if reference is not None:
        add_fused_lm_head(base_model(trainer, trainer.ref_model), head=reference, **options)
    return callback


def train_with(trainer: Any, remote: RemoteHead) -> HeadwaterCallback:
    """Steps, clipping, logs and checkpoints are `headwater.transformers`'; completions are made with the trained weight."""
    if trainer.is_deepspeed_enabled:
        raise refused("deepspeed is not supported for a trainer of TRL: use DDP; transformers' own Trainer has ZeRO", "deepspeed")
    callback = HeadwaterCallback(remote.config).install(trainer, remote)
    if remote.served and hasattr(trainer, "_generate"):
        # Everything that a round of completions does, sending the weights to vLLM included.
        def with_weight(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            remote.pull_weight()
            return generate(*args, **kwargs)

        callback.wrap(trainer, "_generate", with_weight)
    return callback


def base_model(trainer: Any, model: torch.nn.Module) -> torch.nn.Module:
    """The causal language model inside the wrappers of accelerate and PEFT."""
    inner = trainer.accelerator.unwrap_model(model)
    return inner.get_base_model() if is_peft_model(inner) else inner


def attach_reference(trainer: Any, remote: RemoteHead) -> RemoteHead | None:
    """A frozen head of the reference model's weight; None where there is no such model: LoRA, or log-probabilities made before."""
    reference = getattr(trainer, "ref_model", None)
    if reference is None:
        return None
    model = base_model(trainer, reference)
    model.requires_grad_(False)
    config = dataclasses.replace(
        remote.config,
        head=f"{remote.head.name.rpartition('/')[2]}-reference",
        client=remote.config.connect(),
        trainable=False,
        tied="auto",
        optimizer="auto",
        staging_slots=None,
        # The weight is that of this run's reference model, whatever a former run has left.
        if_exists="replace" if trainer.accelerator.is_main_process else "attach",
    )
    with trainer.accelerator.main_process_first():
        return attach_remote_head(model, config)
