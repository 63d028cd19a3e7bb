"""The text that the quickstart trains on, its tokens, and the order in which they are seen.

The text is real and on every machine that runs this: the sources of Python's own standard library, in the order of their names.
Nothing is fetched. The order of the batches is fixed by a seed: every run on one machine sees the same rows in the same order.
"""

import collections
import re
import sysconfig
from pathlib import Path

import numpy as np
import torch

VOCAB_SIZE = 4096
CONTEXT = 64  # tokens of one sequence
TEXT_BYTES = 2_000_000
HELD_OUT_EVERY = 10  # of ten files one is held out

# The pieces that can become tokens: a word with the space before it, a digit, a run of signs, a run of white space.
PIECE = re.compile(r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s+")


def read_text() -> tuple[str, str]:
    """The training text and the held-out text."""
    texts: tuple[list[str], list[str]] = ([], [])
    total = 0
    for index, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        text = path.read_text(encoding="utf-8", errors="replace")
        texts[index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(text)
        total += len(text)
        if total >= TEXT_BYTES:
            break
    return "".join(texts[0]), "".join(texts[1])


class Tokenizer:
    """Tokens are the 256 bytes and the pieces that save most of them in the text given; any text can be written in them."""

    def __init__(self, text: str) -> None:
        counts = collections.Counter(PIECE.findall(text))
        # Ties are broken by the piece itself, so that the same text gives the same vocabulary everywhere.
        savings = sorted(((len(piece.encode()) - 1) * count, piece) for piece, count in counts.items() if len(piece.encode()) > 1)
        chosen = [piece for _, piece in savings[: -(VOCAB_SIZE - 256) - 1 : -1]]
        self._ids = {piece: 256 + index for index, piece in enumerate(chosen)}

    def encode(self, text: str) -> np.ndarray:
        """int32 ids in [0, VOCAB_SIZE)."""
        ids: list[int] = []
        for piece in PIECE.findall(text):
            token = self._ids.get(piece)
            if token is None:
                ids.extend(piece.encode())
            else:
                ids.append(token)
        return np.array(ids, dtype=np.int32)


def prepare(folder: Path) -> dict[str, int]:
    """Writes train.npy and held_out.npy, int32 [sequences, CONTEXT + 1], to `folder`; returns the counts of both."""
    training_text, held_out_text = read_text()
    tokenizer = Tokenizer(training_text)
    sizes = {"text_bytes": len(training_text.encode()) + len(held_out_text.encode()), "vocab_size": VOCAB_SIZE}
    for name, text in (("train", training_text), ("held_out", held_out_text)):
        ids = tokenizer.encode(text)
        count = (len(ids) - 1) // CONTEXT
        starts = CONTEXT * np.arange(count)[:, None]
        np.save(folder / f"{name}.npy", ids[starts + np.arange(CONTEXT + 1)])
        sizes[f"{name}_tokens"] = count * CONTEXT
    return sizes


class Batches:
    """Rows of a prepared file, `sequences` at a time."""

    def __init__(self, folder: Path, name: str, sequences: int, seed: int = 0) -> None:
        # Mapped, not read: the trainer's memory is measured.
        self._rows = np.load(folder / f"{name}.npy", mmap_mode="r")
        self._order = np.random.default_rng(seed).permutation(len(self._rows))
        self._sequences = sequences

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch `index`: int64 inputs [sequences, CONTEXT] and int64 targets [sequences * CONTEXT]; starts over at the end."""
        picks = self._order[(index * self._sequences + np.arange(self._sequences)) % len(self._order)]
        rows = torch.from_numpy(self._rows[np.sort(picks)].astype(np.int64))
        return rows[:, :-1], rows[:, 1:].reshape(-1)
