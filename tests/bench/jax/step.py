#!/usr/bin/env python3
"""One loss with its gradients in JAX, again and again: by a remote head, or by optax over logits. Prints a line of JSON."""

import os
import statistics
import subprocess
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the server has its share of the GPU

import jax
import jax.numpy as jnp
import numpy as np
import optax
import runs

import headwater
import headwater.jax

BLOCKS = 5


def headwater_step(options, weights):
    """A function of x and labels: the loss and its gradient by x; that by the weights is added on the server."""
    client = headwater.connect(options.address)
    # [vocab_size, hidden_size] as the head stores it; create_head of headwater.jax would transpose it on the host.
    head = client.create_head("head", np.asarray(weights.T), optimizer=headwater.SGD())
    return jax.jit(jax.value_and_grad(lambda x, labels: headwater.jax.linear_softmax_cross_entropy_loss(head, x, labels)))


def optax_step(options, weights):
    """The same, with the gradient by the weights [hidden_size, vocab_size] here."""

    def loss(x, weights, labels):
        logits = jnp.matmul(x, weights, preferred_element_type=jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    def run(x, labels):
        value, (grad_x, grad_weights) = step(x, weights, labels)
        grad_weights.block_until_ready()
        return value, grad_x

    return run


def used_mib():
    """The GPU memory that all processes use; 0 without a GPU."""
    if jax.default_backend() != "gpu":
        return 0.0
    command = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[0])


def main():
    options = runs.trainer_options()
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (options.rows, options.hidden), jnp.bfloat16)
    scale = options.hidden**-0.5
    # Drawn in its own type: float32 would double what is there at the peak.
    weights = jax.random.normal(keys[1], (options.hidden, options.vocab), jnp.bfloat16) * jnp.bfloat16(scale)
    labels = jax.random.randint(keys[2], (options.rows,), 0, options.vocab)
    step = {"headwater": headwater_step, "optax": optax_step}[options.way](options, weights)
    if options.way == "headwater":
        weights.delete()
    value, grad = jax.block_until_ready(step(x, labels))
    first = {"loss": float(value), "grad_norm": float(jnp.linalg.norm(grad.astype(jnp.float32)))}
    times = []
    for block in range(BLOCKS + 1):
        start = time.perf_counter()
        for _ in range(options.steps):
            value, grad = jax.block_until_ready(step(x, labels))
        if block > 0:  # the first warms up
            times.append((time.perf_counter() - start) * 1e3 / options.steps)
    stats = jax.local_devices()[0].memory_stats() or {}
    result = {
        "step_ms": statistics.median(times),
        "spread": (max(times) - min(times)) / statistics.median(times),
        "peak_mib": stats.get("peak_bytes_in_use", 0) / 2**20,
        "device_mib": used_mib(),
        "machine": f"{jax.devices()[0].device_kind}; JAX {jax.__version__}",
        **first,
    }
    runs.say(result)


if __name__ == "__main__":
    main()
