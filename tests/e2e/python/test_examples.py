"""The examples run, and do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "client" / "examples" / "python"


@pytest.mark.parametrize("example", ["distill.py", "teacher_process.py"])
def test_distilling_lowers_the_divergence(each_place, example):
    arguments = [each_place.address] if each_place.remote else []
    done = subprocess.run([sys.executable, EXAMPLES / example, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r"divergence ([0-9.]+) nats", done.stdout))
    assert last < 0.9 * first
    if each_place.remote:
        assert not [info for info in each_place.client.heads() if "example" in info.name]
