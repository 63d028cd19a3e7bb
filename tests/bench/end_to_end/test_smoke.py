"""That the end-to-end benchmark runs: tiny, on the CPU, every way that needs no GPU."""

import csv
import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.skipif("HEADWATER_BUILD_DIR" not in os.environ, reason="HEADWATER_BUILD_DIR does not name a build")
def test_trains_with_the_head_in_process_and_remote(tmp_path):
    pytest.importorskip("torch")
    command = [
        sys.executable,
        str(HERE / "run"),
        "--smoke",
        "--build",
        os.environ["HEADWATER_BUILD_DIR"],
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "end-to-end.json").read_text(encoding="utf-8"))
    assert set(document["ways"]) == {"in_process_eager", "remote_grpc", "remote_grpc_overlapped", "remote_shared_memory"}
    assert document["not_measured"] == {}
    # The same weights and text everywhere: the losses agree, at the first step and after a few updates.
    losses = [way["first_loss"] for way in document["ways"].values()]
    assert max(losses) - min(losses) < 0.01 * min(losses)
    assert all(way["tokens_per_second"] > 0 and way["steps"] >= 4 for way in document["ways"].values())
    with open(tmp_path / "end-to-end.csv", newline="", encoding="utf-8") as file:
        cases = {row["case"]: row for row in csv.DictReader(file)}
    assert float(cases["cpu_end_to_end_remote_grpc_tokens_per_second"]["value"]) > 0
