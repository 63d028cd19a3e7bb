"""`Head.export`: a model that was trained remotely, saved and loaded again, computes what was trained."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import headwater
import headwater.torch

VOCAB_SIZE, HIDDEN_SIZE = 64, 16
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture
def ids():
    return torch.randint(0, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(3))


def make_model(tied, dtype=torch.float32, kind="Qwen2"):
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**SIZES, tie_word_embeddings=tied)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()


def attach(client, name, model, **options):
    return headwater.torch.attach(client, name, model.get_output_embeddings(), model=model, **options)


def train(model, head, ids, optimizer=None):
    """One step by a large rate: the head differs from the layer by much."""
    loop = headwater.torch.TrainingLoop(head, optimizer)
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    hidden = model.base_model(ids).last_hidden_state
    loop.backward(loss_fn(hidden[:, :-1], ids[:, 1:]))
    loop.step(0.5)


def logits_of(model, head, ids):
    """The trained logits: the head applied to the body's output for the ids."""
    with torch.no_grad():
        hidden = model.base_model(ids).last_hidden_state
        logits = hidden.float() @ torch.from_numpy(head.weight(dtype="float32")).T
        return logits if not head.spec.has_bias else logits + torch.from_numpy(head.bias(dtype="float32"))


def reload(folder, ids):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    with torch.no_grad():
        return model.eval()(ids).logits.float(), model


@pytest.mark.parametrize("shards", ("10GB", "5KB"), ids=("one file", "index"))
@pytest.mark.parametrize("flow", ("untied", "trainer", "server"))
def test_a_folder_of_save_pretrained_gets_the_trained_head(client, ids, tmp_path, shards, flow):
    model = make_model(flow != "untied")
    before = model(ids).logits.detach()
    options = {} if flow == "untied" else {"tied": flow}
    optimizer = None
    if flow == "trainer":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    else:
        options["optimizer"] = headwater.SGD()
    head = attach(client, f"export-{flow}-{shards.lower()}", model, **options)
    train(model, head, ids, optimizer)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "5KB")
    names = {path.name for path in tmp_path.iterdir()}
    head.export(tmp_path)
    wanted = logits_of(model, head, ids)
    got, loaded = reload(tmp_path, ids)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert (got - before).abs().max() > 1e-2
    # All the rest is what was saved.
    for name, tensor in model.base_model.state_dict().items():
        torch.testing.assert_close(loaded.base_model.state_dict()[name], tensor, rtol=0, atol=0)
    assert {path.name for path in tmp_path.iterdir()} == names
    # The model in memory, too.
    head.export(model)
    torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-5, atol=1e-5)


def test_a_tied_model_takes_an_untied_head_only_with_a_tensor_of_its_own(client, ids, tmp_path):
    model = make_model(True)
    head = client.create_head("export-untie", model.lm_head.weight.detach(), optimizer=headwater.SGD())
    train(model, head, ids)
    model.save_pretrained(tmp_path / "a", max_shard_size="5KB")
    shutil.copytree(tmp_path / "a", tmp_path / "before")
    for target in (tmp_path / "a", model, model.lm_head):
        with pytest.raises(headwater.InvalidArgumentError, match="untie=True"):
            head.export(target)
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
    head.export(tmp_path / "a", untie=True)
    wanted = logits_of(model, head, ids)
    got, loaded = reload(tmp_path / "a", ids)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert (
        loaded.config.tie_word_embeddings is False and json.loads((tmp_path / "a/config.json").read_text())["model_type"] == "qwen2"
    )
    torch.testing.assert_close(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight, rtol=0, atol=0)
    head.export(model, untie=True)
    torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-5, atol=1e-5)
    assert model.config.tie_word_embeddings is False
    # As it is saved now, it has a head of its own.
    model.save_pretrained(tmp_path / "b")
    torch.testing.assert_close(reload(tmp_path / "b", ids)[0], wanted, rtol=1e-5, atol=1e-5)


def test_a_16_bit_model_keeps_its_type_and_gets_the_rounded_master_weights(client, ids, tmp_path):
    model = make_model(False, torch.bfloat16)
    head = client.create_head("export-16", model.lm_head.weight.float().detach(), optimizer=headwater.SGD())
    train(model, head, ids)
    model.save_pretrained(tmp_path)
    wanted = torch.from_numpy(head.weight(dtype="float32"))
    head.export(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert torch.equal(saved["lm_head.weight"], wanted.bfloat16())
    head.export(tmp_path, dtype="float32")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["lm_head.weight"], wanted)
    head.export(tmp_path / "head.safetensors", dtype="float16")
    assert torch.equal(load_file(tmp_path / "head.safetensors")["lm_head.weight"], wanted.half())
    head.export(tmp_path / "head.safetensors")  # which has a type by now
    assert torch.equal(load_file(tmp_path / "head.safetensors")["lm_head.weight"], wanted.half())


def test_other_names_and_biases(client, ids, tmp_path):
    """gpt_neox calls its head embed_out; phi has a bias."""
    for kind, name in (("GPTNeoX", "embed_out"), ("Phi", "lm_head")):
        model = make_model(False, kind=kind)
        layer = model.get_output_embeddings()
        head = attach(client, f"export-{kind.lower()}", model, optimizer=headwater.SGD())
        train(model, head, ids)
        model.save_pretrained(tmp_path / kind)
        head.export(tmp_path / kind)
        assert f"{name}.weight" in load_file(tmp_path / kind / "model.safetensors")
        torch.testing.assert_close(reload(tmp_path / kind, ids)[0], logits_of(model, head, ids), rtol=1e-5, atol=1e-5)
        if layer.bias is not None:
            bare = client.create_head("export-bare", layer.weight.detach())
            for target in (tmp_path / kind, model):
                with pytest.raises(headwater.InvalidArgumentError, match="has a bias"):
                    bare.export(target)


def test_a_model_that_was_saved_without_its_head_gets_one_by_name(client, ids, tmp_path):
    """The layer was deleted, as a head that the server trains allows."""
    model = make_model(False)
    head = attach(client, "export-deleted", model, optimizer=headwater.SGD())
    train(model, head, ids)
    model.lm_head = torch.nn.Identity()
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    with pytest.raises(headwater.NotFoundError, match="saved without its head"):
        head.export(tmp_path)
    head.export(tmp_path, tensor="lm_head.weight")
    torch.testing.assert_close(reload(tmp_path, ids)[0], logits_of(model, head, ids), rtol=1e-5, atol=1e-5)
    with pytest.raises(headwater.NotFoundError, match="no tensor can be the head"):
        head.export(tmp_path, tensor="lm_haed.weight")


def test_what_cannot_be_the_head_is_listed(client, tmp_path):
    head = client.create_head("export-lost", np.ones((VOCAB_SIZE, HIDDEN_SIZE), np.float32))
    some = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    save_file({"a.mystery": some, "b.small": some[:3].clone()}, tmp_path / "x.safetensors")
    with pytest.raises(headwater.NotFoundError, match=r"no tensor can be the head.*Those of that shape: a\.mystery$"):
        head.export(tmp_path / "x.safetensors")
    head.export(tmp_path / "x.safetensors", tensor="a.mystery")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["a.mystery"], torch.ones(VOCAB_SIZE, HIDDEN_SIZE))
    with pytest.raises(headwater.InvalidArgumentError, match="must have shape"):
        head.export(tmp_path / "x.safetensors", tensor="b.small")
    save_file({"x.lm_head.weight": some, "y.lm_head.weight": some.clone()}, tmp_path / "two.safetensors")
    with pytest.raises(headwater.NotFoundError, match=r"x\.lm_head\.weight, y\.lm_head\.weight can all be the head"):
        head.export(tmp_path / "two.safetensors")
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(headwater.NotFoundError, match="save_pretrained"):
            head.export(missing)
    index = tmp_path / "model.safetensors.index.json"
    for damaged in ("[", "{}", '{"weight_map": {"lm_head.weight": "../x.safetensors"}}'):
        index.write_text(damaged)
        with pytest.raises(headwater.DataLossError):
            head.export(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(headwater.DataLossError, match=r"model\.safetensors is not a safetensors file"):
        head.export(tmp_path)
    with pytest.raises(headwater.InvalidArgumentError, match="adapter"):
        layer = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False)
        layer.lora_A = torch.nn.Linear(HIDDEN_SIZE, 2)
        head.export(layer)


def test_a_write_that_fails_leaves_what_was_there(client, tmp_path, monkeypatch):
    head = client.create_head("export-full", np.ones((VOCAB_SIZE, HIDDEN_SIZE), np.float32))
    save_file({"lm_head.weight": torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)}, tmp_path / "x.safetensors")
    before = (tmp_path / "x.safetensors").read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        head.export(tmp_path / "x.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
    assert (tmp_path / "x.safetensors").read_bytes() == before
