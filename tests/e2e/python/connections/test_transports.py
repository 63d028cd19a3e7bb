"""The paths that rows take, the memory that they lie in, and what a client says about both."""

import signal
import threading
import time

import numpy as np
import pytest
import torch
from expectations import ClientProgram, refused

import headwater
import headwater.torch
from headwater._memory import BlockPool, ordinary_block

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 700, 512, 64  # 1.4 MB of float32 rows: above what memory is kept for


@pytest.fixture(params=("grpc", "shared_memory"))
def client(request, sharing):
    with headwater.connect(sharing.address, transport=request.param) as client:
        yield client


@pytest.fixture
def head(client, make_head, weight):
    return make_head(client, weight, optimizer=headwater.SGD(), staging_slots=2)


# ---- which path ---------------------------------------------------------------------------------------------------------


def test_the_best_path_is_taken_and_named(sharing, make_head, rows):
    with headwater.connect(sharing.address) as client:
        head = make_head(client, np.ones((VOCAB_SIZE, HIDDEN_SIZE), np.float32))
        assert head.cross_entropy(*rows, micro_batch=0).transport == "shared_memory"
        found = client.transports()
        assert set(found) == {"cuda_ipc", "shared_memory", "grpc"} and found["shared_memory"] is found["grpc"] is None
        assert client.transports_future().result(30) == found


def test_a_path_that_is_not_there_is_refused_with_its_reason(remote, sharing, make_head, rows):
    for transport in ("shared_memory", "cuda_ipc"):
        with refused("TRANSPORT_UNAVAILABLE", headwater.TransportUnavailableError) as info:
            headwater.connect(remote.address, transport=transport)
        assert transport in str(info.value) and info.value.code == "FAILED_PRECONDITION"
    # Shared memory belongs to a session, and what is undecided would belong to it as well.
    with headwater.connect(sharing.address, session=False, transport="shared_memory") as client:
        head = make_head(client, np.ones((VOCAB_SIZE, HIDDEN_SIZE), np.float32))
        assert head.cross_entropy(*rows, micro_batch=0).transport == "shared_memory"
        with refused("TRANSPORT_UNAVAILABLE", headwater.TransportUnavailableError):
            head.cross_entropy(*rows, micro_batch=1, commit="explicit")


def test_a_client_says_why_it_takes_a_worse_path(remote, make_head, rows):
    with headwater.connect(remote.address) as client:
        head = make_head(client, np.ones((VOCAB_SIZE, HIDDEN_SIZE), np.float32))
        assert head.cross_entropy(*rows, micro_batch=0).transport == "grpc"
        assert "--descriptor_socket" in client.transports()["shared_memory"] and client.transport_note


# ---- memory -------------------------------------------------------------------------------------------------------------


def test_rows_in_shared_memory(client, head, rows):
    hidden, targets = rows
    expected = head.cross_entropy(hidden, targets, backward=False).loss_sum
    own = client.empty_rows(NUM_TOKENS, HIDDEN_SIZE)
    assert own.shape == hidden.shape and own.dtype == np.float32 and own.flags.c_contiguous and own.flags.writeable
    own[:] = hidden
    grad = client.empty_rows(NUM_TOKENS, HIDDEN_SIZE)
    out = head.cross_entropy(own, targets, micro_batch=0, grad_hidden_out=grad)
    assert out.grad_hidden is grad and out.loss_sum == expected
    # A part of them, by a view.
    view = own[100:300]
    part = head.cross_entropy(view, targets[100:300].astype(np.int32), micro_batch=1)
    np.testing.assert_allclose(part.grad_hidden, grad[100:300], rtol=1e-3, atol=1e-5)  # products of another size
    small = client.empty_rows(1, 1, "float16")
    assert small.shape == (1, 1) and small.dtype == np.float16
    assert client.empty_rows(2, 3, "bfloat16").shape == (2, 3)
    for bad in ((0, 4), (4, 0), (4, 2.5)):
        with pytest.raises(headwater.InvalidArgumentError):
            client.empty_rows(*bad)


def test_shared_memory_outlives_its_client(sharing):
    client = headwater.connect(sharing.address)
    rows = client.empty_rows(1000, 1000)
    client.close()
    rows[:] = 7
    assert rows.sum() == 7_000_000
    del rows


def test_torch_tensors_over_shared_memory(client, head, rows):
    hidden, targets = rows
    expected = head.cross_entropy(hidden, targets, micro_batch=0).grad_hidden
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        tensor = headwater.torch.empty_rows(client, *hidden.shape, dtype)
        assert tensor.shape == hidden.shape and tensor.dtype == dtype
    tensor.copy_(torch.from_numpy(hidden))
    np.testing.assert_array_equal(head.cross_entropy(tensor, targets, micro_batch=1).grad_hidden.numpy(), expected)


def test_grad_hidden_is_written_where_the_caller_wants_it(client, head, rows):
    hidden, targets = rows
    expected = head.cross_entropy(hidden, targets, micro_batch=0).grad_hidden
    out = np.full_like(hidden, np.nan)
    assert head.cross_entropy(hidden, targets, micro_batch=1, grad_hidden_out=out).grad_hidden is out
    np.testing.assert_array_equal(out, expected)
    # Rows that are left out of the upload have a gradient of 0.
    ignored = np.where(np.arange(NUM_TOKENS) % 2, -100, targets)
    head.cross_entropy(hidden, ignored, micro_batch=2, grad_hidden_out=out)
    np.testing.assert_allclose(out[::2], expected[::2], rtol=1e-3, atol=1e-5)  # products of another size
    assert not out[1::2].any()
    half = np.empty(hidden.shape, np.float16)
    head.cross_entropy(hidden, targets, micro_batch=3, grad_hidden_dtype="float16", grad_hidden_out=half)
    np.testing.assert_allclose(half, expected, rtol=1e-3, atol=1e-6)
    bits = headwater.BFloat16(np.empty(hidden.shape, np.uint16))
    head.cross_entropy(hidden, targets, micro_batch=4, grad_hidden_dtype="bfloat16", grad_hidden_out=bits)
    np.testing.assert_allclose(bits.to_float32(), expected, rtol=1e-2, atol=1e-6)


def test_memory_for_grad_hidden_is_checked(head, rows):
    hidden, targets = rows
    read_only = np.empty_like(hidden)
    read_only.flags.writeable = False
    several = np.empty((2 * NUM_TOKENS, HIDDEN_SIZE), np.float32)
    for reason, arguments in (
        ("SHAPE_MISMATCH", {"grad_hidden_out": np.empty((NUM_TOKENS, HIDDEN_SIZE - 1), np.float32)}),
        ("DATA_TYPE_MISMATCH", {"grad_hidden_out": np.empty(hidden.shape, np.float16)}),
        ("DATA_TYPE_MISMATCH", {"grad_hidden_out": np.empty_like(hidden), "grad_hidden_dtype": "float16"}),
        ("INVALID_FIELD", {"grad_hidden_out": np.empty((HIDDEN_SIZE, NUM_TOKENS), np.float32).T}),
        ("INVALID_FIELD", {"grad_hidden_out": read_only}),
        ("INVALID_COMBINATION", {"grad_hidden_out": np.empty_like(hidden), "return_grad_hidden": False}),
    ):
        with refused(reason, headwater.InvalidArgumentError):
            head.cross_entropy(hidden, targets, micro_batch=0, **arguments)
    # What is written over the rows would be sent in their place when they are sent again.
    for out in (several[:NUM_TOKENS], several[1 : NUM_TOKENS + 1], several[NUM_TOKENS - 1 : -1]):
        with refused("INVALID_COMBINATION", headwater.InvalidArgumentError):
            head.cross_entropy(several[:NUM_TOKENS], targets, micro_batch=0, grad_hidden_out=out)
        with refused("INVALID_COMBINATION", headwater.InvalidArgumentError):
            head.jsd(hidden, head, several[:NUM_TOKENS], micro_batch=0, grad_hidden_out=out)
    assert not head.step_state().open.micro_batches
    several[:NUM_TOKENS] = hidden
    head.cross_entropy(several[:NUM_TOKENS], targets, micro_batch=0, grad_hidden_out=several[NUM_TOKENS:])


def test_memory_of_answers_is_used_again_once_nobody_looks(head, rows):
    hidden, targets = rows
    out = head.cross_entropy(hidden, targets, micro_batch=0)
    address, expected = out.grad_hidden.ctypes.data, out.grad_hidden.copy()
    view = out.grad_hidden[5:7]
    del out
    other = head.cross_entropy(-hidden, targets, micro_batch=1)
    assert other.grad_hidden.ctypes.data != address
    np.testing.assert_array_equal(view, expected[5:7])
    del view, other
    places = {head.cross_entropy(hidden, targets, micro_batch=index).grad_hidden.ctypes.data for index in range(2, 6)}
    assert len(places) == 1


def test_blocks_that_are_free_are_bounded(monkeypatch):
    freed = []
    pool = BlockPool(ordinary_block)
    monkeypatch.setattr(headwater._memory, "_MAX_FREE_BYTES", 8 << 20)
    monkeypatch.setattr(headwater._memory._ArrayBlock, "free", lambda block: freed.append(block.nbytes))
    arrays = [pool.empty((3 << 20,), "float32") for _ in range(5)]  # 12 MiB each
    assert not freed
    del arrays
    small = pool.empty((1 << 20,), "float32")
    assert freed == [12 << 20] * 5
    del small
    pool.close()
    assert freed == [12 << 20] * 5 + [4 << 20]


# ---- threads ------------------------------------------------------------------------------------------------------------


def begin(server, head, transport, work):
    """A program that has the head, and rows for it."""
    rows = f"rows = numpy.ones(({NUM_TOKENS}, {HIDDEN_SIZE}), numpy.float32), [1] * {NUM_TOKENS}\n"
    return ClientProgram(server.address, rows + work, head.name, transport=transport)


def test_a_blocking_call_lets_other_threads_run(slow, rows):
    server, head, _ = slow
    ticks = 0
    with server.frozen():
        waiter = threading.Thread(target=lambda: head.cross_entropy(*rows, micro_batch=0))
        waiter.start()
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            ticks += 1
        assert waiter.is_alive()
    waiter.join(60)
    assert not waiter.is_alive() and ticks > 1000


def test_ctrl_c_ends_a_blocking_call(slow):
    work = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored if these tests run in the background
print("calling", flush=True)
try:
    sys.stdin.readline()
    head.cross_entropy(*rows, micro_batch=0)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    server, program = slow[0], begin(*slow, work)
    program.go_on()
    assert program.process.stdout.readline() == "calling\n"
    with server.frozen():
        program.go_on()
        time.sleep(0.3)
        program.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert program.process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - began < 60  # and not the five minutes of the call's deadline
    program.finish(60)


def test_a_program_that_ends_with_calls_under_way_ends(slow):
    work = """
head.cross_entropy(*rows, micro_batch=0)
kept = client.empty_rows(1000, 1000)
print("ready", flush=True)
sys.stdin.readline()
futures = [head.cross_entropy_future(*rows, micro_batch=index) for index in range(1, 9)]
"""
    server, program = slow[0], begin(*slow, work)
    program.go_on()
    assert program.process.stdout.readline() == "ready\n"
    with server.frozen():
        program.finish(60)
    assert program.errors == ""
