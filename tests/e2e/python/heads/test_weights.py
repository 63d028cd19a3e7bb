"""Weights in and out: element types, uploads that were cut, files, checkpoints."""

import importlib.util
import json
import struct
import time

import numpy as np
import pytest
import torch
from conftest import HIDDEN_SIZE, VOCAB_SIZE
from expectations import refused
from loss_oracle import as_float64, round_to, stored

import headwater


@pytest.mark.parametrize("data_type", ("float32", "float16", "bfloat16"))
def test_weights_come_back_as_they_went(backend, make_head, weight, data_type):
    head = make_head(backend.client, stored(weight, data_type), stored(weight[:, 0], data_type))
    assert head.spec.data_type == data_type
    np.testing.assert_array_equal(as_float64(head.weight()), round_to(weight, data_type).astype(np.float64))
    np.testing.assert_array_equal(as_float64(head.bias()), round_to(weight[:, 0], data_type).astype(np.float64))
    np.testing.assert_array_equal(head.weight(dtype="float32"), round_to(weight, data_type))


@pytest.mark.parametrize("data_type", ("float16", "bfloat16"))
def test_float32_weights_are_kept_whole_in_the_master(one_shard, make_head, weight, data_type):
    head = make_head(one_shard.client, weight, dtype=data_type, optimizer=headwater.SGD())
    np.testing.assert_array_equal(head.weight(dtype="float32"), weight)
    np.testing.assert_array_equal(as_float64(head.weight()), round_to(weight, data_type).astype(np.float64))
    plain = make_head(one_shard.client, weight, dtype=data_type)
    np.testing.assert_array_equal(plain.weight(dtype="float32"), round_to(weight, data_type))


def test_uint16_bits_are_bfloat16(one_shard, make_head, weight):
    bits = headwater.BFloat16.from_float32(weight).bits
    head = make_head(one_shard.client, bits, dtype="bfloat16")
    np.testing.assert_array_equal(as_float64(head.weight()), round_to(weight, "bfloat16").astype(np.float64))
    out = head.cross_entropy(headwater.BFloat16(bits[:5]), [1, 2, 3, 4, 5], micro_batch=0)
    assert isinstance(out.grad_hidden, headwater.BFloat16) and out.grad_hidden.shape == (5, HIDDEN_SIZE)


# Where ml_dtypes is not installed there is nothing to test.
if importlib.util.find_spec("ml_dtypes"):

    def test_ml_dtypes_bfloat16(one_shard, make_head, weight):
        import ml_dtypes

        array = weight.astype(ml_dtypes.bfloat16)
        head = make_head(one_shard.client, array)
        assert head.weight().dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(head.weight(), array)
        assert head.cross_entropy(array[:3], [0, 1, 2], micro_batch=0).grad_hidden.dtype == ml_dtypes.bfloat16


def test_torch_tensors_come_back_as_torch_tensors(one_shard, make_head, weight):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensor = torch.tensor(weight).to(dtype)
        head = make_head(one_shard.client, tensor)
        out = head.cross_entropy(tensor[:4].t().contiguous().t(), torch.tensor([3, 2, 1, 0]), micro_batch=0)
        assert isinstance(out.grad_hidden, torch.Tensor) and out.grad_hidden.dtype == dtype
        np.testing.assert_array_equal(as_float64(head.weight()), tensor.double().numpy())


def test_arrays_that_are_not_contiguous_are_copied(one_shard, make_head, weight):
    head = make_head(one_shard.client, np.asfortranarray(weight))
    np.testing.assert_array_equal(head.weight(), weight)
    hidden = np.ascontiguousarray(weight[:, ::-1])[:6, ::-1]
    plain = head.cross_entropy(weight[:6], [0] * 6, micro_batch=0)
    np.testing.assert_array_equal(head.cross_entropy(hidden, [0] * 6, micro_batch=1).grad_hidden, plain.grad_hidden)


def test_checkpoints_are_listed_newest_first(backend, make_head, weight):
    head = make_head(backend.client, weight, optimizer=headwater.SGD())
    assert head.checkpoints() == []
    before_s = int(time.time())
    first = head.save("one")
    head.discard_gradient()
    head.save("two")
    newest, oldest = head.checkpoints()
    assert (newest.checkpoint, newest.step, newest.damaged) == ("two", head.step, False)
    assert (oldest.checkpoint, oldest.step) == ("one", head.step - 1)
    assert oldest.total_bytes == first.total_bytes
    assert head.delete_checkpoint("two") and not head.delete_checkpoint("two") and head.checkpoints() == [oldest]
    assert before_s <= oldest.save_time_s <= newest.save_time_s <= time.time() + 1


def write_safetensors(path, tensors):
    """As huggingface/safetensors' format says; written apart from the package's own writer."""
    header, payload = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(payload), len(payload) + array.nbytes]}
        payload += array.tobytes()
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + payload)


def test_load_reads_files_and_model_folders(one_shard, make_head, weight):
    root = one_shard.load_root
    write_safetensors(root / "one.safetensors", {"weight": ("F32", weight), "bias": ("F32", weight[:, 0].copy())})
    folder = root / "model"
    folder.mkdir(exist_ok=True)
    bits = headwater.BFloat16.from_float32(weight * 2).bits
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"model.norm.weight": ("F32", weight[0].copy())})
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"model.embed_tokens.weight": ("BF16", bits)})
    index = {
        "model.norm.weight": "model-00001-of-00002.safetensors",
        "model.embed_tokens.weight": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))

    head = make_head(one_shard.client, (VOCAB_SIZE, HIDDEN_SIZE), bias=True, dtype="float32")
    assert head.load("one.safetensors").state == "READY"
    np.testing.assert_array_equal(head.weight(), weight)
    np.testing.assert_array_equal(head.bias(), weight[:, 0])
    tied = make_head(one_shard.client, (VOCAB_SIZE, HIDDEN_SIZE), dtype="bfloat16", trainable=False)
    tied.load("model")
    np.testing.assert_array_equal(as_float64(tied.weight()), round_to(weight * 2, "bfloat16").astype(np.float64))

    with refused("WEIGHTS_NOT_FOUND"):
        tied.load("model/model-00002-of-00002.safetensors")
    tied.load("model/model-00002-of-00002.safetensors", weight_tensor="model.embed_tokens.weight")
    with refused("WEIGHTS_NOT_FOUND", headwater.NotFoundError):
        head.load("nowhere.safetensors")
    with pytest.raises(headwater.InvalidArgumentError):
        head.load("../one.safetensors")
    (root / "broken.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with refused("FILE_CORRUPT", headwater.DataLossError):
        head.load("broken.safetensors")
