#!/usr/bin/env python3
"""One trainer of the Medusa benchmark: a model with five heads, and a way to compute their losses. Started by `run`.

Prints a line with a JSON object for each number of sequences, as it is measured: losses, time of a step, peaks of memory.
"""

import language_model
import runs
import torch
import trainers

import headwater

HEADS = 5  # head k says which token comes k + 1 places later
WARM_UP, STEPS = 3, 8
LLAMA_3_8B = language_model.Shape(hidden=4096, layers=2, heads=32, kv_heads=8, feed_forward=14336, vocab=128256, context=2048)


class NoLayer(torch.nn.Module):
    """Nothing but the trunk: its memory is what the others' is compared with."""

    def forward(self, rows, ids):
        return rows.mean(dtype=torch.float32)  # which keeps nothing for backward


def make_heads(options, shape, device):
    """The heads, with last layers of the way."""
    if options.way == "headwater":
        client = headwater.connect(options.address, transport="auto" if device == "cpu" else "cuda_ipc")
    layers = []
    for number in range(HEADS):
        shift, weight = number + 1, language_model.make_head_weight(shape, device, torch.bfloat16, number)
        if options.way == "no_heads":
            layers.append(NoLayer())
        elif options.way == "headwater":
            # The sum of losses has the gradient 1 in each: it is declared, so that nothing waits for backward.
            layers.append(trainers.RemoteHead(client, f"medusa-{number}", weight, shift=shift, loss_scale=1.0))
        else:
            layers.append(trainers.LocalHead("eager" if options.way == "torch" else options.way, weight, shift))
    return trainers.ManyHeads((trainers.Residual(shape.hidden) for _ in layers), layers).to(device, torch.bfloat16)


def main():
    options = runs.trainer_options()
    device = trainers.use_device(options.device)
    shape = language_model.TINY if device == "cpu" else LLAMA_3_8B
    text, _ = language_model.read_texts(200_000 if device == "cpu" else 2 << 20)
    sequences = language_model.sequences_of(language_model.tokenize(text, shape.vocab), shape.context).to(device)
    body = language_model.make_body(shape, device, torch.bfloat16)
    heads = make_heads(options, shape, device)
    optimizer = trainers.make_optimizer([*body.parameters(), *heads.parameters()], device)
    for size in options.sequences:
        batches = language_model.batches(sequences, size)

        def step(batches=batches):
            ids, _ = next(batches)
            loss = heads(body(ids), ids)
            loss.backward()
            trainers.update(optimizer, heads.layers)
            return loss.detach()

        losses = trainers.timed(step, device, least=WARM_UP)["losses"]
        torch.cuda.empty_cache()
        result = trainers.timed(step, device, least=STEPS)
        free, total = (0, 0) if device == "cpu" else torch.cuda.mem_get_info()
        rows = size * shape.context
        runs.say(
            {
                **result,
                "rows": rows,
                "device_mib": (total - free) / trainers.MIB,
                "logits_mib": HEADS * rows * shape.vocab * body.embedding.weight.element_size() / trainers.MIB,
                "losses": losses + result["losses"],
            }
        )


if __name__ == "__main__":
    main()
