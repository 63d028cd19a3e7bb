"""What the scripts of deploy/ do on machines that are not the one they were written on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def in_library(code: str, *arguments: str, **environment: str) -> str:
    """What shell code prints that has sourced deploy/lib.sh."""
    command = ["bash", "-c", f'set -euo pipefail; cd "$0"; . deploy/lib.sh; {code}', str(REPOSITORY), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_checkout_is_found_whatever_cdpath_says(tmp_path):
    (tmp_path / "deploy").mkdir()
    for folders in (".", str(tmp_path), f"{tmp_path}:."):
        assert in_library('echo "$headwater_root"', CDPATH=folders) == str(REPOSITORY)


def test_the_checkout_is_the_same_one_through_a_link(tmp_path):
    (tmp_path / "link").symlink_to(REPOSITORY)
    command = ["bash", "-c", '. "$0/deploy/lib.sh"; echo "$headwater_root"', str(tmp_path / "link")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == str(REPOSITORY)


@pytest.mark.parametrize(("version", "found"), [("3, 10", False), ("3, 11", True), ("4, 0", True)])
def test_an_interpreter_that_is_too_old_is_not_taken(tmp_path, version, found):
    # An interpreter of that version which imports everything.
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import importlib, sys\n"
        f"sys.version_info = ({version})\n"
        "importlib.import_module = lambda name: None\n"
        "exec(sys.argv[2])\n"
    )
    python.chmod(0o755)
    printed = in_library("find_python torch || echo none", HEADWATER_PYTHON=str(python))
    assert printed == (str(python) if found else "none")


def write_groups(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


NO_LIMIT = "65536 1152921504606846976"


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/", {}, NO_LIMIT),
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, NO_LIMIT),
        # A container with a namespace of its own, and one without, under either version.
        ("0::/", {"cpu.max": "250000 100000", "memory.max": "4000000000"}, "3 4000000000"),
        ("4:memory:/docker/a\n1:cpu,cpuacct:/docker/a", {"memory/memory.limit_in_bytes": "4000000000"}, "65536 4000000000"),
        ("1:cpuacct,cpu:/", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, "1 1152921504606846976"),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, NO_LIMIT),
        # The strictest of a group and those above it.
        ("0::/a.slice/b", {"a.slice/memory.max": "3000000000", "a.slice/b/memory.max": "max"}, "65536 3000000000"),
        ("0::/a.slice/b", {"a.slice/cpu.max": "800000 100000", "a.slice/b/cpu.max": "200000 100000"}, "2 1152921504606846976"),
        ("5:pids:/a\n0::/", {"a/memory.max": "1"}, NO_LIMIT),
    ],
)
def test_limits_of_control_groups_are_read(tmp_path, groups, files, limits):
    write_groups(tmp_path / "root", files)
    (tmp_path / "groups").write_text(groups + "\n")
    assert in_library('control_group_limits "$@"', str(tmp_path / "root"), str(tmp_path / "groups")) == limits


@pytest.mark.parametrize(("limits", "jobs"), [("1 64000000000", "1"), ("2 1000000000", "1"), ("65536 2000000000", "1")])
def test_a_build_keeps_to_the_limits(limits, jobs):
    assert in_library(f'control_group_limits() {{ echo "{limits}"; }}; build_jobs') == jobs
