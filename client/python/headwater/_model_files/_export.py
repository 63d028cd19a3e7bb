"""Writes a head's weights into the model that they came from: a torch module, a safetensors file, a save_pretrained folder."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._errors import make_error, refused
from headwater._model_files import _safetensors
from headwater._model_files._files import replace_file
from headwater._types import HeadSpec

DEFAULT_TENSOR = "lm_head.weight"
# Last parts of the names that models give their output layer and their input embedding.
_HEAD_NAMES = (
    DEFAULT_TENSOR,
    "embed_out.weight",
    "output.weight",
    "output_layer.weight",
    "proj_out.weight",
    "codec_head.weight",
    "ff_out.weight",
    "head.weight",
)
_EMBEDDING_NAMES = (
    "embed_tokens.weight",
    "tok_embeddings.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "embeddings.weight",
    "embedding.weight",
    "wte.weight",
)
_INDEX, _SINGLE, _CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
_TIE = "tie_word_embeddings"


class Head(Protocol):
    """The parts of a `headwater.Head` that are written."""

    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> HeadSpec: ...
    def weight(self, *, dtype: Any, timeout_s: float | None) -> Any: ...
    def bias(self, *, dtype: Any, timeout_s: float | None) -> Any: ...


# Downloads "weight" or "bias" as elements of a type.
_Download = Callable[[str, str], HostArray]


def export(head: Head, target: Any, tensor: str, dtype: Any, untie: bool, timeout_s: float | None) -> None:
    """See `Head.export`."""

    def download(which: str, data_type: str) -> HostArray:
        # The master weights where they are rounded here.
        wanted = data_type if data_type == head.spec.data_type else _arrays.FLOAT32
        values = (head.weight if which == "weight" else head.bias)(dtype=wanted, timeout_s=timeout_s)
        array: HostArray = _arrays.from_any(values, which)
        _arrays.check_fits(array, data_type, which)
        return array if array.data_type == data_type else _arrays.rounded(array.data, data_type)

    is_tied = getattr(head, "tied", None) is not None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(target, torch.nn.Module):
        if tensor or dtype is not None:
            raise refused("a module has its own tensors and dtype: leave tensor= and dtype= out", "target")
        _into_module(head, target, is_tied, untie, download)
        return
    if not isinstance(target, (str, os.PathLike)):
        raise refused(f"target must be a path or a torch.nn.Module, got {type(target).__name__}", "target")
    data_type = None if dtype is None else _arrays.data_type_name(dtype)
    path = Path(target)
    if path.is_dir() or path.exists():
        _into_files(head, ModelFiles(path), is_tied, tensor, data_type, untie, download)
    elif path.suffix == ".safetensors":
        kind = data_type or head.spec.data_type
        arrays = {tensor or DEFAULT_TENSOR: download("weight", kind)}
        if head.spec.has_bias:
            arrays[_bias_of(tensor or DEFAULT_TENSOR)] = download("bias", kind)
        replace_file(path, lambda file: _safetensors.rewrite(None, arrays, file))
    else:
        raise make_error(
            "NOT_FOUND",
            "WEIGHTS_NOT_FOUND",
            f"{path} is not there; pass a folder that save_pretrained has written, or the path of a .safetensors file",
            {"path": str(path)},
        )


def _bias_of(weight_name: str) -> str:
    return weight_name.removesuffix("weight") + "bias"


def _check_bias(head: Head, there: bool, where: str) -> None:
    if head.spec.has_bias and not there:
        raise refused(f"{head.name} has a bias, {where} has none: the model would compute other logits", "target")
    if there and not head.spec.has_bias:
        raise refused(f"{where} has a bias, {head.name} has none: the model would compute other logits", "target")


_TIED = (
    'is also its input embedding, and the head was trained apart from that; attach it with tied="trainer" or tied="server", or '
    f"pass untie=True, which gives the head a tensor of its own and sets {_TIE} to false"
)


# ---- a module -----------------------------------------------------------------------------------------------------------


def _into_module(head: Head, module: Any, is_tied: bool, untie: bool, download: _Download) -> None:
    import torch

    from headwater._model_files._torch_modules import embedding_of, output_layer

    holder = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else module
    if holder is None:
        raise refused(f"{type(module).__name__} has no output layer", "target")
    layer = output_layer(holder)
    _arrays.check_shape(tuple(layer.weight.shape), (head.spec.vocab_size, head.spec.hidden_size), "target's weight")
    _check_bias(head, layer.bias is not None, type(holder).__name__)
    if not is_tied and embedding_of(layer.weight) is not None:
        if not untie:
            raise refused(f"the weight of the model's output layer {_TIED}", "untie")
        holder.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
        if getattr(module, "config", None) is not None:
            setattr(module.config, _TIE, False)
    for which, parameter in (("weight", holder.weight), ("bias", holder.bias)):
        if parameter is not None:
            array = download(which, _arrays.data_type_name(parameter.dtype))
            with torch.no_grad():
                parameter.copy_(_arrays.to_torch(array))


# ---- files --------------------------------------------------------------------------------------------------------------


class ModelFiles:
    """The safetensors files of a model, or one of them.

    Attributes:
        folder: where they lie.
        config: content of config.json; None without one, or for one file.
        index: content of the index; None without one.
        entries: by tensor, its file and its entry in that file's header.
    """

    def __init__(self, path: Path):
        self.folder = path if path.is_dir() else path.parent
        self.config = self.index = None
        names = [path.name]
        if path.is_dir():
            self.config = _read_json(path / _CONFIG)
            # As from_pretrained looks for them: an index beside a whole file is left over.
            self.index = None if (path / _SINGLE).exists() else _read_json(path / _INDEX)
            names = [_SINGLE] if self.index is None else sorted(set(_weight_map(self.index, path).values()))
        files = [self.folder / name for name in names]
        self.entries: dict[str, tuple[Path, dict[str, Any]]] = {}
        for file in files:
            if not file.exists():
                raise make_error(
                    "NOT_FOUND",
                    "WEIGHTS_NOT_FOUND",
                    f"{file} is not there: expected {_SINGLE}, or {_INDEX} and its files, as save_pretrained writes them",
                    {"path": str(file)},
                )
            self.entries.update((name, (file, entry)) for name, entry in _safetensors.contents_of(file).tensors.items())
        if not self.entries:
            raise refused(f"{path} has no tensors", "target")

    def fitting(self, names: Iterable[str], shape: tuple[int, ...]) -> list[str]:
        """Tensors of this shape that have one of these names, under any prefix."""
        return [
            name
            for name, (_, entry) in self.entries.items()
            if tuple(entry["shape"]) == shape and any(name == known or name.endswith(f".{known}") for known in names)
        ]

    def of_shape(self, shape: tuple[int, ...]) -> str:
        """For messages: all tensors of this shape."""
        names = [name for name, (_, entry) in self.entries.items() if tuple(entry["shape"]) == shape]
        return ", ".join(names) or "none"


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise make_error("DATA_LOSS", "FILE_CORRUPT", f"{path} is not a JSON object", {"file": str(path)})
    return content


def _weight_map(index: dict[str, Any], folder: Path) -> dict[str, str]:
    """By tensor, its file in the index's folder."""
    names = index.get("weight_map")
    if not isinstance(names, dict) or any(not isinstance(name, str) or Path(name).name != name for name in names.values()):
        raise make_error("DATA_LOSS", "FILE_CORRUPT", f"the weight_map of {folder / _INDEX} names no files of the folder")
    return names


def _says_tied(config: dict[str, Any] | None) -> bool | None:
    """Whether the configuration says that the head is tied; None if it does not say."""
    if config is None:
        return None
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return next((bool(part[_TIE]) for part in parts if _TIE in part), None)


def _into_files(
    head: Head, files: ModelFiles, is_tied: bool, tensor: str, data_type: str | None, untie: bool, download: _Download
) -> None:
    shape = (head.spec.vocab_size, head.spec.hidden_size)
    found = [DEFAULT_TENSOR] if DEFAULT_TENSOR in files.entries else files.fitting(_HEAD_NAMES, shape)
    # A tensor by name is one that is there, or one to add to a model that was saved without its head.
    heads = [tensor] if tensor and (tensor in files.entries or not found) else [] if tensor else found
    says = _says_tied(files.config)
    # A configuration that says nothing stands for the model's own default: where no head was saved, there is none.
    ties = not tensor and (bool(says) or (says is None and files.config is not None and not heads))
    if ties and not is_tied and not untie:
        raise refused(f"the output layer of the model in {files.folder} {_TIED}", "untie")
    if ties and untie:
        heads = heads or [DEFAULT_TENSOR]
    embeddings = files.fitting(_EMBEDDING_NAMES, shape) if ties and not untie else []
    places = heads + embeddings
    if len(heads) > 1 or len(embeddings) != (ties and not untie) or not places:
        what = f"{', '.join(places)} can all" if len(places) > 1 else "no tensor can"
        raise make_error(
            "NOT_FOUND",
            "WEIGHTS_NOT_FOUND",
            f"{what} be the head of {files.folder}; pass tensor= with the name of one of shape {list(shape)}, or of one to add "
            f"where the model was saved without its head. Those of that shape: {files.of_shape(shape)}",
            {"expected": str(list(shape))},
        )
    bias = _bias_of(heads[0] if heads else DEFAULT_TENSOR)
    is_new = bool(heads) and heads[0] not in files.entries
    if bias in files.entries or not is_new:
        _check_bias(head, bias in files.entries, str(files.folder))
    writes = dict.fromkeys(places, "weight")
    if head.spec.has_bias:
        writes[bias] = "bias"
    _write(head, files, writes, data_type, download)
    if untie and files.config is not None:
        text = json.dumps(_untied(files.config), indent=2) + "\n"
        replace_file(files.folder / _CONFIG, lambda file: file.write(text.encode()))


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    parts = {key: {**part, _TIE: False} if isinstance(part, dict) and _TIE in part else part for key, part in config.items()}
    return {**parts, _TIE: False}


def _write(head: Head, files: ModelFiles, writes: dict[str, str], data_type: str | None, download: _Download) -> None:
    """Writes tensors by name, file by file; each file is the old one or the new one, whatever happens."""
    by_file: dict[Path, dict[str, HostArray]] = {}
    downloaded: dict[tuple[str, str], HostArray] = {}
    last = next(reversed(files.entries.values()))[0]  # where a new tensor goes
    for name, which in writes.items():
        file, entry = files.entries.get(name, (last, None))
        stored = head.spec.data_type if entry is None else _safetensors.DATA_TYPES.get(entry["dtype"])
        kind = data_type or stored
        if kind is None:
            raise refused(f"{name} in {file} is {entry and entry['dtype']}, which is no type of a head; pass dtype=", "dtype")
        if entry is not None:
            _arrays.check_shape(
                tuple(entry["shape"]), (head.spec.vocab_size, head.spec.hidden_size)[: 1 + (which == "weight")], name
            )
        if (which, kind) not in downloaded:
            downloaded[which, kind] = download(which, kind)
        by_file.setdefault(file, {})[name] = downloaded[which, kind]
    for file, arrays in by_file.items():
        replace_file(file, functools.partial(_safetensors.rewrite, file, arrays))
    if files.index is not None:
        added = {name: file.name for file, arrays in by_file.items() for name in arrays if name not in files.entries}
        if added:
            index = {**files.index, "weight_map": {**files.index["weight_map"], **added}}
            replace_file(files.folder / _INDEX, lambda file: file.write((json.dumps(index, indent=2) + "\n").encode()))
