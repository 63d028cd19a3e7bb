#!/usr/bin/env python3
"""Measures eager PyTorch's linear + cross entropy, forward and backward: what the CPU engine is compared with.

    logits = hidden @ weight.T
    F.cross_entropy(logits, targets, reduction="sum").backward()

Prints CSV rows `case,value,unit`: seconds (median) and peak memory beyond hidden states, weights and their gradients.
"""

import argparse
import statistics
import time

import torch


def resident_bytes(field):
    """The kernel's `VmRSS` (resident now) or `VmHWM` (most so far) of this process, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    def forward_and_backward(hidden, weight, targets):
        hidden.grad = None
        weight.grad = None
        logits = hidden @ weight.T
        torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()

    # Small, so that what libraries allocate once is not counted.
    forward_and_backward(torch.randn(8, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True), torch.randint(32, (8,)))
    generator = torch.Generator().manual_seed(1)
    before = resident_bytes("VmRSS")
    hidden = torch.randn(options.rows, options.hidden, generator=generator).requires_grad_()
    weight = torch.randn(options.vocab, options.hidden, generator=generator).mul_(0.05).requires_grad_()
    targets = torch.randint(options.vocab, (options.rows,), generator=generator)
    tensors = 2 * (hidden.numel() + weight.numel()) * 4

    seconds = []
    for _ in range(options.rounds):
        start = time.perf_counter()
        forward_and_backward(hidden, weight, targets)
        seconds.append(time.perf_counter() - start)
    peak = resident_bytes("VmHWM") - before - tensors
    print(f"eager_pytorch_{torch.__version__}_seconds,{statistics.median(seconds):.3f},s")
    print(f"eager_pytorch_peak_bytes,{peak},bytes")


if __name__ == "__main__":
    main()
