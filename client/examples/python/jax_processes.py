"""Trains on two processes, each of which sends the rows of its own part of the batch.

python jax_processes.py unix:/run/headwater/headwater.sock       # starts the second process itself
"""

import multiprocessing
import socket
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import headwater
import headwater.jax

VOCAB_SIZE, HIDDEN_SIZE, FEATURES, BATCH, STEPS, LEARNING_RATE = 200, 16, 8, 32, 20, 0.5
PROCESSES = 2


def body(parameters: jax.Array, features: jax.Array) -> jax.Array:
    """The last hidden states, (BATCH, HIDDEN_SIZE)."""
    return jnp.tanh(features @ parameters)


def train(rank: int, coordinator: str, address: str) -> None:
    """The program of each process."""
    jax.distributed.initialize(coordinator, PROCESSES, rank)
    mesh = Mesh(np.asarray(jax.devices()), ("data",))

    def place(array: np.ndarray, spec: P) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    random = np.random.default_rng(0)
    weights = random.standard_normal((HIDDEN_SIZE, VOCAB_SIZE)).astype(np.float32) / 4
    features = random.standard_normal((BATCH, FEATURES)).astype(np.float32)
    parameters = place(random.standard_normal((FEATURES, HIDDEN_SIZE)).astype(np.float32), P())
    batch = place(features, P("data")), place(random.integers(0, VOCAB_SIZE, BATCH).astype(np.int32), P("data"))

    with headwater.connect(address) as client:
        # One process creates the head, the other one finds it.
        head = headwater.jax.create_head(client, "jax-processes", weights, optimizer=headwater.SGD(), if_exists="attach")
        loss_and_grads = headwater.jax.value_and_grad(body, head, reduction="mean")
        update = jax.jit(lambda parameters, grads: optax.apply_updates(parameters, -LEARNING_RATE * grads))
        for step in range(STEPS):
            loss, grads = loss_and_grads(parameters, *batch)
            parameters = update(parameters, grads)
            headwater.jax.apply_optimizer_step(head, learning_rate=LEARNING_RATE, grads=grads)
            if rank == 0 and step in (0, STEPS - 1):
                print(f"step {step}: loss {float(loss):.4f} nats", flush=True)
    jax.distributed.shutdown()


def main() -> None:
    address = sys.argv[1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    other = multiprocessing.get_context("spawn").Process(target=train, args=(1, coordinator, address))
    other.start()
    train(0, coordinator, address)
    other.join()
    with headwater.connect(address) as client:
        client.head("jax-processes").delete()
    sys.exit(other.exitcode)


if __name__ == "__main__":
    main()
