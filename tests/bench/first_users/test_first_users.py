"""That the benchmark of first users' programs runs."""

import csv
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.skipif("HEADWATER_BUILD_DIR" not in os.environ, reason="HEADWATER_BUILD_DIR does not name a build")
def test_two_losses_are_measured_against_one(tmp_path):
    pytest.importorskip("torch")
    build = os.environ["HEADWATER_BUILD_DIR"]
    command = [sys.executable, str(HERE / "run"), "--smoke", "--build", build, "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    with open(tmp_path / "first-users.csv", newline="", encoding="utf-8") as file:
        values = {row["case"]: float(row["value"]) for row in csv.DictReader(file)}
    assert len(values) == 3 and all(value > 0 for value in values.values())
