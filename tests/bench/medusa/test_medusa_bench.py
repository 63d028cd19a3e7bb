"""That the Medusa benchmark runs: tiny, on the CPU; with the heads on a server the losses are those of PyTorch's."""

import csv
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.skipif("HEADWATER_BUILD_DIR" not in os.environ, reason="HEADWATER_BUILD_DIR does not name a build")
def test_losses_of_the_heads_on_a_server_are_pytorchs(tmp_path):
    pytest.importorskip("torch")
    build = os.environ["HEADWATER_BUILD_DIR"]
    command = [sys.executable, str(HERE / "run"), "--smoke", "--build", build, "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    with open(tmp_path / "frameworks.csv", newline="", encoding="utf-8") as file:
        values = {row["case"]: float(row["value"]) for row in csv.DictReader(file)}
    for rows in (64, 128):
        assert values[f"cpu_medusa_n{rows}_headwater_step_ms"] > 0
        assert values[f"cpu_medusa_n{rows}_headwater_losses_to_torch"] <= 1e-3
