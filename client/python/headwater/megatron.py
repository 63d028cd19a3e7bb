"""Megatron-Core: the loss of a frozen output layer on a server, by `GPTModel`'s hook at the end of its forward.

    context = headwater.megatron.Context(server="localhost:50051", head="student")
    losses = model(ids, positions, mask, labels=labels, output_processor=output_processor, output_processor_context=context)

`losses` are those of the tokens, (batch, context), as `GPTModel` returns them. The layer must be frozen, as under adapters. Tensor
parallelism is refused. Written against the interface that Megatron-Core 0.19 publishes, `GPTModel.forward(output_processor=)`, and
tested by calls of that form: Megatron-Core itself asks for Python 3.12 and a GPU, and is not among the tests.
"""

from __future__ import annotations

from typing import Any

import torch

from headwater._errors import option_refused
from headwater.torch._frozen_layer import FrozenLayer
from headwater.torch._remote_head import HeadwaterConfig

__all__ = ["Context", "output_processor"]


class Context(FrozenLayer):
    """Which head: what `output_processor_context` is. Keep one for all steps, on the ranks of the last pipeline stage alone: where
    one is and computes no loss, the optimizer's step is stopped.

    Args:
        server, head: as of `headwater.transformers.HeadwaterConfig`.
        options: other fields of it.
    """

    def __init__(self, server: str | None = None, head: str = "", **options: Any):
        super().__init__(HeadwaterConfig(server=server, head=head, **options), reduction="none")


def output_processor(
    *, hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, labels: Any, context: Context, config: Any, **_: Any
) -> torch.Tensor:
    """What `GPTModel.forward` calls in place of its output layer and loss.

    Returns:
        (batch, context) float32, the loss of each token; 0 where the label is -100.
    Raises:
        InvalidArgumentError: no labels; tensor or sequence parallelism; MuP's scale of the logits.
    """
    if labels is None:
        raise option_refused("labels", "without labels GPTModel returns logits: call it without output_processor")
    if getattr(config, "tensor_model_parallel_size", 1) > 1 or getattr(config, "sequence_parallel", False):
        raise option_refused("tensor_model_parallel_size", "the rows and the layer are spread over ranks, which is not supported")
    if getattr(config, "use_mup", False):
        raise option_refused("use_mup", "it scales the logits")
    weight = output_layer.weight if output_weight is None else output_weight
    rows = hidden_states.transpose(0, 1)  # (context, batch, hidden_size) in Megatron
    return context.loss(weight, getattr(output_layer, "bias", None), rows, labels, None)
