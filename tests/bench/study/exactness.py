#!/usr/bin/env python3
"""Accumulation is exact: the loss and gradients of a step, in one micro-batch and in many, against PyTorch with sums in fp64.

    tests/bench/study/exactness.py --build BUNDLE --output FOLDER [--commit NAME] [--cuda] [--smoke]

The head is fp32, its rows are random, and a twelfth of the targets is ignored. One step of the same rows is taken in 1, 4, 16
and 64 micro-batches. The loss must be PyTorch's within 1e-8: fp32 logits, and sums over the vocabulary and the rows in fp64.
Gradients are compared with fp64 throughout. Then AdamW trains head and body for some cycles, beside PyTorch in fp64. The losses
of all micro-batches, their variance, and the weight at the end are compared. Writes study.csv (the columns of figures.py) into
FOLDER. Exits 1 if a bound is missed.
"""

import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
import figures
import runs
import server

IGNORED = -100
MOST_OF_LOSS, MOST_OF_GRADIENT, MOST_OF_CURVE = 1e-8, 1e-5, 1e-5
LEARNING_RATE = 1e-3


def relative(ours, theirs):
    """|ours - theirs| / |theirs| in fp64; NaN if anything is."""
    difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    return float(difference)


def reference(torch, hidden, weight, targets):
    """(loss with fp32 logits and fp64 sums, grad_hidden, grad_weight in fp64) of the mean over valid rows."""
    cross_entropy = torch.nn.functional.cross_entropy
    loss = cross_entropy((hidden @ weight.T).double(), targets)
    wide_hidden, wide_weight = (tensor.double().requires_grad_() for tensor in (hidden, weight))
    cross_entropy(wide_hidden @ wide_weight.T, targets).backward()
    return float(loss), wide_hidden.grad, wide_weight.grad


def accumulated(torch, client, name, hidden, weight, targets, micro_batches):
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


def train(torch, client, shape, cycles, micro_batches):
    """(our losses, PyTorch's, our weight, PyTorch's) of cycles with AdamW: Headwater in fp32, PyTorch in fp64."""
    import headwater
    import headwater.torch

    rows, hidden_size, vocab = shape
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
    ours = torch.optim.AdamW([body], **settings)
    wide_body, wide_weight = start.double().requires_grad_(), weight.double().requires_grad_()
    theirs = torch.optim.AdamW([wide_body, wide_weight], **settings)
    curves = ([], [])
    for cycle in range(cycles):
        for part, own in zip(inputs[cycle], targets[cycle], strict=True):
            loss = loss_fn(part @ body, own) / micro_batches
            loss.backward()
            curves[0].append(float(loss.detach()) * micro_batches)
            wide = torch.nn.functional.cross_entropy(part.double() @ wide_body @ wide_weight.T, own) / micro_batches
            wide.backward()
            curves[1].append(float(wide.detach()) * micro_batches)
        head.apply_optimizer_step(learning_rate=LEARNING_RATE, expected_micro_batches=loss_fn.micro_batches)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    end = torch.from_numpy(head.weight())
    head.delete(force=True)
    return *(torch.tensor(curve, dtype=torch.float64) for curve in curves), end, wide_weight.detach()


def main():
    parser = runs.make_parser(__doc__, "small: that it runs")
    parser.add_argument("--cuda", action="store_true", help="on the first GPU, instead of the CPU engine")
    options = parser.parse_args()
    build = options.build.resolve()
    sys.path.insert(0, str(build / "python"))
    os.environ["HEADWATER_BUILD_DIR"] = str(build)
    import torch

    import headwater

    rows, hidden_size, vocab = shape = (256, 32, 200) if options.smoke else (4096, 512, 32000)
    cycles = 3 if options.smoke else 20
    torch.manual_seed(4)
    hidden, weight = torch.randn(rows, hidden_size), torch.randn(vocab, hidden_size) * 0.05
    targets = torch.randint(vocab, (rows,))
    targets[::12] = IGNORED
    loss, grad_hidden, grad_weight = reference(torch, hidden, weight, targets)
    prefix = f"{figures.GPU_PREFIX if options.cuda else 'cpu_'}study_exact_"
    table = figures.Table(runs.machine_name(), options.commit, prefix, show=True)
    engine = ("--engine=cuda",) if options.cuda else ()
    with tempfile.TemporaryDirectory(prefix="hw-") as name, server.running(build, pathlib.Path(name), *engine) as started:
        with headwater.connect(started.address) as client:
            for count in (1, 4, 16, 64):
                ours = accumulated(torch, client, f"exact-{count}", hidden, weight, targets, count)
                table.add(f"a{count}_loss", abs(ours[0] - loss) / loss, "of the loss", MOST_OF_LOSS)
                table.add(f"a{count}_grad_hidden", relative(ours[1], grad_hidden), "of fp64", MOST_OF_GRADIENT)
                table.add(f"a{count}_grad_weight", relative(ours[2], grad_weight), "of fp64", MOST_OF_GRADIENT)
            curve, wide_curve, end, wide_end = train(torch, client, shape, cycles, 8)
            table.add("cycles_largest_gap", float(((curve - wide_curve) / wide_curve).abs().max()), "of the loss", MOST_OF_CURVE)
            variance = abs(float(curve.var() / wide_curve.var()) - 1)
            table.add("cycles_variance", variance, "of PyTorch's variance", 1e-3)
            table.add("cycles_weight", relative(end, wide_end), "of fp64", MOST_OF_CURVE)
    figures.merge(options.output / "study.csv", table.rows)
    return figures.verdict(table.rows)


if __name__ == "__main__":
    sys.exit(main())
