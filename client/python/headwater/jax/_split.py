"""`value_and_grad`: the loss between two programs. JAX sees the body alone, and the host computes the loss of concrete arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from headwater._errors import invalid_argument, must_be, refused, wrong_shape
from headwater._futures import Future
from headwater._head import Head
from headwater._loss._contributions import Contribution
from headwater._loss._requests import check_bool, check_choice
from headwater._types import LossResult
from headwater.jax import _device
from headwater.jax._losses import check_head, cross_entropy_options, jsd_options
from headwater.jax._submissions import submissions_of

_Key = tuple[tuple[int, int], ...]  # where a shard's rows lie in the global array: begin and end of each dimension

_ONE_OWNER = (
    "several processes have the same rows of the hidden states, and each of them would need their gradient: split the rows over "
    'all devices where body returns, as in jax.lax.with_sharding_constraint(hidden, P(("data", "model")))'
)


def value_and_grad(
    body: Callable[..., Any],
    head: Head,
    *,
    teacher: Head | None = None,
    reduction: str = "sum",
    class_weights: Any = None,
    has_aux: bool = False,
    timeout_s: float | None = None,
    **options: Any,
) -> Callable[..., tuple[Any, Any]]:
    """The function `f(params, batch, labels)` that returns the loss and its gradient by params, and adds the head's gradient.

        loss_and_grads = headwater.jax.value_and_grad(model.apply, head, reduction="mean")
        loss, grads = loss_and_grads(params, batch, labels)
        step = headwater.jax.apply_optimizer_step(head, learning_rate=1e-3, grads=grads, max_grad_norm=1.0)
        updates, state = optimizer.update(step.grads, state, params)

    `f` runs three programs: the body, on the host the loss of each shard of the hidden states, and the pullback. There is no
    callback in any of them, and nothing is gathered: each process sends its own shards, side by side. It must not be called under
    `jit`. Errors are those of `Head.cross_entropy` and `Head.jsd`, as they were raised.

    Every call is a micro-batch of the head's open step; call `f` several times to accumulate. Ids are n * shards + shard, for the
    n-th call of the step and the global number of a shard. They are the same in every run. A call that fails gives its ids back.
    Call `f` again with the same arguments, which adds the missing micro-batches, or close the step by `Head.discard_gradient`.

    `f(params, batch, labels=None, *, weight=None, teacher_x=None)`:
        params: pytree that the gradient is taken by.
        batch: pytree, the body's second argument.
        labels: [...] integers in [0, vocab_size) or `ignore_index`. Required without a teacher.
        weight: [...] finite: multiplies each token's loss; a mask, for example.
        teacher_x: [..., hidden size of the teacher], with `teacher` alone.
    Arrays beside params and batch are numpy arrays or `jax.Array`s that belong to all rows of the global hidden states. One whose
    shards lie on other processes must be split as the hidden states are.

    Args:
        body: `body(params, batch)` returns [..., hidden_size], float32, float16 or bfloat16. Compiled here; its outer dimensions
            may be split over devices.
        head: from `create_head` or `Client.head`. A frozen head adds nothing.
        teacher: makes the loss a Jensen-Shannon divergence to this head.
        reduction: "sum"; or "mean", sum(weight * loss) / sum(weight) over labels that are not ignored, 0 where there are none.
        class_weights: [vocab_size] finite: multiply a token's loss by its label's. "mean" divides by weight * class weight.
        has_aux: `body` returns (hidden, aux), and `f` ((loss, aux), gradient). aux gets no gradient.
        timeout_s: bound of each call to the server, in seconds. None: the client's.
        options: those of `linear_softmax_cross_entropy_loss`, with a teacher those of `linear_jsd_loss`.
    Returns:
        `f`. The loss is float32, a scalar, of the rows of all processes.
    Raises:
        InvalidArgumentError: options, shapes, types; rows that several processes have; rows of a process alone, in a program of
            several.
    """
    if teacher is not None:
        check_head(teacher, "teacher")
    make_options = cross_entropy_options if teacher is None else jsd_options
    split = _Split(
        head=head,
        teacher=teacher,
        options=make_options(**options),
        class_weights=None if class_weights is None else np.asarray(class_weights),
        is_mean=check_choice(reduction, "reduction", ("sum", "mean")) == "mean",
        timeout_s=timeout_s,
    )
    has_aux = check_bool(has_aux, "has_aux")

    @jax.jit
    def forward(params: Any, batch: Any) -> Any:
        # The vjp inside of jit: its pullback is the same for every call. The pullback of vjp(jit(body)) would be compiled each
        # time.
        return jax.vjp(lambda params: body(params, batch), params, has_aux=has_aux)

    @jax.jit
    def backward(pullback: Any, grad_hidden: jax.Array) -> Any:
        return pullback(grad_hidden)[0]

    @functools.wraps(body)
    def value_and_grad_of_body(
        params: Any, batch: Any, labels: Any = None, *, weight: Any = None, teacher_x: Any = None
    ) -> tuple[Any, Any]:
        hidden, pullback, *aux = forward(params, batch)
        loss, grads = split(hidden, labels, weight, teacher_x, functools.partial(backward, pullback))
        return ((loss, aux[0]) if has_aux else loss), grads

    return value_and_grad_of_body


class _Shard(NamedTuple):
    """Rows that this process has, once, whatever number of its devices hold them."""

    number: int  # among the shards of all processes
    index: tuple[slice, ...]  # in the global array
    data: jax.Array


class _Split(NamedTuple):
    """The loss of concrete hidden states."""

    head: Head
    teacher: Head | None
    options: dict[str, Any]
    class_weights: np.ndarray | None
    is_mean: bool
    timeout_s: float | None

    def __call__(
        self, hidden: Any, labels: Any, weight: Any, teacher_x: Any, backward: Callable[[jax.Array], Any]
    ) -> tuple[jax.Array, Any]:
        """The loss, a float32 scalar, and the result of `backward` for its gradient by the hidden states."""
        self._check(hidden, labels, weight, teacher_x)
        shards, count = _shards(hidden)
        scale = self._mean_factor(hidden, labels, weight) if self.is_mean else 1.0
        drawn = self._draw(shards, count)
        try:
            results = self._run(shards, drawn, scale, hidden, labels, weight, teacher_x)
            loss = _add_up(hidden, [result.loss_sum * scale for result in results])
            grads = backward(_gradient(hidden, shards, results))
        except BaseException:
            for contribution in drawn:
                contribution.give_back()
            raise
        for contribution in drawn:
            contribution.added()
        return loss, grads

    def _check(self, hidden: Any, labels: Any, weight: Any, teacher_x: Any) -> None:
        if not isinstance(hidden, jax.Array) or isinstance(hidden, jax.core.Tracer):
            raise must_be("body", "a function that returns one array, and called outside of jit", type(hidden))
        size = self.head.spec.hidden_size
        if hidden.ndim == 0 or hidden.shape[-1] != size:
            raise wrong_shape("hidden", f"[..., {size}]", hidden.shape)
        if labels is None and self.teacher is None:
            raise invalid_argument("MISSING_FIELD", "labels is required", field="labels")
        if (teacher_x is None) != (self.teacher is None):
            raise refused("teacher_x comes with teacher=, and not without it", "teacher_x")
        teacher_size = () if self.teacher is None else (self.teacher.spec.hidden_size,)
        for name, array, last in (("labels", labels, ()), ("weight", weight, ()), ("teacher_x", teacher_x, teacher_size)):
            expected = (*hidden.shape[:-1], *last)
            if array is not None and tuple(np.shape(array)) != expected:
                raise wrong_shape(name, expected, np.shape(array))

    def _mean_factor(self, hidden: jax.Array, labels: Any, weight: Any) -> float:
        """1 / (sum of the weights of tokens that are not ignored), over all processes; 0 if there is nothing to divide by."""
        total = float(_weight_sum(labels, weight, self.class_weights, hidden.shape[:-1], self.options["ignore_index"]))
        return 1.0 / total if total else 0.0

    def _draw(self, shards: Sequence[_Shard], count: int) -> list[Contribution]:
        """A micro-batch for each shard; none of a frozen head."""
        submissions = submissions_of(self.head)
        submissions.raise_kept()
        own = shards if self.head.spec.trainable else ()
        return [submissions.draw(shard.number, count, self.timeout_s) for shard in own]

    def _run(
        self, shards: Sequence[_Shard], drawn: Sequence[Contribution], scale: float, hidden: jax.Array, *others: Any
    ) -> list[LossResult]:
        """The results of the shards, whose calls run side by side."""
        hidden_name, method = ("hidden", "cross_entropy") if self.teacher is None else ("student_hidden", "jsd")
        options = {**self.options, "class_weights": self.class_weights, "loss_scale": scale, "timeout_s": self.timeout_s}
        if self.teacher is not None:
            options["teacher"] = self.teacher
        start = functools.partial(getattr(self.head, f"{method}_future"), **options)
        names = {"labels": "targets", "weight": "token_weights", "teacher_x": "teacher_hidden"}
        futures: list[Future[LossResult]] = []
        rows: list[jax.Array] = []  # on GPUs; they must stay until the answers have come
        gradients: list[jax.Array] = []  # one for each, which the answers are written into
        try:
            for shard in shards:
                if not _device.is_on_gpu(shard.data):
                    shard.data.copy_to_host_async()
            for place, shard in enumerate(shards):
                arrays = {
                    names[name]: _rows(array, shard.index, hidden.shape, name)
                    for name, array in zip(names, others, strict=True)
                    if array is not None
                }
                if _device.is_on_gpu(shard.data):
                    rows.append(shard.data.reshape(-1, hidden.shape[-1]))
                    arrays[hidden_name] = _device.concrete(rows[-1])
                    gradient, arrays["grad_hidden_out"] = _device.memory_for(rows[-1], shard.data.device)
                    gradients.append(gradient)
                else:
                    # A view: the array cannot be donated or freed before the answer has come.
                    arrays[hidden_name] = np.asarray(shard.data).reshape(-1, hidden.shape[-1])
                call: Any = functools.partial(start, **arrays)
                futures.append(drawn[place].submit(call) if drawn else call())
            results = [future.result() for future in futures]
            if not gradients:
                return results
            return [dataclasses.replace(result, grad_hidden=array) for result, array in zip(results, gradients, strict=True)]
        except BaseException as error:
            for future in futures:  # an answer that comes later would add to a step that is closed
                if not isinstance(error, Exception):
                    future.cancel()
                with contextlib.suppress(BaseException):
                    future.exception()
            raise


def _key(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Key:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _shards(hidden: jax.Array) -> tuple[list[_Shard], int]:
    """The shards that this process sends, and the number of all."""
    if jax.process_count() > 1 and hidden.is_fully_addressable:
        raise refused(
            f"the hidden states are an array of process {jax.process_index()} alone, and its gradient is reduced with no other: "
            "make batch and params global arrays (jax.make_array_from_process_local_data, a mesh over all devices)",
            "body",
        )
    places = {device: _key(index, hidden.shape) for device, index in hidden.sharding.devices_indices_map(hidden.shape).items()}
    if any(key[-1] != (0, hidden.shape[-1]) for key in places.values()):
        raise refused(
            "the hidden states are split along hidden_size: split their rows instead, by jax.lax.with_sharding_constraint where "
            "body returns",
            "body",
        )
    processes: dict[_Key, set[int]] = {}
    for device, key in places.items():
        processes.setdefault(key, set()).add(device.process_index)
    if any(len(having) > 1 for having in processes.values()):
        raise refused(_ONE_OWNER, "body")
    numbers = {key: number for number, key in enumerate(sorted(processes))}
    shards = {
        key: _Shard(numbers[key], shard.index, shard.data)
        for shard in reversed(hidden.addressable_shards)
        for key in [_key(shard.index, hidden.shape)]
    }
    return sorted(shards.values(), key=lambda shard: shard.number), len(numbers)


def _rows(array: Any, index: tuple[slice, ...], shape: tuple[int, ...], name: str) -> np.ndarray:
    """The part of an array that belongs to a shard of the hidden states, which have this shape and the shard this index in them."""
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        wanted = _key(index, shape)[:-1]
        for shard in array.addressable_shards:
            if _key(shard.index, array.shape)[: len(wanted)] == wanted:
                part = np.asarray(shard.data)
                break
        else:
            raise refused(f"{name} must be split over devices as the hidden states are, which are {shape}", name)
    else:
        part = np.asarray(array)[index[:-1]]
    return part.reshape(-1, *part.shape[len(shape) - 1 :])


@functools.partial(jax.jit, static_argnums=(3, 4))
def _weight_sum(labels: Any, weight: Any, class_weights: Any, shape: tuple[int, ...], ignore_index: int) -> jax.Array:
    weights = jnp.ones(shape, jnp.float32) if weight is None else jnp.asarray(weight, jnp.float32)
    if labels is not None:
        labels = jnp.asarray(labels)
        is_ignored = labels == ignore_index
        if class_weights is not None:
            weights *= jnp.asarray(class_weights, jnp.float32)[jnp.where(is_ignored, 0, labels)]
        weights = jnp.where(is_ignored, 0.0, weights)
    return jnp.sum(weights)


def _gradient(hidden: jax.Array, shards: Sequence[_Shard], results: Sequence[LossResult]) -> jax.Array:
    """The gradient by the hidden states, on the devices that have them."""
    grads = {_key(shard.index, hidden.shape): result.grad_hidden for shard, result in zip(shards, results, strict=True)}
    pieces = [
        jax.device_put(grads[_key(shard.index, hidden.shape)].reshape(shard.data.shape), shard.device)
        for shard in hidden.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(hidden.shape, hidden.sharding, pieces)


def _add_up(hidden: jax.Array, losses: list[float]) -> jax.Array:
    """The sum over all processes, a scalar on all devices of the hidden states."""
    if jax.process_count() == 1:
        return jnp.float32(np.sum(losses))
    devices = sorted(hidden.sharding.device_set, key=lambda device: device.id)
    own = [device for device in devices if device.process_index == jax.process_index()]
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
    first = np.full(1, np.sum(losses), np.float32)
    pieces = [jax.device_put(first if device is own[0] else np.zeros_like(first), device) for device in own]
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(jnp.sum, out_shardings=everywhere)(jax.make_array_from_single_device_arrays((len(devices),), split, pieces))
