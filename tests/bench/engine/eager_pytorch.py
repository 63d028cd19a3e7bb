#!/usr/bin/env python3
"""Eager PyTorch's linear + cross entropy, forward and backward, for comparison with the CPU engine: a process of `run`.

    logits = hidden @ weight.T
    F.cross_entropy(logits, targets, reduction="sum").backward()

Requests (runs.Service):

- `version`: PyTorch's.
- `memory`: the peak in fp32 beyond hidden states, weights and their gradients, in bytes.
- `run type=float32|bfloat16 [added=1] [exact=1]`: milliseconds by the clock, and of processor time. A new gradient is made. `added`
  adds it to an fp32 tensor, as the engine does. `exact` converts the logits to fp32, as trainers do.
"""

import argparse
import pathlib
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
import runs


def forward_and_backward(hidden, weight, targets, accumulator=None, exact=False):
    """The loss and both gradients; the weight's added to `accumulator` if there is one."""
    hidden.grad = None
    weight.grad = None
    logits = hidden @ weight.T
    torch.nn.functional.cross_entropy(logits.float() if exact else logits, targets, reduction="sum").backward()
    if accumulator is not None:
        accumulator.add_(weight.grad)


def make_inputs(options):
    """Hidden states, weight and targets in fp32."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(options.rows, options.width, generator=generator)
    weight = torch.randn(options.vocab, options.width, generator=generator).mul_(0.05)
    return hidden, weight, torch.randint(options.vocab, (options.rows,), generator=generator)


def peak_bytes(options):
    """The peak of two computations."""
    # Small, so that what libraries allocate once is not counted.
    forward_and_backward(torch.randn(8, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True), torch.randint(32, (8,)))
    before = runs.memory_of("self")
    hidden, weight, targets = make_inputs(options)
    tensors = 2 * (hidden.numel() + weight.numel()) * 4
    for _ in range(2):
        forward_and_backward(hidden.requires_grad_(), weight.requires_grad_(), targets)
    return runs.memory_of("self", "VmHWM") - before - tensors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("rows", "width", "vocab"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    inputs = {}  # by type

    def answer(command, **values):
        if command == "version":
            return (torch.__version__,)
        if command == "memory":
            return (peak_bytes(options),)
        kind = getattr(torch, values["type"])
        if kind not in inputs:
            hidden, weight, targets = make_inputs(options)
            inputs[kind] = (hidden.to(kind).requires_grad_(), weight.to(kind).requires_grad_(), targets)
            inputs.setdefault("accumulator", torch.zeros(options.vocab, options.width))
        clock, processor = time.perf_counter(), time.process_time()
        forward_and_backward(*inputs[kind], inputs["accumulator"] if "added" in values else None, "exact" in values)
        return 1000 * (time.perf_counter() - clock), 1000 * (time.process_time() - processor)

    runs.serve(lambda: answer)


if __name__ == "__main__":
    main()
