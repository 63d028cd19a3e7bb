"""Trains a head under a body of its own in numpy, and continues where it was stopped.

python recover.py DIRECTORY unix:/run/headwater/headwater.sock [STEPS]     # a server
python recover.py DIRECTORY local [STEPS]                                  # a server of its own

Kill it, or the server, at any moment: it ends with the same weights as if nothing had happened, to the last bit.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np

import headwater
import headwater.local

VOCAB_SIZE, HIDDEN_SIZE, FEATURES, TOKENS, CHECKPOINT_EVERY = 500, 32, 16, 64, 5


def main() -> None:
    directory, place = Path(sys.argv[1]), sys.argv[2]
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 20
    initial = np.random.default_rng(0)
    body = {"weight": initial.standard_normal((FEATURES, HIDDEN_SIZE), np.float32) / 4}
    weight = initial.standard_normal((VOCAB_SIZE, HIDDEN_SIZE), np.float32) / 4
    if place == "local":
        client = headwater.local.connect(checkpoint_dir=directory / "heads")
    else:
        client = headwater.connect(place, replay=True)  # follows a server that was started again; without, the loop goes back
    with client:
        head = client.create_head("example-recover", weight, optimizer=headwater.AdamW(), if_exists="attach")

        def train_step(step: int) -> None:
            data = np.random.default_rng(step)  # a step's data are the same whenever it is done
            features, targets = data.standard_normal((TOKENS, FEATURES), np.float32), data.integers(0, 50, TOKENS)
            out = head.cross_entropy(features @ body["weight"], targets, micro_batch=0, loss_scale=1 / TOKENS)
            head.apply_optimizer_step(learning_rate=0.01, expected_micro_batches=1)
            body["weight"] = body["weight"] - 0.5 * features.T @ out.grad_hidden
            print(f"step {step}: loss {out.loss_sum / TOKENS:.4f} nats", flush=True)

        state = headwater.StateFiles(
            directory / "body",
            suffix=".npy",
            save=lambda path: np.save(path, body["weight"]),
            load=lambda path: body.update(weight=np.load(path)),
        )
        headwater.train(head, train_step, steps, state=state, checkpoint_every=CHECKPOINT_EVERY)
        print("weights", hashlib.sha256(head.weight().tobytes() + body["weight"].tobytes()).hexdigest())


if __name__ == "__main__":
    main()
