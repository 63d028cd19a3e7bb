"""Heads that were there before: at the step and with the weights that the caller believes, or not without a word."""

import warnings

import numpy as np
import pytest
import torch
from conftest import HIDDEN_SIZE, VOCAB_SIZE
from expectations import refused

import headwater
import headwater.torch

TRAINED = {"optimizer": headwater.SGD()}


def train(head, rows, steps):
    for _ in range(steps):
        head.cross_entropy(*rows, micro_batch=0)
        head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=1)


def attach(client, head, weight, bias=None, **options):
    return client.create_head(head.name, weight, bias, if_exists="attach", **options)


def quiet(call):
    """What `call` returns, without any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call()


def test_the_expected_step_is_the_heads_open_step(backend, make_head, weight, rows):
    client = backend.client
    head = make_head(client, weight, **TRAINED)
    train(head, rows, 2)
    head.save("step-2")
    train(head, rows, 1)
    epoch = head.info().epoch
    for call in (
        lambda: client.head(head.name, expected_step=2),
        lambda: attach(client, head, weight, expected_step=2, **TRAINED),
        lambda: client.head(head.name).take(expected_step=4),
    ):
        with refused("STEP_MISMATCH", headwater.StepMismatchError) as info:
            call()
        assert "stands at step 3" in str(info.value) and info.value.metadata["openStep"] == "3"
        assert info.value.checkpoints == {"step-2": 2}
        way = 'Head.restore("step-2") goes there' if info.value.metadata["step"] == "2" else "its checkpoints (step-2=2)"
        assert way in str(info.value)
    assert head.info().epoch == epoch
    assert client.head(head.name, expected_step=3).step == 3
    assert attach(client, head, weight, expected_step=3, **TRAINED).step == 3
    head.restore("step-2")
    assert client.head(head.name).take(expected_step=2).open_step == 2


def test_a_new_head_begins_at_its_initial_step(backend, make_head, weight):
    """One that was to continue from another step is not left behind."""
    client = backend.client
    head = make_head(client, weight, initial_step=5)
    head.delete()
    with refused("STEP_MISMATCH", headwater.StepMismatchError):
        attach(client, head, weight, expected_step=10)
    with refused("HEAD_NOT_FOUND"):
        client.head(head.name)
    for options in ({"if_exists": "fail"}, {"if_exists": "replace"}, {"trainable": False, "if_exists": "attach"}):
        with refused("INVALID_COMBINATION", headwater.InvalidArgumentError):
            client.create_head(head.name, weight, expected_step=10, **options)
    assert attach(client, head, weight, initial_step=10, expected_step=10).step == 10


@pytest.mark.parametrize("options", ({"trainable": False}, TRAINED), ids=("frozen", "at its first step"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_other_weights_are_refused(backend, make_head, weight, rng, options, dtype):
    client = backend.client
    bias = rng.standard_normal(VOCAB_SIZE).astype(np.float32)
    weight[0, 0] = np.nan  # equal to itself for this purpose
    head = make_head(client, weight, bias, dtype=dtype, **options)
    stored = torch.from_numpy(weight).to(getattr(torch, dtype))
    for same in (weight, stored):
        assert not quiet(lambda same=same: attach(client, head, same, bias, dtype=dtype, **options)).created
    one_other = weight.copy()
    one_other[-1, -1] += 0.5
    for field, arrays in (("weight", (one_other, bias)), ("bias", (weight, -bias)), ("weight", (np.zeros_like(weight), bias))):
        with refused("HEAD_SPEC_MISMATCH", headwater.AlreadyExistsError) as info:
            attach(client, head, *arrays, dtype=dtype, **options)
        assert info.value.metadata["field"] == field and 'if_exists="replace"' in str(info.value)
    assert attach(client, head, weight.shape, True, dtype=dtype, **options).epoch == head.epoch


def test_a_head_that_has_trained_warns_once_at_its_first_loss(backend, make_head, weight, rows):
    client = backend.client
    head = make_head(client, weight, **TRAINED)
    train(head, rows, 2)
    again = attach(client, head, weight, **TRAINED)
    again.take()
    quiet(lambda: again.cross_entropy(*rows, backward=False))
    with pytest.warns(headwater.HeadWarning, match=r"stands at step 2 and keeps its own weights.*expected_step=2") as caught:
        again.cross_entropy(*rows, micro_batch=0)
    assert [warning.filename for warning in caught] == [__file__]
    quiet(lambda: again.cross_entropy(*rows, micro_batch=1))


# Options of the attach, and what the trainer calls then.
CONFIRMED = {
    "expected_step": ({"expected_step": 2}, lambda again: None),
    "take": ({}, lambda again: again.take(expected_step=2)),
    "set_weight": ({}, lambda again: again.set_weight(again.weight())),
    "restore": ({}, lambda again: again.restore("step-2")),
    "resume": ({}, lambda again: headwater.torch.TrainingLoop(again).resume()),
}


@pytest.mark.parametrize("how", CONFIRMED)
def test_who_says_where_the_run_continues_is_not_warned(one_shard, make_head, weight, rows, how):
    options, call = CONFIRMED[how]
    head = make_head(one_shard.client, weight, **TRAINED)
    train(head, rows, 2)
    head.save("step-2")
    again = attach(one_shard.client, head, weight, **options, **TRAINED)
    call(again)
    quiet(lambda: again.cross_entropy(*rows, micro_batch=0))


def test_a_trainers_own_weights_are_compared_and_replaced(one_shard, make_head, weight, rows):
    """Without an optimizer the weights are the trainer's: it may have them already, or replaces them."""
    client = one_shard.client
    head = make_head(client, weight)
    quiet(lambda: attach(client, head, weight).cross_entropy(*rows, micro_batch=0))
    other = attach(client, head, -weight)
    with pytest.warns(headwater.HeadWarning, match="keeps its own weights"):
        other.cross_entropy(*rows, micro_batch=1)
    other = attach(client, head, -weight)
    other.set_weight(-weight)
    quiet(lambda: other.cross_entropy(*rows, micro_batch=0))


def test_replace_begins_anew_with_the_given_weights(backend, make_head, weight, rows):
    client = backend.client
    options = {"optimizer": headwater.SGD(), "initial_step": 3}
    head = make_head(client, weight, **options)
    train(head, rows, 2)
    head.cross_entropy(*rows, micro_batch=0)  # undone with the rest
    new = client.create_head(head.name, -weight, if_exists="replace", **options)
    assert new.created and new.step == 3 and new.epoch != head.epoch
    np.testing.assert_array_equal(new.weight(), -weight)
    with refused("EPOCH_FENCED", headwater.EpochFencedError):
        head.cross_entropy(*rows, micro_batch=1)
    with refused("HEAD_SPEC_MISMATCH", headwater.AlreadyExistsError):
        client.create_head(head.name, weight, if_exists="replace", softcap=3.0, **options)
    new.delete()
    assert client.create_head(head.name, weight, if_exists="replace").created


def test_an_embedding_is_no_head_of_its_own(one_shard, make_head):
    model = torch.nn.Sequential(torch.nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE), torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False))
    make_head(one_shard.client, model[1].weight, optimizer=headwater.AdamW())
    model[1].weight = model[0].weight
    with refused("INVALID_COMBINATION", headwater.InvalidArgumentError) as info:
        one_shard.client.create_head("tied", model[1].weight, optimizer=headwater.AdamW())
    assert "headwater.torch.attach" in str(info.value) and 'tied="trainer"' in str(info.value)
    make_head(one_shard.client, model[1].weight, trainable=False)
    make_head(one_shard.client, model[1].weight.detach())
    for tied, optimizer in (("trainer", None), ("server", headwater.AdamW())):
        head = headwater.torch.attach(one_shard.client, f"tied-{tied}", model[1], model=model, tied=tied, optimizer=optimizer)
        head.delete()
