"""`headwater.torch.TrainerState`: the trainer's own files beside the heads' checkpoints."""

import numpy as np
import torch
from expectations import refused

import headwater
import headwater.torch


def test_a_state_may_hold_any_object(tmp_path, monkeypatch):
    class RandomState:
        def __init__(self):
            self.generator = np.random.RandomState(7)

        def state_dict(self):
            return {"numpy": self.generator.get_state()}

        def load_state_dict(self, state):
            self.generator.set_state(state["numpy"])

    load = torch.load  # as of PyTorch 2.6: only weights, unless told otherwise
    monkeypatch.setattr(torch, "load", lambda *args, weights_only=True, **rest: load(*args, weights_only=weights_only, **rest))
    random = RandomState()
    state = headwater.torch.TrainerState(tmp_path, random=random)
    state.save(1)
    drawn = random.generator.rand(4)
    state.load(1)
    np.testing.assert_array_equal(random.generator.rand(4), drawn)


def test_trainer_state_is_atomic_and_keeps_what_it_is_told(tmp_path):
    model = torch.nn.Linear(2, 2)
    state = headwater.torch.TrainerState(tmp_path, keep=2, model=model)
    for step in (1, 2, 10):
        model.weight.data.fill_(step)
        state.save(step)
    assert state.steps() == [2, 10] and not state.every_rank
    (tmp_path / ".step-11.pt.123").write_bytes(b"cut")  # a process died while writing
    assert state.steps() == [2, 10]
    state.load(2)
    assert (model.weight == 2).all()
    with refused("CHECKPOINT_NOT_FOUND", headwater.NotFoundError):
        state.load(3)
    ranked = headwater.torch.TrainerState(tmp_path, rank=1, model=model)
    ranked.save(2)
    assert ranked.every_rank and ranked.steps() == [2] and state.steps() == [2, 10]
    with refused("MISSING_FIELD", ValueError):
        headwater.torch.TrainerState(tmp_path)
    with refused("INVALID_FIELD", ValueError):
        headwater.torch.TrainerState(tmp_path, model=3)
