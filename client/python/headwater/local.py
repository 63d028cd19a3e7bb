"""The same API in this process: no server, the same engine. For parity checks, debugging, and going on without the service.

client = headwater.local.connect(shards=2)
head = client.create_head("student", weight, optimizer=headwater.AdamW())     # and so on, as with headwater.connect
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from headwater._client import DEFAULT_TIMEOUT_S, Client
from headwater._errors import invalid_argument
from headwater._types import check_integer

__all__ = ["connect"]


def connect(
    shards: int = 1,
    threads: int = 0,
    workspace_bytes: int = 0,
    *,
    memory_budget_bytes: int = 0,
    token_chunk_rows: int = 0,
    shard_weights: Sequence[int] | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    load_root: str | os.PathLike[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    tenant: str = "default",
    engine: str = "cpu",
    device: int = 0,
    timed_search: bool = True,
    algorithm_cache: str | os.PathLike[str] | None = "auto",
) -> Client:
    """Starts an engine in this process.

    Args:
        shards: number of vocabulary shards, >= 1.
        threads: CPU threads over all shards; 0: the cores that this process may use. "cpu" only.
        workspace_bytes: bounds the logits that are held at once; 0: the engine's default.
        memory_budget_bytes: for all heads; 0: 80 % of the machine's memory, or of the GPU's.
        token_chunk_rows: rows that are computed at once; 0: from the workspace.
        shard_weights: relative sizes of the shards; None: even.
        checkpoint_dir: where `Head.save` writes; None: checkpoints are refused.
        load_root: where `Head.load` reads; None: loading is refused.
        timeout_s: how long a call waits for others of this client to end, in seconds. Computing itself is not interrupted.
        tenant: whose heads short names mean.
        engine: "cpu", or "cuda": one NVIDIA GPU, by the module libheadwater_cuda.so of the same build (beside the library, in its
            build's or bundle's bin/, or where HEADWATER_CUDA_MODULE says). Tensors are still handed over in host memory.
        device: index of the GPU, as CUDA counts the visible ones. "cuda" only.
        timed_search: try the matrix products out when a head is created; False: those that the library proposes, the same ones at
            every start. "cuda" only.
        algorithm_cache: file that keeps what was found, from start to start; "auto": headwater/cublaslt.json in $XDG_CACHE_HOME,
            else in ~/.cache; None: none is kept. "cuda" only.
    Returns:
        A Client. Closing it frees its heads, and so does forgetting it. A process that is forked from this one must connect again.
    Raises:
        UnavailableError: libheadwater_local.so is not beside the package, and HEADWATER_LOCAL_LIBRARY does not name it.
        FeatureNotBuiltError: the CUDA engine's module or a usable GPU is not there; the message says which.
    """
    from headwater._engine_library import Engine
    from headwater._local_backend import LocalBackend

    numbers = {
        "threads": threads,
        "workspace_bytes": workspace_bytes,
        "memory_budget_bytes": memory_budget_bytes,
        "token_chunk_rows": token_chunk_rows,
    }
    for name, value in numbers.items():
        check_integer(value, name)
    check_integer(shards, "shards", low=1, high=2**31 - 1)
    if shard_weights is not None and len(shard_weights) != shards:
        raise invalid_argument(
            "SHAPE_MISMATCH", f"shard_weights has {len(shard_weights)} entries, expected {shards}", field="shard_weights"
        )
    check_integer(device, "device", high=2**31 - 1)
    if engine not in ("cpu", "cuda"):
        raise invalid_argument("INVALID_FIELD", f'engine must be "cpu" or "cuda", got {engine!r}', field="engine")
    running = Engine(
        name=engine,
        device=device,
        timed_search=timed_search,
        algorithm_cache=_algorithm_cache(algorithm_cache),
        shards=shards,
        shard_weights=shard_weights,
        **numbers,
    )
    return Client(LocalBackend(running, checkpoint_dir=checkpoint_dir, load_root=load_root), timeout_s=timeout_s, tenant=tenant)


def _algorithm_cache(choice: str | os.PathLike[str] | None) -> str:
    """The file's path; empty for none. The same rule as headwaterd's --algorithm_cache."""
    if choice is None:
        return ""
    if choice != "auto":
        return os.fspath(choice)
    for variable, folder in (("XDG_CACHE_HOME", ""), ("HOME", ".cache")):
        base = os.environ.get(variable, "")
        if os.path.isabs(base):
            return os.path.join(base, folder, "headwater", "cublaslt.json")
    return ""
