"""Megatron-Core: the loss of an output layer on a server, by `GPTModel`'s hook at the end of its forward.

    context = headwater.megatron.Context(server="localhost:50051", head="student")
    losses = model(ids, positions, mask, labels=labels, output_processor=output_processor, output_processor_context=context)

`losses` are those of the tokens, (batch, context), as `GPTModel` returns them.

The layer must be frozen before DistributedDataParallel and the optimizer are made: `model.output_layer.requires_grad_(False)`. With
`Context(trainable=True)` the server trains it, as Megatron's optimizer would. The head's step closes with the optimizer's, or is
skipped with it; gradients are clipped by the norm of body and head together. Each checkpoint has one of the head's beside it.

Tensor parallelism is refused, and for a trained head pipeline parallelism, too. Written against the interface that Megatron-Core
0.19 publishes, `GPTModel.forward(output_processor=)` and `ChainedOptimizer`, and tested by calls of that form. Megatron-Core itself
asks for Python 3.12 and a GPU, and is not among the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from headwater._errors import option_refused
from headwater._loss._micro_batches import distributed_place
from headwater._types import SGD, AdamW
from headwater.torch._joint_step import Wrapped, WrappedStep
from headwater.torch._layer_head import LayerHead
from headwater.torch._remote_head import HeadwaterConfig, RemoteHead
from headwater.torch._trained_layer import TrainedLayer, live, users_of

__all__ = ["Context", "output_processor"]

# The methods of a ChainedOptimizer's step, in order.
_STEP = ("prepare_grads", "get_grad_norm", "step_with_ready_grads", "step")


class Context(LayerHead):
    """Which head: the `output_processor_context`. Keep one for all steps, on the ranks of the last pipeline stage alone. A context
    without a computed loss stops the optimizer's step.

    `detach()` takes all hooks off, and gives the layer the trained weight.

    Args:
        server, head: as of `headwater.transformers.HeadwaterConfig`.
        options: other fields of it. `trainable=True` for a layer that the server trains.
    """

    def __init__(self, server: str | None = None, head: str = "", **options: Any):
        super().__init__(HeadwaterConfig(server=server, head=head, **options), _train, reduction="none")


def output_processor(
    *, hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, labels: Any, context: Context, config: Any, **_: Any
) -> torch.Tensor:
    """Computes the loss in place of `GPTModel.forward`'s output layer and loss.

    Returns:
        (batch, context) float32, the loss of each token; 0 where the label is -100.
    Raises:
        InvalidArgumentError: no labels; tensor or sequence parallelism; MuP's scale of the logits. For a trained head further
            pipeline parallelism, `calculate_per_token_loss`, `mtp_num_layers`, a weight that is the embedding's, too.
    """
    if labels is None:
        raise option_refused("labels", "without labels GPTModel returns logits: call it without output_processor")
    if getattr(config, "tensor_model_parallel_size", 1) > 1 or getattr(config, "sequence_parallel", False):
        raise option_refused("tensor_model_parallel_size", "the rows and the layer are spread over ranks, which is not supported")
    if getattr(config, "use_mup", False):
        raise option_refused("use_mup", "it scales the logits")
    weight = output_layer.weight if output_weight is None else output_weight
    if context.config.trainable is True:
        _check_trained(config, shared=output_weight is not None)
    rows = hidden_states.transpose(0, 1)  # (context, batch, hidden_size) in Megatron
    return context.loss(weight, getattr(output_layer, "bias", None), rows, labels, None)


def _check_trained(config: Any, *, shared: bool) -> None:
    """Refuses settings that a head that the server trains cannot follow."""
    if shared:
        raise option_refused("share_embeddings_and_output_weights", "the server trains a weight of its own: untie it")
    if getattr(config, "pipeline_model_parallel_size", 1) > 1:
        raise option_refused("pipeline_model_parallel_size", "the optimizers of earlier stages do not know of the head's step")
    if getattr(config, "calculate_per_token_loss", False):
        raise option_refused("calculate_per_token_loss", "it divides the gradients after backward, which a head's are not here")
    if getattr(config, "mtp_num_layers", None):
        raise option_refused("mtp_num_layers", "its layers compute logits with the weight that is here, which is not trained")


class _MegatronStep(WrappedStep):
    """Closes a head's steps with those of a ChainedOptimizer, which clips the body itself, by the norm that it is given."""

    def __init__(self, remote: RemoteHead, optimizer: Any):
        self._megatron = optimizer
        scales = any(getattr(part, "grad_scaler", None) for part in optimizer.chained_optimizers)
        scaler = SimpleNamespace(get_scale=optimizer.get_loss_scale) if scales else None
        super().__init__([remote], optimizer, parameters=[], scaler=scaler, gradient_factor=1.0 / distributed_place()[1])

    def _register_hooks(self) -> list[Any]:
        around = (self._around_prepare, self._around_norm, self._around_update, self._around_step)
        return [Wrapped(self._megatron, name, method) for name, method in zip(_STEP, around, strict=True)]

    def _around_prepare(self, prepare_grads: Callable[[], Any]) -> bool:
        self.prepare()
        overflowed, found = not self._seals_are_finite(), bool(prepare_grads())
        if overflowed and not found:
            for part in self._megatron.chained_optimizers:
                part.grad_scaler.update(True)
        return found or overflowed

    def _around_norm(self, get_grad_norm: Callable[[], Any]) -> float:
        return self.clip(self._megatron.config.clip_grad, get_grad_norm)

    def _around_update(self, step_with_ready_grads: Callable[[], Any]) -> bool:
        self._before_step()
        done = bool(step_with_ready_grads())
        self._after_step()
        return done

    def _around_step(self, step: Callable[[], Any]) -> Any:
        result = step()
        self.settle()  # of a step that Megatron has skipped
        return result


def _train(weight: torch.Tensor, bias: torch.Tensor | None, config: HeadwaterConfig) -> TrainedLayer:
    if weight.requires_grad:
        raise option_refused(
            "output_layer",
            "Megatron's buffers and optimizer have its weight: call model.output_layer.requires_grad_(False) before they are made, "
            "and pass Context(trainable=True) for a head that the server trains",
        )
    if config.optimizer == "torch":
        raise option_refused("optimizer", 'with "torch" Megatron\'s optimizer would have to hold the weight: leave it out')
    optimizer = _optimizer()
    return TrainedLayer(
        weight,
        bias,
        config,
        users=users_of(weight),
        joint_of=lambda remote: _MegatronStep(remote, optimizer),
        optimizers=[part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None],
        like=_like(optimizer.config) if config.optimizer == "auto" else None,
    )


def _optimizer() -> Any:
    """The ChainedOptimizer of this process, as `get_megatron_optimizer` returns it."""
    found = live(lambda kind: all(hasattr(kind, name) for name in (*_STEP, "get_loss_scale")))
    chained = [optimizer for optimizer in found if hasattr(optimizer, "chained_optimizers")]
    if len(chained) != 1:
        raise option_refused(
            "optimizer",
            f"the head's step closes with that of one ChainedOptimizer, as get_megatron_optimizer returns; got {len(chained)}",
        )
    return chained[0]


def _like(config: Any) -> AdamW | SGD:
    """The optimizer that updates a weight as Megatron's optimizer of this OptimizerConfig does."""
    if config.optimizer == "adam" and config.decoupled_weight_decay:
        return AdamW(beta1=config.adam_beta1, beta2=config.adam_beta2, epsilon=config.adam_eps, weight_decay=config.weight_decay)
    if config.optimizer == "sgd":
        return SGD(momentum=config.sgd_momentum, weight_decay=config.weight_decay)
    raise option_refused(
        "optimizer", f"a head has AdamW or SGD, not {config.optimizer}: pass Context(optimizer=headwater.AdamW(...))"
    )
