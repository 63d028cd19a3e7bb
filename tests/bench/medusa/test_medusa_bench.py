"""The Medusa benchmark runs: tiny, on the CPU; with the heads on a server the losses are those of PyTorch's."""

import pytest


def test_losses_of_the_heads_on_a_server_are_pytorchs(smoke_run):
    pytest.importorskip("torch")
    values = smoke_run("frameworks")
    for rows in (64, 128):
        assert values[f"cpu_medusa_n{rows}_headwater_step_ms"] > 0
        assert values[f"cpu_medusa_n{rows}_headwater_losses_to_torch"] <= 1e-3
