"""What of a PyTorch model can be served by a head, and what cannot: found before anything is sent."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headwater._errors import HeadwaterError, invalid_argument

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Attributes by which adapters and quantisers can be told: peft's wrappers, torch.nn.utils.weight_norm, GPTQ, AWQ, bitsandbytes.
_ADAPTER_ATTRIBUTES = ("lora_A", "lora_B", "lora_embedding_A", "lora_magnitude_vector", "base_layer", "active_adapters")
_QUANTISED_ATTRIBUTES = ("qweight", "qzeros", "weight_scale", "quant_state", "_packed_params")
_REPARAMETRISED_ATTRIBUTES = ("weight_g", "weight_v", "weight_orig", "parametrizations")

# What a model's configuration says of its logits, as transformers has it: key, the option of a head that does it, the number that
# does nothing, and whether the option is the number's reciprocal.
_LOGIT_KEYS = (
    ("final_logit_softcapping", "softcap", 0.0, False),  # Gemma
    ("logits_soft_cap", "softcap", 0.0, False),  # RecurrentGemma
    ("logit_scale", "logit_scale", 1.0, False),  # Cohere
    ("logits_scaling", "logit_scale", 1.0, True),  # Granite divides by it
    ("lm_head_multiplier", "logit_scale", 1.0, False),  # Falcon-H1
    ("output_multiplier_scale", "logit_scale", 1.0, False),  # Grok
)


@dataclass(frozen=True)
class OutputLayer:
    """The tensors of a model's last layer."""

    weight: torch.Tensor  # (vocab_size, hidden_size)
    bias: torch.Tensor | None  # (vocab_size,)
    module: torch.nn.Module | None  # None: the weight was given alone


def _refused(message: str, field: str = "module", **metadata: object) -> HeadwaterError:
    return invalid_argument("INVALID_COMBINATION", message, field=field, **metadata)


def output_layer(module: torch.nn.Module | torch.Tensor) -> OutputLayer:
    """Weight and bias of an nn.Linear, or a weight alone.

    Raises:
        InvalidArgumentError: something else: LoRA, quantised, reparametrised, sharded, on meta, or of another shape or dtype.
    """
    layer = _from_module(module) if isinstance(module, torch.nn.Module) else OutputLayer(module, None, None)
    weight = layer.weight
    if not isinstance(weight, torch.Tensor):
        raise _refused(f"module must be a torch.nn.Linear or its weight, got {type(module).__name__}")
    if hasattr(weight, "placements"):
        raise _refused("the weight is a sharded DTensor; attach it before the model is sharded, and leave it out of the sharding")
    if weight.device.type == "meta":
        raise _refused("the weight is on the meta device: load it before it is attached")
    for name, tensor in (("weight", weight), ("bias", layer.bias)):
        if tensor is not None and tensor.dtype not in _DTYPES:
            raise _refused(
                f"the {name} is {tensor.dtype}: quantised heads are not supported; expected float32, bfloat16 or float16",
                expected="float32, bfloat16, float16",
                actual=tensor.dtype,
            )
    if weight.dim() != 2:
        raise invalid_argument(
            "SHAPE_MISMATCH",
            f"the weight must have shape (vocab_size, hidden_size), got {tuple(weight.shape)}",
            field="module",
            actual=tuple(weight.shape),
        )
    return layer


def _from_module(module: torch.nn.Module) -> OutputLayer:
    kind = type(module).__name__
    present = {name for name in (*_ADAPTER_ATTRIBUTES, *_QUANTISED_ATTRIBUTES) if getattr(module, name, None) is not None}
    if present.intersection(_ADAPTER_ATTRIBUTES) or any("lora_" in name for name, _ in module.named_modules()):
        raise _refused(
            f"{kind} has an adapter (LoRA) on the head, which is not supported: keep adapters on the body, and attach the layer "
            "below, with trainable=False if it stays as it is"
        )
    if present:
        raise _refused(f"{kind} is quantised, which heads are not: attach a layer of float32, bfloat16 or float16")
    if any(hasattr(module, name) for name in _REPARAMETRISED_ATTRIBUTES):
        raise _refused(f"the weight of this {kind} is computed from other parameters (a parametrization): remove it first")
    if not isinstance(module, torch.nn.Linear):
        raise _refused(f"module must be a torch.nn.Linear or its weight, got {kind}")
    if type(module).forward is not torch.nn.Linear.forward:
        raise _refused(f"{kind} computes something else than torch.nn.Linear, which is what a head computes")
    return OutputLayer(module.weight, module.bias, module)


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
    """Every parameter and buffer of the model that shares memory with the layer's weight, but for the layer's own."""
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


def check_logits(model: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """What the model does to its logits is among the options of a head, as far as the model's configuration tells it.

    Raises:
        InvalidArgumentError: `INVALID_COMBINATION`: it is not; with the option to pass.
    """
    config = getattr(model, "config", None)
    for prefix, part in (("", config), ("text_config.", _entry(config, "text_config"))):
        for key, option, neutral, reciprocal in _LOGIT_KEYS:
            value = _entry(part, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value == neutral or option in options:
                continue
            wanted = f"1 / {value!r}" if reciprocal else repr(value)
            raise _refused(
                f"the model's config has {prefix}{key}={value!r}, which the layer alone does not do: pass {option}={wanted}, or "
                f"another {option}= if the model does something else",
                option,
                key=f"{prefix}{key}",
                actual=value,
            )


def _entry(config: Any, key: str) -> Any:
    """That of a configuration, which may be an object or a mapping; None if there is none."""
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
