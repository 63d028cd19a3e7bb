"""NeMo Automodel: the loss of a frozen output layer on a server, by the recipe's YAML file.

    loss_fn:
      _target_: headwater.nemo.RemoteLinearCrossEntropy
      server: localhost:50051
      head: student

The layer must be frozen, as under PEFT; one that is trained is refused, because the recipe clips and steps without asking the loss.
Tested with NeMo Automodel 0.7.
"""

from __future__ import annotations

from typing import Any

import torch
from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy

from headwater.torch._frozen_layer import FrozenLayer, refuse_unknown
from headwater.torch._remote_head import HeadwaterConfig

__all__ = ["RemoteLinearCrossEntropy"]


class RemoteLinearCrossEntropy(LinearCrossEntropy):  # type: ignore[misc]
    """Cross entropy of a head. A recipe gives a LinearCrossEntropy the last hidden states and the layer's weight, not logits.

    Args:
        server, head: as of `headwater.transformers.HeadwaterConfig`.
        options: other fields of it.
    """

    ignore_index = -100
    reduction = "sum"

    def __init__(self, server: str | None = None, head: str = "", **options: Any):
        super().__init__()
        self._layer = FrozenLayer(HeadwaterConfig(server=server, head=head, **options))

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
