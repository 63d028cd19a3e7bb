"""The runs of the training benchmark, in processes of `run`.

A run's name is MODEL/OPTIMIZER/WAY/SEED. Every way trains the body alike: weights in bf16 (fp32 on the CPU) with fp32 masters, the
same optimizer, first weights and text. The seed decides the order of the text, and is part of the head's name, which the draws of a
dithered gradient depend on. The text is used once, so that all seeds see the same targets equally often.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from typing import Any

import language_model
import numpy as np
import torch
import torch.nn.functional as F
import trainers

import headwater

SHAPES = {
    "scratch": language_model.Shape(512, 8, 8, 4, 2048, 32768, 256),
    "tiny": dataclasses.replace(language_model.TINY, vocab=2048),
}
SEQUENCES = {"smollm2": 4, "smollm2_8k": 32, "scratch": 4, "tiny": 4}  # of a micro-batch, which is a step
STEPS = {"smollm2": 1000, "smollm2_8k": 1000, "scratch": 1000, "tiny": 5}
HELD_OUT = {"smollm2": 128, "smollm2_8k": 16, "scratch": 128, "tiny": 4}  # micro-batches
EVALUATIONS = 4  # over a run, besides the one before it
RATES = {
    "smollm2": {"adamw": 2e-4, "sgd": 3e-4},
    "smollm2_8k": {"adamw": 2e-4, "sgd": 3e-4},
    "scratch": {"adamw": 1e-3, "sgd": 0.03},
    "tiny": {"adamw": 1e-3, "sgd": 0.1},
}
WARM_UP = 50  # steps, of a linear rise; the rate is constant afterwards
BETAS, EPSILON, MOMENTUM = (0.9, 0.95), 1e-8, 0.9  # no weight decay: a row's change is that of its gradients alone
POINT = 10  # steps of a point of the curve
RARE, SELDOM = 5, 50  # an id is rare if it is a target at least once and fewer than RARE times; seldom up to SELDOM times


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


def tokens_of(text: str, tokenizer: Any) -> torch.Tensor:
    """Ids of a text, whose pieces are tokenized at the same time."""
    pieces = [text[start : start + 100_000] for start in range(0, len(text), 100_000)]
    return torch.cat([torch.tensor(ids) for ids in tokenizer(pieces, add_special_tokens=False)["input_ids"]])


def prepare(name: str, file: str, gguf: str) -> None:
    """Writes a model's shape, first weights, and micro-batches of ids (count, sequences, context + 1): `train` has a run's."""
    if name.startswith("smollm2"):
        shape, body, tokenizer = smollm2(pathlib.Path(gguf))
        head = body["embedding.weight"].clone()
        is_long = name == "smollm2_8k"
        texts = language_model.read_texts(48_000_000 if is_long else 8_000_000, packages=is_long)
        ids = [tokens_of(text, tokenizer) for text in texts]
    else:
        shape = SHAPES[name]
        body = language_model.make_body(shape, "cpu", torch.float32).state_dict()
        head = language_model.make_head_weight(shape, "cpu", torch.float32)
        texts = language_model.read_texts(200_000 if name == "tiny" else 8_000_000)
        ids = [language_model.tokenize(text, shape.vocab, texts[0]) for text in texts]
    prepared = {"shape": dataclasses.asdict(shape), "body": body, "head": head}
    counts = {"train": STEPS[name] * SEQUENCES[name], "held_out": HELD_OUT[name] * SEQUENCES[name]}
    for tokens, (split, count) in zip(ids, counts.items(), strict=True):
        sequences = language_model.sequences_of(tokens, shape.context)[:count].clone()
        if len(sequences) < count:
            raise ValueError(f"{name}: the text has {len(sequences)} sequences, {count} are needed")
        prepared[split] = sequences.unflatten(0, (-1, SEQUENCES[name]))
    torch.save(prepared, file)


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
        self.parameters = parameters
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
        copy_all([master.grad for master in self.masters], [parameter.grad for parameter in self.parameters])
        self._optimizer.step()
        copy_all(self.parameters, self.masters)
        for parameter in self.parameters:
            parameter.grad = None


class LocalHead(trainers.LocalHead):
    """The weight is the trainer's. Its gradient has the weight's 16 bits, where a server adds in fp32; the masters are alike."""

    def __init__(self, way: str, weight: torch.Tensor, kind: str):
        super().__init__("eager" if way == "torch" else way, weight)
        self._masters = Masters([self.weight], kind)

    def step(self, rate: float) -> None:
        self._masters.step(rate)

    def master_weight(self) -> torch.Tensor:
        return self._masters.masters[0].detach()


class RemoteHead(trainers.RemoteHead):
    """The weight and its optimizer are a server's. `way` is exact, or tau_N for a gradient resolution of 2**-N."""

    def __init__(self, address: str, name: str, way: str, weight: torch.Tensor, kind: str):
        optimizer = headwater.AdamW(*BETAS, EPSILON, 0.0) if kind == "adamw" else headwater.SGD(momentum=MOMENTUM)
        tau = 0.0 if way == "exact" else 2.0 ** -int(way.partition("_")[2])
        # A loss alone has the gradient 1: it is declared, so that nothing waits for backward.
        super().__init__(client_of(address), name, weight, optimizer, gradient_resolution=tau, loss_scale=1.0)

    def master_weight(self) -> torch.Tensor:
        return torch.from_numpy(self.head.weight(dtype="float32"))


@functools.cache
def client_of(address: str) -> headwater.Client:
    return headwater.connect(address)


# ---- runs ------------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def load(file: str, device: str) -> tuple[Any, dict[str, Any]]:
    """(body, what prepare() made). On a GPU the body's passes are graphs: its kernels are too small for one process's calls."""
    prepared = torch.load(file)
    shape = language_model.Shape(**prepared["shape"])
    body = language_model.make_body(shape, device, torch.float32 if device == "cpu" else torch.bfloat16)
    if device != "cpu":
        example = torch.zeros(prepared["train"].shape[1], shape.context, dtype=torch.int64, device=device)
        body = torch.cuda.make_graphed_callables(body, (example,))
    for split in ("train", "held_out"):
        prepared[split] = prepared[split].to(device)
    return body, prepared


def train(name: str, address: str, folder: str, rows: str, device: str) -> dict[str, Any]:
    """A run's curve and losses; the norm of each row's change goes to a file in `rows`."""
    model, kind, way, seed = name.split("/")
    body, prepared = load(f"{folder}/{model}.pt", device)
    body.load_state_dict(prepared["body"])
    masters = Masters(list(body.parameters()), kind)
    first = prepared["head"].to(masters.parameters[0])
    key = name.replace("/", "-").replace("_", "-")
    is_local = way in ("torch", "cce")
    head = LocalHead(way, first.clone(), kind) if is_local else RemoteHead(address, key, way, first, kind)
    seen = torch.bincount(prepared["train"][..., 1:].flatten(), minlength=len(first))
    sequences = prepared["train"].flatten(0, 1)
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(int(seed)))
    batches = sequences[order.to(device)].view_as(prepared["train"])
    every = max(1, STEPS[model] // EVALUATIONS)
    curve, losses = [], []
    held_out = {0: held_out_losses(body, first, prepared["held_out"], seen)}
    began = time.monotonic()
    for step, ids in enumerate(batches):
        loss = head(body(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        rate = RATES[model][kind] * min(1.0, (step + 1) / WARM_UP)
        future = head.step(rate=rate)
        masters.step(rate)
        if future:
            future.result()
        losses.append(loss.detach())
        if len(losses) == POINT or step + 1 == len(batches):
            curve.append((step + 1, float(torch.stack(losses).mean())))
            losses = []
        if (step + 1) % every == 0:
            held_out[step + 1] = held_out_losses(body, head.master_weight().to(first), prepared["held_out"], seen)
    seconds = time.monotonic() - began
    change = (head.master_weight().to(device) - first.float()).norm(dim=1)
    if not is_local:
        head.head.delete(force=True)
    arrays = {"change": change, "rare": (seen > 0) & (seen < RARE), "unseen": seen == 0}
    np.savez_compressed(f"{rows}/{key}.npz", **{part: array.cpu().numpy() for part, array in arrays.items()})
    peak = torch.cuda.max_memory_allocated() / trainers.MIB if device != "cpu" else 0.0
    return {"curve": curve, "held_out": held_out, "seconds": seconds, "trainer_peak_mib": peak}


@torch.no_grad()
def held_out_losses(body: Any, weight: torch.Tensor, batches: torch.Tensor, seen: torch.Tensor) -> dict[str, float]:
    """Mean losses of the held-out text: all targets, and those that training sees rarely or seldom. Alike for all ways."""
    found = [
        F.cross_entropy(F.linear(body(ids[:, :-1]).flatten(0, 1), weight).float(), ids[:, 1:].flatten(), reduction="none")
        for ids in batches
    ]
    losses, times = torch.cat(found), seen[batches[..., 1:].flatten()]
    parts = {"all": times >= 0, "rare": (times > 0) & (times < RARE), "seldom": (times >= RARE) & (times <= SELDOM)}
    return {part: float(losses[mask].mean()) for part, mask in parts.items() if mask.any()}
