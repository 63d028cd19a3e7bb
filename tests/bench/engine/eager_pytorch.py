#!/usr/bin/env python3
"""Measures eager PyTorch's linear + cross entropy, forward and backward, for comparison with the CPU engine.

    logits = hidden @ weight.T
    F.cross_entropy(logits, targets, reduction="sum").backward()

By default prints the CSV row `case,value,unit` of its peak memory in fp32 beyond hidden states, weights and their gradients.

With --turns reads the name of a case a line, runs it, and answers with a line of seconds: wall-clock time, and processor time.
`float32` and `bfloat16` make a new gradient. `added` behind the type adds it to an fp32 tensor, as the engine does; `exact` besides
converts the logits to fp32, as trainers do.
"""

import argparse
import sys
import time

import torch


def resident_bytes(field):
    """The kernel's `VmRSS` (resident now) or `VmHWM` (most so far) of this process, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


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
    hidden = torch.randn(options.rows, options.hidden, generator=generator)
    weight = torch.randn(options.vocab, options.hidden, generator=generator).mul_(0.05)
    return hidden, weight, torch.randint(options.vocab, (options.rows,), generator=generator)


def measure_memory(options):
    """Prints the peak of two computations."""
    # Small, so that what libraries allocate once is not counted.
    forward_and_backward(torch.randn(8, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True), torch.randint(32, (8,)))
    before = resident_bytes("VmRSS")
    hidden, weight, targets = make_inputs(options)
    tensors = 2 * (hidden.numel() + weight.numel()) * 4
    for _ in range(2):
        forward_and_backward(hidden.requires_grad_(), weight.requires_grad_(), targets)
    print(f"eager_pytorch_{torch.__version__}_peak_bytes,{resident_bytes('VmHWM') - before - tensors},bytes")


def serve_turns(options):
    """Runs the cases that standard input names, until it ends."""
    inputs = {}
    accumulator = torch.zeros(options.vocab, options.hidden)
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        data_type, *words = line.split()
        if data_type not in inputs:
            hidden, weight, targets = make_inputs(options)
            kind = getattr(torch, data_type)
            inputs[data_type] = (hidden.to(kind).requires_grad_(), weight.to(kind).requires_grad_(), targets)
        clock, processor = time.perf_counter(), time.process_time()
        forward_and_backward(*inputs[data_type], accumulator if "added" in words else None, "exact" in words)
        print(time.perf_counter() - clock, time.process_time() - processor, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--turns", action="store_true")
    options = parser.parse_args()
    (serve_turns if options.turns else measure_memory)(options)


if __name__ == "__main__":
    main()
