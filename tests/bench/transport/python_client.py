#!/usr/bin/env python3
"""The Python client as `run` drives it: submits micro-batches on command, as a trainer does.

The request `submit step=N first=N count=N` (client_loop.py) submits so many micro-batches from the id `first` on.
"""

import numpy as np
from client_loop import serve

import headwater


def make_rows(client, options):
    """Hidden states, bfloat16 (rows, hidden), where the path wants them."""
    values = np.random.default_rng(2).standard_normal((options.rows, options.width), dtype=np.float32)
    if options.transport == "cuda_ipc":
        import torch

        return torch.from_numpy(values).to("cuda", torch.bfloat16)
    rows = headwater.BFloat16.from_float32(values)
    if options.transport != "shared_memory":
        return rows
    shared = client.empty_rows(options.rows, options.width, "bfloat16")
    target = shared.bits if isinstance(shared, headwater.BFloat16) else shared.view(np.uint16)
    target[...] = rows.bits
    return shared


def prepare(options):
    """A function that submits micro-batches `first` to `first + count - 1` of a step."""
    client = headwater.connect(options.address, transport=options.transport)
    head = client.head("student")
    rows = make_rows(client, options)
    targets = np.random.default_rng(3).integers(0, options.vocab, options.rows, dtype=np.int32)

    def submit(count, step, first):
        for micro_batch in range(first, first + count):
            out = head.cross_entropy(rows, targets, step=step, micro_batch=micro_batch)
            if out.transport != options.transport:
                raise RuntimeError(f"the rows went over {out.transport}, not {options.transport}")
            if out.valid_token_count != options.rows or not out.loss_sum > 0 or out.grad_hidden is None:
                raise RuntimeError("the server computed nonsense")

    return submit


if __name__ == "__main__":
    serve(__doc__, "--transport", ("grpc", "shared_memory", "cuda_ipc"), prepare, (headwater.HeadwaterError, ImportError))
