#!/usr/bin/env python3
"""One trainer of the end-to-end benchmark: a model, a way to compute its head's loss, tokens per second, memory. Started by `run`.

Prints a line with a JSON object. With --probe it then looks for the largest micro-batch that fits, and prints another line with
both.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
import time

import language_model
import torch
import torch.nn.functional as F

LEARNING_RATE = 1e-4


def cross_entropy_sum(hidden, weight, targets):
    """The textbook's loss: logits in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


class InProcessHead:
    """The head beside the body: loss by torch.compile, by Liger, or eager; its weight is one of the optimizer's."""

    def __init__(self, kind, shape, device, dtype, dynamic=False):
        self.weight = torch.nn.Parameter(language_model.make_head_weight(shape, device, dtype))
        if kind == "liger":
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
            self._loss = lambda hidden, weight, targets: liger(weight, hidden, targets)
        elif kind == "compile":
            self._loss = torch.compile(cross_entropy_sum, dynamic=dynamic)
        else:
            self._loss = cross_entropy_sum

    def parameters(self):
        return [self.weight]

    def train(self, body, micro_batches, items):
        """Forward and backward of all micro-batches; the loss per token, on the device."""
        total = 0
        for inputs, targets in micro_batches:
            hidden = body(inputs).flatten(0, 1)
            loss = self._loss(hidden, self.weight, targets.flatten()) / items
            loss.backward()
            total = total + loss.detach()
        return total

    def step(self, optimizer):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def forget(self):
        """Drops the remains of a step that was broken off."""
        self.weight.grad = None

    def close(self):
        self.weight = None


class RemoteHead:
    """The head on a server, by the drop-in loss for autograd, or with the next forward under way while the server computes."""

    def __init__(self, address, transport, overlap, shape, device, dtype):
        import headwater
        import headwater.torch

        self._client = headwater.connect(address, transport=transport)
        weight = language_model.make_head_weight(shape, "cpu", dtype)
        self._head = self._client.create_head(f"end-to-end-{os.getpid()}", weight, optimizer=headwater.AdamW())
        del weight
        self._loss = headwater.torch.CrossEntropyLoss(self._head)
        self._overlap = overlap
        self._count = 0
        self.transport = ""

    def parameters(self):
        return []

    def train(self, body, micro_batches, items):
        return self._train_overlapped(body, micro_batches, items) if self._overlap else self._train(body, micro_batches, items)

    def _train(self, body, micro_batches, items):
        total = 0
        for inputs, targets in micro_batches:
            loss = self._loss(body(inputs), targets, num_items_in_batch=items)
            loss.backward()
            total = total + loss.detach()
        self._count = len(micro_batches)
        return total

    def _train_overlapped(self, body, micro_batches, items):
        """The gradient of the loss is known beforehand (1 / items), so nothing waits for backward: EAGER, two in flight."""
        waiting, total = [], 0.0
        for number, (inputs, targets) in enumerate(micro_batches):
            hidden = body(inputs)
            rows = hidden.detach().flatten(0, 1)
            future = self._head.cross_entropy_future(rows, targets.flatten(), micro_batch=number, loss_scale=1 / items)
            waiting.append((hidden, future))
            if len(waiting) == 2:
                total += self._back(*waiting.pop(0))
        while waiting:
            total += self._back(*waiting.pop(0))
        self._count = len(micro_batches)
        return torch.tensor(total / items)

    def _back(self, hidden, future):
        out = future.result()
        self.transport = out.transport
        hidden.backward(out.grad_hidden.view_as(hidden))
        return out.loss_sum

    def step(self, optimizer):
        # The server's optimizer works while this process's does.
        future = self._head.apply_optimizer_step_future(learning_rate=LEARNING_RATE, expected_micro_batches=self._count)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        future.result()

    def forget(self):
        """Drops the remains of a step that was broken off."""
        self._head.discard_gradient()

    def close(self):
        self._head.delete(force=True)
        self._client.close()


def make_head(options, shape, device, dtype, dynamic=False):
    """The head that --mode names."""
    if options.mode.startswith("remote"):
        return RemoteHead(options.address, options.transport, options.mode == "remote_overlapped", shape, device, dtype)
    kind = {"in_process": options.loss, "data_parallel": options.loss}[options.mode]
    return InProcessHead(kind, shape, device, dtype, dynamic)


def synchronize(device):
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak_mib(device):
    return torch.cuda.max_memory_allocated() / 2**20 if device.startswith("cuda") else 0.0


def make_optimizer(parameters, device):
    fused = {"fused": True} if device.startswith("cuda") else {}
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), **fused)


def measure(options, shape, device, dtype, rank=0, world=1):
    """Tokens per second over --seconds, at --sequences a micro-batch."""
    text, origin = language_model.collect_text(options.text_bytes)
    batches = language_model.Batches(language_model.tokenize(text, shape.vocab), shape.context, device)
    if rank:
        batches.take(rank * options.sequences)
    body = language_model.make_body(shape, device, dtype)
    head = make_head(options, shape, device, dtype)
    model = body
    if world > 1:
        model, head = data_parallel(body, head, device)
    optimizer = make_optimizer([*body.parameters(), *head.parameters()], device)
    tokens = options.sequences * shape.context * options.micro_batches

    def step():
        micro_batches = [batches.take(options.sequences, (world - 1) * options.sequences) for _ in range(options.micro_batches)]
        loss = head.train(model, micro_batches, tokens)
        head.step(optimizer)
        return loss

    first_loss = float(step())  # compiles
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):  # with the first one, as many for each data-parallel rank
        step()
        synchronize(device)
    times, losses = [], []
    began = time.monotonic()
    while len(times) < (options.steps if world > 1 else 4) or (world == 1 and time.monotonic() - began < options.seconds):
        start = time.perf_counter()
        losses.append(float(step()))
        synchronize(device)
        times.append(time.perf_counter() - start)
    result = {
        "tokens_per_second": world * tokens / statistics.median(times),
        "step_ms": 1000 * statistics.median(times),
        "step_ms_spread": (max(times) - min(times)) / statistics.median(times),
        "steps": len(times),
        "peak_mib": peak_mib(device),
        "first_loss": first_loss,
        "last_loss": losses[-1],
        "text": origin,
        "parameters": sum(p.numel() for p in body.parameters()) + shape.vocab * shape.hidden,
    }
    head.close()
    return result


class DataParallelHead(InProcessHead):
    """Body and head as one module, so that PyTorch reduces both gradients while backward runs."""

    def __init__(self, head, module):
        self.weight, self._loss, self._module = head.weight, head._loss, module

    def train(self, body, micro_batches, items):
        total = 0
        for number, (inputs, targets) in enumerate(micro_batches):
            # PyTorch divides by the number of ranks; each has `items` tokens of a step.
            if number + 1 < len(micro_batches):
                with self._module.no_sync():
                    loss = self._module(inputs, targets) / items
                    loss.backward()
            else:
                loss = self._module(inputs, targets) / items
                loss.backward()
            total = total + loss.detach()
        return total


def data_parallel(body, head, device):
    """Both wrapped for data parallelism."""

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.weight = body, head.weight

        def forward(self, inputs, targets):
            return head._loss(self.body(inputs).flatten(0, 1), self.weight, targets.flatten())

    ids = [torch.device(device).index] if device.startswith("cuda") else None
    module = torch.nn.parallel.DistributedDataParallel(Whole(), device_ids=ids, gradient_as_bucket_view=True)
    return body, DataParallelHead(head, module)


def is_out_of_memory(error):
    """Whether it says so in one of PyTorch's ways; its libraries have words of their own."""
    text = str(error)
    return isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in text or "ALLOC_FAILED" in text


def probe(options, shape, device, dtype):
    """The most sequences of a micro-batch that fit: doubled until one does not, then between the two, within --probe-seconds."""
    deadline = time.monotonic() + options.probe_seconds
    text, _ = language_model.collect_text(options.text_bytes)
    batches = language_model.Batches(language_model.tokenize(text, shape.vocab), shape.context, device)
    body = language_model.make_body(shape, device, dtype)
    head = make_head(options, shape, device, dtype, dynamic=True)
    optimizer = make_optimizer([*body.parameters(), *head.parameters()], device)
    tried = {}

    def fits(sequences):
        try:
            micro_batch = batches.take(sequences)
            head.train(body, [micro_batch], sequences * shape.context)
            head.step(optimizer)
            synchronize(device)
            tried[sequences] = True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            tried[sequences] = False
        if not tried[sequences]:  # outside of the handler, which keeps the graph
            body.zero_grad(set_to_none=True)
            gc.collect()
            head.forget()
        gc.collect()
        torch.cuda.empty_cache()
        return tried[sequences]

    good, bad = 0, None
    sequences = options.sequences
    while time.monotonic() < deadline and bad is None and sequences <= options.most_sequences:
        if fits(sequences):
            good, sequences = sequences, sequences * 2
        else:
            bad = sequences
    while bad is not None and bad - good > max(1, good // 16) and time.monotonic() < deadline:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    head.close()
    return {"largest_sequences": good, "smallest_that_fails": bad, "largest_tokens": good * shape.context}


def say(result):
    """A line for `run`, which takes the last one that has come."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def run_rank(rank, options, shape, queue):
    """One of two data-parallel trainers."""
    device = f"cuda:{rank}" if options.device.startswith("cuda") else "cpu"
    if device != "cpu":
        torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port), NCCL_NVLS_ENABLE="0")
    torch.distributed.init_process_group("nccl" if device != "cpu" else "gloo", rank=rank, world_size=2)
    result = measure(options, shape, device, torch.bfloat16, rank, 2)
    torch.distributed.destroy_process_group()
    if rank == 0:
        queue.put(result)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", required=True, choices=("in_process", "remote", "remote_overlapped", "data_parallel"))
    parser.add_argument("--loss", default="compile", choices=("compile", "liger", "eager"), help="of a head in process")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--address", default="")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--sequences", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--steps", type=int, default=15, help="of data-parallel trainers, which must agree")
    parser.add_argument("--text-bytes", type=int, default=4 << 20)
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("--probe-seconds", type=float, default=30)
    parser.add_argument("--most-sequences", type=int, default=64)
    parser.add_argument("--port", type=int, default=29517)
    options = parser.parse_args()
    shape = language_model.TINY if options.tiny else language_model.Shape()
    dtype = torch.bfloat16
    if options.device.startswith("cuda"):
        torch.cuda.set_device(options.device)
    if options.mode == "data_parallel":
        context = torch.multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        torch.multiprocessing.spawn(run_rank, (options, shape, queue), nprocs=2)
        result = queue.get()
    else:
        result = measure(options, shape, options.device, dtype)
    result["shape"] = dataclasses.asdict(shape)
    say(result)
    if options.probe and options.mode != "data_parallel":
        gc.collect()
        torch.cuda.empty_cache()
        result.update(probe(options, shape, options.device, dtype))
        say(result)


if __name__ == "__main__":
    main()
