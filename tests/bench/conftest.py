"""The common parts of the benchmarks' tests: each runs the `run` beside it, tiny, on the CPU."""

import os
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "common"))  # for the tests, too
import figures


@pytest.fixture
def smoke_run(request, tmp_path):
    """Runs the benchmark's script with --smoke and options; the values of the table NAME.csv that it writes, by case."""
    build = os.environ["HEADWATER_BUILD_DIR"]

    def run(name: str, *options: str, script: str = "run") -> dict[str, float]:
        path = pathlib.Path(request.path).with_name(script)
        command = [sys.executable, str(path), "--smoke", "--build", build, "--output", str(tmp_path), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return {row["case"]: float(row["value"]) for row in figures.read(tmp_path / f"{name}.csv")}

    return run
