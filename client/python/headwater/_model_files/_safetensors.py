"""Reading, writing and rewriting safetensors files. Format: 8 bytes of header length, a JSON header, the tensors' bytes."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._errors import make_error

# The names of the heads' types in files.
NAMES = {_arrays.FLOAT32: "F32", _arrays.BFLOAT16: "BF16", _arrays.FLOAT16: "F16"}
DATA_TYPES = {name: data_type for data_type, name in NAMES.items()}
# How elements are held in memory, by the file's names: bfloat16 as its bits.
_ELEMENTS = {"F32": "<f4", "BF16": "<u2", "F16": "<f2", "I32": "<i4", "I64": "<i8"}

# Longer headers are refused before memory is taken for them.
MAX_HEADER_BYTES = 100 << 20
# Bytes that are copied from file to file at a time.
_PIECE_BYTES = 1 << 24
_METADATA = "__metadata__"


def rewrite(old: Path | None, tensors: dict[str, HostArray], new: BinaryIO) -> None:
    """Writes the other tensors and the metadata of the file `old`, with these tensors in it. `old` stays; None: nothing."""
    with contextlib.ExitStack() as stack:
        header: dict[str, Any] = {}
        if old is not None:
            source = stack.enter_context(old.open("rb"))
            header, start = _read_header(source, old, old.stat().st_size)
        metadata = header.pop(_METADATA, None)
        described = {}
        for name in {**header, **tensors}:
            if name in tensors:
                described[name] = NAMES[tensors[name].data_type], list(tensors[name].shape), tensors[name].data.nbytes
            else:
                begin, end = header[name]["data_offsets"]
                described[name] = header[name]["dtype"], header[name]["shape"], end - begin
        _write_header(described, metadata, new)
        for name in described:
            if name in tensors:
                new.write(tensors[name].byte_view())
                continue
            begin, end = header[name]["data_offsets"]
            source.seek(start + begin)
            while begin < end:
                piece = source.read(min(end - begin, _PIECE_BYTES))
                if not piece:
                    raise _corrupt(old, "it ends early")
                new.write(piece)
                begin += len(piece)


def _write_header(tensors: Mapping[str, tuple[str, list[int], int]], metadata: Any, file: BinaryIO) -> None:
    """`tensors`: by name, in the order in which they follow, the type, the shape and the number of bytes."""
    entries = {} if metadata is None else {_METADATA: metadata}
    offset = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    encoded = json.dumps(entries).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(struct.pack("<Q", len(encoded)))
    file.write(encoded)


def write(file: BinaryIO, tensors: Mapping[str, tuple[str, list[np.ndarray]]], metadata: Mapping[str, str]) -> None:
    """Writes a new file.

    Args:
        tensors: by name, the type as the file calls it ("BF16", "I64", ...) and C-contiguous pieces that are joined along the first
            dimension.
        metadata: fields of the header beside the tensors.
    """
    described = {
        name: (dtype, [sum(map(len, pieces)), *pieces[0].shape[1:]], sum(piece.nbytes for piece in pieces))
        for name, (dtype, pieces) in tensors.items()
    }
    _write_header(described, dict(metadata), file)
    for _, pieces in tensors.values():
        for piece in pieces:
            file.write(memoryview(piece.reshape(-1).view(np.uint8)))


@dataclass(frozen=True)
class Contents:
    """The content of a file's header. Tensors are read when they are asked for."""

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, Mapping[str, Any]]  # each with `dtype`, `shape` and `data_offsets`
    start: int  # of the tensors' bytes in the file

    def array(self, name: str) -> tuple[str, np.ndarray]:
        """A tensor's type as the file calls it, and its elements: a read-only view of the file.

        Raises:
            DataLossError: `FILE_CORRUPT`: no such tensor, another type than this package reads, or bytes that are not there.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise _corrupt(self.path, f"it has no tensor {name}")
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
            elements = np.dtype(_ELEMENTS[dtype])
        except (KeyError, TypeError, ValueError):
            raise _corrupt(self.path, f"its tensor {name} is {entry}") from None
        # Python's integers do not overflow.
        count = 1
        for size in shape:
            count *= size
        if not 0 <= begin <= end <= self.path.stat().st_size - self.start or min(shape, default=0) < 0:
            raise _corrupt(self.path, f"the bytes of {name} are not in it")
        if end - begin != count * elements.itemsize:
            raise _corrupt(self.path, f"{name} has {end - begin} bytes, which are not {shape} of {dtype}")
        if count == 0:
            return dtype, np.zeros(shape, elements)
        return dtype, np.memmap(self.path, elements, "r", self.start + begin, shape)


def contents_of(path: Path) -> Contents:
    """A file's tensors and metadata.

    Raises:
        DataLossError: `FILE_CORRUPT`.
    """
    with path.open("rb") as file:
        header, start = _read_header(file, path, path.stat().st_size)
    metadata = header.pop(_METADATA, None) or {}
    if not all(isinstance(entry, dict) for entry in (metadata, *header.values())):
        raise _corrupt(path, "its header has entries that are not objects")
    return Contents(path, metadata, header, start)


def _corrupt(path: Path, why: str) -> Exception:
    return make_error("DATA_LOSS", "FILE_CORRUPT", f"{path.name} is not a safetensors file: {why}", {"file": path.name})


def _read_header(file: BinaryIO, path: Path, file_bytes: int) -> tuple[dict[str, dict], int]:
    prefix = file.read(8)
    if len(prefix) != 8:
        raise _corrupt(path, "it is shorter than its length field")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise _corrupt(path, f"its header would have {length} bytes")
    try:
        header = json.loads(file.read(length))
    except ValueError:
        raise _corrupt(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is not an object")
    return header, 8 + length
