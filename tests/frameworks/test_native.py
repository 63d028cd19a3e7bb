"""The losses for torchtitan, NeMo Automodel and Megatron-Core, each where its framework calls it."""

import types
from pathlib import Path

import pytest
import torch
import yaml
from nemo_automodel.components.loss.loss import build_loss_config
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.loss.utils import calculate_loss
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

import headwater
from headwater import megatron
from headwater.nemo import RemoteLinearCrossEntropy
from headwater.torchtitan import HeadwaterLoss

ENVIRONMENTS = ("native",)

VOCAB_SIZE, HIDDEN_SIZE = 97, 32


@pytest.fixture
def layer():
    torch.manual_seed(0)
    layer = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False)
    torch.nn.init.normal_(layer.weight, std=0.3)
    return layer.requires_grad_(False)


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 8, HIDDEN_SIZE, generator=generator).requires_grad_()
    labels = torch.randint(VOCAB_SIZE, (2, 8), generator=generator)
    labels[0, :3] = -100
    return hidden, labels


def with_gradient(loss, hidden):
    (gradient,) = torch.autograd.grad(loss.sum(), hidden)
    return loss.detach(), gradient


def same(ours, stock):
    for first, second in zip(ours, stock, strict=True):
        assert torch.allclose(first, second, rtol=0, atol=1e-5)


def test_torchtitan(layer, rows, server):
    hidden, labels = rows
    tokens = torch.tensor(40.0)
    stock = CrossEntropyLoss.Config().build()
    expected = with_gradient(stock(layer(hidden), labels, tokens)[0], hidden)
    loss_fn = HeadwaterLoss.Config(server=server.address, head="torchtitan").build(compile_config=None)
    assert isinstance(loss_fn, ChunkedLossWrapper)  # the Trainer's check before it hands over the layer
    loss_fn.set_lm_head(layer)
    loss, metrics = loss_fn(hidden, labels, tokens, positions=torch.arange(8))
    assert metrics == {}
    same(with_gradient(loss, hidden), expected)
    with pytest.raises(headwater.InvalidArgumentError, match="advantages"):
        loss_fn(hidden, labels, tokens, advantages=torch.ones(2, 8))


def test_automodel(layer, rows, server):
    hidden, labels = rows
    model = torch.nn.Module()
    model.lm_head = layer
    expected = with_gradient(MaskedCrossEntropy()(logits=layer(hidden), labels=labels, num_label_tokens=40), hidden)
    loss_fn = build_loss_config(RemoteLinearCrossEntropy, server=server.address, head="automodel").build()
    given = {"labels": labels, "model": model, "hidden_states": hidden, "num_label_tokens": 40}
    same(with_gradient(calculate_loss(loss_fn, **given), hidden), expected)
    weights = torch.rand(2, 8)
    logits = layer(hidden).flatten(0, 1)
    each = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
    expected = with_gradient((each * weights.flatten()).sum() / 40, hidden)
    same(with_gradient(calculate_loss(loss_fn, **given, loss_weights=weights), hidden), expected)


def call_as_megatron(layer, hidden, labels, context, **config):
    """As `GPTModel._postprocess` of Megatron-Core 0.19 calls its output_processor."""
    layout = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "use_mup": False, **config}
    return megatron.output_processor(
        hidden_states=hidden.transpose(0, 1),
        output_layer=layer,
        output_weight=None,
        labels=labels,
        loss_mask=None,
        input_ids=None,
        position_ids=None,
        attention_mask=None,
        decoder_input=None,
        inference_context=None,
        packed_seq_params=None,
        runtime_gather_output=None,
        context=context,
        compute_language_model_loss=None,
        scale_logits=None,
        config=types.SimpleNamespace(**layout),
    )


def test_megatron(layer, rows, server):
    hidden, labels = rows
    each = torch.nn.functional.cross_entropy(layer(hidden).flatten(0, 1), labels.flatten(), reduction="none").view(2, 8)
    context = megatron.Context(server=server.address, head="megatron")
    same(with_gradient(call_as_megatron(layer, hidden, labels, context), hidden), with_gradient(each, hidden))
    for option, words in (({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size"), ({"use_mup": True}, "use_mup")):
        with pytest.raises(headwater.InvalidArgumentError, match=words):
            call_as_megatron(layer, hidden, labels, context, **option)
    with pytest.raises(headwater.InvalidArgumentError, match="labels"):
        call_as_megatron(layer, hidden, None, context)


def test_a_trained_layer_that_no_optimizer_holds_is_refused(layer, rows, server):
    layer.requires_grad_(True)
    with pytest.raises(headwater.InvalidArgumentError, match="optimizer"):
        RemoteLinearCrossEntropy(server=server.address, head="trained")(*rows, layer.weight)
    with pytest.raises(headwater.InvalidArgumentError, match="a frozen head would stay behind"):
        RemoteLinearCrossEntropy(server=server.address, head="trained", trainable=False)(*rows, layer.weight)


def test_a_loss_that_was_replaced_stops_the_step(layer, rows, server):
    loss_fn = RemoteLinearCrossEntropy(server=server.address, head="replaced")
    hidden, labels = rows
    optimizer = torch.optim.SGD([hidden], lr=0.1)
    hidden.square().sum().backward()
    before = hidden.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    gradient, hidden.grad = hidden.grad, torch.zeros_like(hidden)
    optimizer.step()  # as torch.distributed.checkpoint makes an optimizer's state
    hidden.grad = gradient
    with pytest.raises(headwater.FailedPreconditionError, match="no loss of replaced"):
        optimizer.step()  # as a warm-up begins
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(headwater.FailedPreconditionError, match="no loss of replaced"):
        optimizer.step()
    assert torch.equal(hidden.detach(), before)
    loss_fn(hidden, labels, layer.weight).backward()
    optimizer.step()
    assert not torch.equal(hidden.detach(), before)


def test_the_lines_of_the_guide(layer):
    page = (Path(__file__).parents[2] / "docs/guides/frameworks.md").read_text()
    blocks = [block.partition("\n")[2] for block in page.split("```")[1::2]]

    def only(word):
        (block,) = (block for block in blocks if word in block)
        return block

    config = types.SimpleNamespace()
    exec(only("headwater.torchtitan"), {"config": config})
    made = [config.loss.build(compile_config=None)]
    assert isinstance(made[0], HeadwaterLoss)
    recipe = yaml.safe_load(only("headwater.nemo"))["loss_fn"]
    assert recipe.pop("_target_") == f"{RemoteLinearCrossEntropy.__module__}.{RemoteLinearCrossEntropy.__name__}"
    made.append(build_loss_config(RemoteLinearCrossEntropy, **recipe).build())

    class Model:
        output_layer = layer.requires_grad_(True)

        def __call__(self, *_, labels, output_processor, output_processor_context):
            assert output_processor is megatron.output_processor
            return output_processor_context

    names = {"model": Model(), **dict.fromkeys(("ids", "positions", "mask", "labels"))}
    exec(only("headwater.megatron"), names)
    made.append(names["losses"])
    assert made[2].config.trainable is True and not layer.weight.requires_grad
    for loss in made:
        loss.detach()
