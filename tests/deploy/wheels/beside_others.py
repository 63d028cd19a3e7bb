"""Uses headwater, PyTorch and grpcio in one process, headwater imported first or last: their copies of gRPC do not meet."""

import importlib
import sys

address, order = sys.argv[1:]
names = ["headwater", "torch", "grpc", "google.protobuf.descriptor_pb2"]
if order == "last":
    names.append(names.pop(0))
for name in names:
    importlib.import_module(name)

import grpc  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

import headwater  # noqa: E402
import headwater.torch  # noqa: E402


def health() -> bytes:
    """The server's answer to grpcio: SERVING is field 1 with value 1."""
    with grpc.insecure_channel(address) as channel:
        return channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)


assert health() == b"\x08\x01"
with headwater.connect(address) as client:
    head = client.create_head("beside", np.zeros((50, 16), np.float32), optimizer=headwater.AdamW(), if_exists="replace")
    hidden = torch.randn(32, 16, requires_grad=True)
    loss = headwater.torch.CrossEntropyLoss(head)(hidden, torch.arange(32))
    assert health() == b"\x08\x01"
    loss.backward()
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all()
# Both end their threads in a process that continues.
assert health() == b"\x08\x01" and torch.ones(3).sum() == 3
print("beside others, headwater imported", order)
