"""One problem, computed by a remote head and by plain JAX: programs are written once, and run on either side.

The model is `tanh(features @ w + b)` before a head of `VOCAB_SIZE` columns with a bias. Under a mesh the remote loss runs in a
`shard_map` over the axis `data`, and the body is partitioned by XLA.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import headwater
import headwater.jax

SEQUENCES, CONTEXT, FEATURES, HIDDEN_SIZE, VOCAB_SIZE, TEACHER_SIZE = 4, 3, 8, 16, 40, 12
NUM_TOKENS = SEQUENCES * CONTEXT
LEARNING_RATE = 0.1

_names = itertools.count()

jax.config.update("jax_default_matmul_precision", "highest")  # a GPU's default rounds to 10 bits


def numbers(*shape, seed: int, size: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(np.float32)


def host(array) -> np.ndarray:
    """A whole array, of one process or of several."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def mesh_of(devices: str, rank: str | None = None, coordinator: str | None = None) -> Mesh | None:
    """So many devices of this process, or this one of so many processes, in a mesh; None for one. Before JAX is used."""
    if rank is not None:
        jax.distributed.initialize(coordinator, int(devices), int(rank))
    elif devices != "1":
        jax.config.update("jax_num_cpu_devices", int(devices))
    assert jax.device_count() == int(devices), jax.devices()
    return None if devices == "1" else Mesh(np.asarray(jax.devices()), ("data",))


def body(parameters, features):
    """The last hidden states, (..., HIDDEN_SIZE)."""
    return jnp.tanh(features @ parameters["w"] + parameters["b"])


def logits(head, x):
    return jnp.matmul(x, head["w"], precision="highest") + head["b"]


class Side:
    """Parameters, batches and losses; `shards` is how many calls a loss makes, `mesh` is None on one device."""

    def __init__(self, mesh: Mesh | None):
        self.mesh = mesh
        self.shards = 1 if mesh is None else mesh.size
        self.body = {"w": numbers(FEATURES, HIDDEN_SIZE, seed=1, size=0.5), "b": numbers(HIDDEN_SIZE, seed=2, size=0.1)}
        self.head_weight, self.head_bias = numbers(HIDDEN_SIZE, VOCAB_SIZE, seed=3), numbers(VOCAB_SIZE, seed=4)
        self.teacher_weight = numbers(TEACHER_SIZE, VOCAB_SIZE, seed=5)

    def place(self, tree, spec=None):
        """Arrays as the place has them: on its device, or on the mesh, by `spec` (replicated without)."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, tree)
        sharding = NamedSharding(self.mesh, P() if spec is None else spec)
        return jax.tree.map(lambda leaf: jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index]), tree)

    def batch(self, seed: int = 0, *, micro_batches: int | None = None):
        """Features (SEQUENCES, CONTEXT, FEATURES) and labels (SEQUENCES, CONTEXT); of several with a leading axis."""
        lead = () if micro_batches is None else (micro_batches,)
        features = numbers(*lead, SEQUENCES, CONTEXT, FEATURES, seed=100 + seed)
        labels = np.random.default_rng(200 + seed).integers(0, VOCAB_SIZE, features.shape[:-1], dtype=np.int32)
        return self.place((features, labels), P(*(None for _ in lead), "data"))

    def mean(self, parameters, batch, **options):
        """The mean cross entropy of a batch."""
        features, labels = batch
        return self.cross_entropy(body(parameters["body"], features), labels, parameters.get("head"), **options) / NUM_TOKENS


class Plain(Side):
    """The head is two parameters among the others, on one device."""

    def __init__(self):
        super().__init__(None)

    @property
    def params(self):
        return self.place({"body": self.body, "head": {"w": self.head_weight, "b": self.head_bias}})

    def cross_entropy(self, x, labels, head, **_):
        """The sum over all tokens."""
        return self.cross_entropy_here(x, labels, head)

    def cross_entropy_here(self, x, labels, head, **_):
        log_p = jax.nn.log_softmax(logits(head, x))
        return -jnp.take_along_axis(log_p, labels[..., None], -1).sum()

    def divergence(self, x, teacher_x, head):
        """The sum over all tokens of the Jensen-Shannon divergence with beta = 0.5."""
        log_q = jax.nn.log_softmax(logits(head, x))
        log_p = jax.nn.log_softmax(jnp.matmul(teacher_x, self.teacher_weight, precision="highest"))
        log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
        return 0.5 * (jnp.exp(log_p) * (log_p - log_m) + jnp.exp(log_q) * (log_q - log_m)).sum()

    def split(self, parameters, batch):
        return jax.value_and_grad(self.mean)(parameters, batch)

    def close(self, commits, grads=None):
        """The optimizers of the programs update the head with the body."""


class Remote(Side):
    """The head is on a server."""

    def __init__(self, client, mesh=None):
        super().__init__(mesh)
        name = f"program-{next(_names)}"  # all processes of a run count alike
        options = {"if_exists": "attach", "optimizer": headwater.SGD()}
        self.head = headwater.jax.create_head(client, name, self.head_weight, bias=self.head_bias, **options)
        self.teacher = headwater.jax.create_head(
            client, "programs-teacher", self.teacher_weight, trainable=False, if_exists="attach"
        )
        self.client = client
        self.steps = 0

    @property
    def params(self):
        return self.place({"body": self.body})

    def _sharded(self, loss, *rows, **operands):
        """The sum of a loss over the rows, in a shard_map under a mesh; `operands` are scalars."""
        if self.mesh is None:
            return loss(*rows, **operands)

        @functools.partial(jax.shard_map, mesh=self.mesh, in_specs=(P("data"), P()), out_specs=P())
        def sharded(rows, operands):
            ids = {name: value * self.shards + jax.lax.axis_index("data") for name, value in operands.items()}
            return jax.lax.psum(loss(*rows, **ids), "data")

        return sharded(rows, operands)

    def cross_entropy(self, x, labels, _, *, train=None, **operands):
        loss = functools.partial(headwater.jax.linear_softmax_cross_entropy_loss, self.head, train=train)
        return self._sharded(loss, x, labels, **operands)

    def cross_entropy_here(self, x, labels, _, **options):
        """Without a shard_map of its own."""
        return headwater.jax.linear_softmax_cross_entropy_loss(self.head, x, labels, **options)

    def divergence(self, x, teacher_x, _):
        loss = functools.partial(headwater.jax.linear_jsd_loss, self.head, self.teacher, beta=0.5)
        return self._sharded(loss, x, teacher_x)

    def split(self, parameters, batch):
        step = headwater.jax.value_and_grad(lambda p, features: body(p["body"], features), self.head, reduction="mean")
        return step(parameters, *batch)

    def commits(self) -> int:
        """The server's commits in the open step."""
        return self.client.head(self.head.name).step_state().open.totals.micro_batch_count

    def gradients(self):
        """The gradients so far of the head's weight (HIDDEN_SIZE, VOCAB_SIZE) and bias."""
        weight, bias = self.client.head(self.head.name).gradient(bias=True)
        return {"w": weight.T, "b": bias}

    def weights(self):
        head = self.client.head(self.head.name)
        return {"w": head.weight().T, "b": head.bias()}

    def close(self, commits, grads=None):
        """The head's optimizer step; fails unless the step has as many commits, each from every shard."""
        headwater.jax.apply_optimizer_step(self.head, learning_rate=LEARNING_RATE, grads=grads)
        self.steps += 1
        multihost_utils.sync_global_devices(f"step {self.steps} of {self.head.name}")  # the first process applies it
        state = self.client.head(self.head.name).step_state()
        assert state.open.step == self.steps, f"{self.steps} steps taken, the server is at {state.open.step}"
        closed = state.last_closed
        assert closed.state == "APPLIED", closed.state
        counted = closed.totals.micro_batch_count
        assert counted == commits * self.shards, f"{counted} commits, expected {commits} of {self.shards} shards"
