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
) -> Client:
    """Starts an engine in this process.

    Args:
        shards: number of vocabulary shards, >= 1.
        threads: CPU threads over all shards; 0: the cores that this process may use.
        workspace_bytes: bounds the logits that are held at once; 0: the engine's default.
        memory_budget_bytes: for all heads; 0: 80 % of the machine's memory.
        token_chunk_rows: rows that are computed at once; 0: from the workspace.
        shard_weights: relative sizes of the shards; None: even.
        checkpoint_dir: where `Head.save` writes; None: checkpoints are refused.
        load_root: where `Head.load` reads; None: loading is refused.
        timeout_s: how long a call waits for others of this client to end, in seconds. Computing itself is not interrupted.
        tenant: whose heads short names mean.
    Returns:
        A Client. Closing it frees its heads.
    Raises:
        UnavailableError: libheadwater_local.so is not beside the package, and HEADWATER_LOCAL_LIBRARY does not name it.
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
    engine = Engine(shards=shards, shard_weights=shard_weights, **numbers)
    return Client(LocalBackend(engine, checkpoint_dir=checkpoint_dir, load_root=load_root), timeout_s=timeout_s, tenant=tenant)
