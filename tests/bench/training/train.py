#!/usr/bin/env python3
"""Trains the runs whose names come on standard input, one a line, and answers each with a line of JSON. Started by `run`.

    train.py --prepare MODEL FILE [--gguf SmolLM2.gguf]      # the model's first weights and its text, once for all runs
    train.py --address ADDRESS --prepared FOLDER --rows FOLDER --device cuda

A run's name is MODEL/OPTIMIZER/WAY/SEED. Every way trains the body alike: weights in bf16 (fp32 on the CPU) with fp32 masters, the
same optimizer, first weights and text. The seed decides the order of the text, and is part of the head's name, which the draws of a
dithered gradient depend on. The text is used once, so that all seeds see the same targets equally often.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import random
import sys
import sysconfig
import time
import traceback
from typing import Any

import language_model
import numpy as np
import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parents[3]
SHAPES = {
    "scratch": language_model.Shape(512, 8, 8, 4, 2048, 32768, 256),
    "tiny": dataclasses.replace(language_model.TINY, vocab=2048),
}
FOLDERS = ("client", "docs", "kernels", "server", "tests")  # of this project, whose texts are read
SEQUENCES = 4  # of a micro-batch, which is a step
STEPS = {"smollm2": 1000, "scratch": 1000, "tiny": 5}
HELD_OUT = {"smollm2": 128, "scratch": 128, "tiny": 4}  # micro-batches
EVALUATIONS = 4  # over a run, besides the one before it
RATES = {"smollm2": {"adamw": 2e-4, "sgd": 0.001}, "scratch": {"adamw": 1e-3, "sgd": 0.1}, "tiny": {"adamw": 1e-3, "sgd": 0.1}}
WARM_UP = 50  # steps, of a linear rise; the rate is constant afterwards
BETAS, EPSILON, MOMENTUM = (0.9, 0.95), 1e-8, 0.9  # no weight decay: a row's change is that of its gradients alone
POINT = 10  # steps of a point of the curve
RARE, SELDOM = 5, 50  # an id is rare if it is a target at least once and fewer than RARE times; seldom up to SELDOM times


# ---- model and text --------------------------------------------------------------------------------------------------------------


def read_texts(most_bytes: int) -> tuple[str, str]:
    """(training text, held-out text) of this project and of Python's standard library: every tenth file is held out."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [path for name in FOLDERS for kind in ("md", "cc", "h", "py") for path in (ROOT / name).glob(f"**/*.{kind}")]
    files += [*library.glob("*.py"), *library.glob("*/*.py")]
    files = sorted(path for path in files if not {"site-packages", "dist-packages", "test"} & set(path.parts))
    random.Random(0).shuffle(files)
    parts: tuple[list[str], list[str]] = ([], [])
    size = 0
    for number, path in enumerate(files):
        parts[number % 10 == 0].append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(parts[number % 10 == 0][-1])
        if size >= most_bytes:
            break
    return "\n\n".join(parts[0]), "\n\n".join(parts[1])


def smollm2(gguf: pathlib.Path) -> tuple[language_model.Shape, dict[str, torch.Tensor], Any]:
    """(shape, the body's weights, tokenizer). The head is tied to the embedding there; here each way trains a copy."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)  # in 16 bits it would keep the file's own format
    config, theirs = loaded.config, {name: tensor.bfloat16() for name, tensor in loaded.model.state_dict().items()}
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or config.rope_theta
    shape = language_model.Shape(
        config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads,
        config.intermediate_size, config.vocab_size, 256, theta,
    )  # fmt: skip
    weights = {"embedding.weight": theirs["embed_tokens.weight"], "norm.weight": theirs["norm.weight"]}
    of_block = {
        "attention_norm": ("input_layernorm",),
        "feed_forward_norm": ("post_attention_layernorm",),
        "query": ("self_attn.q_proj",),
        "key_value": ("self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    for layer in range(shape.layers):
        for name, sources in of_block.items():
            weights[f"blocks.{layer}.{name}.weight"] = torch.cat([theirs[f"layers.{layer}.{source}.weight"] for source in sources])
    return shape, weights, AutoTokenizer.from_pretrained(**names)


def prepare(name: str, gguf: pathlib.Path | None) -> dict[str, Any]:
    """A model's shape, first weights, and sequences of ids (count, context + 1): `train` has exactly those of a run."""
    if gguf:
        shape, body, tokenizer = smollm2(gguf)
        head = body["embedding.weight"].clone()
        texts = read_texts(8_000_000)
        ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    else:
        shape = SHAPES[name]
        body = language_model.make_body(shape, "cpu", torch.float32).state_dict()
        head = language_model.make_head_weight(shape, "cpu", torch.float32)
        texts = [text.encode() for text in read_texts(200_000 if name == "tiny" else 8_000_000)]
        ids = [language_model.tokenize(text, shape.vocab, texts[0]) for text in texts]
    needed = (STEPS[name] * SEQUENCES, HELD_OUT[name] * SEQUENCES)
    sequences = []
    for tokens, count in zip(ids, needed, strict=True):
        if len(tokens) <= count * shape.context:
            raise SystemExit(f"{name}: the text has {len(tokens)} tokens, {count * shape.context + 1} are needed")
        sequences.append(tokens[: count * shape.context + 1].unfold(0, shape.context + 1, shape.context).clone())
    return {"shape": dataclasses.asdict(shape), "body": body, "head": head, "train": sequences[0], "held_out": sequences[1]}


# ---- heads -----------------------------------------------------------------------------------------------------------------------


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each source; in a few kernels where this PyTorch can."""
    with torch.no_grad():
        if hasattr(torch, "_foreach_copy_"):
            torch._foreach_copy_(targets, sources)
            return
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


class Masters:
    """Parameters of 16 bits with masters in fp32, which an optimizer of PyTorch updates."""

    def __init__(self, parameters: list[torch.nn.Parameter], kind: str):
        self._parameters = parameters
        self.masters = [parameter.detach().float().clone().requires_grad_() for parameter in parameters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        fused = {"fused": True} if parameters[0].is_cuda else {}
        if kind == "adamw":
            self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                self.masters, lr=0.0, betas=BETAS, eps=EPSILON, weight_decay=0.0, **fused
            )
        else:
            self._optimizer = torch.optim.SGD(self.masters, lr=0.0, momentum=MOMENTUM, **fused)

    def step(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        copy_all([master.grad for master in self.masters], [parameter.grad for parameter in self._parameters])
        self._optimizer.step()
        copy_all(self._parameters, self.masters)
        for parameter in self._parameters:
            parameter.grad = None


class LocalHead:
    """The weight is the trainer's. Its gradient has the weight's 16 bits, where a server adds in fp32; the masters are alike."""

    def __init__(self, way: str, weight: torch.Tensor, kind: str):
        self._weight = torch.nn.Parameter(weight)
        self._masters = Masters([self._weight], kind)
        if way == "cce":
            from cut_cross_entropy import linear_cross_entropy

            self.loss = lambda hidden, targets: linear_cross_entropy(hidden, self._weight, targets)
        else:
            self.loss = lambda hidden, targets: F.cross_entropy(F.linear(hidden, self._weight).float(), targets)

    def step(self, rate: float) -> None:
        self._masters.step(rate)

    def weight(self) -> torch.Tensor:
        """The masters."""
        return self._masters.masters[0].detach()

    def close(self) -> None:
        """Nothing is to be left."""


class RemoteHead:
    """The weight and its optimizer are a server's. `way` is exact, or tau_N for a gradient resolution of 2**-N."""

    def __init__(self, client: Any, name: str, way: str, weight: torch.Tensor, kind: str):
        import headwater.torch

        optimizer = headwater.AdamW(*BETAS, EPSILON, 0.0) if kind == "adamw" else headwater.SGD(momentum=MOMENTUM)
        self._head = client.create_head(name, weight.cpu(), optimizer=optimizer, if_exists="replace")
        tau = 0.0 if way == "exact" else 2.0 ** -int(way.partition("_")[2])
        # A loss alone has the gradient 1: it is declared, so that nothing waits for backward.
        self.loss = headwater.torch.CrossEntropyLoss(self._head, gradient_resolution=tau, loss_scale=1.0)
        self._device = weight.device

    def step(self, rate: float) -> Any:
        """Starts the step, and returns its future."""
        return self._head.apply_optimizer_step_future(learning_rate=rate, expected_micro_batches=1)

    def weight(self) -> torch.Tensor:
        """The masters."""
        return torch.from_numpy(self._head.weight(dtype="float32")).to(self._device)

    def close(self) -> None:
        self._head.delete(force=True)


# ---- runs ------------------------------------------------------------------------------------------------------------------------


class Trainer:
    """Trains the runs of the models that are prepared, one after the other."""

    def __init__(self, address: str, device: str, prepared: pathlib.Path, rows: pathlib.Path):
        self._address, self._device = address, device
        self._prepared, self._rows = prepared, rows
        self._dtype = torch.float32 if device == "cpu" else torch.bfloat16

    @functools.cached_property
    def _client(self) -> Any:
        import headwater

        return headwater.connect(self._address)

    @functools.lru_cache(maxsize=1)  # noqa: B019 - one trainer lives as long as its process
    def _model(self, name: str) -> tuple[Any, dict[str, Any]]:
        """(body, what prepare() made). On a GPU the body's passes are graphs: its kernels are too small for one process's calls."""
        prepared = torch.load(self._prepared / f"{name}.pt")
        shape = language_model.Shape(**prepared["shape"])
        body = language_model.make_body(shape, self._device, self._dtype)
        if self._device != "cpu":
            example = torch.zeros(SEQUENCES, shape.context, dtype=torch.int64, device=self._device)
            body = torch.cuda.make_graphed_callables(body, (example,))
        for split in ("train", "held_out"):
            prepared[split] = prepared[split].to(self._device).unflatten(0, (-1, SEQUENCES))
        return body, prepared

    def run(self, name: str) -> dict[str, Any]:
        """A run's curve and losses; the norm of each row's change goes to a file."""
        model, kind, way, seed = name.split("/")
        body, prepared = self._model(model)
        body.load_state_dict(prepared["body"])
        first = prepared["head"].to(self._device, self._dtype)
        local = way in ("torch", "cce")
        key = name.replace("/", "-").replace("_", "-")
        head: Any = LocalHead(way, first.clone(), kind) if local else RemoteHead(self._client, key, way, first, kind)
        masters = Masters(list(body.parameters()), kind)
        seen = torch.bincount(prepared["train"][..., 1:].flatten(), minlength=len(first))
        order = torch.randperm(STEPS[model] * SEQUENCES, generator=torch.Generator().manual_seed(int(seed)))
        batches = prepared["train"].flatten(0, 1)[order.to(self._device)].unflatten(0, (-1, SEQUENCES))
        every = max(1, STEPS[model] // EVALUATIONS)
        curve, losses = [], []
        held_out = {0: self._held_out(body, first, prepared["held_out"], seen)}
        began = time.monotonic()
        for step, ids in enumerate(batches):
            loss = head.loss(body(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            rate = RATES[model][kind] * min(1.0, (step + 1) / WARM_UP)
            future = head.step(rate)
            masters.step(rate)
            if future:
                future.result()
            losses.append(loss.detach())
            if len(losses) == POINT or step + 1 == len(batches):
                curve.append((step + 1, float(torch.stack(losses).mean())))
                losses = []
            if (step + 1) % every == 0:
                held_out[step + 1] = self._held_out(body, head.weight(), prepared["held_out"], seen)
        seconds = time.monotonic() - began
        change = (head.weight() - first.float()).norm(dim=1)
        head.close()
        arrays = {"change": change, "rare": (seen > 0) & (seen < RARE), "unseen": seen == 0}
        np.savez_compressed(self._rows / f"{key}.npz", **{part: array.cpu().numpy() for part, array in arrays.items()})
        peak = torch.cuda.max_memory_allocated() / 2**20 if self._device != "cpu" else 0.0
        return {"curve": curve, "held_out": held_out, "seconds": seconds, "trainer_peak_mib": peak}

    @torch.no_grad()
    def _held_out(self, body: Any, weight: torch.Tensor, batches: torch.Tensor, seen: torch.Tensor) -> dict[str, float]:
        """Mean losses of the held-out text: all targets, and those that training sees rarely or seldom. Alike for all ways."""
        weight = weight.to(self._dtype)
        found = [
            F.cross_entropy(F.linear(body(ids[:, :-1]).flatten(0, 1), weight).float(), ids[:, 1:].flatten(), reduction="none")
            for ids in batches
        ]
        losses, times = torch.cat(found), seen[batches[..., 1:].flatten()]
        parts = {"all": times >= 0, "rare": (times > 0) & (times < RARE), "seldom": (times >= RARE) & (times <= SELDOM)}
        return {part: float(losses[mask].mean()) for part, mask in parts.items() if mask.any()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", nargs=2, metavar=("MODEL", "FILE"))
    parser.add_argument("--gguf", type=pathlib.Path)
    parser.add_argument("--address", default="")
    parser.add_argument("--prepared", type=pathlib.Path, help="folder of the prepared models, MODEL.pt")
    parser.add_argument("--rows", type=pathlib.Path, help="folder for the norms of rows' changes")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.prepare:
        model, path = options.prepare
        torch.save(prepare(model, options.gguf), path)
        return
    answers, sys.stdout = sys.stdout, sys.stderr
    trainer = Trainer(options.address, options.device, options.prepared, options.rows)
    for line in sys.stdin:
        try:
            result = trainer.run(line.strip())
        except Exception as error:  # the next run may still succeed
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {error}"[:1500]}
        answers.write(json.dumps(result) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
