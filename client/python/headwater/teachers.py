"""Stored rows of a teacher: hidden states that were computed once, in shards of safetensors.

    with headwater.teachers.Writer("rows", model="Qwen/Qwen3-8B", tokenizer_size=len(tokenizer), final_norm=True) as writer:
        for token_ids in sequences:
            writer.add(token_ids, body(token_ids))       # (tokens, hidden_size): the rows after the final norm

    rows = headwater.teachers.Reader("rows")
    rows.check(teacher_head)                             # the rows are those of this head's model
    loss = jsd_loss(student_rows, rows[0])

A folder has the shards rows-00000.safetensors, rows-00001.safetensors, ... and index.json, which is written last. Each shard has
    rows       (tokens of the shard, hidden_size)   BF16, F16 or F32
    token_ids  (tokens of the shard,)               I32: row i was computed at token i, and predicts the token after it
    lengths    (sequences of the shard,)            I64: tokens of each sequence
and, as metadata, the format, the model, the tokenizer's size, the type, and whether the rows have passed the final norm.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._errors import invalid_argument, make_error, must_be, refused, wrong_shape
from headwater._head import Head
from headwater._loss._requests import check_bool
from headwater._model_files import _safetensors
from headwater._model_files._files import replace_file
from headwater._types import check_integer

__all__ = ["Reader", "Writer"]

FORMAT = "headwater.teacher_rows.1"
_INDEX = "index.json"
_SHARD = "rows-{:05d}.safetensors"
# Bytes of rows after which a shard is written.
_SHARD_BYTES = 1 << 30


class Writer:
    """Writes a folder of stored rows. A context manager; leaving it without an error completes the folder.

    Args:
        folder: made if it is not there. One that has stored rows is refused.
        model: name of the teacher, for people and for `Reader.model`.
        tokenizer_size: number of tokens of the teacher's tokenizer (`len(tokenizer)`), not of the model's padded vocabulary.
        final_norm: whether the rows have passed the model's final norm. A loss needs rows that have; False is for rows from
            elsewhere, which the reader applies the norm to.
        dtype: of the stored rows; others are rounded to nearest. None: that of the first rows.
        shard_bytes: bytes of rows after which a shard is written, >= 1. The rows of one shard are held in memory.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: str,
        tokenizer_size: int,
        final_norm: bool,
        dtype: Any = None,
        shard_bytes: int = _SHARD_BYTES,
    ):
        if not isinstance(model, str):
            raise must_be("model", "a string", type(model))
        self._folder = Path(folder)
        self._model = model
        self._tokenizer_size = check_integer(tokenizer_size, "tokenizer_size", low=1)
        self.final_norm = check_bool(final_norm, "final_norm")
        self._data_type = None if dtype is None else _arrays.data_type_name(dtype)
        self._shard_bytes = check_integer(shard_bytes, "shard_bytes", low=1)
        self._hidden_size: int | None = None
        self._rows: list[np.ndarray] = []
        self._token_ids: list[np.ndarray] = []
        self._shards: list[str] = []
        self._sequences = 0
        self._folder.mkdir(parents=True, exist_ok=True)
        if (self._folder / _INDEX).exists() or any(self._folder.glob("rows-*.safetensors")):
            raise refused(f"{self._folder} has stored rows; take another folder", "folder")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def add(self, token_ids: Any, rows: Any) -> int:
        """Adds a sequence, and returns its number: 0, 1, ...

        Args:
            token_ids: (tokens,) integers in [0, tokenizer_size), the teacher's input.
            rows: (tokens, hidden_size) float32, float16 or bfloat16.
        Raises:
            InvalidArgumentError: shape, dtype or range.
        """
        array = _arrays.from_any(rows, "rows")
        if len(array.shape) != 2 or array.shape[0] == 0 or array.shape[1] != (self._hidden_size or array.shape[1]):
            width = "hidden_size" if self._hidden_size is None else self._hidden_size
            raise wrong_shape("rows", f"(at least one token, {width})", array.shape)
        ids, least, largest = _arrays.int_vector(token_ids, "token_ids", array.shape[0])
        if least < 0 or largest >= self._tokenizer_size:
            raise must_be("token_ids", f"in [0, {self._tokenizer_size})", least if least < 0 else largest)
        if self._data_type is None:
            self._data_type = array.data_type
        if array.data_type != self._data_type:
            array = _arrays.rounded(_arrays.to_float32(array), self._data_type)
        self._hidden_size = array.shape[1]
        # Copies: the caller may use the memory again.
        self._rows.append(array.data.copy())
        self._token_ids.append(ids.copy())
        self._sequences += 1
        if sum(piece.nbytes for piece in self._rows) >= self._shard_bytes:
            self._write_shard()
        return self._sequences - 1

    def close(self) -> None:
        """Writes the remaining rows, and index.json, which makes the folder complete. Idempotent."""
        if (self._folder / _INDEX).exists():
            return
        if self._rows:
            self._write_shard()
        if not self._shards:
            raise invalid_argument("INVALID_FIELD", "no rows were added", field="rows")
        index = {"format": FORMAT, "shards": self._shards, "sequences": self._sequences}
        replace_file(self._folder / _INDEX, lambda file: file.write(json.dumps(index, indent=1).encode()))

    def _write_shard(self) -> None:
        assert self._data_type is not None
        name = _SHARD.format(len(self._shards))
        lengths = np.array([piece.shape[0] for piece in self._rows], np.int64)
        tensors = {
            "rows": (_safetensors.NAMES[self._data_type], self._rows),
            "lengths": ("I64", [lengths]),
            "token_ids": ("I32", self._token_ids),
        }
        metadata = {
            "format": FORMAT,
            "model": self._model,
            "tokenizer_size": str(self._tokenizer_size),
            "final_norm": "applied" if self.final_norm else "not applied",
            "dtype": self._data_type,
        }
        replace_file(self._folder / name, lambda file: _safetensors.write(file, tensors, metadata))
        self._shards.append(name)
        self._rows, self._token_ids = [], []


class Reader:
    """Reads a folder of stored rows: a sequence of arrays, each a view of its file.

    Attributes:
        model, tokenizer_size, hidden_size, final_norm, dtype: as the shards say.

    Args:
        folder: that a `Writer` has completed.
        norm: the teacher's final norm, a torch module or another callable that takes and returns a tensor (tokens, hidden_size).
            Required where the rows have not passed it, refused where they have.
    Raises:
        NotFoundError: no index.json: the folder has no stored rows, or was not completed.
        DataLossError: `FILE_CORRUPT`: a shard is missing, damaged, or of another set.
    """

    def __init__(self, folder: str | os.PathLike[str], *, norm: Callable[[Any], Any] | None = None):
        self._folder = Path(folder)
        index = self._folder / _INDEX
        if not index.exists():
            raise make_error("NOT_FOUND", "WEIGHTS_NOT_FOUND", f"{self._folder} has no {_INDEX}: no complete set of rows", {})
        try:
            described = json.loads(index.read_text())
            format_, names, sequences = described["format"], list(described["shards"]), int(described["sequences"])
        except (ValueError, KeyError, TypeError):
            raise self._corrupt(_INDEX, "is not the index of stored rows") from None
        if format_ != FORMAT:
            raise self._corrupt(_INDEX, f"has the format {format_}, expected {FORMAT}")
        if not names:
            raise self._corrupt(_INDEX, "names no shard")
        self._shards = [self._open(name) for name in names]
        first = self._shards[0]
        for shard in self._shards:
            if shard.metadata != first.metadata:
                raise self._corrupt(shard.path.name, f"says {dict(shard.metadata)}, {first.path.name} {dict(first.metadata)}")
        try:
            self.model = first.metadata["model"]
            self.tokenizer_size = int(first.metadata["tokenizer_size"])
            self.final_norm = {"applied": True, "not applied": False}[first.metadata["final_norm"]]
            self.dtype = _arrays.data_type_name(first.metadata["dtype"])
        except (KeyError, ValueError):
            raise self._corrupt(first.path.name, "does not say what its rows are") from None
        self._offsets = [self._check(shard) for shard in self._shards]
        self._first = list(itertools.accumulate((len(offsets) - 1 for offsets in self._offsets), initial=0))
        if self._first[-1] != sequences:
            raise self._corrupt(_INDEX, f"counts {sequences} sequences, the shards have {self._first[-1]}")
        self.hidden_size = int(first.array("rows")[1].shape[1])
        if norm is None and not self.final_norm:
            raise invalid_argument(
                "MISSING_FIELD", f"the rows in {self._folder} have not passed the model's final norm: pass norm=", field="norm"
            )
        if norm is not None and self.final_norm:
            raise refused(f"the rows in {self._folder} have passed the final norm: leave norm= out", "norm")
        self._norm = norm

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, index: int) -> Any:
        """Rows of a sequence, (tokens, hidden_size), after the final norm.

        Without `norm`, a view of the file: numpy's float32 or float16, bfloat16 as ml_dtypes' if that is imported, else as
        `headwater.BFloat16`. With `norm`, the tensor that it returns.
        """
        shard, begin, end = self._find(index)
        rows = HostArray(self._shards[shard].array("rows")[1][begin:end], self.dtype, _arrays.to_numpy)
        if self._norm is None:
            return _arrays.to_numpy(rows)
        import torch

        with torch.no_grad():
            return self._norm(_arrays.to_torch(rows))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def token_ids(self, index: int) -> np.ndarray:
        """The teacher's input of a sequence, (tokens,) int32."""
        shard, begin, end = self._find(index)
        return self._shards[shard].array("token_ids")[1][begin:end]

    def check(self, head: Head) -> None:
        """Raises InvalidArgumentError unless the rows can go through this head.

        Vocabularies are compared by the tokenizer's size: make the head with `valid_vocab_size=` of the tokenizer, not with the
        model's padded one.
        """
        if head.spec.hidden_size != self.hidden_size:
            raise invalid_argument(
                "SHAPE_MISMATCH",
                f"the rows of {self.model} have {self.hidden_size} numbers each, {head.name} takes {head.spec.hidden_size}",
                field="head",
                expected=head.spec.hidden_size,
                actual=self.hidden_size,
            )
        if head.spec.valid_size != self.tokenizer_size:
            raise invalid_argument(
                "VOCAB_SIZE_MISMATCH",
                f"the tokenizer of {self.model} has {self.tokenizer_size} tokens, {head.name} {head.spec.valid_size} valid "
                f"columns; create the head with valid_vocab_size={self.tokenizer_size}",
                field="head",
                expected=self.tokenizer_size,
                actual=head.spec.valid_size,
            )

    def _corrupt(self, name: str, why: str) -> Exception:
        return make_error("DATA_LOSS", "FILE_CORRUPT", f"{self._folder / name} {why}", {"file": name})

    def _open(self, name: Any) -> _safetensors.Contents:
        if not isinstance(name, str) or Path(name).name != name:
            raise self._corrupt(_INDEX, f"names {name!r}, which is no file of the folder")
        path = self._folder / name
        if not path.is_file():
            raise self._corrupt(name, "is not there")
        return _safetensors.contents_of(path)

    def _check(self, shard: _safetensors.Contents) -> np.ndarray:
        """The first token of each sequence of a shard, and the number of its tokens."""
        dtype, rows = shard.array("rows")
        _, lengths = shard.array("lengths")
        _, ids = shard.array("token_ids")
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        width = self._shards[0].array("rows")[1].shape[1:]
        sound = dtype == _safetensors.NAMES[self.dtype] and rows.ndim == 2 and rows.shape[1:] == width
        if not sound or lengths.ndim != 1 or (lengths < 1).any() or not ids.shape == (offsets[-1],) == rows.shape[:1]:
            raise self._corrupt(shard.path.name, "has rows, lengths and token_ids that do not belong together")
        return offsets

    def _find(self, index: int) -> tuple[int, int, int]:
        """Shard of a sequence, its first token there, and the one after its last."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        index %= len(self)
        shard = bisect.bisect_right(self._first, index) - 1
        begin, end = self._offsets[shard][index - self._first[shard] :][:2]
        return shard, int(begin), int(end)
