"""Rewriting safetensors files. Format: 8 bytes of header length, a JSON header, the tensors' bytes."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._errors import make_error

_NAMES = {_arrays.FLOAT32: "F32", _arrays.BFLOAT16: "BF16", _arrays.FLOAT16: "F16"}
_DATA_TYPES = {name: data_type for data_type, name in _NAMES.items()}

# Longer headers are refused before memory is taken for them.
MAX_HEADER_BYTES = 100 << 20
# Bytes that are copied from file to file at a time.
_PIECE_BYTES = 1 << 24
_METADATA = "__metadata__"


def rewrite(old: Path | None, tensors: dict[str, HostArray], new: BinaryIO) -> None:
    """Writes what the file `old` has, its other tensors and its metadata, with these tensors in it. `old` stays; None: nothing."""
    with contextlib.ExitStack() as stack:
        header: dict[str, Any] = {}
        if old is not None:
            source = stack.enter_context(old.open("rb"))
            header, start = _read_header(source, old, old.stat().st_size)
        metadata = header.pop(_METADATA, None)
        entries = {} if metadata is None else {_METADATA: metadata}
        offset = 0
        for name in {**header, **tensors}:
            if name in tensors:
                dtype, shape, nbytes = _NAMES[tensors[name].data_type], list(tensors[name].shape), tensors[name].data.nbytes
            else:
                begin, end = header[name]["data_offsets"]
                dtype, shape, nbytes = header[name]["dtype"], header[name]["shape"], end - begin
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
        encoded = json.dumps(entries).encode()
        encoded += b" " * (-len(encoded) % 8)
        new.write(struct.pack("<Q", len(encoded)))
        new.write(encoded)
        for name in {**header, **tensors}:
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


def header_of(path: Path) -> dict[str, dict[str, Any]]:
    """A file's tensors by name, each with `dtype`, `shape` and `data_offsets`."""
    with path.open("rb") as file:
        header = _read_header(file, path, path.stat().st_size)[0]
    header.pop(_METADATA, None)
    return header


def data_type_of(name: str) -> str | None:
    """The type of a head that a file calls so; None for any other."""
    return _DATA_TYPES.get(name)


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
