#!/usr/bin/env python3
"""Accumulation is exact: the loss and gradients of a step, in one micro-batch and in many, against PyTorch with sums in fp64.

The head is fp32, its rows are random, and a twelfth of the targets is ignored. One step of the same rows is taken in 1, 4, 16
and 64 micro-batches. The loss must be PyTorch's within 1e-8: fp32 logits, and sums over the vocabulary and the rows in fp64.
Gradients are compared with fp64 throughout. Then AdamW trains head and body for some cycles, beside PyTorch in fp64. The losses
of all micro-batches, their variance, and the weight at the end are compared. Prints a line of JSON with all differences. Started by
`run`, which has their bounds.
"""

import runs
import torch
import torch.nn.functional as F

import headwater
import headwater.torch

IGNORED = -100
LEARNING_RATE = 1e-3


def relative(ours, theirs):
    """|ours - theirs| / |theirs| in fp64; NaN if anything is."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def reference(hidden, weight, targets):
    """(loss with fp32 logits and fp64 sums, grad_hidden, grad_weight in fp64) of the mean over valid rows."""
    loss = F.cross_entropy((hidden @ weight.T).double(), targets)
    wide_hidden, wide_weight = (tensor.double().requires_grad_() for tensor in (hidden, weight))
    F.cross_entropy(wide_hidden @ wide_weight.T, targets).backward()
    return float(loss), wide_hidden.grad, wide_weight.grad


def accumulated(client, name, hidden, weight, targets, micro_batches):
    """(mean loss, grad_hidden, grad_weight) of a step in so many micro-batches."""
    head = client.create_head(name, weight.numpy(), if_exists="replace")
    valid = int((targets != IGNORED).sum())
    total, rows = 0.0, []
    for number, (part, own) in enumerate(zip(hidden.chunk(micro_batches), targets.chunk(micro_batches), strict=True)):
        result = head.cross_entropy(part.numpy(), own.numpy(), micro_batch=number, loss_scale=1 / valid)
        total += result.loss_sum
        rows.append(torch.from_numpy(result.grad_hidden))
    gradient = torch.from_numpy(head.gradient())
    head.delete(force=True)
    return total / valid, torch.cat(rows), gradient


def train(client, rows, hidden_size, vocab, cycles, micro_batches=8):
    """(our losses, PyTorch's, our weight, PyTorch's) of cycles with AdamW: Headwater in fp32, PyTorch in fp64."""
    torch.manual_seed(5)
    weight = torch.randn(vocab, hidden_size) * 0.1
    start = torch.randn(hidden_size, hidden_size) / hidden_size**0.5
    inputs = torch.randn(cycles, micro_batches, rows // micro_batches, hidden_size)
    targets = torch.randint(vocab, inputs.shape[:3])
    # A large epsilon: AdamW divides noise by noise where an element's gradient is that of rounding.
    settings = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.0}
    optimizer = headwater.AdamW(beta1=0.9, beta2=0.95, epsilon=1e-4, weight_decay=0.0)
    head = client.create_head("cycles", weight.numpy(), optimizer=optimizer, if_exists="replace")
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    body = start.clone().requires_grad_()
    wide_body, wide_weight = start.double().requires_grad_(), weight.double().requires_grad_()
    optimizers = [torch.optim.AdamW(parameters, **settings) for parameters in ([body], [wide_body, wide_weight])]
    curves = ([], [])
    for cycle in range(cycles):
        for part, own in zip(inputs[cycle], targets[cycle], strict=True):
            losses = loss_fn(part @ body, own), F.cross_entropy(part.double() @ wide_body @ wide_weight.T, own)
            for curve, loss in zip(curves, losses, strict=True):
                (loss / micro_batches).backward()
                curve.append(float(loss.detach()))
        head.apply_optimizer_step(learning_rate=LEARNING_RATE, expected_micro_batches=loss_fn.micro_batches)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    end = torch.from_numpy(head.weight())
    head.delete(force=True)
    return *(torch.tensor(curve, dtype=torch.float64) for curve in curves), end, wide_weight.detach()


def main():
    options = runs.trainer_options()
    rows, hidden_size, vocab = shape = (256, 32, 200) if options.device == "cpu" else (4096, 512, 32000)
    torch.manual_seed(4)
    hidden, weight = torch.randn(rows, hidden_size), torch.randn(vocab, hidden_size) * 0.05
    targets = torch.randint(vocab, (rows,))
    targets[::12] = IGNORED
    loss, grad_hidden, grad_weight = reference(hidden, weight, targets)
    found = {}
    with headwater.connect(options.address) as client:
        for count in (1, 4, 16, 64):
            ours = accumulated(client, f"exact-{count}", hidden, weight, targets, count)
            found[f"a{count}_loss"] = abs(ours[0] - loss) / loss
            found[f"a{count}_grad_hidden"] = relative(ours[1], grad_hidden)
            found[f"a{count}_grad_weight"] = relative(ours[2], grad_weight)
        curve, wide_curve, end, wide_end = train(client, *shape, cycles=3 if options.device == "cpu" else 20)
    found["cycles_largest_gap"] = float(((curve - wide_curve) / wide_curve).abs().max())
    found["cycles_variance"] = abs(float(curve.var() / wide_curve.var()) - 1)
    found["cycles_weight"] = relative(end, wide_end)
    runs.say(found)


if __name__ == "__main__":
    main()
