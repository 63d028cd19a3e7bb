"""Trains a head for two steps by numpy alone, on a server and by headwater.local: what the installed client needs is there."""

import importlib.metadata
import sys

import numpy as np

import headwater
import headwater.local

versions = {name: importlib.metadata.version(name) for name in ("headwater", "headwater-server")}
assert set(versions.values()) == {headwater.__version__}, versions
generator = np.random.default_rng(0)
hidden = generator.normal(size=(32, 16)).astype(np.float32)
targets = generator.integers(0, 50, size=32)
for connect in (lambda: headwater.connect(sys.argv[1]), headwater.local.connect):
    with connect() as client:
        assert client.server_info().version == headwater.__version__
        head = client.create_head("first-steps", np.zeros((50, 16), np.float32), optimizer=headwater.AdamW(), if_exists="replace")
        losses = []
        for step in range(2):
            out = head.cross_entropy(hidden, targets, step=step, micro_batch=0, loss_scale=1 / 32)
            head.apply_optimizer_step(step=step, learning_rate=0.1, expected_micro_batches=1)
            losses.append(out.loss_sum / out.valid_token_count)
    assert losses[1] < losses[0], losses
    print("first steps:", losses)
