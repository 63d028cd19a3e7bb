"""headwater.jax.orbax: the head's checkpoints are saved, restored and removed with those of Orbax, in both of its interfaces."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

import headwater
import headwater.jax
import headwater.jax.orbax

ENVIRONMENTS = ("jax",)

HIDDEN, VOCAB = 8, 12
WEIGHTS = np.random.default_rng(3).standard_normal((HIDDEN, VOCAB)).astype(np.float32)


_numbers = itertools.count()


@pytest.fixture
def head(client):
    # A name of its own: checkpoints stay when a head is deleted.
    return headwater.jax.create_head(client, f"student-{next(_numbers)}", WEIGHTS, optimizer=headwater.SGD())


def body(params, batch):
    return jnp.tanh(batch * params["scale"])


PARAMS = {"scale": jnp.ones(HIDDEN)}


def train(head, params, steps):
    """Moves body and head by so many steps."""
    loss_and_grads = headwater.jax.value_and_grad(body, head, reduction="mean")
    for _ in range(steps):
        batch = np.random.default_rng(head.step).standard_normal((4, HIDDEN)).astype(np.float32)
        _, grads = loss_and_grads(params, batch, np.arange(4))
        step = headwater.jax.apply_optimizer_step(head, learning_rate=0.5, grads=grads)
        params = jax.tree.map(lambda param, grad: param - 0.5 * grad, params, step.grads)
    return params


class Managed:
    """Orbax 0.12's CheckpointManager, which keeps two steps."""

    def __init__(self, folder, *, background):
        asynchronous = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=background)
        self.manager = ocp.CheckpointManager(folder, options=asynchronous)

    def save(self, step, params, head):
        items = ocp.args.Composite(state=ocp.args.StandardSave(params), head=headwater.jax.orbax.HeadSave(head))
        assert self.manager.save(step, args=items)

    def wait(self):
        self.manager.wait_until_finished()

    def restore(self, step, head):
        state = ocp.args.StandardRestore(jax.tree.map(jnp.zeros_like, PARAMS))
        items = ocp.args.Composite(state=state, head=headwater.jax.orbax.HeadRestore(head))
        return self.manager.restore(step, args=items)["state"]

    def remove(self, step):
        self.manager.delete(step)

    def steps(self):
        return sorted(self.manager.all_steps())

    def close(self):
        self.manager.close()


class Checkpointed:
    """Orbax v1's Checkpointer, which keeps two steps."""

    def __init__(self, folder, *, background):
        policy = v1.training.preservation_policies.LatestN(2)
        self.checkpointer = v1.training.Checkpointer(folder, preservation_policy=policy)
        self._background = background
        self._written = None

    def save(self, step, params, head):
        items = {"state": params, "head": head}
        if self._background:
            if self._written is not None:
                assert self._written.result()  # Orbax skips a save while it writes the one before
            self._written = self.checkpointer.save_checkpointables_async(step, items)
        else:
            assert self.checkpointer.save_checkpointables(step, items)

    def wait(self):
        self.checkpointer.close()

    def restore(self, step, head):
        items = {"state": jax.tree.map(jnp.zeros_like, PARAMS), "head": head}
        return self.checkpointer.load_checkpointables(step, items)["state"]

    def remove(self, step):
        self.checkpointer.delete(step)

    def steps(self):
        return sorted(checkpoint.step for checkpoint in self.checkpointer.checkpoints)

    def close(self):
        self.checkpointer.close()


INTERFACES = pytest.mark.parametrize("interface", (Managed, Checkpointed))


def steps_of(head):
    """The steps of the head's checkpoints on the server."""
    return sorted(checkpoint.step for checkpoint in head.checkpoints())


@INTERFACES
@pytest.mark.parametrize("background", (False, True), ids=("blocking", "async"))
def test_head_is_saved_restored_and_removed_with_the_step(interface, background, head, tmp_path):
    # More than the server keeps of a series, so that its own rule would remove what Orbax keeps.
    orbax = interface(tmp_path / "run", background=background)
    params, states = PARAMS, {}
    for number in range(1, 6):
        params = train(head, params, 1)
        states[number] = params["scale"], head.weight()
        orbax.save(10 * number, params, head)
        # The next step is applied while Orbax writes.
    params = train(head, params, 1)
    orbax.wait()
    orbax = orbax if interface is Managed else interface(tmp_path / "run", background=background)
    assert orbax.steps() == [40, 50]
    assert steps_of(head) == [4, 5]
    for number in (4, 5, 4):
        restored = orbax.restore(10 * number, head)
        np.testing.assert_array_equal(restored["scale"], states[number][0])
        np.testing.assert_array_equal(head.weight(), states[number][1])
        assert head.step == number
    train(head, restored, 1)
    assert head.step == 5
    orbax.close()


@INTERFACES
def test_process_that_is_started_again_removes_what_the_earlier_one_has_saved(interface, head, client, tmp_path):
    orbax = interface(tmp_path / "run", background=False)
    for number in (1, 2):
        train(head, PARAMS, 1)
        orbax.save(number, PARAMS, head)
    orbax.close()
    again = client.head(head.name)  # this one knows nothing of them
    again.take()
    orbax = interface(tmp_path / "run", background=False)
    train(again, PARAMS, 1)
    orbax.save(3, PARAMS, again)
    assert orbax.steps() == [2, 3]
    assert steps_of(again) == [2, 3]
    orbax.remove(2)
    assert steps_of(again) == [3]
    orbax.remove(3)  # the newest one: it is finished
    assert steps_of(again) == []
    orbax.close()


@INTERFACES
def test_checkpoints_of_others_stay(interface, head, tmp_path):
    head.save("best")
    orbax, other = (interface(tmp_path / name, background=False) for name in ("run", "other"))
    for number in (1, 2, 3, 4):
        train(head, PARAMS, 1)
        orbax.save(number, PARAMS, head)
        other.save(number, PARAMS, head)
    assert steps_of(head) == [0, 3, 3, 4, 4]
    orbax.close()
    other.close()


def test_head_is_at_the_step_of_the_save_whatever_is_applied_while_orbax_writes(head, tmp_path, monkeypatch):
    orbax = Managed(tmp_path / "run", background=True)
    write = ocp.StandardCheckpointHandler.async_save
    saved = []

    async def late(self, *args, **kwargs):
        saved.append(steps_of(head))
        return await write(self, *args, **kwargs)

    monkeypatch.setattr(ocp.StandardCheckpointHandler, "async_save", late)
    params = train(head, PARAMS, 1)
    weight = head.weight()
    orbax.save(1, params, head)
    train(head, params, 3)
    orbax.wait()
    orbax.restore(1, head)
    np.testing.assert_array_equal(head.weight(), weight)
    orbax.close()


def test_step_is_removed_with_the_next_save_where_the_server_was_away(head, tmp_path, monkeypatch, caplog):
    orbax = Managed(tmp_path / "run", background=False)
    delete = headwater.Head.delete_checkpoint

    def away(self, name):
        raise headwater.UnavailableError("the server is away")

    monkeypatch.setattr(headwater.Head, "delete_checkpoint", away)
    for number in (1, 2, 3):
        train(head, PARAMS, 1)
        orbax.save(number, PARAMS, head)
    assert "is deleted with the next save: UNAVAILABLE: the server is away" in caplog.text
    assert steps_of(head) == [1, 2, 3]
    monkeypatch.setattr(headwater.Head, "delete_checkpoint", delete)
    train(head, PARAMS, 1)
    orbax.save(4, PARAMS, head)
    assert steps_of(head) == [3, 4]
    orbax.close()


def test_file_beside_the_step_names_the_checkpoint(head, tmp_path):
    orbax = Managed(tmp_path / "run", background=False)
    train(head, PARAMS, 1)
    orbax.save(7, PARAMS, head)
    said = json.loads((tmp_path / "run" / "7" / "head" / "headwater.json").read_text())
    assert said == {"head": head.name, "checkpoint": head.checkpoints()[0].checkpoint, "step": 1}
    assert orbax.manager.item_metadata(7)["head"] == headwater.jax.orbax.HeadCheckpoint(**said)
    orbax.close()


@INTERFACES
def test_checkpoint_of_another_head_is_refused(interface, head, client, tmp_path):
    orbax = interface(tmp_path / "run", background=False)
    orbax.save(1, PARAMS, head)
    other = headwater.jax.create_head(client, f"other-{next(_numbers)}", WEIGHTS, optimizer=headwater.SGD())
    with pytest.raises(headwater.InvalidArgumentError, match=f"has the checkpoint of {head.name}, not of {other.name}"):
        orbax.restore(1, other)
    orbax.close()
