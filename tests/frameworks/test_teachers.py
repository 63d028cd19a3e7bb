"""Stored rows of a teacher: what is written is what is read, and what does not belong together is refused.

The files of vLLM are made here, in its published format.
"""

import fcntl
import json
import threading

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CohereConfig, CohereForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import headwater
import headwater.torch
import headwater.vllm
from headwater.teachers import Reader, Writer

HIDDEN, TOKENS, PADDED = 32, 97, 104
LAYERS = 2
SEQUENCES = [[5, 6, 7], [8], [9, 10, 11, 12]]


def llama(vocab_size=PADDED):
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, num_key_value_heads=2, **sizes)).eval()
    # A norm that changes directions, as a trained one does.
    torch.nn.init.uniform_(model.model.norm.weight, 0.2, 3.0)
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    return model


def body(model, ids):
    """Rows of the last layer before and after the final norm."""
    before = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, arguments: before.append(arguments[0][0]))
    with torch.no_grad():
        after = model.model(torch.tensor([ids])).last_hidden_state[0]
    hook.remove()
    return before[0], after


def written(folder, rows, **options):
    settings = {"model": "tiny", "tokenizer_size": TOKENS, "final_norm": True, **options}
    with Writer(folder, **settings) as writer:
        for index, (ids, values) in enumerate(zip(SEQUENCES, rows, strict=True)):
            assert writer.add(ids, values) == index
    return folder


def as_float32(rows):
    return rows.to_float32() if isinstance(rows, headwater.BFloat16) else np.asarray(rows, np.float32)


@pytest.fixture
def rows():
    torch.manual_seed(1)
    return [torch.randn(len(ids), HIDDEN) for ids in SEQUENCES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [1, 400, 1 << 30])
def test_rows_come_back_as_they_were_written(tmp_path, rows, dtype, shard_bytes):
    rows = [values.to(dtype) for values in rows]
    reader = Reader(written(tmp_path / "rows", rows, shard_bytes=shard_bytes))
    assert (reader.model, reader.tokenizer_size, reader.hidden_size, reader.final_norm) == ("tiny", TOKENS, HIDDEN, True)
    assert reader.dtype == str(dtype).removeprefix("torch.") and len(reader) == len(SEQUENCES)
    for index, ids in enumerate(SEQUENCES):
        assert reader.token_ids(index).tolist() == ids
        assert np.array_equal(as_float32(reader[index]), rows[index].float().numpy())
        assert np.array_equal(as_float32(reader[index][:-1]), rows[index][:-1].float().numpy())
    assert np.array_equal(as_float32(reader[-1]), as_float32(reader[2])) and len(list(reader)) == 3
    with pytest.raises(IndexError):
        reader[3]


def test_shards_are_safetensors_and_say_what_they_are(tmp_path, rows):
    written(tmp_path / "rows", rows, dtype="bfloat16", final_norm=False, shard_bytes=1)
    shards = sorted((tmp_path / "rows").glob("*.safetensors"))
    assert [shard.name for shard in shards] == ["rows-00000.safetensors", "rows-00001.safetensors", "rows-00002.safetensors"]
    assert torch.equal(load_file(shards[0])["rows"], rows[0].bfloat16())  # rounded as PyTorch rounds
    with safe_open(shards[2], "pt") as shard:
        assert shard.metadata() == {
            "format": "headwater.teacher_rows.1",
            "model": "tiny",
            "tokenizer_size": "97",
            "final_norm": "not applied",
            "dtype": "bfloat16",
        }
    assert not list((tmp_path / "rows").glob(".*"))


def test_what_a_loss_takes_is_what_was_stored(tmp_path, client):
    teacher, student = llama(), llama()
    stored = [body(teacher, ids)[1] for ids in SEQUENCES]
    reader = Reader(written(tmp_path / "rows", stored, dtype="bfloat16"))
    options = {"model": teacher, "trainable": False, "if_exists": "replace"}
    padded = headwater.torch.attach(client, "padded", teacher.lm_head, **options)
    with pytest.raises(headwater.InvalidArgumentError, match=r"tokenizer of tiny has 97 tokens.*valid_vocab_size=97"):
        reader.check(padded)
    head = headwater.torch.attach(client, "teacher", teacher.lm_head, valid_vocab_size=TOKENS, **options)
    reader.check(head)
    loss_fn = headwater.torch.JSDLoss(head, head, beta=0.0)
    with torch.no_grad():
        hidden = student.model(torch.tensor([SEQUENCES[2]])).last_hidden_state[0]
        loss = loss_fn(hidden, reader[2])
        logits = [values.double() @ teacher.lm_head.weight.double().T for values in (hidden, stored[2].bfloat16())]
        logq, logp = (torch.log_softmax(values[:, :TOKENS], -1) for values in logits)
    assert loss.item() == pytest.approx(float((logp.exp() * (logp - logq)).sum(-1).mean()), rel=1e-4, abs=1e-9)
    narrow = client.create_head("narrow", (TOKENS, 8), dtype="float32", trainable=False, if_exists="replace")
    with pytest.raises(headwater.InvalidArgumentError, match=r"32 numbers each.*takes 8"):
        reader.check(narrow)


def test_a_norm_is_asked_for_where_it_is_missing_and_refused_where_it_is_not(tmp_path):
    model = llama()
    before, after = zip(*(body(model, ids) for ids in SEQUENCES), strict=True)
    folder = written(tmp_path / "before", before, final_norm=False)
    with pytest.raises(headwater.InvalidArgumentError, match=r"not passed.*pass norm="):
        Reader(folder)
    for index, values in enumerate(Reader(folder, norm=model.model.norm)):
        assert torch.equal(values, after[index])
    with pytest.raises(headwater.InvalidArgumentError, match="leave norm= out"):
        Reader(written(tmp_path / "after", after), norm=model.model.norm)


def test_a_writer_refuses_what_it_cannot_store(tmp_path, rows):
    folder = written(tmp_path / "rows", rows)
    with pytest.raises(headwater.InvalidArgumentError, match="has stored rows"):
        written(folder, rows)
    with pytest.raises(headwater.InvalidArgumentError, match="no rows were added"):
        Writer(tmp_path / "empty", model="m", tokenizer_size=1, final_norm=True).close()
    writer = Writer(tmp_path / "refused", model="m", tokenizer_size=TOKENS, final_norm=True)
    writer.add([1], np.zeros((1, HIDDEN), np.float32))
    for ids, values, named in [
        ([1, 2], np.zeros((1, HIDDEN), np.float32), "token_ids"),
        ([TOKENS], np.zeros((1, HIDDEN), np.float32), "token_ids"),
        ([-1], np.zeros((1, HIDDEN), np.float32), "token_ids"),
        ([1], np.zeros((1, HIDDEN + 1), np.float32), "rows"),
        ([], np.zeros((0, HIDDEN), np.float32), "rows"),
        ([1], np.zeros((1, HIDDEN), np.int32), "rows"),
    ]:
        with pytest.raises(headwater.InvalidArgumentError, match=named):
            writer.add(ids, values)


def test_a_set_that_is_not_whole_is_refused(tmp_path, rows):
    with (
        pytest.raises(RuntimeError, match="in between"),
        Writer(tmp_path / "cut", model="m", tokenizer_size=TOKENS, final_norm=True, shard_bytes=1) as writer,
    ):
        writer.add(SEQUENCES[0], rows[0])
        raise RuntimeError("in between")
    with pytest.raises(headwater.NotFoundError, match="no complete set"):
        Reader(tmp_path / "cut")

    def damaged(change):
        folder = written(tmp_path / f"damaged-{len(list(tmp_path.iterdir()))}", rows, shard_bytes=1)
        change(folder, json.loads((folder / "index.json").read_text()))
        with pytest.raises(headwater.DataLossError, match=folder.name):
            Reader(folder)

    damaged(lambda folder, index: (folder / "rows-00001.safetensors").unlink())
    damaged(lambda folder, index: (folder / "index.json").write_text("{"))
    damaged(lambda folder, index: (folder / "index.json").write_text(json.dumps({**index, "sequences": 4})))
    damaged(lambda folder, index: (folder / "index.json").write_text(json.dumps({**index, "format": "other"})))
    damaged(lambda folder, index: (folder / "index.json").write_text(json.dumps({**index, "shards": ["../x.safetensors"]})))
    damaged(
        lambda folder, index: (
            written(folder.with_name(folder.name + "-other"), rows, model="x", shard_bytes=1)
            .joinpath("rows-00001.safetensors")
            .replace(folder / "rows-00001.safetensors")
        )
    )
    damaged(
        lambda folder, index: save_file(
            {"rows": torch.zeros(2, HIDDEN), "token_ids": torch.zeros(2, dtype=torch.int32), "lengths": torch.tensor([3])},
            folder / "rows-00000.safetensors",
            load_metadata(folder / "rows-00001.safetensors"),
        )
    )
    folder = written(tmp_path / "short", rows)
    shard = folder / "rows-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(headwater.DataLossError, match=r"rows-00000.safetensors.*not in it"):
        Reader(folder)


def load_metadata(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


# ---- vLLM --------------------------------------------------------------------------------------------------------------


def vllm_file(path, model, ids, layers):
    """The file that ExampleHiddenStatesConnector writes for a request."""
    states = []
    hooks = [layer.register_forward_hook(lambda _, __, output: states.append(output)) for layer in model.model.layers]
    with torch.no_grad():
        model.model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    chosen = torch.stack([states[layer - 1][0] if states[layer - 1].dim() == 3 else states[layer - 1] for layer in layers], dim=1)
    save_file({"hidden_states": chosen.contiguous(), "token_ids": torch.tensor(ids)}, path)
    (path.parent / (path.name + ".lock")).touch()
    return path


@pytest.mark.parametrize("layers", [[LAYERS], [1, LAYERS], [LAYERS, 1]])
def test_rows_of_vllm_pass_the_final_norm(tmp_path, layers):
    model = llama()
    path = vllm_file(tmp_path / "request.safetensors", model, SEQUENCES[2], layers)
    norm = headwater.vllm.final_norm(model)
    ids, rows = headwater.vllm.read(path, norm=norm, layer_ids=layers, num_hidden_layers=LAYERS)
    assert ids.tolist() == SEQUENCES[2]
    assert torch.allclose(rows, body(model, SEQUENCES[2])[1], rtol=0, atol=1e-6)


def test_requests_of_vllm_become_stored_rows(tmp_path):
    model = llama()
    paths = [vllm_file(tmp_path / f"{index}.safetensors", model, ids, [LAYERS]) for index, ids in enumerate(SEQUENCES)]
    settings = {"norm": model.model.norm, "layer_ids": [LAYERS], "num_hidden_layers": LAYERS}
    with Writer(tmp_path / "rows", model="tiny", tokenizer_size=TOKENS, final_norm=True) as writer:
        assert headwater.vllm.store(paths, writer, **settings) == 3
    reader = Reader(tmp_path / "rows")
    for index, ids in enumerate(SEQUENCES):
        assert reader.token_ids(index).tolist() == ids
        assert np.allclose(reader[index], body(model, ids)[1], rtol=0, atol=1e-6)
    writer = Writer(tmp_path / "twice", model="tiny", tokenizer_size=TOKENS, final_norm=False)
    with pytest.raises(headwater.InvalidArgumentError, match="final_norm=True"):
        headwater.vllm.store(paths, writer, **settings)


def test_a_request_that_vllm_is_still_writing_is_waited_for(tmp_path):
    model = llama()
    path = tmp_path / "late.safetensors"
    with (tmp_path / "late.safetensors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = []
        settings = {"norm": model.model.norm, "layer_ids": [LAYERS], "num_hidden_layers": LAYERS}
        reading = threading.Thread(target=lambda: answer.append(headwater.vllm.read(path, **settings)))
        reading.start()
        reading.join(0.2)
        assert reading.is_alive() and not answer
        vllm_file(path, model, SEQUENCES[0], [LAYERS])
    reading.join(30)
    assert answer[0][0].tolist() == SEQUENCES[0]


def test_a_request_without_the_last_layer_is_refused(tmp_path):
    model = llama()
    path = vllm_file(tmp_path / "request.safetensors", model, SEQUENCES[0], [1])
    with pytest.raises(headwater.InvalidArgumentError, match="has no 2, by which vLLM names"):
        headwater.vllm.read(path, norm=model.model.norm, layer_ids=[1], num_hidden_layers=LAYERS)
    with pytest.raises(headwater.InvalidArgumentError, match="has 1 layers, layer_ids names 2"):
        headwater.vllm.read(path, norm=model.model.norm, layer_ids=[1, 2], num_hidden_layers=LAYERS)
    save_file({"hidden_states": torch.zeros(3, HIDDEN), "token_ids": torch.zeros(3, dtype=torch.int64)}, path)
    with pytest.raises(headwater.DataLossError, match="no file of vLLM's"):
        headwater.vllm.read(path, norm=model.model.norm, layer_ids=[2], num_hidden_layers=LAYERS)


def tiny_gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, n_positions=16, n_embd=HIDDEN, n_layer=2, n_head=4)).eval()


def tiny_cohere():
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return CohereForCausalLM(CohereConfig(vocab_size=TOKENS, **sizes)).eval()


@pytest.mark.parametrize("make", [llama, tiny_gpt2, tiny_cohere])
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_the_final_norm_of_a_folder_is_the_models(tmp_path, make, max_shard_size):
    model = make()
    expected = next(module for name, module in model.named_modules() if name in ("model.norm", "transformer.ln_f"))
    torch.nn.init.uniform_(expected.weight, 0.2, 3.0)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    values = torch.randn(4, HIDDEN)
    for norm in (headwater.vllm.final_norm(model), headwater.vllm.final_norm(tmp_path)):
        assert torch.equal(norm(values), expected(values))
        assert not any(parameter.requires_grad for parameter in norm.parameters())


def test_a_model_without_a_final_norm_is_refused():
    model = llama()
    model.model.norm = torch.nn.Identity()
    with pytest.raises(headwater.InvalidArgumentError, match="no norm of LlamaForCausalLM"):
        headwater.vllm.final_norm(model)
