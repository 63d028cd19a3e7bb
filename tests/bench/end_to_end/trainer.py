#!/usr/bin/env python3
"""One trainer of the end-to-end benchmark: a model, a way to compute its head's loss, tokens per second, memory. Started by `run`.

Prints a line with a JSON object. With `probe` it then looks for the largest micro-batch that fits, and prints another line with
both.
"""

import contextlib
import gc
import math
import time

import language_model
import runs
import torch
import trainers

import headwater

MICRO_BATCHES = 4  # of a step
RANK_STEPS = 15  # of data-parallel trainers, which must agree
PROBE_SECONDS = 30
MOST_SEQUENCES = 64


class Model(torch.nn.Module):
    """Body and head as one module, so that PyTorch reduces the gradients of both while backward runs."""

    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, inputs, targets):
        return self.head(self.body(inputs), targets)


def train(model, micro_batches):
    """Forward and backward of all micro-batches; the mean loss, on the device."""
    total = 0
    for number, (inputs, targets) in enumerate(micro_batches):
        reduces = not hasattr(model, "no_sync") or number + 1 == len(micro_batches)
        with contextlib.nullcontext() if reduces else model.no_sync():
            loss = model(inputs, targets) / len(micro_batches)
            loss.backward()
        total = total + loss.detach()
    return total


def train_overlapped(model, micro_batches):
    """The same. The gradient of the loss is known beforehand, so nothing waits for backward: EAGER, two in flight."""
    scale = 1 / sum(targets.numel() for _, targets in micro_batches)
    waiting, total = [], 0.0

    def finish(hidden, future):
        out = future.result()
        hidden.backward(out.grad_hidden.view_as(hidden))
        return out.loss_sum * scale

    for number, (inputs, targets) in enumerate(micro_batches):
        hidden = model.body(inputs)
        rows, resolution = hidden.detach().flatten(0, 1), model.head.loss.gradient_resolution
        future = model.head.head.cross_entropy_future(
            rows, targets.flatten(), micro_batch=number, loss_scale=scale, gradient_resolution=resolution
        )
        waiting.append((hidden, future))
        if len(waiting) == 2:
            total += finish(*waiting.pop(0))
    return total + sum(finish(*entry) for entry in waiting)


def make_model(options, shape, device):
    """The body, under the head that `way` names: remote, declared or overlapped, or the way of a head in process."""
    body = language_model.make_body(shape, device, torch.bfloat16)
    weight = language_model.make_head_weight(shape, device, torch.bfloat16)
    if options.way not in ("remote", "declared", "overlapped"):
        return Model(body, trainers.LocalHead(options.way, weight))
    client = headwater.connect(options.address, transport=options.transport)
    declared = {"loss_scale": 1 / MICRO_BATCHES} if options.way == "declared" else {}
    return Model(body, trainers.RemoteHead(client, "head", weight, gradient_resolution=options.resolution, **declared))


def measure(rank, options, shape):
    """Prints tokens per second over the options' seconds, then what probe() finds."""
    device = trainers.use_device(options.device, rank)
    text, _ = language_model.read_texts(200_000 if device == "cpu" else 4 << 20)
    sequences = language_model.sequences_of(language_model.tokenize(text, shape.vocab), shape.context).to(device)
    of_rank = rank * options.sequences, options.ranks * options.sequences
    batches = language_model.batches(sequences, options.sequences, *of_rank)
    model = whole = make_model(options, shape, device)
    if options.ranks > 1:
        whole = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = trainers.make_optimizer(model.parameters(), device)
    train_step = train_overlapped if options.way == "overlapped" else train

    def step():
        loss = train_step(whole, [next(batches) for _ in range(MICRO_BATCHES)])
        trainers.update(optimizer, [model.head], MICRO_BATCHES)
        return loss

    bounds = {"least": RANK_STEPS} if options.ranks > 1 else {"least": 4, "seconds": options.seconds}
    result = trainers.timed(step, device, warm_up=options.warm_up, **bounds)
    tokens = options.ranks * MICRO_BATCHES * options.sequences * shape.context
    result["tokens_per_second"] = 1000 * tokens / result["step_ms"]
    if device != "cpu":
        free, total = torch.cuda.mem_get_info()
        result["beside_mib"] = (total - free - torch.cuda.memory_reserved()) / trainers.MIB
    if rank == 0:
        runs.say(result)
    if options.probe:
        runs.say({**result, "largest_tokens": probe(options, model, optimizer, sequences) * shape.context})


def is_out_of_memory(error):
    """Whether it says so in one of PyTorch's ways; its libraries have words of their own."""
    text = str(error)
    return isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in text or "ALLOC_FAILED" in text


def probe(options, model, optimizer, sequences):
    """The most sequences of a micro-batch that fit: doubled until one does not, then between the two, within PROBE_SECONDS."""
    deadline = time.monotonic() + PROBE_SECONDS
    is_remote = isinstance(model.head, trainers.RemoteHead)
    if not is_remote:
        model.head.of_rows = trainers.loss_of_rows(options.way, dynamic=True)
    torch.cuda.empty_cache()

    def fits(size):
        try:
            train(model, [next(language_model.batches(sequences, size))])
            trainers.update(optimizer, [model.head])
            torch.cuda.synchronize()
            fit = True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            fit = False
        if not fit:  # outside of the handler, which keeps the graph
            optimizer.zero_grad(set_to_none=True)
            gc.collect()
            if is_remote:
                model.head.head.discard_gradient()
        gc.collect()
        torch.cuda.empty_cache()
        return fit

    size, good, bad = options.sequences, 0, math.inf
    while bad - good > max(1, good // 16) and size <= MOST_SEQUENCES and time.monotonic() < deadline:
        if fits(size):
            good = size
        else:
            bad = size
        size = 2 * good if bad == math.inf else (good + bad) // 2
    return good


def main():
    options = runs.trainer_options()
    shape = language_model.TINY if options.device == "cpu" else language_model.Shape()
    if options.ranks > 1:
        trainers.run_ranks(measure, options.ranks, options.device, options, shape)
    else:
        measure(0, options, shape)


if __name__ == "__main__":
    main()
