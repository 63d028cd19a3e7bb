#!/usr/bin/env python3
"""headwater.jax as `run` drives it: compiled value_and_grad of the loss, whose backward commits.

The request `submit step=N first=N count=N` (client_loop.py) submits so many micro-batches from the id `first` on, to
the head's open step.
"""

import os
import warnings

import numpy as np
from client_loop import serve

# The server and the benchmark have their share of the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def prepare(options):
    """A function that submits micro-batches `first` to `first + count - 1`, whatever the step's number."""
    import jax
    import jax.numpy as jnp

    import headwater
    import headwater.jax

    if options.transport == "cuda_ipc" and jax.default_backend() != "gpu":
        raise ImportError(f"JAX computes on {jax.default_backend()}")
    warnings.simplefilter("error", headwater.HeadWarning)  # as where the handler cannot be used
    client = headwater.connect(options.address, transport=options.transport)
    head = client.head("student")
    x = jax.random.normal(jax.random.key(2), (options.rows, options.width), jnp.bfloat16)
    labels = jax.random.randint(jax.random.key(3), (options.rows,), 0, options.vocab)

    def loss(x, labels, micro_batch):
        return headwater.jax.linear_softmax_cross_entropy_loss(head, x, labels, micro_batch=micro_batch)

    step = jax.jit(jax.value_and_grad(loss)).lower(x, labels, np.int32(0)).compile()

    def submit(count, first, **_):
        for micro_batch in range(first, first + count):
            value, grad = jax.block_until_ready(step(x, labels, np.int32(micro_batch)))
            if not value > 0 or grad.shape != x.shape:
                raise RuntimeError("the server computed nonsense")
        sent = client._backend.connection.info()
        taken = sent["host_transport"] or sent["cuda_transport"]
        if taken != options.transport:
            raise RuntimeError(f"the rows went over {taken}, not {options.transport}")

    return submit


if __name__ == "__main__":
    serve(__doc__, "--transport", ("shared_memory", "cuda_ipc"), prepare, ImportError)
