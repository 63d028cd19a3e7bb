"""Hints about a model's logits in its configuration, by the table that headwaterctl has, too: model_config_keys.json."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Lies beside the package's modules; headwaterctl embeds the same file. Its "about" has the format.
_TABLE = Path(__file__).parent.parent / "model_config_keys.json"
# Levels that a configuration may nest.
_MAX_DEPTH = 4


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(_TABLE.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Asked:
    """One thing that a model may do to its logits, or to its rows before the layer."""

    where: str  # `text_config.logits_scaling`
    value: Any  # the value of the field
    option: str  # that of `attach` which does it: "softcap", "logit_scale", "valid_vocab_size"; "" if none can, or none is known
    wanted: Any  # the option's value; None if the model's effect is not known
    shown: str  # `wanted` as the caller would write it
    rows: bool  # whether the model does it to the rows before the layer


def entry(config: Any, key: str) -> Any:
    """The entry of a configuration, which may be an object or a mapping; None if there is none."""
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def entries(config: Any) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})


def levels(config: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """A configuration, and each language model's that it nests; with the prefix of their keys."""
    if config is None or depth > _MAX_DEPTH:
        return
    yield prefix, config
    for name in _table()["nested"]:
        part = entry(config, name)
        if isinstance(part, Mapping) or (part is not None and hasattr(part, "__dict__")):
            yield from levels(part, f"{prefix}{name}.", depth + 1)


def asked(config: Any) -> list[Asked]:
    """Every field of a configuration that changes logits, or may, without those at a value that does nothing."""
    every = list(levels(config))
    types = [name for _, level in every if isinstance(name := entry(level, "model_type"), str)]
    found: dict[str, Asked] = {}
    for rule in _table()["keys"]:
        effects = (_effect(rule, where, value, every, types) for where, value in _values(rule, every, types))
        if effect := next((effect for effect in effects if effect), None):
            found.setdefault(effect.where, effect)
    for name, effect in _table()["report_models"].items():
        if name in types and effect not in _table()["buffers"]:  # buffers are looked at where they are
            found.setdefault("model_type", Asked("model_type", name, "", None, effect, False))
    for prefix, level in every:
        for key, value in entries(level).items():
            if _suspect(key, value):
                found.setdefault(prefix + key, Asked(prefix + key, value, "", None, "", False))
    return _together(list(found.values()))


def _together(every: list[Asked]) -> list[Asked]:
    """Several factors of one model's logits are one option."""
    scales = [effect for effect in every if effect.option == "logit_scale"]
    if len(scales) < 2:
        return every
    wanted = None if any(effect.wanted is None for effect in scales) else math.prod(effect.wanted for effect in scales)
    where = " and ".join(f"{effect.where}={effect.value!r}" for effect in scales[:-1]) + f" and {scales[-1].where}"
    shown = " * ".join(effect.shown for effect in scales)
    product = Asked(where, scales[-1].value, "logit_scale", wanted, shown, any(effect.rows for effect in scales))
    return [*(effect for effect in every if effect.option != "logit_scale"), product]


def _values(rule: Mapping[str, Any], every: Sequence[tuple[str, Any]], types: Sequence[str]) -> Iterator[tuple[str, Any]]:
    if "only" in rule and not set(rule["only"]).intersection(types):
        return
    if "unless" in rule and any(entry(level, rule["unless"]) is not None for _, level in every):
        return
    present = False
    innermost_first = sorted(every, key=lambda level: -level[0].count("."))
    for prefix, level in innermost_first:
        value = entry(level, rule["key"])
        if value is not None:
            present = True
            yield prefix + rule["key"], value
    if not present:
        # A configuration that is an object has its class's defaults; a mapping may leave them out.
        for prefix, level in innermost_first:
            default = rule.get("absent", {}).get(entry(level, "model_type"))
            if default is not None and isinstance(level, Mapping):
                yield prefix + rule["key"], default


def _effect(
    rule: Mapping[str, Any], where: str, value: Any, every: Sequence[tuple[str, Any]], types: Sequence[str]
) -> Asked | None:
    effect = next((rule["except"][name] for name in types if name in rule.get("except", {})), rule["effect"])
    if isinstance(value, str):
        effect, value, word = rule.get("words", {}).get(value, "report"), True, value
    else:
        word = value
    if effect in ("bias", "vocab_size"):
        return None  # the layer has its bias and its rows
    if any(value == nothing and isinstance(value, bool) == isinstance(nothing, bool) for nothing in rule["nothing"]):
        return None
    rows = rule["where"] == "rows"
    if effect == "report":
        return Asked(where, word, "", None, "", rows)
    width = next((size for _, level in reversed(every) if (size := _width(level))), None)
    if effect == "root_width":
        if not value:
            return None
        wanted = 1 / math.sqrt(width) if width else None
        return Asked(where, word, "logit_scale", wanted, f"{width}**-0.5" if width else "hidden_size**-0.5", rows)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if effect == "softcap":
        return Asked(where, value, "softcap", value, repr(value), rows)
    if effect == "valid_vocab_size":
        return Asked(where, value, "valid_vocab_size", value, repr(value), rows)
    if value == 0:
        return Asked(where, value, "", None, "", rows)
    if effect == "divide":
        return Asked(where, value, "logit_scale", 1 / value, f"1 / {value!r}", rows)
    if effect == "multiply_by_width":
        if value == width:
            return None
        return Asked(where, value, "logit_scale", value / width if width else None, f"{value!r} / {width or 'hidden_size'}", rows)
    return Asked(where, value, "logit_scale", value, repr(value), rows)


def _width(level: Any) -> int | None:
    sizes = (entry(level, rule["key"]) for rule in _table()["hidden_size"] if "only" not in rule)
    return next((size for size in sizes if isinstance(size, int)), None)


def _suspect(key: Any, value: Any) -> bool:
    table = _table()
    return (
        isinstance(key, str)
        and isinstance(value, (int, float, str))
        and not isinstance(value, bool)
        and any(part in key for part in table["suspect"])
        and not any(part in key for part in table["harmless_parts"])
        and key not in table["harmless"]
        and all(key != rule["key"] for rule in table["keys"])
    )


def logit_buffers(model: torch.nn.Module) -> Iterator[str]:
    """Names of buffers that a model adds to its logits, and that are not all zero."""
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in _table()["buffers"] and buffer.device.type != "meta" and bool((buffer != 0).any()):
            yield name
