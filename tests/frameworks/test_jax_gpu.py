"""headwater.jax on a GPU: rows stay there, and go to the server by CUDA IPC."""

import jax
import jax.numpy as jnp
import numpy as np
from jax_on_device import losses

import headwater.jax
from headwater._memory import PrivateRows
from headwater.jax import _callbacks

ENVIRONMENTS = ("jax_gpu",)


def test_rows_are_read_and_written_where_they_lie():
    x = jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4)
    seen = []

    def note(memory, rows):
        seen.append((rows, memory))
        return [memory[0], np.int32(7), np.full((3, 4), 9, np.float32)]

    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
    ]
    _, number, filled = jax.jit(lambda rows: _callbacks.call(note, shapes, {"rows": rows}))(x)
    ((rows, memory),) = seen
    assert isinstance(rows, PrivateRows) and rows.shape == (3, 4) and rows.data_type == "bfloat16"
    assert isinstance(memory[0], PrivateRows) and memory[1] is None and memory[2].data_type == "float32"
    assert number == 7 and np.array_equal(np.asarray(filled), np.full((3, 4), 9))


def test_losses_go_by_cuda_ipc_and_never_share_the_memory_of_xla(remote_client):
    connection = remote_client._backend.connection
    before = connection.info()
    losses(remote_client, "by-cuda-ipc", "bfloat16")
    after = connection.info()
    # Memory that could not be exported would be a reason.
    assert (after["cuda_transport"], after["why_not_better"]) == ("cuda_ipc", "")
    assert int(after["micro_batches.cuda_ipc"]) == int(before["micro_batches.cuda_ipc"]) + 1


def test_compiled_step_takes_new_rows_each_time(remote_client):
    keys = jax.random.split(jax.random.key(0), 3)
    weights = jax.random.normal(keys[0], (64, 96)) / 8
    labels = jax.random.randint(keys[1], (256,), 0, 96)
    head = headwater.jax.create_head(remote_client, "rows-each-time", weights)

    def plain(x):
        return -jnp.take_along_axis(jax.nn.log_softmax(jnp.matmul(x, weights, precision="highest")), labels[:, None], 1).sum()

    @jax.jit
    def step(seed):
        # Rows, and what is done with their gradient, are of the same program: both are in the order of its stream.
        x = jnp.tanh(jax.random.normal(jax.random.key(seed), (256, 64)))
        value, grad = jax.value_and_grad(lambda x: headwater.jax.linear_softmax_cross_entropy_loss(head, x, labels))(x)
        return x, value, 2 * grad

    for seed in range(5):
        x, value, doubled = step(seed)
        expected = jax.value_and_grad(plain)(x)
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        np.testing.assert_allclose(doubled, 2 * expected[1], rtol=1e-3, atol=1e-5)
    assert head.step_state().open.totals.micro_batch_count == 5
    remote_client.head("rows-each-time").delete(force=True)
