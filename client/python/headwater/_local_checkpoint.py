"""Checkpoints and weights files of heads in this process.

ROOT/{tenant}/{head}/{checkpoint}/manifest.json        written last; the folder is renamed in when it is complete
ROOT/{tenant}/{head}/{checkpoint}/head.safetensors
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater import _arrays, _safetensors
from headwater._arrays import HostArray
from headwater._engine_library import EngineHead
from headwater._errors import make_error
from headwater._types import SGD, AdamW, CheckpointInfo, HeadSpec

_FORMAT = "headwater.local/1"
_STATE_TENSORS = ("moment1_weight", "moment1_bias", "moment2_weight", "moment2_bias")
_INDEX = "model.safetensors.index.json"
_WEIGHT_NAMES = (
    "lm_head.weight",
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "model.decoder.embed_tokens.weight",
    "weight",
)
# Of one file of several: an embedding there says nothing of whether another one has the head itself.
_PART = re.compile(r"-\d+-of-0*([2-9]|[1-9]\d+)\.safetensors$", re.ASCII)
_PART_WEIGHT_NAMES = ("lm_head.weight", "weight")
_BIAS_NAMES = ("lm_head.bias", "bias")


@dataclass(frozen=True)
class State:
    """What a checkpoint says beside its tensors."""

    spec: HeadSpec
    step: int
    update_count: int


def _folder(root: Path | None, head: str, checkpoint: str) -> Path:
    if root is None:
        raise make_error(
            "FAILED_PRECONDITION", "STORAGE_NOT_CONFIGURED", "pass checkpoint_dir= to headwater.local.connect to use checkpoints"
        )
    _, tenant, _, head_id = head.split("/")
    return root / tenant / head_id / checkpoint


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tensor_names(head: EngineHead) -> list[str]:
    stored = [f"master_{name}" if head.has(f"master_{name}") else name for name in ("weight", "bias") if head.has(name)]
    return stored + [name for name in _STATE_TENSORS if head.has(name)]


def save(root: Path | None, name: str, checkpoint: str, overwrite: bool, state: State, head: EngineHead) -> int:
    """Writes a checkpoint and returns its bytes; it is there as a whole, or not at all."""
    folder = _folder(root, name, checkpoint)
    if folder.exists() and not overwrite:
        raise make_error("ALREADY_EXISTS", "CHECKPOINT_ALREADY_EXISTS", f"{checkpoint} exists", {"checkpoint": checkpoint})
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
    try:
        tensors = {tensor: HostArray(*head.read(tensor), _arrays.to_numpy) for tensor in _tensor_names(head)}
        file = temporary / "head.safetensors"
        _safetensors.write(file, tensors)
        manifest = {
            "format": _FORMAT,
            "spec": _spec_entry(state.spec),
            "step": state.step,
            "update_count": state.update_count,
            "bytes": file.stat().st_size,
            "sha256": _file_digest(file),
        }
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            # A folder cannot replace a filled one in one call: the old one steps aside first.
            aside = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
            os.rename(folder, aside / "old")
            os.rename(temporary, folder)
            shutil.rmtree(aside)
        else:
            os.rename(temporary, folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise make_error("RESOURCE_EXHAUSTED", "DISK_FULL", f"the checkpoint could not be written: {error.strerror}") from error
    return sum(entry.stat().st_size for entry in folder.iterdir())


def list_newest_first(root: Path | None, name: str) -> list[CheckpointInfo]:
    """Every checkpoint of the head; damaged ones last."""
    infos = []
    for manifest in _folder(root, name, ".").glob("[!.]*/manifest.json"):
        folder = manifest.parent
        total_bytes = sum(entry.stat().st_size for entry in folder.iterdir())
        try:
            step = int(json.loads(manifest.read_text(encoding="utf-8"))["step"])
        except (ValueError, KeyError, TypeError):
            infos.append(CheckpointInfo(folder.name, 0, 0, None, True))
        else:
            infos.append(CheckpointInfo(folder.name, step, total_bytes, manifest.stat().st_mtime, False))
    return sorted(infos, key=lambda info: (info.damaged, -(info.save_time_s or 0), info.checkpoint))


def _spec_entry(spec: HeadSpec) -> dict[str, Any]:
    entry = dataclasses.asdict(dataclasses.replace(spec, staging_slots=None, initial_step=0))
    del entry["parallelism"]  # a checkpoint is the same for both
    entry["optimizer_kind"] = {AdamW: "adamw", SGD: "sgd"}.get(type(spec.optimizer))
    return entry


def restore(root: Path | None, name: str, checkpoint: str, spec: HeadSpec, head: EngineHead) -> State:
    """Verifies a checkpoint, then writes its tensors into the head."""
    folder = _folder(root, name, checkpoint)
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        state = State(spec, int(manifest["step"]), int(manifest["update_count"]))
        saved_spec, checksum = manifest["spec"], manifest["sha256"]
    except FileNotFoundError:
        raise make_error(
            "NOT_FOUND", "CHECKPOINT_NOT_FOUND", f"there is no checkpoint {checkpoint}", {"checkpoint": checkpoint}
        ) from None
    except (ValueError, KeyError, TypeError):
        raise make_error(
            "DATA_LOSS", "FILE_CORRUPT", f"the manifest of {checkpoint} is damaged", {"checkpoint": checkpoint}
        ) from None
    if saved_spec != _spec_entry(spec):
        raise make_error(
            "FAILED_PRECONDITION", "CHECKPOINT_SPEC_MISMATCH", f"{checkpoint} was made for another head", {"checkpoint": checkpoint}
        )
    file = folder / "head.safetensors"
    if not file.is_file() or _file_digest(file) != checksum:
        raise make_error(
            "DATA_LOSS", "CHECKSUM_MISMATCH", f"{checkpoint} has changed since it was written", {"checkpoint": checkpoint}
        )
    tensors = {tensor: _safetensors.read(file, tensor) for tensor in _tensor_names(head)}
    for tensor, array in tensors.items():
        head.write(tensor, array.data)
    return state


def load_weights(root: Path | None, path: str, weight_tensor: str, bias_tensor: str, has_bias: bool) -> dict[str, HostArray]:
    """Reads weight and bias from a safetensors file or a Hugging Face folder under `root`."""
    if root is None:
        raise make_error(
            "FAILED_PRECONDITION", "STORAGE_NOT_CONFIGURED", "pass load_root= to headwater.local.connect to load weights"
        )
    if not path or os.path.isabs(path) or ".." in Path(path).parts:
        raise make_error(
            "INVALID_ARGUMENT", "INVALID_FIELD", f"path must be relative, without '..'; got {path!r}", {"field": "path"}
        )
    place = root / path
    usual = _PART_WEIGHT_NAMES if place.is_file() and _PART.search(place.name) else _WEIGHT_NAMES
    arrays = {"weight": _find_tensor(place, path, (weight_tensor,) if weight_tensor else usual)}
    if has_bias:
        arrays["bias"] = _find_tensor(place, path, (bias_tensor,) if bias_tensor else _BIAS_NAMES)
    return arrays


def _find_tensor(place: Path, shown: str, wanted: tuple[str, ...]) -> HostArray:
    if place.is_dir():
        index = place / _INDEX
        if index.is_file():
            try:
                files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError, TypeError):
                raise make_error("DATA_LOSS", "FILE_CORRUPT", f"{_INDEX} of {shown} is damaged", {"file": _INDEX}) from None
            holders = {tensor: place / Path(str(file)).name for tensor, file in files.items()}
        else:
            holders = {tensor: file for file in sorted(place.glob("*.safetensors")) for tensor in _safetensors.names(file)}
    elif place.is_file():
        holders = dict.fromkeys(_safetensors.names(place), place)
    else:
        holders = {}
    for tensor in wanted:
        if tensor not in holders:
            continue
        if not holders[tensor].is_file():
            # Not the next name: that may be an embedding, and this the head that is not tied to it.
            raise make_error(
                "DATA_LOSS",
                "FILE_CORRUPT",
                f"{shown} lacks a file that its index names for {tensor}",
                {"file": holders[tensor].name},
            )
        return _safetensors.read(holders[tensor], tensor)
    raise make_error("NOT_FOUND", "WEIGHTS_NOT_FOUND", f"{shown} has no tensor {' or '.join(wanted)}", {"path": shown})
