"""torchtitan: the loss of an output layer on a server, chosen in the function that makes the Trainer's configuration.

    config.loss = HeadwaterLoss.Config(server="localhost:50051", head="student")

The server trains a layer that requires a gradient, as the Trainer's optimizer would. The head's step closes with the optimizer's,
and gradients are clipped by the norm of body and head together. Each checkpoint of torchtitan has one of the head's beside it. A
frozen layer stays as it is. Tested with torchtitan 0.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.distributed import utils as dist_utils

from headwater._errors import option_refused
from headwater.torch._layer_head import LayerHead, refuse_unknown
from headwater.torch._remote_head import HeadwaterConfig
from headwater.torch._trained_layer import TrainedLayer, train_with_holder

__all__ = ["HeadwaterLoss"]


class HeadwaterLoss(ChunkedLossWrapper):  # type: ignore[misc]
    """Cross entropy of a head. torchtitan hands the layer to a ChunkedLossWrapper, and has the model leave it out.

    `detach()` takes all hooks off, and gives the layer the trained weight.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):  # type: ignore[misc]
        """`server` and `head` as of `headwater.transformers.HeadwaterConfig`, whose other fields `options` may have."""

        server: str | None = None
        head: str = ""
        options: dict[str, Any] | None = None

    def __init__(self, config: Config, *, compile_config: Any = None):
        self.lm_head: torch.nn.Module | None = None
        self._layer = LayerHead(HeadwaterConfig(server=config.server, head=config.head, **(config.options or {})), _train)
        self.detach = self._layer.detach

    def __call__(
        self, pred: torch.Tensor, labels: torch.Tensor, global_valid_tokens: torch.Tensor | None = None, **loss_inputs: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The sum of the tokens' losses, divided by the tokens of all ranks, and no metrics.

        Args:
            pred: (batch, context, hidden_size), the inputs of the layer.
            labels: (batch, context) ids or -100, of the next token already.
            global_valid_tokens: () number of tokens of the step.
        """
        refuse_unknown(loss_inputs, ignored=("positions",))
        if pred.is_cuda and torch.cuda.is_current_stream_capturing():
            raise option_refused("training.disable_cuda_graphs", "a CUDA graph cannot ask a server: set it to True")
        assert self.lm_head is not None, "torchtitan sets the layer before the first loss"
        bias = getattr(self.lm_head, "bias", None)
        return self._layer.loss(self.lm_head.weight, bias, pred, labels, global_valid_tokens), {}


def _train(weight: torch.Tensor, bias: torch.Tensor | None, config: HeadwaterConfig) -> TrainedLayer:
    # FSDP adds the ranks' gradients: each has divided by the tokens of all.
    trained = train_with_holder(weight, bias, config, gradient_factor=1.0)
    trained.wrap_clipping(dist_utils, "clip_grad_norm_", _clip)
    return trained


def _clip(
    trained: TrainedLayer,
    clip_grad_norm_: Callable[..., torch.Tensor],
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    kept = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if norm_type != 2:
        raise option_refused("norm_type", f"body and head have a norm of 2 together, not {norm_type}")
    return trained.clip(kept, max_norm, lambda norm: clip_grad_norm_(kept, norm, norm_type, *args, **kwargs))
