"""`headwater.torch.attach` with models of transformers, adapters of peft and weights of torchao."""

import warnings

import peft
import pytest
import torch
import transformers

import headwater
import headwater.torch

VOCAB_SIZE, HIDDEN_SIZE = 96, 32
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def tiny(kind, dtype=torch.float32, **sizes):
    """A causal model of this kind; rows of its head are large enough for scales and caps to show."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(0, 0.4)
    return model.to(dtype)


def batch():
    ids = (torch.arange(24).view(2, 12) * 7) % 80 + 10
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def refused(client, layer, **options):
    before = client.heads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(headwater.InvalidArgumentError) as info:
            headwater.torch.attach(client, "refused", layer, **options)
    assert client.heads() == before
    assert info.value.reason == "INVALID_COMBINATION"
    return str(info.value)


def accepted(client, layer, **options):
    """Attaches with a warning being an error, and compares the losses of a batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head = headwater.torch.attach(client, "accepted", layer, check=batch(), **options)
    head.delete()
    assert head.checked == "forward"
    return head


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    ("kind", "config", "advice", "options"),
    [
        ("llama", {}, None, {}),
        ("gemma2", {"final_logit_softcapping": 30.0}, "softcap=30.0", {"softcap": 30.0}),
        ("granite", {"logits_scaling": 8.0}, "logit_scale=1 / 8.0", {"logit_scale": 1 / 8}),
        ("hyperclovax", {"logits_scaling": 8.0}, "logit_scale=8.0", {"logit_scale": 8.0}),
        ("cohere", {"logit_scale": 0.0625}, "logit_scale=0.0625", {"logit_scale": 0.0625}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_advice_is_what_the_model_does(client, kind, config, advice, options, dtype):
    model = tiny(kind, dtype, **config)
    if advice is not None:
        assert f"Pass {advice}" in refused(client, model.lm_head, model=model)
    accepted(client, model.lm_head, model=model, **options)


def test_minicpm_divides_its_rows_before_the_layer(client):
    heads = {"num_key_value_heads": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    model = tiny("minicpm3", dim_model_base=8, q_lora_rank=16, kv_lora_rank=16, **heads)
    with pytest.warns(UserWarning, match=r"rows that reach the layer are not those that model returns.*logit_scale=8 / 32"):
        headwater.torch.attach(client, "rows", model.lm_head, model=model, check=batch()).delete()


def wrappers():
    def distributed(model):
        return torch.nn.parallel.DistributedDataParallel(model)

    class Module(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, **inputs):
            return self.model(**inputs)

    def adapters(model):
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))

    return {"DistributedDataParallel": distributed, "torch.compile": torch.compile, "a module": Module, "peft": adapters}


@pytest.mark.parametrize("name", wrappers())
def test_a_model_is_seen_behind_its_wrapper(client, name, tmp_path):
    model = tiny("gemma2", final_logit_softcapping=30.0)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = wrappers()[name](model)
        assert "Pass softcap=30.0" in refused(client, model.lm_head, model=wrapped)
        accepted(client, model.lm_head, model=wrapped, softcap=30.0)
    finally:
        torch.distributed.destroy_process_group()


def test_the_copy_that_peft_trains_is_the_head(client):
    model = tiny("llama")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    wrapper = model.lm_head
    copy = wrapper.modules_to_save["default"]
    with torch.no_grad():
        copy.weight.add_(0.1)
    for layer in (wrapper, copy):
        head = headwater.torch.attach(client, "copy", layer, model=wrapped, optimizer="torch", check=batch())
        assert head.checked == "forward" and head.weight_parameter is copy.weight
        head.delete()
    for options in ({}, {"model": wrapped}):
        message = refused(client, wrapper.original_module, **options)
        assert "modules_to_save" in message and "does not use this layer" in message and "LoRA" not in message
    with wrapped.disable_adapter():
        accepted(client, wrapper, model=wrapped, trainable=False)
        assert "does not use this layer" in refused(client, copy, model=wrapped)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (lambda: peft.LoraConfig(target_modules=["lm_head"]), "LoRA"),
        (lambda: peft.LoraConfig(target_modules=["lm_head"], use_dora=True), "LoRA"),
        (lambda: peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]), "(ia3)"),
        (lambda: peft.LoHaConfig(target_modules=["lm_head"]), "(loha)"),
        (lambda: peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices={"lm_head": [1, 2]}), "TrainableTokens"),
    ],
    ids=("LoRA", "DoRA", "IA3", "LoHa", "trainable tokens"),
)
def test_an_adapter_on_the_head_is_named(client, config, name):
    model = tiny("llama")
    wrapped = peft.get_peft_model(model, config())
    message = refused(client, model.lm_head, model=wrapped)
    assert "has an adapter" in message and name in message
    assert ("LoRA" in message) == (name == "LoRA")


def test_a_whole_model_is_not_its_last_layer(client):
    for model in (tiny("llama"), peft.get_peft_model(tiny("llama"), peft.LoraConfig(target_modules=["q_proj"]))):
        message = refused(client, model)
        assert "whole model" in message and "lm_head" in message and "LoRA" not in message


@pytest.mark.parametrize("kind", ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"))
def test_weights_of_torchao_are_refused_before_anything_is_sent(client, kind):
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny("llama")
    quantization.quantize_(model, getattr(quantization, kind)(), filter_fn=lambda _, name: name == "lm_head")
    message = refused(client, model.lm_head, model=model, trainable=False)
    assert "quantised" in message and "float32, bfloat16 or float16" in message


def test_a_tied_model_is_refused_without_the_model(client):
    model = tiny("qwen2", tie_word_embeddings=True)
    for options in ({}, {"model": model}):
        message = refused(client, model.lm_head, optimizer=headwater.AdamW(), **options)
        assert 'tied="trainer"' in message and 'tied="server"' in message
    accepted(client, model.lm_head, model=model, tied="trainer")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert "tie_word_embeddings=True" in refused(client, model.lm_head, model=model)
    accepted(client, model.lm_head, model=model, tied=False)
