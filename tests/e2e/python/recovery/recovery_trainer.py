"""A trainer with an optimizer of its own for its body and the server's for its head."""

from pathlib import Path

import numpy as np

import headwater

VOCAB_SIZE, HIDDEN_SIZE, FEATURES, TOKENS, MICRO_BATCHES = 40, 16, 8, 12, 2
CHECKPOINT_EVERY = 2


def initial(seed, rows, columns=HIDDEN_SIZE):
    """Numbers that every process makes alike."""
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * 0.3).astype(np.float32)


def rows(step, micro_batch, columns=HIDDEN_SIZE):
    """Rows and targets of a micro-batch, the same whenever it is done."""
    rng = np.random.default_rng([step, micro_batch])
    return rng.standard_normal((TOKENS, columns)).astype(np.float32), rng.integers(0, VOCAB_SIZE, TOKENS)


class Trainer:
    """A linear body with momentum in numpy, under a head with AdamW. `interrupt(step, place)` is called in between."""

    def __init__(self, client, directory):
        self.head = client.create_head(
            "student", initial(1, VOCAB_SIZE), optimizer=headwater.AdamW(), staging_slots=1, if_exists="attach"
        )
        self.body, self.momentum = initial(2, FEATURES), np.zeros((FEATURES, HIDDEN_SIZE), np.float32)
        self.state = headwater.StateFiles(Path(directory), save=self._save, load=self._load)
        self.steps = []  # as they were done
        self.interrupt = lambda step, place: None

    def _save(self, path):
        with path.open("wb") as file:
            np.savez(file, body=self.body, momentum=self.momentum)

    def _load(self, path):
        with np.load(path) as arrays:
            self.body, self.momentum = arrays["body"], arrays["momentum"]

    def train_step(self, step):
        """Submits the step's micro-batches and closes it."""
        self.steps.append(step)
        self.interrupt(step, "begun")
        gradient = np.zeros_like(self.body)
        for micro_batch in range(MICRO_BATCHES):
            features, targets = rows(step, micro_batch, FEATURES)
            out = self.head.cross_entropy(features @ self.body, targets, micro_batch=micro_batch, loss_scale=1 / TOKENS)
            gradient += features.T @ out.grad_hidden
            self.interrupt(step, "micro-batch")
        sealed = self.head.seal(expected_micro_batches=MICRO_BATCHES)
        self.interrupt(step, "sealed")
        result = self.head.apply_optimizer_step(
            learning_rate=0.01, max_grad_norm=0.5, other_grad_norm_squared=float(np.sum(gradient.astype(np.float64) ** 2))
        )
        assert sealed.totals.micro_batch_count == MICRO_BATCHES
        self.momentum = 0.9 * self.momentum + np.float32(result.clip_factor) * gradient
        self.body = self.body - 0.05 * self.momentum
        self.interrupt(step, "closed")

    def run(self, steps):
        """Trains until this step is open; the weights of head and body."""
        headwater.train(self.head, self.train_step, steps, state=self.state, checkpoint_every=CHECKPOINT_EVERY, patience_s=60)
        return self.head.weight(), self.body, self.momentum
