"""The programs of the table in docs/guides/jax.md, by the names that they have there, and what each comes to in a place.

python jax_programs.py ADDRESS NAMES DEVICES [RANK COORDINATOR]     # on so many devices here, or as one of DEVICES processes

NAMES is a list in JSON. It prints a line in JSON for each program: its name and its outcome.
"""

import dataclasses
import functools
import json
import sys
import traceback
import warnings
from collections.abc import Callable

import flax.linen
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec as P
from jax_sides import (
    CONTEXT,
    FEATURES,
    HIDDEN_SIZE,
    LEARNING_RATE,
    NUM_TOKENS,
    SEQUENCES,
    TEACHER_SIZE,
    Plain,
    Remote,
    body,
    host,
    mesh_of,
    numbers,
)

import headwater

TOLERANCE = 1e-5


@dataclasses.dataclass
class Outcome:
    """The result of a program: values, and the gradients of its one step or the parameters after its steps."""

    values: object
    grads: object = None
    commits: int = 1  # of the step that is still open, from each shard
    params: object = None
    warning: str | None = None  # that closing the step is to bring about


PROGRAMS: dict[str, Callable] = {}


def program(name: str):
    def add(function):
        PROGRAMS[name] = function
        return function

    return add


@program("`jit(value_and_grad)`")
def jitted(side):
    return Outcome(*jax.jit(jax.value_and_grad(side.mean))(side.params, side.batch()))


@program("`value_and_grad` without `jit`")
def eager(side):
    return Outcome(*jax.value_and_grad(side.mean)(side.params, side.batch()))


@program("two losses in one step")
def two_losses(side):
    @jax.jit
    def step(params, first, second):
        return jax.value_and_grad(lambda p: side.mean(p, first) + 2 * side.mean(p, second))(params)

    return Outcome(*step(side.params, side.batch(0), side.batch(1)), commits=2)


@program("evaluation, with `train=False`")
def evaluation(side):
    value = jax.jit(functools.partial(side.mean, train=False))(side.params, side.batch(1))
    return Outcome(value, grads_of(side))


def grads_of(side):
    """The gradients of a step of its own: for programs that commit nothing by themselves."""
    return jax.jit(jax.grad(side.mean))(side.params, side.batch())


@program("`jit` of a whole training step, with donation")
def donated(side):
    optimizer = optax.sgd(LEARNING_RATE)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, batch):
        value, grads = jax.value_and_grad(side.mean)(params, batch)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    params, values = side.params, []
    state = optimizer.init(params)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")  # the batch's
        for seed in range(3):
            params, state, value = step(params, state, side.batch(seed))
            values.append(value)
            side.close(1, params)
    return Outcome(values, params=params)


def accumulated(side, loss):
    """The gradients of three micro-batches, by lax.scan; `loss` of parameters, batch and index."""

    @jax.jit
    def step(params, batches):
        def add(total, indexed):
            index, batch = indexed
            value, grads = jax.value_and_grad(loss)(params, batch, index)
            return jax.tree.map(jnp.add, total, grads), value

        grads, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (jnp.arange(3), batches))
        return values, grads

    return Outcome(*step(side.params, side.batch(micro_batches=3)), commits=3)


@program("`lax.scan` over micro-batches")
def scanned(side):
    return accumulated(side, lambda params, batch, _: side.mean(params, batch))


@program("`lax.scan`, with `micro_batch=`")
def scanned_with_ids(side):
    return accumulated(side, lambda params, batch, index: side.mean(params, batch, micro_batch=index))


@program("`lax.cond`")
def conditional(side):
    @jax.jit
    def step(params, batch, wanted):
        def skip(params, batch):
            return jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)

        return jax.lax.cond(wanted, jax.value_and_grad(side.mean), skip, params, batch)

    step(side.params, side.batch(1), False)
    return Outcome(*step(side.params, side.batch(), True))


@program("`shard_map` around the step, default `check_vma`")
def whole_shard_map(side):
    mesh = side.mesh or Mesh(np.asarray(jax.local_devices()[:1]), ("data",))

    def loss(params, features, labels):
        return side.cross_entropy_here(body(params["body"], features), labels, params.get("head")) / NUM_TOKENS

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(params, features, labels):
        value, grads = jax.value_and_grad(loss)(params, features, labels)
        return jax.lax.psum(value, "data"), grads

    return Outcome(*step(side.params, *side.batch()))


@program("`optax.MultiSteps` around the body's optimizer")
def multi_steps(side):
    optimizer = optax.MultiSteps(optax.sgd(LEARNING_RATE), 2, use_grad_mean=False)

    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(lambda p: side.mean(p, batch) / 2)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params, values = side.params, []
    state = optimizer.init(params)
    for seed in range(4):
        params, state, value = step(params, state, side.batch(seed))
        values.append(value)
        if seed % 2:
            side.close(2, params)
    return Outcome(values, params=params)


@program("Flax NNX: `nnx.jit`, `nnx.value_and_grad`, `nnx.Optimizer`")
def with_nnx(side):
    class Model(nnx.Module):
        def __init__(self, params):
            self.linear = nnx.Linear(FEATURES, HIDDEN_SIZE, rngs=nnx.Rngs(0))
            self.linear.kernel = nnx.Param(params["body"]["w"])
            self.linear.bias = nnx.Param(params["body"]["b"])
            self.head = nnx.data({name: nnx.Param(value) for name, value in params.get("head", {}).items()})

        def __call__(self, features):
            return jnp.tanh(self.linear(features))

    @nnx.jit
    def step(model, optimizer, features, labels):
        def loss(model):
            head = {name: value[...] for name, value in model.head.items()}
            return side.cross_entropy(model(features), labels, head) / NUM_TOKENS

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    model = Model(side.params)
    optimizer = nnx.Optimizer(model, optax.sgd(LEARNING_RATE), wrt=nnx.Param)
    values = []
    for seed in range(2):
        values.append(step(model, optimizer, *side.batch(seed)))
        side.close(1, nnx.state(model, nnx.Param))
    params = {"body": {"w": model.linear.kernel[...], "b": model.linear.bias[...]}}
    return Outcome(values, params={**params, "head": {name: value[...] for name, value in model.head.items()}})


@program("Flax Linen: `TrainState`")
def with_linen(side):
    class Model(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, features):
            return jnp.tanh(flax.linen.Dense(HIDDEN_SIZE, name="linear")(features))

    @jax.jit
    def step(state, features, labels):
        def loss(params):
            x = state.apply_fn({"params": params["model"]}, features)
            return side.cross_entropy(x, labels, params.get("head")) / NUM_TOKENS

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    params = side.params
    linear = params.pop("body")
    params["model"] = {"linear": {"kernel": linear["w"], "bias": linear["b"]}}
    state = flax.training.train_state.TrainState.create(apply_fn=Model().apply, params=params, tx=optax.sgd(LEARNING_RATE))
    values = []
    for seed in range(2):
        state, value = step(state, *side.batch(seed))
        values.append(value)
        side.close(1, state.params)
    linear = state.params["model"]["linear"]
    return Outcome(values, params={"body": {"w": linear["kernel"], "b": linear["bias"]}, "head": state.params.get("head")})


@program("the split step, `headwater.jax.value_and_grad`")
def split(side):
    return Outcome(*side.split(side.params, side.batch()))


@program("distillation, `linear_jsd_loss`")
def distilled(side):
    teacher_x = side.place(numbers(SEQUENCES, CONTEXT, TEACHER_SIZE, seed=6), P("data"))

    @jax.jit
    def step(params, features, teacher_x):
        def loss(params):
            return side.divergence(body(params["body"], features), teacher_x, params.get("head")) / NUM_TOKENS

        return jax.value_and_grad(loss)(params)

    return Outcome(*step(side.params, side.batch()[0], teacher_x))


@program("`vmap`")
def mapped(side):
    @jax.jit
    def step(params, batches):
        return jax.value_and_grad(lambda p: jax.vmap(functools.partial(side.mean, p))(batches).sum())(params)

    return Outcome(*step(side.params, side.batch(micro_batches=2)), commits=2)


@program("`jax.checkpoint` around the body")
def checkpointed_body(side):
    @jax.jit
    def step(params, features, labels):
        def loss(params):
            x = jax.checkpoint(body)(params["body"], features)
            return side.cross_entropy(x, labels, params.get("head")) / NUM_TOKENS

        return jax.value_and_grad(loss)(params)

    return Outcome(*step(side.params, *side.batch()))


@program("`jax.checkpoint` around the loss")
def checkpointed_loss(side):
    return Outcome(*jax.jit(jax.value_and_grad(jax.checkpoint(side.mean)))(side.params, side.batch()))


DISCARDED = "discard"


@program("a pullback that is not called")
def unused_pullback(side):
    value = jax.jit(lambda params, batch: jax.vjp(side.mean, params, batch)[0])(side.params, side.batch(1))
    jax.block_until_ready(value)
    return Outcome(value, grads_of(side), warning=DISCARDED)


@program("`jax.linearize`")
def linearized(side):
    def value_of(params, batch):
        return jax.linearize(lambda p: side.mean(p, batch), params)[0]

    value = jax.jit(value_of)(side.params, side.batch(1))
    jax.block_until_ready(value)
    return Outcome(value, grads_of(side), warning=DISCARDED)


@program("a loss in `has_aux`")
def auxiliary(side):
    @jax.jit
    def step(params, batch, other):
        return jax.value_and_grad(lambda p: (side.mean(p, batch), side.mean(p, other)), has_aux=True)(params)

    return Outcome(*step(side.params, side.batch(), side.batch(1)), warning=DISCARDED)


@program("`jax.jacrev`")
def jacobian(side):
    @jax.jit
    def rows_of(params, batch):
        return jax.jacrev(lambda p: side.mean(p, batch) * jnp.array([1.0, 2.0]))(params)

    rows = rows_of(side.params, side.batch())
    return Outcome((), jax.tree.map(lambda leaf: leaf.sum(0), rows))


def over_frozen_body(side, **options):
    """The gradient of the head alone: of no parameter that JAX knows, where the head is on a server."""

    @jax.jit
    def step(params, features, labels):
        def loss(head):
            return side.cross_entropy(body(params["body"], features), labels, head, **options)

        return jax.value_and_grad(loss)(params.get("head", {}))

    value, grads = step(side.params, *side.batch())
    return Outcome(value, {"body": {}, "head": grads})


@program("a frozen body")
def frozen_body(side):
    return over_frozen_body(side)


@program("a frozen body, with `train=True`")
def trained_over_frozen_body(side):
    return over_frozen_body(side, train=True)


def over_stopped_gradient(side, **options):
    @jax.jit
    def step(params, features, labels):
        def loss(params):
            x = jax.lax.stop_gradient(body(params["body"], features))
            return side.cross_entropy(x, labels, params.get("head"), **options)

        return jax.value_and_grad(loss)(params)

    return Outcome(*step(side.params, *side.batch()))


@program("`stop_gradient` before the loss")
def stopped(side):
    return over_stopped_gradient(side)


@program("`stop_gradient` before the loss, with `train=True`")
def trained_behind_stop(side):
    return over_stopped_gradient(side, train=True)


@program("`lax.scan` over hidden states, with `train=True`")
def scanned_over_rows(side):
    @jax.jit
    def step(params, features, labels):
        def loss(params):
            def add(total, batch):
                return total + side.cross_entropy(*batch, params.get("head"), train=True), None

            rows = jax.lax.stop_gradient(body(params["body"], features))
            return jax.lax.scan(add, 0.0, (rows, labels))[0]

        return jax.value_and_grad(loss)(params)

    return Outcome(*step(side.params, *side.batch(micro_batches=3)), commits=3)


@program("a sharded batch without `shard_map` (GSPMD)")
def partitioned_by_xla(side):
    @jax.jit
    def step(params, features, labels):
        def loss(params):
            return side.cross_entropy_here(body(params["body"], features), labels, params.get("head")) / NUM_TOKENS

        return jax.value_and_grad(loss)(params)

    return Outcome(*step(side.params, *side.batch()))


def assert_equal(what: str, actual, expected) -> None:
    """Leaf by leaf, within TOLERANCE; NaN is never equal."""
    actual, expected = (jax.tree.map(host, tree) for tree in (actual, expected))
    assert jax.tree.structure(actual) == jax.tree.structure(expected), f"{what}: {actual} != {expected}"
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        error = np.max(np.abs(a - b) / (1 + np.abs(b)), initial=0)
        assert a.shape == b.shape and error <= TOLERANCE, f"{what}: off by {error:.3g}"


def check(name: str, remote: Remote) -> None:
    """Raises what the program raises, or AssertionError if it computes something else than plain JAX, or commits otherwise."""
    expected, found = PROGRAMS[name](Plain()), PROGRAMS[name](remote)
    assert_equal("values", found.values, expected.values)
    if found.params is not None:
        assert_equal("parameters", found.params["body"], expected.params["body"])
        assert_equal("the head's weights", remote.weights(), expected.params["head"])
        return
    jax.block_until_ready(found.grads)
    assert_equal("gradients", found.grads["body"], expected.grads["body"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", headwater.HeadWarning)
        if found.warning is None:
            # Before anything is settled: what depends on the gradients depends on the commits.
            assert_equal("the head's gradients", remote.gradients(), expected.grads["head"])
        remote.close(found.commits, found.grads)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, headwater.HeadWarning)]
    if found.warning is None:
        assert not said, said
    else:
        assert any(found.warning in text for text in said), f"no warning says {found.warning!r}: {said}"
    stepped = jax.tree.map(lambda weight, gradient: weight - LEARNING_RATE * gradient, initial(), expected.grads["head"])
    assert_equal("the head's weights", remote.weights(), stepped)


def initial():
    side = Plain()
    return {"w": side.head_weight, "b": side.head_bias}


def outcome(name: str, client, mesh=None) -> str:
    """ "right", "wrong: " and why, or "refused: " and the whole error."""
    remote = Remote(client, mesh)
    try:
        check(name, remote)
    except AssertionError:
        return f"wrong: {traceback.format_exc()}"
    except Exception as error:  # whatever JAX makes of it
        if remote.client.head(remote.head.name).step_state().last_closed is not None:
            return f"wrong: after {remote.steps} steps {traceback.format_exc()}"
        return f"refused: {error}"
    return "right"


def main() -> None:
    address, names, *place = sys.argv[1:]
    mesh = mesh_of(*place)
    # The tenant is the program's own, so that the heads of several places have the same names.
    with headwater.connect(address, tenant=f"programs-{jax.process_count()}-{jax.device_count()}") as client:
        for name in json.loads(names):
            print(json.dumps([name, outcome(name, client, mesh)]), flush=True)
        multihost_utils.sync_global_devices("done")
        if jax.process_index() == 0:
            for info in client.heads():
                client.head(info.name).delete(force=True)  # a server has 64 at most


if __name__ == "__main__":
    main()
