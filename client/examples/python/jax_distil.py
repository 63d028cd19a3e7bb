"""Distils a teacher into a student with JAX: both send hidden states, and the server compares their whole distributions.

python jax_distil.py unix:/run/headwater/headwater.sock       # a server
python jax_distil.py local                                    # a server of its own
"""

import sys

import jax
import jax.numpy as jnp
import optax

import headwater
import headwater.jax
import headwater.local

VOCAB_SIZE, STUDENT_SIZE, TEACHER_SIZE, NUM_TOKENS, STEPS, LEARNING_RATE = 1000, 32, 64, 128, 20, 1e-2


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def main() -> None:
    place = sys.argv[1]
    with headwater.local.connect() if place == "local" else headwater.connect(place) as client:
        teacher = headwater.jax.create_head(
            client, "jax-distil-teacher", normal(0, TEACHER_SIZE, VOCAB_SIZE) / 4, trainable=False, if_exists="replace"
        )
        student = headwater.jax.create_head(
            client, "jax-distil-student", normal(1, STUDENT_SIZE, VOCAB_SIZE) / 4, optimizer=headwater.AdamW(), if_exists="replace"
        )
        optimizer = optax.adamw(LEARNING_RATE)

        @jax.jit
        def step(body, state, teacher_x):
            def loss_fn(body):
                # The student's body reads the inputs of the teacher's last layer; a model would read the tokens.
                x = jnp.tanh(teacher_x @ body)
                return headwater.jax.linear_jsd_loss(student, teacher, x, teacher_x, beta=0.5, reduction="mean")

            loss, grads = jax.value_and_grad(loss_fn)(body)
            updates, state = optimizer.update(grads, state, body)
            return optax.apply_updates(body, updates), state, loss

        body = normal(2, TEACHER_SIZE, STUDENT_SIZE) / 8
        state = optimizer.init(body)
        for index in range(STEPS):
            body, state, loss = step(body, state, normal(100 + index, NUM_TOKENS, TEACHER_SIZE))
            headwater.jax.apply_optimizer_step(student, learning_rate=LEARNING_RATE)
            if index in (0, STEPS - 1):
                print(f"step {index}: divergence {float(loss):.4f} nats")


if __name__ == "__main__":
    main()
