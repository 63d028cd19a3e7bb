"""Checks which parts of a PyTorch model a head can serve, before anything is sent."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from headwater._errors import refused, wrong_shape

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Attributes that identify adapters and quantisers: peft's wrappers, torch.nn.utils.weight_norm, GPTQ, AWQ, bitsandbytes.
_LORA_ATTRIBUTES = ("lora_A", "lora_B", "lora_embedding_A", "lora_magnitude_vector")
_ADAPTER_ATTRIBUTES = ("base_layer", "active_adapters", "original_module", "adapter_layer_names")
_QUANTISED_ATTRIBUTES = ("qweight", "qzeros", "weight_scale", "quant_state", "_packed_params")
_REPARAMETRISED_ATTRIBUTES = ("weight_g", "weight_v", "weight_orig", "parametrizations")


_refused = functools.partial(refused, field="module")


@dataclass(frozen=True)
class OutputLayer:
    """The tensors of a model's last layer."""

    weight: torch.Tensor  # (vocab_size, hidden_size)
    bias: torch.Tensor | None  # (vocab_size,)
    module: torch.nn.Module | None  # None: the weight was given alone


def output_layer(module: torch.nn.Module | torch.Tensor) -> OutputLayer:
    """Weight and bias of an nn.Linear, or a weight alone.

    For a layer that peft trains whole (`modules_to_save`) it is the active copy, which the model uses.

    Raises:
        InvalidArgumentError: something else: LoRA, quantised, reparametrised, sharded, on meta, or of another shape or dtype.
    """
    layer = _from_module(module) if isinstance(module, torch.nn.Module) else OutputLayer(module, None, None)
    if not isinstance(layer.weight, torch.Tensor):
        raise _refused(f"module must be a torch.nn.Linear or its weight, got {type(module).__name__}")
    for name, tensor in (("weight", layer.weight), ("bias", layer.bias)):
        if tensor is not None:
            _check_tensor(name, tensor)
    if layer.weight.dim() != 2:
        raise wrong_shape("weight", "(vocab_size, hidden_size)", tuple(layer.weight.shape))
    return layer


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise _refused(f"the {name} has no values yet (a lazy module): run the model once before it is attached")
    if hasattr(tensor, "placements"):
        raise _refused(f"the {name} is a sharded DTensor; attach it before the model is sharded, and leave it out of the sharding")
    if tensor.device.type == "meta":
        raise _refused(f"the {name} is on the meta device: load it before it is attached")
    if tensor.layout is not torch.strided:
        raise _refused(f"the {name} is sparse ({tensor.layout}): a head has a dense one; attach {name}.to_dense()")
    kind = type(tensor.detach())
    if kind not in (torch.Tensor, torch.nn.Parameter):
        raise _refused(
            f"the {name} is a {kind.__module__}.{kind.__qualname__}, quantised or wrapped: heads take plain tensors of float32, "
            "bfloat16 or float16; attach the layer before it is quantised"
        )
    if tensor.dtype not in _DTYPES:
        raise _refused(
            f"the {name} is {tensor.dtype}: quantised heads are not supported; expected float32, bfloat16 or float16",
            expected="float32, bfloat16, float16",
            actual=tensor.dtype,
        )


def _from_module(module: torch.nn.Module) -> OutputLayer:
    kind = type(module).__name__
    if (used := _copy_in_use(module)) is not None:
        return _from_module(used)
    present = {
        name
        for name in (*_LORA_ATTRIBUTES, *_ADAPTER_ATTRIBUTES, *_QUANTISED_ATTRIBUTES)
        if getattr(module, name, None) is not None
    }
    lora = present.intersection(_LORA_ATTRIBUTES) or any("lora_" in name for name, _ in module.named_modules())
    if _is_model(module):
        raise _refused(
            f"module is a whole model ({kind}): attach its last layer, {_last_layer(module)}, and pass the model as model="
        )
    if lora or present.intersection(_ADAPTER_ATTRIBUTES):
        family = type(module).__module__.split(".")  # peft.tuners.ia3.layer
        adapter = "LoRA" if lora else family[2] if family[:2] == ["peft", "tuners"] else kind
        raise _refused(
            f"{kind} has an adapter ({adapter}) on the head, which is not supported: keep adapters on the body, and "
            "attach the layer below, with trainable=False if it stays as it is"
        )
    if present:
        raise _refused(f"{kind} is quantised, which heads are not: attach a layer of float32, bfloat16 or float16")
    if any(hasattr(module, name) for name in _REPARAMETRISED_ATTRIBUTES):
        raise _refused(f"the weight of this {kind} is computed from other parameters (a parametrization): remove it first")
    if not isinstance(module, torch.nn.Linear):
        raise _refused(f"module must be a torch.nn.Linear or its weight, got {kind}")
    if type(module).forward is not torch.nn.Linear.forward and not torch.nn.parameter.is_lazy(module.weight):
        raise _refused(f"{kind} computes something else than torch.nn.Linear, which is what a head computes")
    _check_in_use(module)
    return OutputLayer(module.weight, module.bias, module)


def _is_model(module: torch.nn.Module) -> bool:
    return hasattr(module, "get_output_embeddings") or any(isinstance(part, torch.nn.Embedding) for part in module.modules())


def _last_layer(model: torch.nn.Module) -> str:
    try:
        layer = model.get_output_embeddings()
    except Exception:
        layer = None
    names = [name for name, part in model.named_modules() if part is layer]
    return f"model.{names[0]}" if names else "model.lm_head as most have it"


def _copy_in_use(module: torch.nn.Module) -> torch.nn.Module | None:
    """The layer that peft's wrapper of `modules_to_save` calls; None if the module is no such wrapper."""
    copies, original = getattr(module, "modules_to_save", None), getattr(module, "original_module", None)
    if not isinstance(copies, torch.nn.ModuleDict) or not isinstance(original, torch.nn.Module):
        return None
    active = getattr(module, "active_adapters", None) or []
    if getattr(module, "disable_adapters", False) or not active or active[0] not in copies:
        return original
    return copies[active[0]]


def _check_in_use(module: torch.nn.Module) -> None:
    """The layer is not one beside which peft has put a copy that the model uses instead."""
    if "peft" not in sys.modules:
        return
    for wrapper in live_modules():
        used = _copy_in_use(wrapper)
        if used is None or used is module:
            continue
        if wrapper.original_module is module or any(copy is module for copy in wrapper.modules_to_save.values()):
            raise _refused(
                "the model does not use this layer, but another copy of it that peft trains (modules_to_save): attach the wrapper "
                "around it (model.lm_head), which finds the copy in use"
            )


def _memory(tensor: torch.Tensor) -> range:
    """The bytes from a tensor's first element to its last, by address."""
    if tensor.numel() == 0 or tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return range(0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have memory in common: parts of one flat buffer (FSDP) have not."""
    first, second = _memory(a), _memory(b)
    return a.device == b.device and max(first.start, second.start) < min(first.stop, second.stop)


@dataclass(frozen=True)
class Sharing:
    """Another place of a model that uses memory of the head's weight."""

    name: str  # `embed_tokens.weight`
    tensor: torch.Tensor


def sharing(model: torch.nn.Module, layer: OutputLayer) -> list[Sharing]:
    """Every parameter and buffer of the model that shares memory with the layer's weight, except the layer's own."""
    return [other for owner, other in _tensors(model) if owner is not layer.module and overlap(other.tensor, layer.weight)]


def live_modules() -> Iterator[torch.nn.Module]:
    """Every torch.nn.Module of this process."""
    # By the type, not by isinstance(), which asks objects for a __class__ that they may make up.
    return (thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module))


def embedding_of(parameter: torch.Tensor) -> torch.nn.Embedding | None:
    """A torch.nn.Embedding of this process whose weight is `parameter`, or shares its memory; None if there is none.

    Looks through every object that Python's garbage collector knows: some 0.1 s in a process with a million of them.
    """
    for module in live_modules():
        if isinstance(module, torch.nn.Embedding):
            weight = module._parameters.get("weight")
            if weight is not None and (weight is parameter or overlap(weight, parameter)):
                return module
    return None


def _tensors(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Sharing]]:
    # Each module once, but every name of a tensor: named_parameters would leave out the second name of a shared one.
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield module, Sharing(f"{prefix}.{name}" if prefix else name, tensor)
