#!/usr/bin/env python3
"""Rows as a trained model has them: those of a real model, and a recipe for larger ones whose softmax is as long-tailed.

    tests/bench/peers/trained.py MODEL.gguf ROWS.npz     # needs transformers and gguf; takes a minute on a CPU
    tests/bench/peers/trained.py --check                 # the recipe at its full size / REAL below; needs 12 GB, a minute or two

The first form runs SmolLM2-135M (H 576, V 49152) over 4096 tokens of this project's documentation. It keeps the last layer's inputs
(bf16), the targets, and that layer's weight as the model's file has it (8 bits): 32 MB. It prints the content of REAL.

A dithered gradient (tau) keeps a row's entries p >= q, and smaller ones with probability p / q. The threshold is q = tau max(1 -
p_y, 1/16), where p_y is the target's probability. *Entries* is the mean number that is kept. *Rest* is the share of 1 - p_y in the
smaller ones. *Entries beside* a share of the ids are those of all but the ids that have most, over 4096 rows.
"""

import argparse
import dataclasses
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[3]
ROWS = 4096
TAUS = {f"2^-{bits}": 2.0**-bits for bits in (6, 8, 10, 12, 14)}
SHARES = (1 / 16, 1 / 4)  # of the ids, those that have most entries
CONTEXT = 1024

# Figures of SmolLM2's rows, as the first form printed them: (tau, quantity) -> number. Entries beside are of a later text, which
# leaves 4 to 7 % fewer entries.
REAL = {
    ("2^-6", "entries"): 35.85,
    ("2^-6", "rest"): 0.4592,
    ("2^-6", "entries_beside_0.0625"): 7.789,
    ("2^-6", "entries_beside_0.25"): 1.686,
    ("2^-8", "entries"): 106.3,
    ("2^-8", "rest"): 0.3275,
    ("2^-8", "entries_beside_0.0625"): 29.26,
    ("2^-8", "entries_beside_0.25"): 6.603,
    ("2^-10", "entries"): 298.9,
    ("2^-10", "rest"): 0.2149,
    ("2^-10", "entries_beside_0.0625"): 105.0,
    ("2^-10", "entries_beside_0.25"): 25.14,
    ("2^-12", "entries"): 774.4,
    ("2^-12", "rest"): 0.1263,
    ("2^-12", "entries_beside_0.0625"): 345.2,
    ("2^-12", "entries_beside_0.25"): 92.74,
    ("2^-14", "entries"): 1811.0,
    ("2^-14", "rest"): 0.06527,
    ("2^-14", "entries_beside_0.0625"): 982.4,
    ("2^-14", "entries_beside_0.25"): 320.7,
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The recipe of logits, in nats. Fitted to REAL at V 128256."""

    slope: float = 1.157  # log-frequency of id j: -slope log(j + first), and noise of each id's own
    first: float = 103.0
    id_noise: float = 1.6
    row_noise: float = 2.98  # of each entry
    level: float = -1.96  # of a row's best candidate above the log-sum-exp of all else: mean and deviation over the rows
    level_deviation: float = 3.54
    gap: float = 1.45  # mean distance of a candidate to the next one
    candidates: int = 64
    frequency_part: float = 64.0  # length of the part of the hidden states that the log-frequencies lie along


def make_rows(rows, width, vocab, device, shuffled=False, recipe=None):
    """(hidden [rows, width], weight [vocab, width], targets [rows]): bf16 and int64, repeatable on one kind of device.

    A weight is noise and a part along one direction, which holds the id's log-frequency. A hidden state is that direction, noise,
    and a sum of its candidates' weights. Targets are drawn from the rows' own softmax. `shuffled`: the order of ids says nothing.
    """
    recipe = recipe or Recipe()
    generator = torch.Generator(device).manual_seed(7)
    normal = {"device": device, "generator": generator}
    frequency = -recipe.slope * (torch.arange(vocab, device=device) + recipe.first).log()
    frequency += recipe.id_noise * torch.randn(vocab, **normal)
    frequency -= frequency.logsumexp(0) + recipe.row_noise**2 / 2  # the log-sum-exp of a row without candidates is 0
    direction = torch.randint(0, 2, (width,), **normal).mul(2.0).sub(1.0) / width**0.5
    noise = torch.randn(vocab, width, **normal).div_(width**0.5)
    noise.addr_(noise @ direction, direction, alpha=-1)
    hidden = recipe.row_noise * torch.randn(rows, width, **normal)
    hidden += (recipe.frequency_part - hidden @ direction)[:, None] * direction
    best = recipe.level + recipe.level_deviation * torch.randn(rows, **normal)
    gaps = torch.empty(rows, recipe.candidates, device=device).exponential_(1 / recipe.gap, generator=generator)
    ids = (torch.rand(rows, recipe.candidates, **normal) ** 3 * vocab).long()
    wanted = best[:, None] - gaps.cumsum(1) - frequency[ids]
    raised = [wanted[:, number] - (hidden * noise[ids[:, number]]).sum(-1) for number in range(recipe.candidates)]
    for number, amount in enumerate(raised):
        hidden += amount.clamp_min(0)[:, None] * noise[ids[:, number]]
    # A constant in all logits of a row changes nothing, but must not eat the digits of bf16.
    noise += ((frequency - frequency.mean()) / recipe.frequency_part)[:, None] * direction
    hidden, weight = hidden.bfloat16(), noise.bfloat16()
    if shuffled:
        weight = weight[torch.randperm(vocab, **normal)]
    targets = []
    for start in range(0, rows, 512):
        probabilities = (hidden[start : start + 512] @ weight.T).float().softmax(-1)
        targets.append(torch.multinomial(probabilities, 1, generator=generator)[:, 0])
    return hidden, weight, torch.cat(targets)


def statistics_of(hidden, weight, targets, block=256):
    """Means over the rows: (tau's name, quantity) -> number, for entries, rest, and entries of all but a share of the ids."""
    sums, by_id = {}, {}
    for start in range(0, len(hidden), block):
        logits = hidden[start : start + block].float() @ weight.float().T
        rows = torch.arange(len(logits), device=logits.device)
        chosen = targets[start : start + block].long()
        probabilities = logits.softmax(-1)
        others = 1 - probabilities[rows, chosen].double()
        probabilities[rows, chosen] = 0
        for name, tau in TAUS.items():
            quantum = (tau * others.clamp_min(1 / 16)).float()[:, None]
            kept = (probabilities / quantum).clamp_max(1)
            rest = torch.where(probabilities < quantum, probabilities, 0).sum(-1, dtype=torch.float64)
            found = {"entries": kept.sum(dtype=torch.float64), "rest": (rest / others.clamp_min(1e-12)).sum()}
            for quantity, value in found.items():
                sums[name, quantity] = sums.get((name, quantity), 0.0) + float(value)
            by_id[name] = by_id.get(name, 0) + kept.sum(0, dtype=torch.float64)
    for name, entries in by_id.items():
        rising = entries.sort().values
        for share in SHARES:
            sums[name, f"entries_beside_{share:g}"] = float(rising[: len(rising) - int(share * len(rising))].sum())
    return {key: value / len(hidden) for key, value in sums.items()}


def read_rows(path):
    """(hidden [rows, 576] bf16, weight [49152, 576] bf16, targets [rows] int64) of a file that this program wrote."""
    import numpy

    with numpy.load(path) as file:
        blocks = torch.from_numpy(file["weight_q8_0"]).view(-1, 34)  # of 32 weights: an fp16 scale and as many int8
        hidden = torch.from_numpy(file["hidden_bf16"]).view(torch.bfloat16)
        targets = torch.from_numpy(file["targets"]).long()
    scales = blocks[:, :2].contiguous().view(torch.float16).float()
    weight = (blocks[:, 2:].contiguous().view(torch.int8).float() * scales).view(-1, hidden.shape[1])
    return hidden, weight.bfloat16(), targets


def write_rows(model, path):
    """Runs the model over the documentation and writes the file."""
    import gguf
    import numpy
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    tokenizer = AutoTokenizer.from_pretrained(**names)
    network = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.bfloat16).eval()
    pages = sorted((ROOT / "docs").glob("*.md"))
    ids = tokenizer("\n\n".join(page.read_text(encoding="utf-8") for page in pages), return_tensors="pt").input_ids[0]
    hidden, targets = [], []
    with torch.no_grad():
        for start in range(0, ROWS, CONTEXT):
            window = ids[start : start + CONTEXT + 1]
            hidden.append(network.model(window[None, :-1]).last_hidden_state[0].bfloat16())
            targets.append(window[1:])
    tensor = next(tensor for tensor in gguf.GGUFReader(model).tensors if tensor.name == "token_embd.weight")
    if tensor.tensor_type != gguf.GGMLQuantizationType.Q8_0:
        sys.exit(f"{model}: the weight's type is {tensor.tensor_type.name}, expected Q8_0")
    numpy.savez_compressed(
        path,
        hidden_bf16=torch.cat(hidden).view(torch.int16).numpy(),
        targets=torch.cat(targets).int().numpy(),
        weight_q8_0=numpy.asarray(tensor.data).reshape(-1),
    )
    rows = read_rows(path)
    difference = (rows[1].float() - network.lm_head.weight.float()).abs().max()
    if not difference <= 1e-2:
        sys.exit(f"the weight that was read differs from the model's by {difference}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, nargs="?")
    parser.add_argument("rows", type=pathlib.Path, nargs="?")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        for key, value in statistics_of(*make_rows(ROWS, 4096, 128256, "cpu")).items():
            print(*key, f"{value:.4g}, {value / REAL[key]:.2f} of the real rows'")
        return
    if options.rows is None:
        parser.error("a model and a file to write are needed")
    write_rows(options.model, options.rows)
    hidden, weight, targets = read_rows(options.rows)
    loss = torch.nn.functional.cross_entropy(hidden.float() @ weight.float().T, targets)
    print(f"mean loss {loss:.3f}")
    for (tau, quantity), value in statistics_of(hidden, weight, targets).items():
        print(f"{tau} {quantity} {value:.4g}")


if __name__ == "__main__":
    main()
