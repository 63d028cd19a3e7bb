"""Trains a small language model in numpy, its head remote: 50 steps, one line of JSON for each, on stdout.

python train.py                  # the server that HEADWATER_SERVER names
python train.py local            # the engine in this process
python train.py --pause_at=STEP  # waits in the middle of that step, after its first micro-batch, for SIGUSR1

The body is an embedding with plain gradient descent; everything random comes from one seed. On a server the head is saved every ten
steps, and a server that is started again is followed (`replay=True`).
"""

import argparse
import json
import os
import signal
import sys
import threading

import numpy as np

import headwater
import headwater.local

STEPS, MICRO_BATCHES, ROWS = 50, 2, 96
VOCAB_SIZE, HIDDEN_SIZE = 512, 64
LEARNING_RATE, BODY_LEARNING_RATE = 3e-3, 5.0
STEPS_PER_CHECKPOINT = 10
# Calls are tried for as long as a container takes to restart on a machine that is busy, within their timeout.
RETRIES = headwater.RetryPolicy(max_attempts=1000, max_backoff=0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("place", nargs="?", choices=["local", "server"], default="server")
    parser.add_argument("--pause_at", type=int, metavar="STEP")
    arguments = parser.parse_args()
    going_on = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: going_on.set())
    # The first process of a container is not ended by signals that it does not take.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    rng = np.random.default_rng(20)
    embedding = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
    weight = (rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)) / np.sqrt(HIDDEN_SIZE)).astype(np.float32)
    local = arguments.place == "local"
    client = headwater.local.connect() if local else headwater.connect(os.environ["HEADWATER_SERVER"], replay=True, retries=RETRIES)
    with client:
        head = client.create_head("pod", weight, optimizer=headwater.AdamW(weight_decay=0.01))
        for step in range(STEPS):
            if not local and step % STEPS_PER_CHECKPOINT == 0:
                head.save(f"step-{step}")
            loss_sum, transports, gradient = 0.0, set(), np.zeros_like(embedding)
            for micro_batch in range(MICRO_BATCHES):
                if step == arguments.pause_at and micro_batch == 1:
                    print(json.dumps({"paused": step}), flush=True)
                    going_on.wait()
                tokens = rng.integers(0, VOCAB_SIZE, ROWS)
                targets = (tokens * 7 + 3) % VOCAB_SIZE
                out = head.cross_entropy(
                    embedding[tokens], targets, step=step, micro_batch=micro_batch, loss_scale=1 / (ROWS * MICRO_BATCHES)
                )
                np.add.at(gradient, tokens, out.grad_hidden)
                loss_sum += out.loss_sum
                transports.add(out.transport)
            head.apply_optimizer_step(step=step, learning_rate=LEARNING_RATE, expected_micro_batches=MICRO_BATCHES)
            embedding -= BODY_LEARNING_RATE * gradient
            loss = loss_sum / (ROWS * MICRO_BATCHES)
            print(json.dumps({"step": step, "loss": loss, "transport": sorted(map(str, transports))}), flush=True)


if __name__ == "__main__":
    main()
