"""A patched model of transformers in a loop of one's own: what it returns, what is left of it, and what is refused."""

import copy
import inspect
import pickle

import pytest
import tiny_models
import torch
import transformers
from tiny_trainer import examples, gap_of_weights, tiny_model

import headwater
import headwater.torch
from headwater.transformers import (
    HeadwaterCausalLMOutput,
    HeadwaterConfig,
    attach_remote_head,
    detach_remote_head,
    local_lm_head,
)

ENVIRONMENTS = ("newest", "oldest")

LOSS_TOLERANCE = 1e-5
IGNORED = -100


@pytest.fixture
def config(client, request):
    yield HeadwaterConfig(client=client, head="patched")
    for info in client.heads():
        if info.name.endswith("/patched"):
            client.head("patched").delete(force=True)


@pytest.fixture
def batch():
    ids, labels = tiny_models.batch()
    return {"input_ids": ids, "labels": labels}


def losses(model, **inputs) -> float:
    with torch.no_grad():
        return float(model(**inputs).loss)


def test_signature_and_name_of_forward_stay(config):
    model, plain = tiny_model(), tiny_model()
    attach_remote_head(model, config)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert model.forward.__name__ == plain.forward.__name__


def test_output_has_a_loss_and_no_logits(config, batch):
    model, plain = tiny_model(), tiny_model()
    attach_remote_head(model, config)
    output = model(**batch, output_hidden_states=True, output_attentions=False)

    assert isinstance(output, HeadwaterCausalLMOutput)
    assert output.logits is None and output.predicted_tokens is None and len(output.hidden_states) == 3
    assert output.loss.requires_grad and output.loss.dtype == torch.float32 and output.loss.shape == ()
    assert not any(values.shape[-1] == 97 for values in output.values() if isinstance(values, torch.Tensor) and values.dim())
    assert output.loss.item() == pytest.approx(plain(**batch).loss.item(), abs=LOSS_TOLERANCE)
    output.loss.backward()
    assert model.get_input_embeddings().weight.grad.abs().max() > 0
    with torch.no_grad():
        output = model(**batch)
    assert list(output.keys()) == ["loss", "predicted_tokens"]
    assert torch.equal(output.predicted_tokens, plain(**batch).logits.argmax(-1))
    assert output.predicted_tokens.dtype == torch.int64


@pytest.mark.parametrize("tensor", [False, True])
def test_number_of_items_divides_the_sum(config, batch, tensor):
    model, plain = tiny_model(), tiny_model()
    attach_remote_head(model, config)
    items = torch.tensor(7) if tensor else 7
    expected = losses(plain, **batch, num_items_in_batch=items)
    assert losses(model, **batch, num_items_in_batch=items) == pytest.approx(expected, abs=LOSS_TOLERANCE)
    assert model(**batch, num_items_in_batch=items).loss.item() == pytest.approx(expected, abs=LOSS_TOLERANCE)


def test_labels_that_are_shifted_already(config, batch):
    model, plain = tiny_model(), tiny_model()
    attach_remote_head(model, config)
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].roll(1, 0)
    expected = losses(plain, **batch, shift_labels=shifted)
    assert expected != pytest.approx(losses(plain, **batch), abs=1e-2)
    assert losses(model, **batch, shift_labels=shifted) == pytest.approx(expected, abs=LOSS_TOLERANCE)


def test_logits_to_keep_are_the_rows_of_the_last_labels(config, batch):
    model, plain = tiny_model(), tiny_model()
    attach_remote_head(model, config)
    logits = plain(batch["input_ids"]).logits[:, -5:-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, -4:].flatten())
    assert losses(model, **batch, logits_to_keep=5) == pytest.approx(expected.item(), abs=LOSS_TOLERANCE)


def test_tuples_and_positional_labels(config, batch):
    model, plain = tiny_model(), tiny_model()
    attach_remote_head(model, config)
    (loss,) = model(**batch, return_dict=False)
    assert loss.item() == pytest.approx(losses(plain, **batch), abs=LOSS_TOLERANCE)
    names = list(inspect.signature(plain.forward).parameters)
    positional = [batch.get(name) for name in names[: names.index("labels") + 1]]
    assert model(*positional).loss.item() == pytest.approx(losses(plain, **batch), abs=LOSS_TOLERANCE)


def test_batch_without_targets_has_loss_0_and_gradients_0(config, batch):
    model = tiny_model()
    attach_remote_head(model, config)
    loss = model(batch["input_ids"], labels=torch.full_like(batch["labels"], IGNORED)).loss
    loss.backward()
    assert loss.item() == 0
    assert model.get_input_embeddings().weight.grad.abs().max() == 0


@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        (transformers.Gemma2Config, {"final_logit_softcapping": 3.0}),
        (transformers.CohereConfig, {"logit_scale": 0.25}),
        (transformers.GraniteConfig, {"logits_scaling": 8.0}),
        (transformers.PhiConfig, {}),
    ],
)
def test_caps_scales_and_biases_are_found(config, batch, config_class, options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    model = transformers.AutoModelForCausalLM.from_config(
        config_class(**sizes, vocab_size=97, head_dim=8, pad_token_id=0, eos_token_id=1, bos_token_id=2, **options)
    )
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(0, 0.5)
        if model.get_output_embeddings().bias is not None:
            model.get_output_embeddings().bias.normal_(0, 1)
    expected = losses(model, **batch)
    remote = attach_remote_head(model, config)
    assert losses(model, **batch) == pytest.approx(expected, abs=LOSS_TOLERANCE)
    spec = remote.head.spec
    assert (spec.softcap, spec.logit_scale) == (
        options.get("final_logit_softcapping"),
        options.get("logit_scale", 1 / options.get("logits_scaling", 1)),
    )
    assert spec.has_bias == (config_class is transformers.PhiConfig)


def test_loop_of_ones_own_trains_and_saves(config, tmp_path):
    model, plain = tiny_model(), tiny_model()
    remote = attach_remote_head(model, config, optimizer=headwater.AdamW(weight_decay=0.1))
    body = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(body) == len(list(plain.parameters())) - 1
    optimizer = torch.optim.AdamW(body, lr=1e-2, weight_decay=0.1)
    stock = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    loop = headwater.torch.TrainingLoop(remote.head, optimizer, max_grad_norm=0.5)
    loop.resume()
    for example in examples(6):
        inputs = {name: values[None] for name, values in example.items()}
        loop.backward(model(**inputs).loss)
        loop.step()
        plain(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        stock.step()
        stock.zero_grad()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert gap_of_weights(loaded, plain) <= 2e-4


def test_stale_layer_is_refused_until_the_weight_is_here(config, batch):
    model = tiny_model()
    remote = attach_remote_head(model, config)
    before = model(batch["input_ids"]).logits  # as nothing was trained yet
    model(**batch).loss.backward()
    remote.head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=remote.loss_fn.micro_batches)

    with pytest.raises(headwater.FailedPreconditionError, match="local_lm_head"):
        model(batch["input_ids"])
    with local_lm_head(model):
        after = model(batch["input_ids"]).logits
        assert not torch.allclose(before, after, atol=1e-2)
        state = model.state_dict()["lm_head.weight"]
    assert torch.equal(state, torch.from_numpy(remote.head.weight()))


def test_detaching_gives_the_model_back(config, batch):
    model, plain = tiny_model(), tiny_model()
    untouched = {name: set(vars(module)) for name, module in model.named_modules()}
    attach_remote_head(model, config)
    detach_remote_head(model)

    assert {name: set(vars(module)) for name, module in model.named_modules()} == untouched
    assert gap_of_weights(model, plain) == 0
    assert torch.equal(model(**batch).logits, plain(**batch).logits)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(headwater.InvalidArgumentError, match="has no remote head"):
        detach_remote_head(model)


def test_copy_of_a_patched_model_is_a_model_of_its_own(config, batch):
    model = tiny_model()
    attach_remote_head(model, config)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
    assert losses(other, **batch) == pytest.approx(losses(tiny_model(), **batch), abs=LOSS_TOLERANCE)
    assert losses(model, **batch) != pytest.approx(losses(other, **batch), abs=1e-4)
    detach_remote_head(other)
    assert losses(model, **batch) > 0  # is still patched
    assert other(**batch).logits is not None


def test_patched_model_cannot_be_pickled(config):
    model = tiny_model()
    attach_remote_head(model, config)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: attach_remote_head(model), "has a remote head already"),
        (lambda model: model.resize_token_embeddings(101), "resize_token_embeddings"),
    ],
)
def test_what_would_go_wrong_afterwards_is_refused(config, change, message):
    model = tiny_model()
    attach_remote_head(model, config)
    with pytest.raises(headwater.InvalidArgumentError, match=message):
        change(model)


def own_loss(model):
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: transformers.BartForCausalLM(tiny_models.tiny_config(transformers.BartConfig)), "BartForCausalLM"),
        (lambda: torch.nn.Linear(4, 4), "no output layer"),
        (lambda: transformers.LlamaModel(tiny_model().config), "no output layer"),
    ],
)
def test_model_that_does_not_fit_is_refused_and_left_alone(config, model, message):
    model = model()
    with pytest.raises(headwater.InvalidArgumentError, match=message):
        attach_remote_head(model, config)
    assert not [name for _, module in model.named_modules() for name in vars(module) if "headwater" in name]
    assert not [info for info in config.client.heads() if info.name.endswith("/patched")]


def test_loss_function_of_ones_own_is_refused(config):
    model = tiny_model()
    own_loss(model)
    with pytest.raises(headwater.InvalidArgumentError, match="loss_function"):
        attach_remote_head(model, config)
    assert model.lm_head.weight.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tied": "server"}, 'tied="server"'),
        ({"tied": True}, "tied"),
        ({"trainable": "yes"}, "trainable"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"outputs": ("logits",)}, "outputs"),
        ({"checkpoint_name": "last"}, "checkpoint_name"),
    ],
)
def test_configuration_is_checked(options, message):
    with pytest.raises(headwater.InvalidArgumentError, match=message):
        HeadwaterConfig(**options)


def test_server_must_be_named(monkeypatch):
    monkeypatch.delenv("HEADWATER_SERVER", raising=False)
    with pytest.raises(headwater.InvalidArgumentError, match="HEADWATER_SERVER"):
        HeadwaterConfig().connect()
