#!/usr/bin/env python3
"""A loss in PyTorch's own process as transport_bench drives it, on the same GPU as the server and the engine.

Reads lines `run COUNT`, computes loss and both gradients so many times, and answers each with `done`; says `ready` first, or
`unavailable: why`. Peers: torch_eager, torch_compile, liger_fp32; their losses are those of tests/bench/peers/peers.py.
"""

import argparse
import contextlib
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "peers"))
import peers


def say(line):
    """A line for the benchmark, which reads standard output."""
    sys.__stdout__.write(line + "\n")
    sys.__stdout__.flush()


def prepare(options):
    """A function that computes loss and gradients once; None if the peer is not installed."""
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(count, columns, deviation):
        values = torch.randn(count, columns, device="cuda", dtype=torch.bfloat16, generator=generator)
        return values.mul_(deviation).requires_grad_()

    hidden, weight = normal(options.rows, options.hidden, 1), normal(options.vocab, options.hidden, options.hidden**-0.5)
    targets = torch.randint(options.vocab, (options.rows,), device="cuda", generator=generator)
    torch_loss = torch.compile(peers.eager_loss) if options.peer == "torch_compile" else peers.eager_loss
    if options.peer == "liger_fp32":
        liger = peers.member("liger_kernel", "liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")
        if liger is None:
            return None
        liger = liger(reduction="sum", accum_dtype=torch.float32)

    def run():
        hidden.grad = weight.grad = None
        if options.peer == "liger_fp32":
            loss = liger(weight, hidden, targets)
        else:
            loss = torch_loss(hidden, weight, targets, None, None)
        loss.backward()

    for _ in range(3):
        run()  # compiles
    torch.cuda.synchronize()
    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True, choices=("torch_eager", "torch_compile", "liger_fp32"))
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    options = parser.parse_args()
    # The output of libraries is not for the benchmark.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            run = prepare(options)
        except (RuntimeError, ImportError) as error:
            say(f"unavailable: {str(error).splitlines()[0]}")
            return
        if run is None:
            say(f"unavailable: {options.peer} is not installed")
            return
        say("ready")
        for line in sys.stdin:
            for _ in range(int(line.split()[1])):
                run()
            torch.cuda.synchronize()
            say("done")


if __name__ == "__main__":
    main()
