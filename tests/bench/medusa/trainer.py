#!/usr/bin/env python3
"""One trainer of the Medusa benchmark: a model with five heads, and a way to compute their losses. Started by `run`.

Prints a line with a JSON object for each number of sequences, as it is measured: curve, time of a step, peaks of memory.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "end_to_end"))
import language_model

HEADS = 5  # head k says which token comes k + 1 places later
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.01
LLAMA_3_8B = language_model.Shape(hidden=4096, layers=2, heads=32, kv_heads=8, feed_forward=14336, vocab=128256, context=2048)
TINY = language_model.Shape(hidden=32, layers=2, heads=4, kv_heads=2, feed_forward=64, vocab=512, context=32)


class Residual(nn.Module):
    """The block before a head's output layer: hidden states plus a layer of them, at first nothing."""

    def __init__(self, hidden: int):
        super().__init__()
        self.layer = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.layer(x))


def make_residuals(shape, device, dtype):
    torch.manual_seed(3)
    residuals = nn.ModuleList(Residual(shape.hidden) for _ in range(HEADS)).to(device=device, dtype=dtype)
    for parameter in residuals.parameters():
        nn.init.zeros_(parameter)
    return residuals


def make_weight(shape, number, device, dtype):
    """The output layer of a head, (vocab, hidden), the same values each time on one device."""
    generator = torch.Generator(device).manual_seed(10 + number)
    return torch.empty(shape.vocab, shape.hidden, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)


class NoHeads:
    """Nothing but the trunk: its memory is what the others' is compared with."""

    def __init__(self, *_):
        self.parameters = []

    def loss(self, rows, number, ids):
        """Mean over the tokens of a head's loss."""
        return rows.mean(dtype=torch.float32)  # which keeps nothing for backward

    def step(self):
        """The work beside the step of the trainer's optimizer."""

    def close(self):
        """Frees what others hold for it."""


class InProcess(NoHeads):
    """Output layers beside the trunk, with one of two losses: logits in fp32, or Liger's, which has none."""

    def __init__(self, shape, device, dtype, options):
        self.parameters = [nn.Parameter(make_weight(shape, number, device, dtype)) for number in range(HEADS)]
        self._liger = None
        if options.way == "liger":
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            self._liger = LigerFusedLinearCrossEntropyLoss()

    def loss(self, rows, number, ids):
        shift = number + 1
        rows, targets = rows[:, :-shift].flatten(0, 1), ids[:, shift:].flatten()
        if self._liger is not None:
            return self._liger(self.parameters[number], rows, targets)
        return F.cross_entropy(F.linear(rows, self.parameters[number]).float(), targets)


class Remote(NoHeads):
    """Five heads on a server. The sum of losses has the gradient 1 in each: it is declared, so that nothing waits for backward."""

    def __init__(self, shape, device, dtype, options):
        import headwater
        import headwater.torch

        self.parameters = []
        transport = "cuda_ipc" if device.startswith("cuda") else "auto"
        self._client = headwater.connect(options.address, transport=transport)
        optimizer = headwater.AdamW(beta1=BETAS[0], beta2=BETAS[1], epsilon=EPSILON, weight_decay=WEIGHT_DECAY)
        self._heads = []
        for number in range(HEADS):
            weight = make_weight(shape, number, device, dtype).cpu()
            self._heads.append(
                self._client.create_head(f"medusa-{number}", weight, optimizer=optimizer, staging_slots=0, if_exists="replace")
            )
        self._losses = [
            headwater.torch.CrossEntropyLoss(head, shift=number + 1, loss_scale=1.0) for number, head in enumerate(self._heads)
        ]

    def loss(self, rows, number, ids):
        return self._losses[number](rows, ids)

    def step(self):
        futures = [head.apply_optimizer_step_future(learning_rate=LEARNING_RATE, expected_micro_batches=1) for head in self._heads]
        for future in futures:
            future.result()

    def close(self):
        for head in self._heads:
            head.delete(force=True)
        self._client.close()


WAYS = {"no_heads": NoHeads, "headwater": Remote, "liger": InProcess, "torch": InProcess}


def mebibytes(size):
    return size / 2**20


def measure(options, shape, body, residuals, heads, optimizer, batches, sequences):
    """Curve, time of a step and peak of memory with so many sequences a step."""
    on_gpu = options.device.startswith("cuda")

    def step():
        ids, _ = batches.take(sequences)
        hidden = body(ids)
        losses = [heads.loss(residual(hidden), number, ids) for number, residual in enumerate(residuals)]
        total = torch.stack([loss.float() for loss in losses]).sum()
        total.backward()
        heads.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.detach()

    losses, times = [], []
    for number in range(options.warmup + options.steps):
        if number == options.warmup and on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        losses.append(float(step()))
        if on_gpu:
            torch.cuda.synchronize()
        if number >= options.warmup:
            times.append(time.perf_counter() - began)
    free, total = torch.cuda.mem_get_info() if on_gpu else (0, 0)
    return {
        "way": options.way,
        "rows": sequences * shape.context,
        "step_ms": 1000 * statistics.median(times),
        "step_ms_spread": (max(times) - min(times)) / statistics.median(times),
        "peak_mib": mebibytes(torch.cuda.max_memory_allocated()) if on_gpu else 0.0,
        "device_mib": mebibytes(total - free),
        "logits_mib": mebibytes(HEADS * sequences * shape.context * shape.vocab * body.embedding.weight.element_size()),
        "losses": losses,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", required=True, choices=tuple(WAYS))
    parser.add_argument("--address", default="")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--sequences", default="2,4", help="of a step, 2048 tokens each; one measurement after the other")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--text-bytes", type=int, default=2 << 20)
    options = parser.parse_args()
    if options.device.startswith("cuda"):
        torch.cuda.set_device(options.device)
    shape, dtype = TINY if options.tiny else LLAMA_3_8B, torch.bfloat16
    text, _ = language_model.collect_text(options.text_bytes)
    tokens = language_model.tokenize(text, shape.vocab)
    body = language_model.make_body(shape, options.device, dtype)
    residuals = make_residuals(shape, options.device, dtype)
    heads = WAYS[options.way](shape, options.device, dtype, options)
    optimizer = torch.optim.AdamW(
        [*body.parameters(), *residuals.parameters(), *heads.parameters],
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=WEIGHT_DECAY,
        **({"fused": True} if options.device.startswith("cuda") else {}),
    )
    for sequences in map(int, options.sequences.split(",")):
        batches = language_model.Batches(tokens, shape.context, options.device)
        result = measure(options, shape, body, residuals, heads, optimizer, batches, sequences)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    heads.close()


if __name__ == "__main__":
    main()
