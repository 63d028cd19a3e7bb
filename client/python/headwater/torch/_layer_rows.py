"""The rows that reach a model's output layer, without the layer's product."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from headwater._errors import refused


def in_type_of_product(hidden: torch.Tensor) -> torch.Tensor:
    """The rows in the type in which the output layer's product would be computed: autocast's, where it is on."""
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


@contextlib.contextmanager
def rows_of(layer: torch.nn.Module, cast_to_fp32: bool) -> Iterator[list[torch.Tensor]]:
    """Lets a model run without its output layer's product, and keeps the layer's input instead.

    The layer returns one unused column, so that whatever the model does to its logits costs nothing. The rows have the type of the
    product, or are float32.
    """
    came: list[torch.Tensor] = []

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        came.append(hidden.float() if cast_to_fp32 else in_type_of_product(hidden))
        return hidden.detach()[..., :1]

    before = vars(layer).get("forward")
    layer.forward = keep  # type: ignore[assignment]
    try:
        yield came
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before  # type: ignore[assignment]


def only_rows(came: list[torch.Tensor]) -> torch.Tensor:
    """Rows of the one call that a forward makes of its output layer, (batch, tokens, hidden_size)."""
    if len(came) != 1:
        raise refused(f"the model has called its output layer {len(came)} times in one forward, expected once", "model")
    return came[0]
