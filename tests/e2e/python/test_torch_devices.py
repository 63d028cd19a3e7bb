"""CUDA devices and streams in the client's own threads: those of whoever called, and no others."""

import concurrent.futures
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
from conftest import running_server

import headwater
from headwater._futures import Future

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
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        assert Future.run(executor, cuda.current_stream).result(60) is stream
        assert executor.submit(lambda: cuda.current_stream(2)).result(60).name == "default"
    assert cuda.made_current == {2}


@pytest.mark.gpu_group
@pytest.mark.parametrize("transport", ("grpc", "shared_memory", "python"))
def test_a_trainer_on_the_second_gpu_takes_nothing_of_the_first(transport):
    gpus = pytest.importorskip("torch").cuda.device_count()
    if gpus < 2:
        pytest.skip(f"needs two GPUs, there are {gpus}")
    with (
        running_server("--engine=cpu", "--descriptor_socket={directory}/memory.sock") as server,
        headwater.connect(server.address) as client,
    ):
        client.create_head("student", np.ones((40, 16), np.float32), optimizer=headwater.SGD())
        out = subprocess.run(
            (sys.executable, "-c", SCRIPT, server.address, transport), check=True, stdout=subprocess.PIPE, text=True, timeout=120
        )
    assert out.stdout.split("\n")[-2] == "[0, 1]"
