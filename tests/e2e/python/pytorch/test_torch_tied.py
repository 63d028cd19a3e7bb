"""Who owns a head's weight: PyTorch's optimizer or the server's, tied to the embedding or not, against the model in one process."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from expectations import refused
from torch_language_model import (
    HIDDEN_SIZE,
    SERVER_ADAMW,
    VOCAB_SIZE,
    LanguageModel,
    attach_with_loop,
    changes,
    optimizer_of,
    train_in_process,
    train_with,
)

import headwater
import headwater.torch

STEPS, MICRO_BATCHES = 24, 2
# Difference of each weight after STEPS steps, by how far it has moved: both sides round in fp32, in another order. Measured: 1e-6.
TOLERANCE = 1e-5


@pytest.fixture
def make_loop(names):
    """attach_with_loop() of a new head."""
    return lambda client, *arguments, **options: attach_with_loop(client, names(client), *arguments, **options)


def reference(tied, *, bias=False, steps=STEPS, max_grad_norm=None):
    model = LanguageModel(tied=tied, bias=bias)
    optimizer = optimizer_of(model.parameters())
    return model, train_in_process(model, steps, MICRO_BATCHES, optimizer, max_grad_norm=max_grad_norm)


def check_equal(expected, losses, model, other_losses):
    assert losses[-1] < 0.9 * losses[0]  # it has learned something
    assert max(abs(a - b) for a, b in zip(losses, other_losses, strict=True)) <= 1e-4
    for name, change in changes(expected, model).items():
        assert change <= TOLERANCE, f"{name}: {change:.2g}"


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("flow", ("trainer", "server"))
def test_a_tied_model_trains_as_in_one_process(one_shard, make_loop, flow, bias):
    expected, losses = reference(True, bias=bias, max_grad_norm=0.5)
    model = LanguageModel(tied=True, bias=bias)
    head, loop, loss_fn = make_loop(one_shard.client, model, flow, max_grad_norm=0.5)
    assert loop.resume() == 0
    others = train_with(loop, loss_fn, model, range(STEPS), MICRO_BATCHES)
    check_equal(expected, losses, model, others)
    np.testing.assert_array_equal(head.weight(), model.embedding.weight.detach().numpy())
    assert head.step_state().last_closed.state == ("REPLACED" if flow == "trainer" else "APPLIED")


@pytest.mark.parametrize("owner", ("trainer", "server"))
def test_an_untied_model_trains_as_in_one_process(backend, make_loop, owner):
    expected, losses = reference(False, bias=True)
    model = LanguageModel(tied=False, bias=True)
    head, loop, loss_fn = make_loop(backend.client, model, owner)
    others = train_with(loop, loss_fn, model, range(STEPS), MICRO_BATCHES)
    if owner == "server":
        assert head.weight_parameter is None  # nothing of the head is needed here any more
        model.lm_head.weight.data, model.lm_head.bias.data = torch.tensor(head.weight()), torch.tensor(head.bias())
    check_equal(expected, losses, model, others)


def test_a_sparse_embedding_gradient_goes_up(one_shard, make_loop):
    def train(sparse):
        model = LanguageModel(tied=True, sparse=sparse)
        head, loop, loss_fn = make_loop(one_shard.client, model, "server")
        train_with(loop, loss_fn, model, range(3), MICRO_BATCHES)
        return head.weight()

    np.testing.assert_allclose(train(True), train(False), rtol=0, atol=1e-7)


def test_the_embeddings_gradient_goes_up_in_parts_that_the_server_takes(remote, make_loop, monkeypatch):
    """A weight that is larger than one contribution may be."""
    weights = []
    for limit in (0, 5 * HIDDEN_SIZE * 4):
        model = LanguageModel(tied=True)
        if limit:
            info = remote.client.server_info()
            info = dataclasses.replace(info, limits={**info.limits, "max_micro_batch_bytes": limit})
            monkeypatch.setattr(remote.client._backend, "server_info", lambda timeout_s, info=info: info)
        head, loop, loss_fn = make_loop(remote.client, model, "server")
        train_with(loop, loss_fn, model, range(2), MICRO_BATCHES)
        parts = math.ceil(VOCAB_SIZE / 5) if limit else 1
        assert len(head.step_state().last_closed.micro_batches) == MICRO_BATCHES + parts
        weights.append(head.weight())
    np.testing.assert_allclose(weights[0], weights[1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_a_16_bit_head_of_an_fp32_parameter(one_shard, make_loop, dtype):
    """tied="server": the parameter gets the fp32 master weights; tied="trainer": the head gets the rounded parameter."""
    for owner in ("server", "trainer"):
        model = LanguageModel(tied=True)
        head, loop, loss_fn = make_loop(one_shard.client, model, owner, attach={"dtype": dtype})
        if owner == "server":  # nothing was rounded on the way
            np.testing.assert_array_equal(head.weight(dtype="float32"), model.embedding.weight.detach().numpy())
        losses = train_with(loop, loss_fn, model, range(8), MICRO_BATCHES)
        assert losses[-1] < losses[0]
        mine = model.embedding.weight.detach()
        served = torch.tensor(np.asarray(head.weight(dtype="float32")))
        rounding = 0 if owner == "server" else torch.finfo(getattr(torch, dtype)).eps
        assert float((mine - served).abs().max()) <= rounding * float(mine.abs().max())


# ---- what attach refuses ------------------------------------------------------------------------------------------------


def test_a_shared_weight_without_a_flow_is_refused(backends):
    client, model = backends("local-1").client, LanguageModel(tied=True)
    for module in (model.lm_head, model.embedding.weight):
        with refused("INVALID_COMBINATION", ValueError) as info:
            headwater.torch.attach(client, "refused", module, model=model, optimizer=SERVER_ADAMW)
        assert "embedding.weight" in str(info.value)
    # Frozen: only if the other use is trained.
    with refused("INVALID_COMBINATION", ValueError):
        headwater.torch.attach(client, "refused", model.lm_head, model=model, trainable=False)
    model.requires_grad_(False)
    headwater.torch.attach(client, "frozen-tied", model.lm_head, model=model, trainable=False).delete()


def test_views_of_one_flat_buffer_are_not_shared(backends):
    client, model = backends("local-1").client, LanguageModel(tied=False)
    flat = torch.cat([model.embedding.weight.flatten(), model.lm_head.weight.flatten()]).detach()
    half = VOCAB_SIZE * HIDDEN_SIZE
    model.embedding.weight.data = flat[:half].view(VOCAB_SIZE, HIDDEN_SIZE)
    model.lm_head.weight.data = flat[half:].view(VOCAB_SIZE, HIDDEN_SIZE)
    headwater.torch.attach(client, "flat", model.lm_head, model=model, optimizer=SERVER_ADAMW).delete()
    # But another Parameter over the same memory is, and no flow can serve two gradients.
    model.embedding.weight.data = model.lm_head.weight.data
    with refused("INVALID_COMBINATION", ValueError):
        headwater.torch.attach(client, "refused", model.lm_head, model=model, optimizer=SERVER_ADAMW)
    with refused("INVALID_COMBINATION", ValueError) as info:
        headwater.torch.attach(client, "refused", model.lm_head, model=model, tied="trainer")
    assert "one Parameter" in str(info.value)


def test_flows_that_do_not_fit_are_refused(backends):
    client, model, untied = backends("local-1").client, LanguageModel(tied=True), LanguageModel(tied=False)
    for arguments in (
        {"module": model.lm_head, "model": model, "tied": "trainer", "optimizer": SERVER_ADAMW},
        {"module": model.lm_head, "model": model, "tied": "server"},
        {"module": model.lm_head, "model": model, "tied": "server", "optimizer": "torch"},
        {"module": model.lm_head, "model": model, "tied": "trainer", "trainable": False},
        {"module": model.lm_head, "model": model, "tied": False},
        {"module": untied.lm_head, "model": untied, "tied": "trainer"},
        {"module": untied.lm_head, "model": untied, "trainable": False, "optimizer": SERVER_ADAMW},
    ):
        with refused("INVALID_COMBINATION", ValueError):
            headwater.torch.attach(client, "refused", **arguments)
    for arguments in ({"tied": "both"}, {"optimizer": "adam"}):
        with refused("INVALID_FIELD", ValueError):
            headwater.torch.attach(client, "refused", untied.lm_head, **arguments)
    untied.lm_head.weight.requires_grad_(False)
    with refused("INVALID_COMBINATION", ValueError):
        headwater.torch.attach(client, "refused", untied.lm_head, optimizer="torch")
    assert not [info for info in client.heads() if "refused" in info.name]
