"""The study runs, tiny, on the CPU; every way has PyTorch's loss, and the matrix keeps its size."""

import os
import pathlib
import subprocess
import sys

import pytest
from points import WAYS, all_points


def test_ways_have_pytorchs_loss(smoke_run):
    pytest.importorskip("transformers")
    values = smoke_run("study")
    for way in ("headwater", "headwater_local"):
        assert values[f"cpu_study_batches_tiny_b2_t32_v512_{way}_first_loss_to_eager"] <= 1e-3
        assert values[f"cpu_study_batches_tiny_b2_t32_v512_{way}_server_planned_mib"] > 0
    assert values["cpu_study_loss_tiny_b2_t32_v512_headwater_first_loss_to_eager"] <= 1e-3
    assert values["cpu_study_accumulation_tiny_b2_t32_a4_v512_checkpointed_headwater_trainer_step_ms"] > 0


def test_accumulation_is_exact(tmp_path):
    pytest.importorskip("torch")
    if "HEADWATER_BUILD_DIR" not in os.environ:
        pytest.skip("HEADWATER_BUILD_DIR does not name a build")
    script = pathlib.Path(__file__).with_name("exactness.py")
    command = [sys.executable, script, "--smoke", "--build", os.environ["HEADWATER_BUILD_DIR"], "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "study.csv").read_text().count("cpu_study_exact_") == 15


def test_the_matrix_is_listed_and_small():
    points = all_points()
    assert len(points) <= 120
    assert len({point.name for point in points}) == len(points)
    assert {point.way for point in points} <= set(WAYS)
