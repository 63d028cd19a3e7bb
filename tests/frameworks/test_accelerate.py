"""`headwater.accelerate.prepare` in a training loop of accelerate's, beside the same loop without it."""

import contextlib
import shutil

import accelerate
import pytest
import torch
from tiny_llama import ACCUMULATE, HIDDEN_SIZE, STEPS, VOCAB_SIZE, batches, tiny

import headwater
import headwater.accelerate
import headwater.local
from headwater.accelerate import HeadwaterConfig

ENVIRONMENTS = ("newest", "oldest")


@contextlib.contextmanager
def loop(model, config=None, loss=None):
    """An Accelerator and `train(first, last)`, which returns the losses of the micro-batches of these steps."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.8, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    objects = model, optimizer, scheduler
    if config is None:
        prepared = accelerator.prepare(*objects)
    else:
        prepared = headwater.accelerate.prepare(accelerator, *objects, config=config)
    model, optimizer, scheduler = prepared
    compute = loss or (lambda batch: model(**batch).loss)

    def train(first, last):
        losses = []
        data = batches()
        for index in range(first * ACCUMULATE, last * ACCUMULATE):
            with accelerator.accumulate(model):
                value = compute(data[index % len(data)])
                accelerator.backward(value)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(value.item())
        return losses

    try:
        yield accelerator, train
    finally:
        if hasattr(accelerator, "_headwater"):
            headwater.accelerate.prepared(accelerator).undo()


def close(first, second, tolerance=1e-5):
    assert len(first) == len(second)
    assert torch.allclose(torch.tensor(first), torch.tensor(second), rtol=0, atol=tolerance), (first, second)


@pytest.fixture
def config(client):
    """The configuration of a head that only this test has."""
    return HeadwaterConfig(client=client, head=f"head-{len(client.heads())}")


@pytest.mark.parametrize("kind", ["untied", "tied", "frozen"])
def test_a_model_of_transformers_trains_as_without(config, kind):
    stock, ours = tiny(kind == "tied"), tiny(kind == "tied")
    if kind == "frozen":
        for model in (stock, ours):
            model.lm_head.requires_grad_(False)
    with loop(stock) as (_, train):
        expected = train(0, STEPS)
    with loop(ours, config) as (accelerator, train):
        assert headwater.accelerate.prepared(accelerator).remote.trained == (kind != "frozen")
        close(expected, train(0, STEPS))
    assert expected[0] - expected[-4] > 0.1  # it has learnt, of the same batch
    # Without the hooks the layer is the model's again, with what the head has learnt.
    for first, second in zip(stock.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(first, second, rtol=0, atol=1e-5)
        assert first.requires_grad == second.requires_grad


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.lm_head = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)

    def forward(self, ids):
        return torch.tanh(self.embedding(ids))

    def get_output_embeddings(self):
        return self.lm_head


def test_a_network_of_ones_own_trains_as_without(config):
    stock, ours = Network(), Network()

    def local(batch):
        logits = stock.lm_head(stock(batch["input_ids"]))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    with loop(stock, loss=local) as (_, train):
        expected = train(0, STEPS)
    made = []

    def remote(batch):
        return headwater.accelerate.prepared(made[0]).loss(ours(batch["input_ids"]), batch["labels"])

    with loop(ours, config, remote) as (accelerator, train):
        made.append(accelerator)
        close(expected, train(0, STEPS))
    for first, second in zip(stock.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(first, second, rtol=0, atol=1e-5)


def test_a_state_is_saved_whole_and_loaded(config, tmp_path):
    with loop(tiny(), config) as (accelerator, train):
        expected = train(0, 2)
        accelerator.save_state(tmp_path / "state")
        expected += train(2, STEPS)
        # Back in the same process, and in one that begins.
        accelerator.load_state(tmp_path / "state")
        close(expected[2 * ACCUMULATE :], train(2, STEPS), 1e-7)
    fresh = tiny()
    with loop(fresh, config) as (accelerator, train):
        accelerator.load_state(tmp_path / "state")
        close(expected[2 * ACCUMULATE :], train(2, STEPS), 1e-7)
        head = headwater.accelerate.prepared(accelerator).remote.head
        head.restore("step-2")
        saved = next((tmp_path / "state").glob("model*.safetensors"))
        import safetensors.torch

        weight = safetensors.torch.load_file(saved)["lm_head.weight"]
        assert torch.equal(weight, torch.from_numpy(head.weight().copy()))
        assert not torch.equal(weight, tiny().lm_head.weight)


def test_a_state_of_the_beginning_is_loaded_after_training(config, tmp_path):
    with loop(tiny(), config) as (accelerator, train):
        accelerator.save_state(tmp_path / "state")
        expected = train(0, 2)
        accelerator.load_state(tmp_path / "state")
        close(expected, train(0, 2), 1e-7)


def test_a_state_whose_head_is_gone_is_refused(tmp_path):
    with headwater.local.connect(checkpoint_dir=tmp_path / "checkpoints") as client:
        with loop(tiny(), HeadwaterConfig(client=client, head="head")) as (accelerator, train):
            train(0, 2)
            accelerator.save_state(tmp_path / "state")
            train(2, 3)
            shutil.rmtree(tmp_path / "checkpoints")
            with pytest.raises(headwater.StepMismatchError):
                accelerator.load_state(tmp_path / "state")


def test_what_a_head_cannot_follow_is_refused(config):
    def refused(words, call):
        with pytest.raises(headwater.InvalidArgumentError, match=words):
            call()

    model = tiny()
    first = accelerate.Accelerator(cpu=True)
    adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1)
    refused("Adagrad", lambda: headwater.accelerate.prepare(first, model, adagrad, config=config))
    refused("one optimizer, got 0", lambda: headwater.accelerate.prepare(first, model, config=config))
    assert model.lm_head.weight.requires_grad
    with loop(model, config) as (accelerator, _):
        refused("clip_grad_value_", lambda: accelerator.clip_grad_value_(model.parameters(), 1.0))
        refused("norm_type", lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1))
        refused("accelerator", lambda: headwater.accelerate.prepare(accelerator, model, adagrad, config=config))
        with accelerator.accumulate(model):
            refused("sync_gradients", lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))


def test_a_loss_that_is_not_the_heads_stops_the_first_step(config):
    model = tiny()
    before = [parameter.clone() for parameter in model.parameters()]

    def other(batch):
        return model.model(batch["input_ids"]).last_hidden_state.square().mean()

    with loop(model, config, other) as (_, train), pytest.raises(headwater.FailedPreconditionError, match="no loss of"):
        train(0, 1)
    assert all(torch.equal(first, second) for first, second in zip(before, model.parameters(), strict=True))
