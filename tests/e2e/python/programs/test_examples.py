"""The example of a teacher in its own process runs, and does what it says."""

import re
from pathlib import Path

from expectations import run_python

EXAMPLE = Path(__file__).resolve().parents[4] / "client" / "examples" / "python" / "teacher_process.py"


def test_distilling_lowers_the_divergence(each_place):
    arguments = [each_place.address] if each_place.remote else []
    first, last = map(float, re.findall(r"divergence ([0-9.]+) nats", run_python(EXAMPLE, *arguments)))
    assert last < 0.9 * first
    if each_place.remote:
        assert not [info for info in each_place.client.heads() if "example" in info.name]
