"""Tensors in memory that is shared with the server."""

from __future__ import annotations

from typing import Any

import torch

from headwater import _arrays
from headwater._client import Client
from headwater._memory import as_tensor


def empty_rows(client: Client, rows: int, hidden_size: int, dtype: Any = torch.float32) -> torch.Tensor:
    """The CPU tensor (rows, hidden_size) over an array of `Client.empty_rows`, with any content."""
    return as_tensor(_arrays.from_any(client.empty_rows(rows, hidden_size, dtype), "rows").data, _arrays.data_type_name(dtype))
