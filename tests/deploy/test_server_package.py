"""The entry points of the package headwater-server turn their process into the program."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from servers import write_program

PACKAGE = Path(__file__).resolve().parents[2] / "server/python/headwater_server"


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder with the package, whose headwaterd prints its arguments."""
    shutil.copytree(PACKAGE, tmp_path / "headwater_server", ignore=shutil.ignore_patterns("__pycache__", "bin"))
    program = '#!/bin/sh\necho "$$"\ngrep SigIgn /proc/self/status\necho "$@"\nexit 7\n'
    write_program(tmp_path / "headwater_server/bin/headwaterd", program)
    return tmp_path


def call(site: Path, code: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", f"import headwater_server; {code}", *arguments]
    return subprocess.Popen(command, env={"PYTHONPATH": str(site)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_entry_point_becomes_the_program(site):
    process = call(site, "headwater_server.headwaterd()", "--flag=a b", "c")
    told, errors = process.communicate(timeout=60)
    pid, ignored, arguments = told.splitlines()
    assert (process.returncode, arguments, errors) == (7, "--flag=a b c", "")
    assert int(pid) == process.pid
    # Python ignores SIGPIPE and SIGXFSZ; the program must not.
    assert int(ignored.split()[1], 16) == 0


def test_a_program_is_found_by_its_name(site):
    told, _ = call(site, "print(headwater_server.binary('headwaterd'))").communicate(timeout=60)
    assert told.strip() == str(site / "headwater_server/bin/headwaterd")
    process = call(site, "headwater_server.binary('../headwaterd')")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ValueError: name: expected one of headwaterd, headwaterctl, got '../headwaterd'" in errors
