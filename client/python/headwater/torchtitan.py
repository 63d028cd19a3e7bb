"""torchtitan: the loss of a frozen output layer on a server, chosen in the function that makes the Trainer's configuration.

    config.loss = HeadwaterLoss.Config(server="localhost:50051", head="student")

The layer must be frozen (`requires_grad_(False)`), as under adapters; one that is trained is refused, because torchtitan clips and
steps without asking the loss. Tested with torchtitan 0.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper

from headwater.torch._frozen_layer import FrozenLayer, refuse_unknown
from headwater.torch._remote_head import HeadwaterConfig

__all__ = ["HeadwaterLoss"]


class HeadwaterLoss(ChunkedLossWrapper):  # type: ignore[misc]
    """Cross entropy of a head. torchtitan hands what is a ChunkedLossWrapper the layer, and has the model leave it out."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):  # type: ignore[misc]
        """`server` and `head` as of `headwater.transformers.HeadwaterConfig`, whose other fields `options` may have."""

        server: str | None = None
        head: str = ""
        options: dict[str, Any] | None = None

    def __init__(self, config: Config, *, compile_config: Any = None):
        self.lm_head: torch.nn.Module | None = None
        self._layer = FrozenLayer(HeadwaterConfig(server=config.server, head=config.head, **(config.options or {})))

    def __call__(
        self, pred: torch.Tensor, labels: torch.Tensor, global_valid_tokens: torch.Tensor | None = None, **loss_inputs: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The sum of the tokens' losses, divided by the tokens of all ranks, and no metrics.

        Args:
            pred: (batch, context, hidden_size), what the layer would be given.
            labels: (batch, context) ids or -100, of the next token already.
            global_valid_tokens: () number of tokens of the step.
        """
        refuse_unknown(loss_inputs, ignored=("positions",))
        assert self.lm_head is not None, "torchtitan sets the layer before the first loss"
        bias = getattr(self.lm_head, "bias", None)
        return self._layer.loss(self.lm_head.weight, bias, pred, labels, global_valid_tokens), {}
