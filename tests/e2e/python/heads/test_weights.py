"""Weights in and out: element types, uploads that were cut, files, checkpoints."""

import json
import struct
import time

import numpy as np
import pytest
import torch
from conftest import HIDDEN_SIZE, VOCAB_SIZE
from expectations import refused
from loss_oracle import as_float64, stored

import headwater


@pytest.mark.parametrize("data_type", ("float32", "float16", "bfloat16"))
def test_weights_come_back_as_they_went(backend, make_head, weight, data_type):
    weight, bias = stored(weight, data_type), stored(weight[:, 0], data_type)
    head = make_head(backend.client, weight, bias)
    assert head.spec.data_type == data_type
    np.testing.assert_array_equal(as_float64(head.weight()), as_float64(weight))
    np.testing.assert_array_equal(as_float64(head.bias()), as_float64(bias))
    np.testing.assert_array_equal(head.weight(dtype="float32"), as_float64(weight))


def test_uint16_bits_are_bfloat16(one_shard, make_head, weight):
    bits = headwater.BFloat16.from_float32(weight).bits
    head = make_head(one_shard.client, bits, dtype="bfloat16")
    np.testing.assert_array_equal(as_float64(head.weight()), as_float64(stored(weight, "bfloat16")))
    out = head.cross_entropy(headwater.BFloat16(bits[:5]), [1, 2, 3, 4, 5], micro_batch=0)
    assert isinstance(out.grad_hidden, headwater.BFloat16) and out.grad_hidden.shape == (5, HIDDEN_SIZE)


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


def test_load_reads_a_file(one_shard, make_head, weight):
    """head_tensors_test.cc has folders and what is found in them."""
    header = {
        "lm_head.weight": {"dtype": "F32", "shape": weight.shape, "data_offsets": [0, weight.nbytes]},
        "other": {"dtype": "F32", "shape": weight.shape, "data_offsets": [weight.nbytes, 2 * weight.nbytes]},
    }
    encoded = json.dumps(header).encode()
    content = struct.pack("<Q", len(encoded)) + encoded + weight.tobytes() + (2 * weight).tobytes()
    (one_shard.load_root / "file.safetensors").write_bytes(content)
    head = make_head(one_shard.client, (VOCAB_SIZE, HIDDEN_SIZE), dtype="float32")
    assert head.load("file.safetensors").state == "READY"
    np.testing.assert_array_equal(head.weight(), weight)
    head.load("file.safetensors", weight_tensor="other")
    np.testing.assert_array_equal(head.weight(), 2 * weight)
    with refused("WEIGHTS_NOT_FOUND", headwater.NotFoundError):
        head.load("nowhere.safetensors")
    (one_shard.load_root / "broken.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with refused("FILE_CORRUPT", headwater.DataLossError):
        head.load("broken.safetensors")
