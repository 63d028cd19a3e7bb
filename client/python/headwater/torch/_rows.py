"""Tensors in memory that is shared with the server, and tensors of the caller's arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headwater import _arrays
from headwater._client import Client
from headwater._errors import invalid_argument


def empty_rows(client: Client, rows: int, hidden_size: int, dtype: Any = torch.float32) -> torch.Tensor:
    """The CPU tensor (rows, hidden_size) over an array of `Client.empty_rows`, with any content."""
    return _arrays.to_torch(_arrays.from_any(client.empty_rows(rows, hidden_size, dtype), "rows"))


def tensor_of(values: Any, name: str) -> torch.Tensor:
    """Numbers as a tensor, with nothing of them changed or dropped.

    Raises:
        InvalidArgumentError: a masked array, a sparse tensor, elements that torch has no type for.
    """
    if isinstance(values, torch.Tensor):
        _arrays.dense_tensor(values, name)
        return values
    _arrays.refuse_mask(values, name)
    if isinstance(values, np.ndarray) and values.dtype.kind in "iuf":
        if values.dtype.kind == "u" and values.dtype.itemsize > 1 and (values.size == 0 or values.max() <= np.iinfo(np.int64).max):
            values = values.astype(np.int64)
        values = values.astype(values.dtype.newbyteorder("="), copy=not values.flags.writeable)
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise invalid_argument("DATA_TYPE_MISMATCH", f"{name} must be an array of numbers: {error}", field=name) from None
