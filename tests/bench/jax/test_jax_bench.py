"""JAX's benchmark runs: tiny, on the CPU; the remote loss is optax's."""

import pytest


def test_remote_loss_is_optax_and_is_timed_against_the_cpp_client(smoke_run):
    pytest.importorskip("optax")
    values = smoke_run("jax")
    assert values["cpu_jax_shared_memory_of_cpp_ratio"] > 0
    assert values["cpu_jax_n64_h32_v256_time_of_optax"] > 0
    assert values["cpu_jax_n64_h32_v256_loss_to_optax"] <= 1e-4
    assert values["cpu_jax_n64_h32_v256_grad_norm_to_optax"] <= 1e-2
