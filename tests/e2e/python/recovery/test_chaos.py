"""Training under disturbances ends in the bits of an undisturbed run; the short form of tests/e2e/chaos/run."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "chaos"))

import chaos

SEED, EVENTS, STEPS = 2, 12, 14  # of every kind


def test_a_disturbed_run_ends_bitwise_where_an_undisturbed_one_does(tmp_path):
    report = chaos.campaign(tmp_path, seed=SEED, events=EVENTS, steps=STEPS, shards=3, link_kind="proxy")
    print(report)
    assert report["events"] == EVENTS
    assert report["trainers"]["conflicts"] == 0 == report["server"].get("conflict", 0)


def test_runs_that_differ_are_told(tmp_path, monkeypatch):
    """Else the first test could not fail."""
    finish = chaos.Run.finish

    def differ(run):
        return {**finish(run), "step": str(run.directory)}

    monkeypatch.setattr(chaos.Run, "finish", differ)
    with pytest.raises(chaos.Failure, match="the runs differ"):
        chaos.campaign(tmp_path, seed=5, events=0, steps=1, shards=1, link_kind="proxy")
