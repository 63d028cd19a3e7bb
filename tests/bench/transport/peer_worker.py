#!/usr/bin/env python3
"""A loss in PyTorch's own process as `run` drives it, on the same GPU as the server and the engine.

The request `run count=N` (client_loop.py) computes loss and both gradients so many times. Peers: torch_eager, torch_compile,
liger_fp32; their losses are those of tests/bench/peers/peers.py.
"""

import pathlib
import sys

import torch
from client_loop import serve

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "peers"))
import peers


def prepare(options):
    """A function that computes loss and gradients so many times."""
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(count, columns, deviation):
        values = torch.randn(count, columns, device="cuda", dtype=torch.bfloat16, generator=generator)
        return values.mul_(deviation).requires_grad_()

    hidden, weight = normal(options.rows, options.width, 1), normal(options.vocab, options.width, options.width**-0.5)
    targets = torch.randint(options.vocab, (options.rows,), device="cuda", generator=generator)
    torch_loss = torch.compile(peers.eager_loss) if options.peer == "torch_compile" else peers.eager_loss
    if options.peer == "liger_fp32":
        liger = peers.member("liger_kernel", "liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")
        if liger is None:
            raise ImportError("liger_fp32 is not installed")
        liger = liger(reduction="sum", accum_dtype=torch.float32)

    def run(count):
        for _ in range(count):
            hidden.grad = weight.grad = None
            if options.peer == "liger_fp32":
                loss = liger(weight, hidden, targets)
            else:
                loss = torch_loss(hidden, weight, targets, None, None)
            loss.backward()
        torch.cuda.synchronize()

    run(3)  # compiles
    return run


if __name__ == "__main__":
    serve(__doc__, "--peer", ("torch_eager", "torch_compile", "liger_fp32"), prepare, (RuntimeError, ImportError))
