"""CUDA devices and streams in the client's own threads: those of whoever called, and no others."""

import concurrent.futures
import sys
import threading
import types

import numpy as np
import pytest
from expectations import run_python
from headwaterd import running_server

import headwater
from headwater._futures import Executors
from headwater._memory import DeviceArray, one_stream

SCRIPT = """
import ctypes, sys
import torch, headwater

torch.cuda.set_device(1)
with headwater.connect(sys.argv[1], transport=sys.argv[2]) as client:
    head = client.head("student")
    hidden = torch.ones(5, 16, device="cuda:1")
    targets = torch.zeros(5, dtype=torch.int64, device="cuda:1")
    out = head.cross_entropy_future(hidden, targets, micro_batch=0).result(60)
    assert out.grad_hidden.device == hidden.device
    head.apply_optimizer_step_future(learning_rate=0.1, expected_micro_batches=1).result(60)
cuda = ctypes.CDLL("libcuda.so.1")
states = []
for device in range(2):
    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    states.append(active.value)
print(states)
"""


class FakeCuda:
    """torch.cuda, as far as streams go: each thread begins with device 0."""

    def __init__(self):
        self._local = threading.local()
        self.made_current = set()  # devices, by any thread but the first

    def _device(self) -> int:
        return getattr(self._local, "device", 0)

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def set_device(self, device: int) -> None:
        self._local.device = device
        if threading.current_thread() is not threading.main_thread():
            self.made_current.add(device)

    def current_stream(self, device: int | None = None):
        device = self._device() if device is None else device
        return getattr(self._local, f"stream_{device}", types.SimpleNamespace(device=device, name="default"))

    def set_stream(self, stream) -> None:
        """Makes its device current, as PyTorch's does."""
        self.set_device(stream.device)
        setattr(self._local, f"stream_{stream.device}", stream)


def test_a_future_has_its_callers_stream_and_makes_no_other_device_current(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    stream = types.SimpleNamespace(device=2, name="the caller's")
    cuda.set_stream(stream)
    executors = Executors()
    executors._pools["waiting"] = concurrent.futures.ThreadPoolExecutor(1)
    assert executors.run("waiting", cuda.current_stream).result(60) is stream
    assert executors._pools["waiting"].submit(lambda: cuda.current_stream(2)).result(60).name == "default"
    assert cuda.made_current == {2}
    executors.shutdown()


def test_a_call_that_no_thread_waits_for_is_begun_and_finished_with_its_callers_stream(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    executors = Executors()
    stream = types.SimpleNamespace(device=2, name="the caller's")
    seen = []

    def note(value):
        seen.append((threading.current_thread(), cuda.current_stream()))
        return value

    def start(done):
        note(None)
        ends.append(done)
        return lambda: None

    ends = []
    before = cuda.current_stream(2)
    cuda.set_stream(stream)
    future = executors.begin(start, lambda outcome: note(outcome()))
    cuda.set_stream(before)
    ends[0](lambda: "the outcome")
    assert future.result(60) == "the outcome"
    assert [current for _, current in seen] == [stream, stream]
    assert seen[0][0] is threading.current_thread() is not seen[1][0]
    executors.shutdown()


class FakeStream:
    """A CUDA stream that notes what is asked of it."""

    def __init__(self, device, handle):
        self.device = device
        self.cuda_stream = handle
        self.waited_for = []
        self.synchronized = 0

    def wait_stream(self, other):
        assert other.device == self.device
        self.waited_for.append(other)

    def synchronize(self):
        self.synchronized += 1


def rows_of(*streams):
    return [DeviceArray(None, "float32", stream) for stream in streams]


def test_streams_of_one_device_are_merged_into_the_first():
    first, second = FakeStream(0, 7), FakeStream(0, 8)
    assert one_stream(rows_of(first, second, first, second)) == 7
    assert first.waited_for == [second] and not second.waited_for
    assert not first.synchronized and not second.synchronized
    assert one_stream([]) == 0


def test_streams_of_several_devices_are_never_mixed():
    first, second, default = FakeStream(0, 7), FakeStream(1, 8), FakeStream(1, 0)
    assert one_stream(rows_of(first, second, default, first)) == 0
    assert first.synchronized == second.synchronized == 1
    assert not default.synchronized  # which 0 comes after by itself
    assert not first.waited_for and not second.waited_for and not default.waited_for


@pytest.mark.gpu_group
@pytest.mark.parametrize("transport", ("grpc", "shared_memory"))
def test_a_trainer_on_the_second_gpu_takes_nothing_of_the_first(transport):
    gpus = pytest.importorskip("torch").cuda.device_count()
    if gpus < 2:
        pytest.skip(f"needs two GPUs, there are {gpus}")
    with (
        running_server("--engine=cpu", "--descriptor_socket={directory}/memory.sock") as server,
        headwater.connect(server.address) as client,
    ):
        client.create_head("student", np.ones((40, 16), np.float32), optimizer=headwater.SGD())
        assert run_python(SCRIPT, server.address, transport).splitlines()[-1] == "[0, 1]"
