"""The rows that reach a model's output layer, without the layer's product."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from headwater._errors import invalid_argument


def as_multiplied(hidden: torch.Tensor) -> torch.Tensor:
    """The input of a layer in the type that its product would be computed in: that of autocast, where it is enabled."""
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


@contextlib.contextmanager
def rows_of(layer: torch.nn.Module, cast_to_fp32: bool) -> Iterator[list[torch.Tensor]]:
    """Lets a model run without its output layer's product, and keeps the layer's input instead.

    The layer answers with one column, which nobody reads: whatever the model does to its logits costs nothing. The rows have the
    type that the product would have been computed in.
    """
    came: list[torch.Tensor] = []

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        came.append(hidden.float() if cast_to_fp32 else as_multiplied(hidden))
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
        raise invalid_argument(
            "INVALID_COMBINATION",
            f"the model has called its output layer {len(came)} times in one forward, expected once",
            field="model",
        )
    return came[0]
