"""The final norm of a transformers model, found by the inputs of its output layer, or by its place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._errors import make_error, refused
from headwater._model_files import _safetensors
from headwater._model_files._export import ModelFiles


def final_norm(model: Any) -> torch.nn.Module:
    """The norm between a model's last layer and its output layer: a copy, frozen and on the CPU.

    Args:
        model: a transformers model, or a folder that save_pretrained has written. In a folder, only the norm's weights are read.
    Raises:
        InvalidArgumentError: no such norm was found.
        NotFoundError: `WEIGHTS_NOT_FOUND`: the folder has no weights of it.
    """
    if isinstance(model, torch.nn.Module):
        norm = copy.deepcopy(_by_running(model)).cpu()
    else:
        import transformers

        config = transformers.AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            name, norm = _by_structure(transformers.AutoModelForCausalLM.from_config(config))
        for parameter, _ in list(norm.named_parameters()):
            setattr(norm, parameter, torch.nn.Parameter(_tensor(Path(model), f"{name}.{parameter}")))
    return norm.eval().requires_grad_(False)


def _not_found(model: torch.nn.Module) -> Exception:
    return refused(
        f"no norm of {type(model).__name__} was found between its last layer and its output layer: pass the module or function "
        "that makes the output layer's rows of the last layer's",
        "norm",
    )


def _by_running(model: torch.nn.Module) -> torch.nn.Module:
    """The leaf whose output the output layer gets, or a view of it, in a forward of two tokens."""
    layer = model.get_output_embeddings()  # type: ignore[operator]
    came: list[torch.Tensor] = []
    outputs: list[tuple[torch.nn.Module, torch.Tensor]] = []

    def keep(module: torch.nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            outputs.append((module, output))

    hooks = [module.register_forward_hook(keep) for module in model.modules() if not list(module.children())]
    hooks.append(layer.register_forward_pre_hook(lambda _, arguments: came.append(arguments[0])))
    try:
        with torch.no_grad():
            model(input_ids=torch.ones(1, 2, dtype=torch.int64, device=next(model.parameters()).device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    sources = [module for module, output in outputs if came[0] is output or came[0]._base is output]
    if len(sources) != 1 or not list(sources[0].parameters()):
        raise _not_found(model)
    return sources[0]


def _by_structure(model: Any) -> tuple[str, torch.nn.Module]:
    """The one module with parameters that stands behind the list of layers, and its name."""
    count = model.config.get_text_config().num_hidden_layers
    found: list[tuple[str, torch.nn.Module]] = []
    for prefix, owner in model.named_modules():
        children = list(owner.named_children())
        places = [
            place for place, (_, child) in enumerate(children) if isinstance(child, torch.nn.ModuleList) and len(child) == count
        ]
        for name, child in children[places[0] + 1 :] if len(places) == 1 else []:
            if list(child.parameters()):
                found.append((f"{prefix}.{name}", child))
    if len(found) != 1 or any(parameter.dim() != 1 for parameter in found[0][1].parameters()):
        raise _not_found(model)
    return found[0]


def _tensor(folder: Path, name: str) -> torch.Tensor:
    """A tensor of a folder's safetensors files."""
    path = next((file for tensor, (file, _) in ModelFiles(folder).entries.items() if tensor == name), None)
    if path is None:
        raise make_error("NOT_FOUND", "WEIGHTS_NOT_FOUND", f"{folder} has no tensor {name}, the final norm's", {})
    dtype, values = _safetensors.contents_of(path).array(name)
    data_type = _safetensors.DATA_TYPES.get(dtype)
    if data_type is None:
        raise make_error("DATA_LOSS", "FILE_CORRUPT", f"{name} of {folder} is {dtype}", {"file": path.name})
    return _arrays.to_torch(HostArray(values, data_type, _arrays.to_numpy)).clone()
