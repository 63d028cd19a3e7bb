"""A model of Flax NNX trains with a remote head as in process, and the examples and the guide to JAX do what they say."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax_figures import write_figures

ENVIRONMENTS = ("jax",)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "client/examples/python"
STEPS = 30


def loaded(name: str, path: Path):
    """A module by its path: there are several folders, some with a conftest of their own."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docs_blocks = loaded("docs_blocks", ROOT / "tests/e2e/python/programs/docs_blocks.py")


def run(*command: object, folder: Path | None = None) -> str:
    """The output of a program."""
    done = subprocess.run([sys.executable, *map(str, command)], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trained_in_process(example, steps: int) -> list[float]:
    """The losses of the example's model with its output layer beside the body, by one optimizer."""

    class Model(nnx.Module):
        def __init__(self):
            self.body = example.Body(nnx.Rngs(0))
            self.head = nnx.Param(example.head_weight())

    model = Model()
    transformation = optax.chain(optax.clip_by_global_norm(example.MAX_GRAD_NORM), optax.adamw(example.SCHEDULE, **example.ADAMW))
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens, labels):
        def loss_fn(model):
            logits = jnp.matmul(model.body(tokens), model.head[...], precision="highest")
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, *example.batch(index))) for index in range(steps)]


def test_thirty_steps_equal_those_in_process(remote_client):
    example = loaded("jax_language_model", EXAMPLES / "jax_language_model.py")
    remote, here = example.train(remote_client, STEPS), trained_in_process(example, STEPS)
    assert here[-1] < here[0] - 0.3
    differences = [abs(a - b) for a, b in zip(remote, here, strict=True)]
    write_figures(("cpu_nnx_30_steps_loss_difference", max(differences), "nats", 1e-5))
    assert all(difference <= 1e-5 for difference in differences), differences


# The language model's training is the test above.
@pytest.mark.parametrize("name", (pytest.param("jax_language_model", marks=pytest.mark.long), "jax_distil", "jax_processes"))
def test_example_lowers_its_loss(name, server):
    printed = run(EXAMPLES / f"{name}.py", server.address)
    values = [float(value) for value in re.findall(r"(?:loss|divergence) ([0-9.]+) nats", printed)]
    assert values[-1] < 0.9 * values[0], printed


GUIDE = [block for page in docs_blocks.pages("jax") for block in docs_blocks.blocks_of(page)]
# The definitions that the fragments rely on.
CONTEXT = """
import functools
import jax, jax.numpy as jnp, numpy as np
import headwater, headwater.jax
from jax.sharding import Mesh, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
params, inputs = jnp.ones((8, 16)), jnp.ones((4, 8))
labels = jnp.arange(4)
def body(params, inputs):
    return jnp.tanh(inputs @ params)
client = headwater.connect("localhost:50051")
head = headwater.jax.create_head(client, "jax-fragment", jnp.ones((16, 32)))
"""


def with_address(program: str, server) -> str:
    return program.replace(docs_blocks.PRINTED_ADDRESS, repr(server.address))


def test_guide_prints_what_it_shows(server, tmp_path):
    (whole,) = [block for block in GUIDE if block[3]]
    docs_blocks.check_output(run("-c", with_address(whole[2], server), folder=tmp_path), whole[3])


def test_fragments_of_the_guide_run(server, tmp_path):
    fragments = [text for _, _, text, output in GUIDE if not output]
    run("-c", with_address(CONTEXT + "".join(fragments), server), folder=tmp_path)
