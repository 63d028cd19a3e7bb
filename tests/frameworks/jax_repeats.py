"""The same step again and again, compiled once: digests of the bits of what it computes.

python jax_repeats.py ADDRESS DEVICES RUNS     # prints a list of {"value", "body", "head", "ids"}
"""

import hashlib
import json
import sys

import jax
import numpy as np
from jax_sides import Remote, host, mesh_of

import headwater
import headwater.jax


def digest(tree) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(host(leaf)).tobytes() for leaf in jax.tree.leaves(tree))).hexdigest()


def main() -> None:
    address, devices, runs = sys.argv[1:]
    mesh = mesh_of(devices)
    digests = []
    with headwater.connect(address) as client:
        side = Remote(client, mesh)

        @jax.jit
        def step(params, *batches):
            # Nothing says which of the losses comes first.
            return jax.value_and_grad(lambda p: sum(side.mean(p, batch) for batch in batches))(params)

        for _ in range(int(runs)):
            value, grads = jax.block_until_ready(step(side.params, *(side.batch(seed) for seed in range(3))))
            # Ordered by id: the last one is known when the step is sealed.
            handle = client.head(side.head.name)
            ids = sorted(handle.step_state().open.micro_batches)
            handle.seal(expected_micro_batches=ids)
            digests.append({"value": digest(value), "body": digest(grads), "head": digest(side.gradients()), "ids": ids})
            headwater.jax.apply_optimizer_step(side.head, learning_rate=0.0, grads=grads)
        for head in (side.head, side.teacher):  # the next run of this program calls its own the same
            client.head(head.name).delete(force=True)
    print(json.dumps(digests))


if __name__ == "__main__":
    main()
