"""That the benchmark of calls measures every client, of one build and of two."""

import csv
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.skipif("HEADWATER_BUILD_DIR" not in os.environ, reason="HEADWATER_BUILD_DIR does not name a build")
def test_each_client_is_measured(tmp_path):
    build = os.environ["HEADWATER_BUILD_DIR"]
    command = [sys.executable, str(HERE / "run"), "--smoke", "--build", build, "--before", build, "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    with open(tmp_path / "client.csv", newline="", encoding="utf-8") as file:
        values = {row["case"]: float(row["value"]) for row in csv.DictReader(file)}
    assert len(values) == 2 * 6 + 2 + 3 and all(value > 0 for value in values.values())
