"""Losses of a remote head for JAX: eager, and inside `jit`, `grad`, `scan`, `cond`, `vmap` and `shard_map`.

    head = headwater.jax.create_head(client, "student", weights, optimizer=headwater.AdamW())       # weights [H, V]

    @jax.jit
    def step(params, batch, labels):
        def loss_fn(params):
            return headwater.jax.linear_softmax_cross_entropy_loss(head, body(params, batch), labels, reduction="mean")
        return jax.value_and_grad(loss_fn)(params)

Tested with jax 0.10 and 0.11.
"""

from headwater.jax._losses import (
    create_head as create_head,
    linear_jsd_loss as linear_jsd_loss,
    linear_softmax_cross_entropy_loss as linear_softmax_cross_entropy_loss,
)
from headwater.jax._optimizer import (
    StepResult as StepResult,
    apply_optimizer_step as apply_optimizer_step,
)
from headwater.jax._split import value_and_grad as value_and_grad
