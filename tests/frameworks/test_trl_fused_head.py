"""`headwater.trl.add_fused_lm_head` against TRL's own function, field by field."""

import copy
import inspect
import itertools

import pytest
import torch
import transformers
from transformers import (
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    PhiConfig,
    Qwen2Config,
)
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head as trl_add_fused_lm_head

import headwater
import headwater.torch
from headwater.trl import add_fused_lm_head

ENVIRONMENTS = ("newest", "oldest")

VOCABULARY, HIDDEN = 97, 32
NUMBERS = itertools.count()  # heads of one server have names of their own
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": (LlamaConfig, {}, 1.0),
    "llama with large logits": (LlamaConfig, {}, 8.0),
    "gemma2": (Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 5.0, "tie_word_embeddings": False}, 4.0),
    "cohere": (CohereConfig, {"logit_scale": 0.5, "tie_word_embeddings": False}, 8.0),
    "granite": (GraniteConfig, {"logits_scaling": 8.0}, 20.0),
    "phi with a bias": (PhiConfig, {"partial_rotary_factor": 0.5}, 2.0),
    "qwen2": (Qwen2Config, {}, 2.0),
}


def tiny(name):
    config_class, changes, size = CONFIGS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**SIZES, **changes)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    layer = model.get_output_embeddings()
    torch.nn.init.normal_(layer.weight, std=0.2 * size)
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias, std=0.5)
    return model


def batch(ignored=0.3):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, 9), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < ignored, -100)
    return ids, labels


def served(client, model, name, **options):
    """A head of the model's output layer."""
    config = model.config
    given = {
        "softcap": getattr(config, "final_logit_softcapping", None),
        "logit_scale": {"cohere": 0.5, "granite": 1 / 8}.get(config.model_type),
    }
    options.update({option: value for option, value in given.items() if value is not None})
    name = f"{name}-{next(NUMBERS)}"
    return headwater.torch.attach(client, name, model.get_output_embeddings(), model=model, **options)


def gradients(model, layer):
    """The gradients of every parameter except the output layer's."""
    own = {id(parameter) for parameter in layer.parameters()}
    return {name: parameter.grad for name, parameter in model.named_parameters() if id(parameter) not in own}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_and_gradient_is_that_of_trl(client, name, temperature):
    stock, ours = tiny(name), tiny(name)
    head = served(client, ours, "fields")
    trl_add_fused_lm_head(stock, temperature=temperature, outputs=OUTPUTS)
    add_fused_lm_head(ours, temperature=temperature, outputs=OUTPUTS, head=head)
    ids, labels = batch()
    expected = stock(input_ids=ids, labels=labels, fused_lm_head=True)
    got = ours(input_ids=ids, labels=labels, fused_lm_head=True)
    assert isinstance(got, FusedCausalLMOutput)
    for field in ("loss", *OUTPUTS, "label_mask"):
        mine, theirs = getattr(got, field), getattr(expected, field)
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), field
        if mine.dtype == torch.bool:
            assert torch.equal(mine, theirs), field
        else:
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4), (field, (mine - theirs).abs().max())
    assert got.aux_loss is None
    assert [getattr(got, field).requires_grad for field in OUTPUTS] == [True, True, False, False, False]
    generator = torch.Generator().manual_seed(2)
    upstream = [torch.randn(got.log_probs.shape, generator=generator) for _ in range(2)]
    for output in (expected, got):
        torch.autograd.backward([output.log_probs, output.entropy], upstream)
    layer = stock.get_output_embeddings()
    for parameter, theirs in gradients(stock, layer).items():
        mine = gradients(ours, ours.get_output_embeddings())[parameter]
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max())), parameter
    head.seal(expected_micro_batches=1)
    weight, bias = (head.gradient(), None) if layer.bias is None else head.gradient(bias=True)
    scale = 1e-4 * float(layer.weight.grad.abs().max())
    assert torch.allclose(torch.as_tensor(weight), layer.weight.grad, rtol=1e-4, atol=scale)
    if bias is not None:
        assert torch.allclose(torch.as_tensor(bias), layer.bias.grad, rtol=1e-4, atol=1e-4 * float(layer.bias.grad.abs().max()))


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)])
def test_the_loss_is_divided_as_trl_divides_it(client, items):
    stock, ours = tiny("llama"), tiny("llama")
    trl_add_fused_lm_head(stock)
    add_fused_lm_head(ours, head=served(client, ours, "items"))
    ids, labels = batch()
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    for given in ({"labels": labels}, {"labels": labels, "shift_labels": shifted}):
        outputs = [m(input_ids=ids, fused_lm_head=True, num_items_in_batch=items, **given) for m in (stock, ours)]
        assert outputs[1].loss.item() == pytest.approx(outputs[0].loss.item(), rel=1e-6)
        assert outputs[1].log_probs.shape == outputs[0].log_probs.shape
        assert torch.allclose(outputs[1].log_probs, outputs[0].log_probs, atol=1e-5)


def test_outputs_that_were_not_asked_for_are_none(client):
    model = tiny("llama")
    add_fused_lm_head(model, outputs=("is_top1",), head=served(client, model, "some"))
    ids, labels = batch()
    output = model(input_ids=ids, labels=labels, fused_lm_head=True)
    assert {name for name, value in output.items() if value is not None} == {"loss", "log_probs", "is_top1", "label_mask"}


@pytest.mark.parametrize("length", [1, 9])
def test_a_batch_without_labels_has_a_zero_to_go_back_through(client, length):
    model = tiny("llama")
    head = served(client, model, "masked")
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"), head=head)
    ids = batch()[0][:, :length]
    output = model(input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True)
    assert output.loss.item() == 0 and not output.log_probs.any() and not output.entropy.any() and not output.is_top1.any()
    assert output.log_probs.shape == (3, length - 1)
    (output.loss + output.entropy.sum()).backward()
    assert not model.model.norm.weight.grad.any()
    assert head.seal(expected_micro_batches=1).totals.micro_batch_count == 1
    assert not head.gradient().any()


def test_several_forwards_before_one_backward_need_no_slots(client):
    stock, ours = tiny("llama"), tiny("llama")
    head = served(client, ours, "several", staging_slots=1)
    trl_add_fused_lm_head(stock, outputs=("entropy",))
    add_fused_lm_head(ours, outputs=("entropy",), head=head)
    losses = []
    for model in (stock, ours):
        total = 0.0
        for _ in range(4):
            ids, labels = batch()
            output = model(input_ids=ids, labels=labels, fused_lm_head=True)
            total = total + (output.log_probs.exp() * output.entropy).sum()
        total.backward()
        losses.append(total.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    head.seal(expected_micro_batches=4)
    expected = stock.lm_head.weight.grad
    assert torch.allclose(torch.as_tensor(head.gradient()), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_frozen_head_gives_gradients_to_the_body_alone(client):
    stock, ours = tiny("gemma2"), tiny("gemma2")
    stock.lm_head.requires_grad_(False)
    head = served(client, ours, "frozen", trainable=False)
    trl_add_fused_lm_head(stock, outputs=("entropy",))
    add_fused_lm_head(ours, outputs=("entropy",), head=head)
    ids, labels = batch()
    for model in (stock, ours):
        output = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (output.log_probs.exp() * output.entropy).sum().backward()
    expected = gradients(stock, stock.lm_head)
    for parameter, mine in gradients(ours, ours.lm_head).items():
        theirs = expected[parameter]
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max())), parameter
    assert ours.lm_head.weight.grad is None


def test_the_loss_of_a_router_is_in_the_loss(client):
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    stock = transformers.AutoModelForCausalLM.from_config(config)
    ours = copy.deepcopy(stock)
    trl_add_fused_lm_head(stock)
    add_fused_lm_head(ours, head=served(client, ours, "router"))
    ids, labels = batch()
    for given in ({}, {"attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)}):
        expected, got = (model(input_ids=ids, labels=labels, fused_lm_head=True, **given) for model in (stock, ours))
        assert got.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-6)
        assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)


@pytest.mark.parametrize("cast", [False, True])
def test_rows_have_the_type_of_the_product_that_they_replace(client, cast):
    model = tiny("llama")
    sent = []
    head = served(client, model, "autocast")
    cross_entropy = head.cross_entropy
    head.cross_entropy = lambda rows, *args, **kwargs: sent.append(rows.dtype) or cross_entropy(rows, *args, **kwargs)
    add_fused_lm_head(model, cast_lm_head_to_fp32=cast, head=head)
    ids, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(input_ids=ids, labels=labels, fused_lm_head=True)
    assert set(sent) == {torch.float32 if cast else torch.bfloat16}
    assert output.log_probs.dtype == torch.float32


def test_other_calls_are_as_before_and_the_undo_takes_all_off(client):
    model = tiny("llama").eval()
    ids, labels = batch()
    with torch.no_grad():
        before = model(input_ids=ids, labels=labels)
    signature, original = inspect.signature(model.forward), model.forward
    undo = add_fused_lm_head(model, head=served(client, model, "undo"))
    assert inspect.signature(model.forward) == signature and model.forward != original
    with torch.no_grad():
        after = model(input_ids=ids, labels=labels)
        model(input_ids=ids, labels=labels, fused_lm_head=True)
        generated = model.generate(ids[:1], max_new_tokens=3, do_sample=False)
    assert torch.equal(after.logits, before.logits) and torch.equal(after.loss, before.loss)
    assert generated.shape == (1, 12)
    assert "forward" not in vars(model.lm_head)
    undo()
    assert model.forward == original


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"outputs": ("logits",)}, "logits"),
        ({"differentiable": ("entropy",)}, "differentiable"),
        ({"differentiable": ()}, "differentiable"),
        ({"outputs": ("mean_logits",), "differentiable": ("mean_logits",)}, "differentiable"),
        ({"head": None}, "head must be"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_what_there_is_not_is_refused(client, options, named):
    model = tiny("llama")
    given = {"head": served(client, model, "refused"), **options}
    with pytest.raises(headwater.InvalidArgumentError, match=named):
        add_fused_lm_head(model, **given)
    assert "forward" not in vars(model)
