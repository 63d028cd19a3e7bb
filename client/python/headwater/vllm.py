"""A bridge from vLLM's extraction of hidden states: its files become rows of a teacher, with the final norm applied.

vLLM (0.17 and newer) writes the hidden states of chosen layers of each request to a file. Run it with
    speculative_config={"method": "extract_hidden_states", "num_speculative_tokens": 1,
                        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [36]}}},     # num_hidden_layers
    kv_transfer_config={"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
                        "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/rows"}},
and each request's `kv_transfer_params["hidden_states_path"]` names a file. The rows of the last layer in it have not passed the
model's final norm, and nothing in the file says so. A loss over them is another loss. `read` and `store` apply the norm.

    norm = headwater.vllm.final_norm("/models/Qwen3-8B")
    token_ids, rows = headwater.vllm.read(path, norm=norm, layer_ids=[36], num_hidden_layers=36)
    client.teacher("step-0", total_rows=len(rows)).stream(rows)

Written against vLLM's published format (its documentation, and the source of the connector), and tested with files of that format.
The tests do not run vLLM itself.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._errors import invalid_argument, make_error, refused
from headwater._model_files import _safetensors
from headwater._model_files._final_norm import final_norm
from headwater.teachers import Writer

__all__ = ["final_norm", "read", "store"]

_HIDDEN_STATES, _TOKEN_IDS = "hidden_states", "token_ids"


def read(
    path: str | os.PathLike[str], *, norm: Callable[[torch.Tensor], torch.Tensor], layer_ids: Sequence[int], num_hidden_layers: int
) -> tuple[np.ndarray, torch.Tensor]:
    """Reads a request's file, and applies the final norm to the rows of the last layer.

    Waits until vLLM has written the file, by the lock that vLLM holds on `path` + ".lock" meanwhile.

    Args:
        path: `hidden_states_path` of the request.
        norm: the model's final norm: `final_norm(folder)`, or the module itself (`model.model.norm`).
        layer_ids: the `eagle_aux_hidden_state_layer_ids` that vLLM was given, in their order.
        num_hidden_layers: of the model. `layer_ids` must have this number: it stands for the output of the last layer.
    Returns:
        token_ids (tokens,) int64, and rows (tokens, hidden_size) of the norm's dtype. Row i is that of token i, and predicts the
        token after it.
    Raises:
        InvalidArgumentError: the last layer was not extracted, or the file has another number of layers.
        DataLossError: `FILE_CORRUPT`: the file has another format.
    """
    path = Path(path)
    layers = list(layer_ids)
    if num_hidden_layers not in layers:
        raise invalid_argument(
            "INVALID_FIELD",
            f"layer_ids={layers} has no {num_hidden_layers}, by which vLLM names the output of the last layer: start vLLM with it",
            field="layer_ids",
        )
    lock = Path(f"{path}.lock")
    if lock.exists():
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH)
    contents = _safetensors.contents_of(path)
    (name, states), (_, token_ids) = contents.array(_HIDDEN_STATES), contents.array(_TOKEN_IDS)
    data_type = _safetensors.DATA_TYPES.get(name)
    if data_type is None or states.ndim != 3 or token_ids.shape != states.shape[:1] or token_ids.dtype.kind != "i":
        raise make_error(
            "DATA_LOSS",
            "FILE_CORRUPT",
            f"{path} is no file of vLLM's hidden states: {_HIDDEN_STATES} is {name} {states.shape}, expected (tokens, layers, "
            f"hidden_size); {_TOKEN_IDS} is {token_ids.shape}",
            {"file": path.name},
        )
    if states.shape[1] != len(layers):
        raise invalid_argument(
            "SHAPE_MISMATCH",
            f"{path} has {states.shape[1]} layers, layer_ids names {len(layers)}",
            field="layer_ids",
            expected=states.shape[1],
            actual=len(layers),
        )
    last = np.ascontiguousarray(states[:, layers.index(num_hidden_layers)])
    with torch.no_grad():
        rows = norm(_arrays.to_torch(HostArray(last, data_type, _arrays.to_numpy)))
    return np.array(token_ids, np.int64), rows


def store(
    paths: Iterable[str | os.PathLike[str]],
    writer: Writer,
    *,
    norm: Callable[[torch.Tensor], torch.Tensor],
    layer_ids: Sequence[int],
    num_hidden_layers: int,
) -> int:
    """Adds requests' files to a folder of stored rows, in this order; returns the number of sequences. Files stay.

    Args:
        writer: made with final_norm=True.
        norm, layer_ids, num_hidden_layers: as in `read`.
    """
    if not writer.final_norm:
        raise refused("the norm is applied here: make the Writer with final_norm=True", "writer")
    numbers = [writer.add(*read(path, norm=norm, layer_ids=layer_ids, num_hidden_layers=num_hidden_layers)) for path in paths]
    return len(numbers)
