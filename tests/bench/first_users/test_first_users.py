"""The benchmark of first users' programs runs."""

import pytest


def test_two_losses_are_measured_against_one(smoke_run):
    pytest.importorskip("torch")
    values = smoke_run("first-users")
    assert len(values) == 3 and all(value > 0 for value in values.values())
