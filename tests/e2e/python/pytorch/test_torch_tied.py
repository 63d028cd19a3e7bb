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
    check_trained,
    train_in_process,
    train_with,
)

import headwater
import headwater.torch

STEPS = 24
# Difference of each weight after STEPS steps, by how far it has moved: both sides round in fp32, in another order. Measured: 1e-6.
TOLERANCE = 1e-5


@pytest.fixture
def make_loop(names):
    """attach_with_loop() of a new head."""
    return lambda client, *arguments, **options: attach_with_loop(client, names(client), *arguments, **options)


def check_equal(model, losses, **options):
    """The model is what training it in one process makes of it."""
    expected = LanguageModel(tied=model.lm_head.weight is model.embedding.weight, bias=model.lm_head.bias is not None)
    expected_losses = train_in_process(expected, STEPS, **options)
    assert losses[-1] < 0.9 * losses[0]  # it has learned something
    assert max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)) <= 1e-4
    check_trained(expected, model, TOLERANCE)


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("flow", ("trainer", "server"))
def test_a_tied_model_trains_as_in_one_process(client, make_loop, flow, bias):
    model = LanguageModel(tied=True, bias=bias)
    head, loop, loss_fn = make_loop(client, model, flow, max_grad_norm=0.5)
    assert loop.resume() == 0
    check_equal(model, train_with(loop, loss_fn, model, range(STEPS)), max_grad_norm=0.5)
    np.testing.assert_array_equal(head.weight(), model.embedding.weight.detach().numpy())
    assert head.step_state().last_closed.state == ("REPLACED" if flow == "trainer" else "APPLIED")


@pytest.mark.parametrize("owner", ("trainer", "server"))
def test_an_untied_model_trains_as_in_one_process(backend, make_loop, owner):
    model = LanguageModel(tied=False, bias=True)
    head, loop, loss_fn = make_loop(backend.client, model, owner)
    losses = train_with(loop, loss_fn, model, range(STEPS))
    if owner == "server":
        assert head.weight_parameter is None  # nothing of the head is needed here any more
        model.lm_head.weight.data, model.lm_head.bias.data = torch.tensor(head.weight()), torch.tensor(head.bias())
    check_equal(model, losses)


def test_a_sparse_embedding_gradient_goes_up(client, make_loop):
    def train(sparse):
        model = LanguageModel(tied=True, sparse=sparse)
        head, loop, loss_fn = make_loop(client, model, "server")
        train_with(loop, loss_fn, model, range(3))
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
        train_with(loop, loss_fn, model, range(2))
        parts = math.ceil(VOCAB_SIZE / 5) if limit else 1
        assert len(head.step_state().last_closed.micro_batches) == 2 + parts
        weights.append(head.weight())
    np.testing.assert_allclose(weights[0], weights[1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_a_16_bit_head_of_an_fp32_parameter(client, make_loop, dtype):
    """tied="server": the parameter gets the fp32 master weights; tied="trainer": the head gets the rounded parameter."""
    for owner in ("server", "trainer"):
        model = LanguageModel(tied=True)
        head, loop, loss_fn = make_loop(client, model, owner, attach={"dtype": dtype})
        if owner == "server":  # nothing was rounded on the way
            np.testing.assert_array_equal(head.weight(dtype="float32"), model.embedding.weight.detach().numpy())
        losses = train_with(loop, loss_fn, model, range(8))
        assert losses[-1] < losses[0]
        mine = model.embedding.weight.detach()
        served = torch.tensor(np.asarray(head.weight(dtype="float32")))
        rounding = 0 if owner == "server" else torch.finfo(getattr(torch, dtype)).eps
        assert float((mine - served).abs().max()) <= rounding * float(mine.abs().max())


# ---- what attach refuses ------------------------------------------------------------------------------------------------


def test_a_shared_weight_without_a_flow_is_refused(client):
    model = LanguageModel(tied=True)
    for module in (model.lm_head, model.embedding.weight):
        with refused("INVALID_COMBINATION", ValueError, "embedding.weight"):
            headwater.torch.attach(client, "refused", module, model=model, optimizer=SERVER_ADAMW)
    # Frozen: only if the other use is trained.
    with refused("INVALID_COMBINATION", ValueError):
        headwater.torch.attach(client, "refused", model.lm_head, model=model, trainable=False)
    model.requires_grad_(False)
    headwater.torch.attach(client, "frozen-tied", model.lm_head, model=model, trainable=False).delete()


def test_views_of_one_flat_buffer_are_not_shared(client):
    model = LanguageModel(tied=False)
    flat = torch.stack([model.embedding.weight, model.lm_head.weight]).detach()
    model.embedding.weight.data, model.lm_head.weight.data = flat
    headwater.torch.attach(client, "flat", model.lm_head, model=model, optimizer=SERVER_ADAMW).delete()
    # But another Parameter over the same memory is, and no flow can serve two gradients.
    model.embedding.weight.data = model.lm_head.weight.data
    with refused("INVALID_COMBINATION", ValueError):
        headwater.torch.attach(client, "refused", model.lm_head, model=model, optimizer=SERVER_ADAMW)
    with refused("INVALID_COMBINATION", ValueError, "one Parameter"):
        headwater.torch.attach(client, "refused", model.lm_head, model=model, tied="trainer")


def test_flows_that_do_not_fit_are_refused(client):
    model, untied = LanguageModel(tied=True), LanguageModel(tied=False)
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
