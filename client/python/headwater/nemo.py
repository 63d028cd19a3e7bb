"""NeMo Automodel: the loss of an output layer on a server, by the recipe's YAML file.

    loss_fn:
      _target_: headwater.nemo.RemoteLinearCrossEntropy
      server: localhost:50051
      head: student

The server trains a layer that requires a gradient, as the recipe's optimizer would. The head's step closes with the optimizer's,
and gradients are clipped by the norm of body and head together. Each checkpoint of the recipe has one of the head's beside it. A
frozen layer, as under PEFT, stays as it is. Tested with NeMo Automodel 0.7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy
from nemo_automodel.components.training import utils as training_utils

from headwater._errors import option_refused
from headwater._loss._micro_batches import distributed_place
from headwater.torch._layer_head import LayerHead, refuse_unknown
from headwater.torch._remote_head import HeadwaterConfig
from headwater.torch._trained_layer import TrainedLayer, train_with_holder

__all__ = ["RemoteLinearCrossEntropy"]


class RemoteLinearCrossEntropy(LinearCrossEntropy):  # type: ignore[misc]
    """Cross entropy of a head. A recipe gives a LinearCrossEntropy the last hidden states and the layer's weight, not logits.

    `detach()` takes all hooks off, and gives the layer the trained weight.

    Args:
        server, head: as of `headwater.transformers.HeadwaterConfig`.
        options: other fields of it.
    """

    ignore_index = -100
    reduction = "sum"

    def __init__(self, server: str | None = None, head: str = "", **options: Any):
        super().__init__()
        self._layer = LayerHead(HeadwaterConfig(server=server, head=head, **options), _train)
        self.detach = self._layer.detach

    @staticmethod
    def materialize_lm_weight(lm_weight: torch.Tensor, *, grad_reduce_group: Any = None) -> torch.Tensor:
        """The weight as it is: it is gathered once, for the head, not in each step."""
        return lm_weight

    def forward(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        lm_weight: torch.Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: Any = None,
        loss_weights: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """The sum of the tokens' losses, divided by `num_label_tokens` unless that is None.

        Args:
            hidden_states: (batch, context, hidden_size), after the final norm.
            labels: (batch, context) ids or -100, of the next token already.
            lm_weight: (vocab_size, hidden_size), the layer's.
            num_label_tokens: number of tokens of the step over all ranks.
            loss_weights: (batch, context) or None.
        """
        refuse_unknown(others)
        return self._layer.loss(lm_weight, None, hidden_states, labels, num_label_tokens, loss_weights)


def _train(weight: torch.Tensor, bias: torch.Tensor | None, config: HeadwaterConfig) -> TrainedLayer:
    # The recipe multiplies each rank's loss by their number, and FSDP averages the gradients over them.
    trained = train_with_holder(weight, bias, config, gradient_factor=1.0 / distributed_place()[1])
    trained.wrap_clipping(training_utils, "clip_grad_norm", _clip)
    return trained


def _clip(
    trained: TrainedLayer,
    clip_grad_norm: Callable[..., Any],
    max_grad_norm: float | None,
    model_parts: list[torch.nn.Module],
    *,
    norm_type: float = 2.0,
    **kwargs: Any,
) -> Any:
    if norm_type != 2:
        raise option_refused("norm_type", f"body and head have a norm of 2 together, not {norm_type}")
    parameters = [parameter for part in model_parts for parameter in part.parameters()]
    return trained.clip(parameters, max_grad_norm, lambda norm: clip_grad_norm(norm, model_parts, norm_type=norm_type, **kwargs))
