"""A Llama-style model without its head, and real text for it: what the benchmarks train."""

from __future__ import annotations

import collections
import contextlib
import itertools
import pathlib
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; the defaults are those of a model of 1.5 billion parameters with an untied head."""

    hidden: int = 2048
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    feed_forward: int = 8192
    vocab: int = 128256
    context: int = 2048
    rope_theta: float = 500000.0


TINY = Shape(hidden=32, layers=2, heads=4, kv_heads=2, feed_forward=64, vocab=512, context=32)


class Norm(nn.Module):
    """Root mean square norm, in fp32."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(F, "rms_norm"):
            return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def rotary_tables(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rotary embeddings, (context, head size)."""
    size = shape.hidden // shape.heads
    frequencies = shape.rope_theta ** (-torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(shape.context).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (batch, heads, length, head size)."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention; by hand where PyTorch is older than its fused form."""
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    length = query.shape[-2]
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    mask = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    return torch.softmax(scores.masked_fill(mask, float("-inf")).float(), dim=-1).to(value.dtype) @ value


class Block(nn.Module):
    """Attention with shared keys and values, and a gated feed-forward part."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads, self.kv_heads, self.size = shape.heads, shape.kv_heads, shape.hidden // shape.heads
        self.attention_norm, self.feed_forward_norm = Norm(shape.hidden), Norm(shape.hidden)
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.key_value = nn.Linear(shape.hidden, 2 * shape.kv_heads * self.size, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        query = self.query(normed).view(batch, length, self.heads, self.size).transpose(1, 2)
        key, value = self.key_value(normed).view(batch, length, 2 * self.kv_heads, self.size).transpose(1, 2).chunk(2, dim=1)
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        repeats = self.heads // self.kv_heads
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        x = x + self.out(attend(query, key, value).transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Body(nn.Module):
    """Everything of the model below its head: tokens (batch, length) to hidden states (batch, length, hidden)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)
        cosines, sines = rotary_tables(shape)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosines[:length], self.sines[:length])
        return self.norm(x)


def make_body(shape: Shape, device: str, dtype: torch.dtype) -> Body:
    """A body of random weights, the same ones each time."""
    torch.manual_seed(1)
    # Made where it will be, if this PyTorch can: a CPU takes a while to draw a billion values.
    place = torch.device(device) if hasattr(torch.device, "__enter__") else contextlib.nullcontext()
    with torch.no_grad():
        with place:
            body = Body(shape)
        body = body.to(device=device, dtype=dtype)
        for parameter in body.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
    return body


def make_head_weight(shape: Shape, device: str, dtype: torch.dtype, number: int = 0) -> torch.Tensor:
    """The weight of a head, (vocab, hidden), the same values each time on one kind of device."""
    generator = torch.Generator(device).manual_seed(2 + number)
    return torch.empty(shape.vocab, shape.hidden, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)


# ---- text ------------------------------------------------------------------------------------------------------------------------

ROOT = pathlib.Path(__file__).resolve().parents[3]
FOLDERS = ("client", "docs", "kernels", "server", "tests")  # of this project, whose texts are read
_WORD = re.compile(r"[A-Za-z_]+|[0-9]|[ \t]+|\n+|[^A-Za-z_0-9\s]")
_BYTES = 256  # ids of single bytes, for words that have none


def read_texts(most_characters: int, packages: bool = False) -> tuple[str, str]:
    """(training text, held-out text): every tenth file is held out. They are this project's and those of Python's standard library,
    with `packages` also those of the packages that are installed here."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [path for name in FOLDERS for kind in ("md", "cc", "h", "py") for path in (ROOT / name).glob(f"**/*.{kind}")]
    files += [*library.glob("*.py"), *library.glob("*/*.py")]
    files = [path for path in files if not {"site-packages", "dist-packages", "test"} & set(path.parts)]
    if packages:
        files += pathlib.Path(sysconfig.get_paths()["purelib"]).glob("**/*.py")
    files.sort()
    random.Random(0).shuffle(files)
    parts: tuple[list[str], list[str]] = ([], [])
    size = 0
    for number, path in enumerate(files):
        parts[number % 10 == 0].append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(parts[number % 10 == 0][-1])
        if size >= most_characters:
            break
    return "\n\n".join(parts[0]), "\n\n".join(parts[1])


def tokenize(text: str, vocab: int, known_from: str | None = None) -> torch.Tensor:
    """Ids of words, runs of white space, digits and signs, the more frequent in `known_from` (default: the text) the smaller; other
    words as their bytes."""
    words = _WORD.findall(text)
    counted = words if known_from is None else _WORD.findall(known_from)
    known = collections.Counter(counted).most_common(vocab - _BYTES)
    ids = {word: [_BYTES + place] for place, (word, _) in enumerate(known)}
    return torch.tensor([token for word in words for token in ids.get(word) or word.encode()], dtype=torch.int64)


def sequences_of(tokens: torch.Tensor, context: int) -> torch.Tensor:
    """Sequences of a text, (count, context + 1): the last token of each is the first of the next."""
    return tokens.unfold(0, context + 1, context)


def batches(sequences: torch.Tensor, size: int, start: int = 0, stride: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets, (size, context), without end; `stride` (default: size) sequences on each time, from `start` on."""
    for first in itertools.count(start, stride or size):
        ids = sequences[(torch.arange(size) + first) % len(sequences)]
        yield ids[:, :-1], ids[:, 1:]
