"""The table of programs with rows that stay on a device: those of the CPU, with a fake driver of CUDA."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_jax_programs import table

ENVIRONMENTS = ("jax",)

FOLDER = Path(__file__).parent


# One device takes as long again, and has only calls outside of programs for itself.
@pytest.mark.parametrize(("devices", "column"), (pytest.param(1, "One device", marks=pytest.mark.long), (4, "Several")))
def test_programs_are_as_the_guide_says(devices, column, own_server):
    names = json.dumps(list(table()))
    command = [sys.executable, FOLDER / "jax_on_device.py", FOLDER / "jax_programs.py", own_server.address, names, devices]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    kinds = {name: outcome.split(":")[0] for name, outcome in outcomes.items()}
    assert kinds == {name: "right" if said[column] == "right" else "refused" for name, said in table().items()}, outcomes
