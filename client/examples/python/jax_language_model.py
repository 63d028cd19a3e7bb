"""Trains a small language model of Flax NNX, whose output layer is on a server.

python jax_language_model.py unix:/run/headwater/headwater.sock [STEPS]     # a server
python jax_language_model.py local [STEPS]                                  # a server of its own
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import headwater
import headwater.jax
import headwater.local

VOCAB_SIZE, HIDDEN_SIZE, CONTEXT, SEQUENCES = 500, 48, 32, 8
MAX_GRAD_NORM = 1.0
SCHEDULE = optax.cosine_decay_schedule(3e-3, decay_steps=60)
ADAMW = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


class Body(nnx.Module):
    """Tokens to last hidden states: one block of a transformer."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCAB_SIZE, HIDDEN_SIZE, rngs=rngs)
        self.position = nnx.Embed(CONTEXT, HIDDEN_SIZE, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, HIDDEN_SIZE, decode=False, rngs=rngs)
        self.before, self.between, self.after = (nnx.LayerNorm(HIDDEN_SIZE, rngs=rngs) for _ in range(3))
        self.wide, self.narrow = nnx.Linear(HIDDEN_SIZE, 96, rngs=rngs), nnx.Linear(96, HIDDEN_SIZE, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(sequences, context) tokens to (sequences, context, HIDDEN_SIZE)."""
        x = self.embedding(tokens) + self.position(jnp.arange(tokens.shape[1]))
        x = x + self.attention(self.before(x), mask=nnx.make_causal_mask(tokens))
        x = x + self.narrow(nnx.gelu(self.wide(self.between(x))))
        return self.after(x)


def head_weight() -> jax.Array:
    """The output layer's initial weight, (HIDDEN_SIZE, VOCAB_SIZE)."""
    return jax.random.normal(jax.random.key(1), (HIDDEN_SIZE, VOCAB_SIZE)) / HIDDEN_SIZE**0.5


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Inputs and labels: sequences that count by a stride."""
    start, stride = (
        jax.random.randint(key, (SEQUENCES, 1), 0, high)
        for key, high in zip(jax.random.split(jax.random.key(step)), (VOCAB_SIZE, 4), strict=True)
    )
    tokens = (start + (stride + 1) * jnp.arange(CONTEXT + 1)) % VOCAB_SIZE
    return tokens[:, :-1], tokens[:, 1:]


def train(client: headwater.Client, steps: int) -> list[float]:
    """The losses of the steps."""
    adamw = headwater.AdamW(beta1=ADAMW["b1"], beta2=ADAMW["b2"], epsilon=ADAMW["eps"], weight_decay=ADAMW["weight_decay"])
    head = headwater.jax.create_head(client, "jax-example", head_weight(), optimizer=adamw, if_exists="replace")
    body = Body(nnx.Rngs(0))
    optimizer = nnx.Optimizer(body, optax.adamw(SCHEDULE, **ADAMW), wrt=nnx.Param)

    @nnx.jit
    def loss_and_grads(body, tokens, labels):
        def loss_fn(body):
            return headwater.jax.linear_softmax_cross_entropy_loss(head, body(tokens), labels, reduction="mean")

        return nnx.value_and_grad(loss_fn)(body)

    @nnx.jit
    def update(body, optimizer, grads):
        optimizer.update(body, grads)

    losses = []
    for step in range(steps):
        loss, grads = loss_and_grads(body, *batch(step))
        # The norm that clips is that of body and head together.
        result = headwater.jax.apply_optimizer_step(head, learning_rate=SCHEDULE(step), grads=grads, max_grad_norm=MAX_GRAD_NORM)
        update(body, optimizer, result.grads)
        losses.append(float(loss))
    return losses


def main() -> None:
    place, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60
    with headwater.local.connect() if place == "local" else headwater.connect(place) as client:
        for step, loss in enumerate(train(client, steps)):
            if step % 10 == 0 or step == steps - 1:
                print(f"step {step}: loss {loss:.4f} nats")


if __name__ == "__main__":
    main()
