"""The public functions: arguments as JAX's fused losses have them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headwater import _arrays
from headwater._client import Client
from headwater._errors import invalid_argument, must_be, refused, wrong_shape, wrong_type
from headwater._head import Head
from headwater._loss._requests import DEFAULT_IGNORE_INDEX, check_bool, check_choice
from headwater._loss._terms import TopKTeacher
from headwater._types import check_number
from headwater.jax import _program, _traced
from headwater.jax._submissions import submissions_of


def create_head(client: Client, name: str, weights: Any, *, bias: Any = None, **options: Any) -> Head:
    """`Client.create_head` for weights as JAX's losses have them, [hidden_size, vocab_size].

    The head stores them as [vocab_size, hidden_size], the layout that `Head.weight` and checkpoints have: they are transposed once,
    here.

    Args:
        weights: [hidden_size, vocab_size], float32, float16 or bfloat16; or the pair (hidden_size, vocab_size) with `dtype=`, for
            a head that `Head.load` or `Head.restore` fills.
        bias: [vocab_size], or None.
        options: other arguments of `Client.create_head`.
    """
    if isinstance(weights, tuple):
        return client.create_head(name, weights[::-1], bias, **options)
    weights = np.asarray(weights)
    if weights.ndim != 2:
        raise wrong_shape("weights", "[hidden_size, vocab_size]", weights.shape)
    bias = None if bias is None else np.asarray(bias)
    return client.create_head(name, np.ascontiguousarray(weights.T), bias, **options)


def linear_softmax_cross_entropy_loss(
    head: Head,
    x: jax.Array,
    labels: jax.Array,
    *,
    weight: jax.Array | None = None,
    reduction: str = "sum",
    logsumexp_weight: float = 0.0,
    label_smoothing: float = 0.0,
    temperature: float = 1.0,
    ignore_index: int = DEFAULT_IGNORE_INDEX,
    class_weights: jax.Array | None = None,
    token_scaling: bool = False,
    gradient_resolution: float = 0.0,
    micro_batch: Any = None,
    train: bool | None = None,
    timeout_s: float | None = None,
) -> jax.Array:
    """Cross entropy of `x @ weights` (+ bias), without the logits, which a remote head computes.

    Differentiable by x. The backward adds the gradient of the head's weights to its open step, times the upstream gradient; see
    `headwater.jax.apply_optimizer_step`.

    Args:
        head: from `create_head` or `Client.head`.
        x: [..., hidden_size], float32, float16 or bfloat16: hidden states, after the model's final norm.
        labels: [...] integers, each in [0, vocab_size) or `ignore_index`; aligned with x, already shifted.
        weight: [...] finite, any sign: multiplies each token's loss; a mask of 0 and 1, for example. No gradient.
        reduction: "sum"; "mean", sum(weight * loss) / sum(weight) over the labels that are not ignored, 0 where all are ignored; or
            "none". With "none" the result is [...] losses times weight, 0 for ignored labels, and takes any upstream gradient, at a
            third more work.
        logsumexp_weight: >= 0, coefficient of logsumexp(logits)^2 (z-loss).
        label_smoothing: in [0, 1].
        temperature: > 0, divides the logits.
        ignore_index: the label of tokens that take no part.
        class_weights: [vocab_size] finite: multiply a token's loss by its label's. "mean" divides by weight * class weight. No
            gradient.
        token_scaling: multiplies each token's loss by the probability of its label, as a constant.
        gradient_resolution: as in `Head.cross_entropy`: small entries of the gradient are rounded at random. 0: exact.
        micro_batch: the id of this loss in the step, an integer >= 0, which may be traced. Unique among all trainers. None: site *
            2^40 + n * devices + device. The loss is the program's site-th of this head (0, 1, ...), and executes for the n-th time
            in the step. `device` is the index of its device in the shard_map around it. For one loss the ids are 0, 1, ...
        train: None adds the head's gradient where x has a gradient. True adds it also where x has none (a frozen body,
            stop_gradient): at forward, for an upstream gradient of 1. False never adds it, and x must have no gradient.
        timeout_s: bound of each call to the server, in seconds. None: the client's.
    Returns:
        float32: a scalar, or [...] with reduction="none".
    Raises:
        InvalidArgumentError: shape, dtype or range. Also programs that would add nothing or the wrong thing, when they are traced
            or compiled. Examples are jax.checkpoint around the loss, a batch of several devices outside of jax.shard_map, a frozen
            body without `train`. An error inside `jit` comes as JAX's own with the text; the next call of headwater.jax for the
            head raises the original.
    """
    check_head(head, "head")
    options = cross_entropy_options(
        logsumexp_weight=logsumexp_weight,
        label_smoothing=label_smoothing,
        temperature=temperature,
        ignore_index=ignore_index,
        token_scaling=token_scaling,
        gradient_resolution=gradient_resolution,
    )
    arrays = {"hidden": x, "targets": labels, "token_weights": weight, "class_weights": class_weights}
    return _loss(head, head.cross_entropy, options, arrays, reduction, micro_batch, train, timeout_s)


def linear_jsd_loss(
    head: Head,
    teacher: Head,
    x: jax.Array,
    teacher_x: jax.Array,
    labels: jax.Array | None = None,
    *,
    weight: jax.Array | None = None,
    reduction: str = "sum",
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
    hard_loss_weight: float = 0.0,
    logsumexp_weight: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = DEFAULT_IGNORE_INDEX,
    class_weights: jax.Array | None = None,
    truncate_to_common: bool = False,
    gradient_resolution: float = 0.0,
    micro_batch: Any = None,
    train: bool | None = None,
    timeout_s: float | None = None,
) -> jax.Array:
    """Generalized Jensen-Shannon divergence of a remote head to a teacher's over the full vocabulary: `Head.jsd` has the formula.

    Differentiable by x alone; everything else is as in `linear_softmax_cross_entropy_loss`.

    Args:
        teacher: the teacher's head, of the same client; usually a frozen one. It gets no gradient.
        x: [..., hidden_size] of the student.
        teacher_x: [..., hidden_size of the teacher]. No gradient.
        labels: [...], needed with hard_loss_weight > 0; otherwise only `ignore_index` in it matters.
        beta: in [0, 1]; 0 is KL(teacher || student), 1 is KL(student || teacher).
        temperature: > 0, of the student, and of the teacher unless `teacher_temperature` is given. No factor of its square.
        hard_loss_weight: in [0, 1], share of the cross entropy with `labels`, which logsumexp_weight, label_smoothing and
            class_weights belong to.
        truncate_to_common: compare the columns that both vocabularies have.
    """
    check_head(head, "head")
    check_head(teacher, "teacher")
    options = jsd_options(
        beta=beta,
        temperature=temperature,
        teacher_temperature=teacher_temperature,
        hard_loss_weight=hard_loss_weight,
        logsumexp_weight=logsumexp_weight,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        truncate_to_common=truncate_to_common,
        gradient_resolution=gradient_resolution,
    )
    options["teacher"] = teacher
    arrays = {
        "student_hidden": x,
        "teacher_hidden": teacher_x,
        "targets": labels,
        "token_weights": weight,
        "class_weights": class_weights,
    }
    return _loss(head, head.jsd, options, arrays, reduction, micro_batch, train, timeout_s)


def cross_entropy_options(
    *,
    logsumexp_weight: float = 0.0,
    label_smoothing: float = 0.0,
    temperature: float = 1.0,
    ignore_index: int = DEFAULT_IGNORE_INDEX,
    token_scaling: bool = False,
    gradient_resolution: float = 0.0,
) -> dict[str, Any]:
    """The options of `Head.cross_entropy`."""
    return {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": logsumexp_weight,
        "temperature": temperature,
        "token_scaling": token_scaling,
        "gradient_resolution": check_number(gradient_resolution, "gradient_resolution", low=0, high=1),
    }


def jsd_options(
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
    hard_loss_weight: float = 0.0,
    logsumexp_weight: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = DEFAULT_IGNORE_INDEX,
    truncate_to_common: bool = False,
    gradient_resolution: float = 0.0,
) -> dict[str, Any]:
    """The options of `Head.jsd`, except the teacher."""
    return {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": logsumexp_weight,
        "beta": beta,
        "student_temperature": temperature,
        "teacher_temperature": temperature if teacher_temperature is None else teacher_temperature,
        "hard_loss_weight": hard_loss_weight,
        "truncate_to_common": truncate_to_common,
        "gradient_resolution": check_number(gradient_resolution, "gradient_resolution", low=0, high=1),
    }


def _loss(
    head: Head,
    method: Any,
    options: dict[str, Any],
    arrays: dict[str, Any],
    reduction: str,
    micro_batch: Any,
    train: bool | None,
    timeout_s: float | None,
) -> jax.Array:
    submissions_of(head).raise_kept()
    check_choice(reduction, "reduction", ("sum", "mean", "none"))
    if train is not None:
        check_bool(train, "train")
    if not head.spec.trainable:
        if train:
            raise refused(f"{head.name} is frozen: there is nothing to train", "train")
        if micro_batch is not None:
            raise refused("micro_batch must be left out: nothing is added, because the head is frozen", "micro_batch")
        if options["gradient_resolution"] != 0:
            raise refused("gradient_resolution is for heads that are trained; this one is frozen", "gradient_resolution")
    arrays = {name: None if value is None else jnp.asarray(value) for name, value in arrays.items()}
    rows = next(iter(arrays))
    _check_arrays(head, options.get("teacher"), rows, arrays)
    batch = arrays[rows].shape[:-1]
    flat = {name: _flat(name, value) for name, value in arrays.items()}
    _program.check(head, flat[rows], train)
    place = _program.place_of(head, micro_batch)
    loss = _traced.Loss(
        head=head,
        run=functools.partial(method, **options, timeout_s=timeout_s),
        rows=rows,
        arrays=tuple(flat),
        per_token=reduction == "none",
        train=train,
        in_gradient=_program.may_be_in_gradient(),
        ignore_index=options["ignore_index"],
        timeout_s=timeout_s,
        devices=place.devices,
    )
    total, divisor = _traced.call(loss, flat, (place.site, place.device))
    if reduction == "mean":
        return jnp.where(divisor == 0, 0.0, total / jnp.where(divisor == 0, 1.0, divisor))
    return total.reshape(batch) if reduction == "none" else total


def _flat(name: str, value: jax.Array | None) -> jax.Array | None:
    """Rows as (num_tokens, hidden_size), a number for each token as (num_tokens,)."""
    if value is None or name == "class_weights":
        return value
    return value.reshape(-1, value.shape[-1]) if name.endswith("hidden") else value.reshape(-1)


def check_head(value: Any, name: str) -> None:
    """A head, and no teacher of another kind."""
    if isinstance(value, TopKTeacher):
        raise refused("headwater.jax has no headwater.TopKTeacher: `Head.jsd` takes it", name)
    if not isinstance(value, Head):
        raise must_be(name, "a headwater.Head", type(value))


def _check_arrays(head: Head, teacher: Head | None, rows: str, arrays: dict[str, Any]) -> None:
    """Shapes and types of elements, which are known when a program is traced; `Head`'s losses check values."""
    batch = arrays[rows].shape[:-1]
    for name, value in arrays.items():
        argument = _traced.ARGUMENTS[name]
        if value is None:
            if name == "targets" and teacher is None:
                raise invalid_argument("MISSING_FIELD", "labels is required", field=argument)
            continue
        if name.endswith("hidden"):
            _arrays.data_type_name(value.dtype, argument)
            size = (teacher if name == "teacher_hidden" else head).spec.hidden_size
            if value.shape != (*batch, size) or value.ndim == 0:
                raise wrong_shape(argument, f"[..., {size}]" if name == rows else (*batch, size), value.shape)
            continue
        kind, expected = (jnp.integer, "integers") if name == "targets" else (jnp.floating, "real numbers")
        if not jnp.issubdtype(value.dtype, kind) and (name == "targets" or value.dtype.kind not in "biu"):
            raise wrong_type(argument, expected, value.dtype)
        if name != "class_weights":
            _arrays.check_shape(value.shape, batch, argument)
