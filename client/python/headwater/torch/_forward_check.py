"""One small forward of a model: whether its logits are those that a head would make of its last layer's input."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headwater._model_files._torch_modules import OutputLayer
from headwater.torch import _model_config

# Sequences of the forward, and tokens of each. Every sequence's last row, which some models compute alone, has another size.
_SEQUENCES, _TOKENS = 4, 5
# Largest logit of each row that is put into the layer, before scale and cap. 0 shows additions to the logits; the last one shows
# caps of some hundreds.
_MAGNITUDES = (0.0, 2.0, 16.0, 128.0)
# Rows of the weight that are multiplied at once, in float32.
_CHUNK_ROWS = 8192
# Log-probabilities below it are those of columns that the model masks, by -inf or a large number.
_MASKED = -1000.0
# Elements of a buffer that is put back after a forward: larger ones are quantised weights, which no forward changes, or caches.
_MAX_BUFFER = 1 << 22
# Ids of special tokens, which models treat otherwise: padding, images.
_SPECIAL_TOKEN = ("token_id", "token_index", "token_ids")
# Arguments of a forward that take token ids, in the order in which they are looked for.
_TOKEN_ARGUMENTS = ("input_ids", "tokens", "idx", "ids", "input_tokens")
_WRAPPED = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}


class CannotRun(Exception):
    """The model cannot be compared here; the text is a clause that says why."""


@dataclass(frozen=True)
class HeadOptions:
    """The options by which a head makes logits of weight, rows and bias."""

    softcap: float | None
    logit_scale: float
    valid_vocab_size: int | None

    def logits(self, layer_output: torch.Tensor) -> torch.Tensor:
        """float32 (rows, vocab_size), -inf for columns that are not valid."""
        logits = self.logit_scale * layer_output
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return self.masked(logits)

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits, -inf for columns that are not valid."""
        if self.valid_vocab_size is not None and self.valid_vocab_size < logits.shape[1]:
            logits = logits.clone()
            logits[:, self.valid_vocab_size :] = -math.inf
        return logits


@dataclass(frozen=True)
class Body:
    """The path from the output of the model's body to the layer."""

    name: str  # `model`
    factor: float | None  # rows of the layer = factor * rows of the body; None: something else

    def explained_by(self, factor: float | None) -> bool:
        """Whether the factor is this one, up to rounding."""
        return factor is not None and self.factor is not None and math.isclose(factor, self.factor, rel_tol=1e-2)


@dataclass(frozen=True)
class Forward:
    """The observations of one forward: rows that entered the layer, and the model's logits of them."""

    products: torch.Tensor  # (rows, vocab_size) float32: rows times weight, without bias
    bias: torch.Tensor | None  # (vocab_size,) float32
    logits: torch.Tensor  # (rows, columns) float32, of the model
    epsilon: float  # of the coarsest type on the way
    body: Body | None  # None: unknown, or the layer gets the body's result

    @property
    def columns(self) -> int:
        """Columns to which the model gives probability."""
        masked = torch.log_softmax(self.logits, -1).amax(0) < _MASKED
        valid = int((~masked).sum())
        return valid if not bool(masked[:valid].any()) else self.logits.shape[1]

    def difference(self, options: HeadOptions, *, of_body: bool = False) -> tuple[float, float]:
        """Largest difference of a log-probability over the difference that rounding explains: above 1 is another model.

        A model that masks no column itself is compared in the head's valid ones: the others are padding, as the caller has said.

        Args:
            of_body: the head gets the rows that the body returns, instead of those that reach the layer.
        """
        factor = 1.0 if not of_body or self.body is None or self.body.factor is None else self.body.factor
        output = self.products / factor
        if self.bias is not None:
            output = output + self.bias
        width = max(output.shape[1], self.logits.shape[1])
        theirs = options.masked(self.logits) if self.columns == output.shape[1] else self.logits
        expected, actual = (_padded(values, width) for values in (options.logits(output), theirs))
        finite = expected[:, : options.valid_vocab_size or output.shape[1]]
        allowed = self.epsilon * finite.abs().amax(1, keepdim=True) + 1e-5
        ours, theirs = torch.log_softmax(expected, -1), torch.log_softmax(actual, -1)
        gap = torch.where((ours < _MASKED) & (theirs < _MASKED), torch.zeros_like(ours), (ours - theirs).abs())
        gap = torch.nan_to_num(gap, nan=math.inf, posinf=math.inf)
        return float(gap.max()), float((gap / allowed).max())

    def same(self, options: HeadOptions, *, of_body: bool = False) -> bool:
        """Whether a head with these options is the model's."""
        return self.difference(options, of_body=of_body)[1] <= 1

    def fitted_scale(self) -> float | None:
        """The factor that explains the smaller rows best."""
        columns = min(self.columns, self.products.shape[1])
        rows = [row for row in range(self.products.shape[0]) if _MAGNITUDES[row % len(_MAGNITUDES)] == _MAGNITUDES[1]]
        ours, theirs = self.products[rows, :columns].double(), self.logits[rows, :columns].double()
        ours, theirs = (values - values.mean(1, keepdim=True) for values in (ours, theirs))
        scale = float((ours * theirs).sum() / (ours * ours).sum())
        return float(f"{scale:.6g}") if math.isfinite(scale) and scale != 0 else None

    def fitted_caps(self, scale: float) -> list[float]:
        """Softcaps that explain the largest row, rounded: a model has a round one."""
        output = scale * (self.products if self.bias is None else self.products + self.bias)
        columns = min(self.columns, output.shape[1])
        row, column = divmod(int(output[:, :columns].abs().argmax()), columns)
        before, after = float(output[row, column].abs()), float(self.logits[row, column].abs())
        if not 0 < after < before:
            return []
        low, high = after, 1e3 * before  # softcap * tanh(before / softcap) rises with the softcap
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if middle * math.tanh(before / middle) < after else (low, middle)
        return [float(f"{low:.{digits}g}") for digits in (2, 4)]


def _padded(values: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=-math.inf)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model without PyTorch's wrappers: DistributedDataParallel, torch.compile, AveragedModel, ..."""
    while True:
        names = (name for kind in type(model).__mro__ if (name := _WRAPPED.get(kind.__name__)) is not None)
        inner = getattr(model, next(names, ""), None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def layer_in(model: torch.nn.Module, layer: OutputLayer) -> torch.nn.Module | None:
    """The module of the model that multiplies by the layer's weight; None if it is not one torch.nn.Linear."""
    if layer.module is not None:
        return layer.module if any(module is layer.module for module in model.modules()) else None
    users = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m._parameters.get("weight") is layer.weight]
    return users[0] if len(users) == 1 else None


def ancestors(model: torch.nn.Module, module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of the model that have `module` in them, the outermost first."""
    modules = dict(model.named_modules())
    path = next((name for name, other in modules.items() if other is module), "")
    parts = path.split(".") if path else []
    return [modules[".".join(parts[:count])] for count in range(len(parts))]


def takes_token_ids(model: torch.nn.Module) -> bool:
    """Whether the model's forward says that it takes `input_ids`."""
    return "input_ids" in _parameters(model)


def configs(model: torch.nn.Module, layer: OutputLayer) -> list[Any]:
    """Configurations of the model and of the modules around its layer, each once."""
    module = layer_in(model, layer)
    around = [model] if module is None else ancestors(model, module)
    found = [config for owner in around if (config := getattr(owner, "config", None)) is not None]
    return list({id(config): config for config in found}.values())


def _parameters(module: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    if getattr(type(module), "forward", None) is torch.nn.Module.forward and "forward" not in vars(module):
        return {}
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}


def _call(module: torch.nn.Module, configs: Sequence[Any]) -> Callable[[], Any] | None:
    """Calls the module with a few token ids; None if it does not say that it takes any."""
    parameters = _parameters(module)
    any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    name = next((name for name in _TOKEN_ARGUMENTS if name in parameters), "input_ids" if any_keyword else None)
    if name is None:
        return None
    embedding = None
    with contextlib.suppress(Exception):
        embedding = module.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, torch.Tensor):
        weight = next((m.weight for m in module.modules() if isinstance(m, torch.nn.Embedding)), None)
    first = next(module.parameters(), None) if weight is None else weight
    if first is None or first.device.type == "meta":
        raise CannotRun("its parameters are on the meta device")
    vocab_size = weight.shape[0] if weight is not None else 2
    ids = _token_ids(vocab_size, configs).to(first.device)
    arguments: dict[str, Any] = {name: ids}
    if "decoder_input_ids" in parameters:
        arguments["decoder_input_ids"] = ids
    if "use_cache" in parameters:
        arguments["use_cache"] = False
    return lambda: module(**arguments)


def _token_ids(vocab_size: int, configs: Sequence[Any]) -> torch.Tensor:
    special: set[int] = set()
    for config in configs:
        for _, level in _model_config.levels(config):
            for key, value in _model_config.entries(level).items():
                if isinstance(key, str) and key.endswith(_SPECIAL_TOKEN):
                    special.update(v for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, int))
    # From the middle on: special tokens stand at both ends.
    ids = [(vocab_size // 2 + count) % vocab_size for count in range(vocab_size)]
    ordinary = itertools.cycle([i for i in ids if i not in special][: 3 * _TOKENS] or ids)
    return torch.tensor(list(itertools.islice(ordinary, _SEQUENCES * _TOKENS)), device="cpu").view(_SEQUENCES, _TOKENS)


@contextlib.contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """No gradients, evaluation mode, and afterwards nothing has changed: modes, buffers, random numbers."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.numel() <= _MAX_BUFFER and buffer.device.type != "meta" and not buffer.is_inference()
    ]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    # Parts that are compiled run as they are written. There are none where the compiler was never imported.
    stance: Any = getattr(getattr(torch, "compiler", None), "set_stance", None) if "torch._dynamo" in sys.modules else None
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=sorted(devices, key=str)))
            stack.enter_context(torch.no_grad())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if stance is not None:
                stack.enter_context(stance("force_eager"))
            for module, _ in modes:
                module.training = False  # not train(False), by which some adapters merge their weights
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, version, values in buffers:
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
                if buffer._version != version:
                    buffer.copy_(values)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def products(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 rows @ weight.T, without a float32 copy of the whole weight."""
    # float32 may mean TF32 on a GPU, as the process has set it.
    exact = torch.float64 if weight.is_cuda else torch.float32
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        rows = rows.to(exact)
        return torch.cat([(rows @ part.to(exact).t()).float() for part in weight.detach().split(_CHUNK_ROWS)], dim=1)


def _made_up_rows(count: int, like: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """(count, hidden_size) normal numbers, equal each time and without a global generator; dtype and device of `like`."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    return torch.randn(count, hidden_size, generator=generator, device="cpu").to(like.device, like.dtype)


def _power_of_two(values: torch.Tensor) -> torch.Tensor:
    """The nearest ones, by which multiplication does not round."""
    return torch.exp2(torch.round(torch.log2(values)))


def _probe(like: torch.Tensor, layer: OutputLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to put into the layer instead of `like`, flat, and their products."""
    weight = layer.weight
    count = like.numel() // like.shape[-1]
    rows = _made_up_rows(count, like, like.shape[-1])
    outcome = products(rows, weight)
    sizes = outcome.abs().amax(1)
    if not bool(((sizes > 0) & torch.isfinite(sizes)).all()):
        raise CannotRun("the layer's weight makes logits that are zero, or not finite")
    wanted = torch.tensor([_MAGNITUDES[row % len(_MAGNITUDES)] for row in range(count)], device=rows.device)
    largest = 1e3 if rows.dtype == torch.float16 else 1e30  # rows stay finite
    factors = torch.where(wanted == 0, torch.zeros_like(wanted), _power_of_two((wanted / sizes).clamp(max=largest)))
    return rows * factors.to(rows.dtype)[:, None], outcome * factors[:, None]


def _bodies(owners: Sequence[torch.nn.Module], module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Candidates for the model's body, by name: modules whose output a trainer would take for the layer's input."""
    found: dict[str, torch.nn.Module] = {}
    for owner in owners:
        for get in (lambda o: o.get_decoder(), lambda o: o.base_model, lambda o: o.model, lambda o: o.transformer):
            with contextlib.suppress(Exception):
                body = get(owner)
                if isinstance(body, torch.nn.Module) and not any(part is module for part in body.modules()):
                    name = next((name for name, other in owner.named_modules() if other is body), type(body).__name__)
                    found.setdefault(name, body)
    return {name: body for name, body in found.items() if name}


def _last_hidden(output: Any) -> torch.Tensor | None:
    if not isinstance(output, torch.Tensor):
        output = getattr(output, "last_hidden_state", output[0] if isinstance(output, (tuple, list)) and output else None)
    return output if isinstance(output, torch.Tensor) else None


def _factor(rows: torch.Tensor, body_rows: torch.Tensor) -> float | None:
    """rows = factor * body_rows; None if there is none."""
    ours, theirs = body_rows.double().flatten(), rows.double().flatten()
    if not bool(torch.isfinite(ours).all()):
        return 1.0  # nothing can be said
    factor = float((ours * theirs).sum() / (ours * ours).sum())
    epsilon = max(_epsilon(rows), _epsilon(body_rows))
    close = bool(((theirs - factor * ours).abs() <= epsilon * theirs.abs().amax()).all())
    if not close or not math.isfinite(factor) or factor == 0:
        return None
    return 1.0 if abs(factor - 1) <= epsilon else factor


def _epsilon(*tensors: torch.Tensor) -> float:
    """How far apart two ways to compute may be, by the largest value."""
    coarsest = max(torch.finfo(tensor.dtype).eps for tensor in tensors)
    if coarsest < 1e-4 and any(tensor.is_cuda for tensor in tensors):
        coarsest = 2.0**-13  # TF32
    return 4 * coarsest if coarsest > 1e-4 else 64 * coarsest


def logits_of(output: Any, rows: int) -> torch.Tensor | None:
    """A model's logits, (rows, columns), among the results of its forward."""
    if isinstance(output, torch.Tensor):
        return output.reshape(-1, output.shape[-1]) if output.dim() > 1 and output[..., 0].numel() == rows else None
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    parts = [logits] if logits is not None else output if isinstance(output, (tuple, list)) else []
    return next((found for part in parts if (found := logits_of(part, rows)) is not None), None)


def run(model: torch.nn.Module, layer: OutputLayer) -> Forward:
    """One small forward of the model, or of the outermost module around its layer that takes token ids.

    Raises:
        CannotRun: it cannot be had.
    """
    module = layer_in(model, layer)
    if module is None:
        raise CannotRun("no torch.nn.Linear of the model has the layer's weight")
    if any(_is_sharded(parameter) for parameter in model.parameters()):
        raise CannotRun("its parameters are sharded: a forward would wait for the other ranks")
    owners = ancestors(model, module)
    why = "its forward does not say that it takes token ids"
    for owner in owners:
        try:
            call = _call(owner, configs(model, layer))
            if call is None:
                continue
            return _run(owner, call, module, layer, owners)
        except CannotRun as error:
            why = str(error)
        except Exception as error:
            why = f"its forward with a few token ids fails ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    raise CannotRun(why)


def _is_sharded(parameter: torch.nn.Parameter) -> bool:
    # DTensor; FSDP's flat parameters; DeepSpeed's ZeRO-3.
    return hasattr(parameter, "placements") or hasattr(parameter, "_is_flat_param") or hasattr(parameter, "ds_id")


def _run(
    owner: torch.nn.Module,
    call: Callable[[], Any],
    module: torch.nn.Module,
    layer: OutputLayer,
    owners: Sequence[torch.nn.Module],
) -> Forward:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # rows that came, products of those that were put in
    outputs: list[torch.Tensor] = []
    of_bodies: dict[str, torch.Tensor] = {}

    def put_in(_: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not arguments or not isinstance(arguments[0], torch.Tensor) or arguments[0].shape[-1] != layer.weight.shape[1]:
            return None
        rows, outcome = _probe(arguments[0], layer)
        seen.append((arguments[0], outcome))
        return (rows.view(arguments[0].shape), *arguments[1:])

    def keep_output(_: torch.nn.Module, __: Any, output: Any) -> None:
        outputs.append(output)

    def keep_body(name: str) -> Callable[..., None]:
        def keep(_: torch.nn.Module, __: Any, output: Any) -> None:
            if (hidden := _last_hidden(output)) is not None:
                of_bodies[name] = hidden

        return keep

    hooks = [module.register_forward_pre_hook(put_in), module.register_forward_hook(keep_output)]
    hooks += [body.register_forward_hook(keep_body(name)) for name, body in _bodies(owners, module).items()]
    try:
        with undisturbed(owner):
            answer = call()
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        raise CannotRun("its forward does not call the layer, or not with rows of the weight's width")
    for (came, outcome), output in zip(seen, outputs, strict=True):
        logits = logits_of(answer, outcome.shape[0])
        if logits is not None and logits.device.type != "meta" and logits.is_floating_point():
            bias = None if layer.bias is None else layer.bias.detach().float().to(outcome.device)
            epsilon = _epsilon(came, layer.weight, output, logits)
            return Forward(outcome, bias, logits.float().to(outcome.device), epsilon, _body(came, of_bodies))
    raise CannotRun("its forward returns no logits for the rows of the layer")


def _body(came: torch.Tensor, of_bodies: Mapping[str, torch.Tensor]) -> Body | None:
    comparable = {name: rows for name, rows in of_bodies.items() if rows.numel() == came.numel()}
    factors = {name: _factor(came, rows.to(came.device)) for name, rows in comparable.items()}
    if not factors or 1.0 in factors.values():
        return None
    name = next((name for name, factor in factors.items() if factor is not None), next(iter(factors)))
    return Body(name, factors[name])


# ---- what the model does, as options ---------------------------------------------------------------------------------------


def fitting(
    forward: Forward, given: HeadOptions, hints: Sequence[_model_config.Asked]
) -> tuple[HeadOptions, dict[str, str]] | None:
    """Options with which the head is the model's, and those that change, as the caller would write them; None if none is found."""
    caps = {given.softcap: repr(given.softcap), None: "None"}
    scales = {given.logit_scale: repr(given.logit_scale), 1.0: "1.0"}
    sizes = {given.valid_vocab_size: repr(given.valid_vocab_size), forward.columns: repr(forward.columns)}
    for hint in hints:
        if hint.option == "softcap" and hint.wanted > 0:
            caps.setdefault(float(hint.wanted), hint.shown)
        elif hint.option == "logit_scale" and hint.wanted is not None:
            scales.setdefault(float(hint.wanted), hint.shown)
            scales.setdefault(1 / float(hint.wanted), repr(1 / float(hint.wanted)))
    for scale in list(scales):
        for cap in forward.fitted_caps(scale):
            caps.setdefault(cap, repr(cap))
    if (fitted := forward.fitted_scale()) is not None:
        scales.setdefault(fitted, repr(fitted))
    changes = []
    for (cap, cap_shown), (scale, scale_shown), (size, size_shown) in itertools.product(
        caps.items(), scales.items(), sizes.items()
    ):
        options = HeadOptions(cap, scale, size)
        shown = {"softcap": cap_shown, "logit_scale": scale_shown, "valid_vocab_size": size_shown}
        changed = {name: text for name, text in shown.items() if getattr(options, name) != getattr(given, name)}
        changes.append((len(changed), options, changed))
    for _, options, changed in sorted(changes, key=lambda change: change[0]):
        if changed and forward.same(options):
            return options, changed
    return None
