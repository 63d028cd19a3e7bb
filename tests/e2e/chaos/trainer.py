"""One rank of a training run that survives whatever chaos.py does: run by it, as a process of its own.

Everything that it computes follows from the seed, the step and what the server answers, so that two runs can be compared bit by
bit. What has been learned outside the head, one vector `body` that is added to all hidden states, is kept in a file for each step.

A step: two explicit micro-batches whose grad_hidden moves the body, an eager one, now and then one that is discarded. The body of
the next step is written before the commits: whenever this process is killed, a successor finds the body of whatever step is open.
"""

import json
import os
import sys
import time
import types
from pathlib import Path

import numpy as np

import headwater

WORLD_SIZE = 2
MICRO_BATCHES = 3  # of a rank and step
NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 24, 16, 64
HEAD = "student"
# A server that was killed, or a link that was cut, takes a while to come back.
PATIENT = headwater.RetryPolicy(max_attempts=60, initial_backoff=0.05, max_backoff=0.3)
TIMEOUT_S = 20
# Errors that no disturbance explains.
FATAL = (headwater.InvalidArgumentError, headwater.InternalError, headwater.DataLossError, headwater.MicroBatchConflictError)
CHECKPOINTS = 3  # names that take turns


def write(path: Path, text: bytes) -> None:
    """A reader, or a successor, never sees half of it."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(text)
    temporary.rename(path)


class Trainer:
    def __init__(self, args: types.SimpleNamespace):
        self.args = args
        self.directory = Path(args.directory)
        self.tries = 0
        self.client = None
        self.status = {"step": 0, "replayed": 0, "discards": 0, "conflicts": 0, "resyncs": 0, "disk_full": 0, "saves": 0}

    def random(self, step: int, micro_batch: int) -> np.random.Generator:
        return np.random.default_rng((self.args.seed, step, micro_batch))

    def body_file(self, step: int) -> Path:
        return self.directory / f"body-{self.args.rank}-{step}"

    def body(self, step: int) -> np.ndarray:
        if step == 0:
            return np.zeros(HIDDEN_SIZE, np.float32)
        return np.frombuffer(self.body_file(step).read_bytes(), np.float32)

    def tell(self) -> None:
        write(self.directory / f"status-{self.args.rank}-{self.args.generation}", json.dumps(self.status).encode())

    # ---- following the server ---------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Meets the server at its open step, with nothing left of what this client believed before."""
        if self.client is not None:
            self.client.close()
        self.client = headwater.connect(
            self.args.address, replay=True, retries=PATIENT, session_lease=2.0, timeout_s=TIMEOUT_S, transport="grpc"
        )
        if self.args.rank == 0:
            rng = self.random(-1 % 2**32, 0)
            weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
            self.head = self.client.create_head(
                HEAD, weight, np.zeros(VOCAB_SIZE, np.float32), optimizer=headwater.AdamW(), if_exists="attach"
            )
            if self.head.created:
                self.save("slot-0")
        else:
            self.head = self.client.head(HEAD)
        info = self.head.info()
        if info.state == "RESTORED":
            self.head.take(only_if_current=True)
        self.head.step = self.head.info().open_step
        self.tries += 1

    def save(self, name: str) -> None:
        try:
            self.head.save(name, overwrite=True)
            self.status["saves"] += 1
        except headwater.ResourceExhaustedError as error:
            if error.reason != "DISK_FULL":
                raise
            self.status["disk_full"] += 1

    def train(self) -> None:
        done = self.directory / "done"
        while True:
            try:
                self.attach()
                while True:
                    while self.head.step < self.args.steps:
                        self.train_step()
                    if self.args.rank == 0:
                        self.head.save("final", overwrite=True)
                        write(done, b"")
                        return
                    # The other one may have to go back once more, and needs this one then.
                    if done.exists():
                        return
                    time.sleep(0.05)
                    self.head.step = self.head.info().open_step
            except FATAL as error:
                self.status["conflicts"] += isinstance(error, headwater.MicroBatchConflictError)
                self.tell()
                raise
            except headwater.HeadwaterError as error:
                print(f"step {self.status['step']}: {type(error).__name__}: {error}", flush=True)
                self.status["resyncs"] += 1
                self.tell()
                time.sleep(0.05)

    # ---- training -----------------------------------------------------------------------------------------------------------

    def submit(self, body: np.ndarray, micro_batch: int, **options) -> headwater.LossResult:
        rng = self.random(self.head.step, micro_batch)
        hidden = rng.standard_normal((NUM_TOKENS, HIDDEN_SIZE)).astype(np.float32) + body
        targets = rng.integers(0, VOCAB_SIZE, NUM_TOKENS)
        # What a predecessor, or this process before it lost its way, has left undecided is superseded.
        attempt = (self.args.generation * 1000 + self.tries) * 1000
        out = self.head.cross_entropy(hidden, targets, micro_batch=micro_batch, loss_scale=0.05, attempt=attempt, **options)
        self.status["replayed"] += out.replayed
        return out

    def await_go(self, step: int) -> None:
        """Not beyond the step in whose course the next disturbance is to come."""
        file = self.directory / "go"
        while step > int(file.read_text()):
            time.sleep(0.005)

    def discard_one(self, body: np.ndarray) -> None:
        try:
            self.submit(body, 100 + self.args.rank, commit="explicit").discard()
            self.status["discards"] += 1
        except headwater.HeadwaterError as error:
            # This process, or a predecessor, has been here before.
            if error.reason not in ("STEP_SEALED", "MICRO_BATCH_DISCARDED"):
                raise

    def train_step(self) -> None:
        step, rank = self.head.step, self.args.rank
        self.status["step"] = step
        self.tell()
        self.await_go(step)
        body = self.body(step)
        gradient = np.zeros(HIDDEN_SIZE, np.float32)
        explicit = []
        for k in range(MICRO_BATCHES):
            is_explicit = k < MICRO_BATCHES - 1
            out = self.submit(body, k * WORLD_SIZE + rank, commit="explicit" if is_explicit else "eager")
            if is_explicit:
                gradient += out.grad_hidden.sum(axis=0, dtype=np.float32)
                explicit.append(out)
        if self.random(step, 10**6).random() < 0.2:
            self.discard_one(body)
        write(self.body_file(step + 1), (body - np.float32(0.1) * gradient).tobytes())
        for out in explicit:
            out.commit(0.5)
        if rank != 0:
            self.head.step = step + 1
            return
        self.head.seal(expected_micro_batches=WORLD_SIZE * MICRO_BATCHES, wait=True)
        self.head.apply_optimizer_step(learning_rate=0.05, max_grad_norm=1.0)
        if (step + 1) % 2 == 0:
            self.save(f"slot-{(step + 1) // 2 % CHECKPOINTS}")


def main() -> None:
    trainer = Trainer(types.SimpleNamespace(**json.loads(sys.argv[1])))
    trainer.train()
    trainer.tell()
    # The client's threads may be in the middle of a call to a server that is about to go.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
