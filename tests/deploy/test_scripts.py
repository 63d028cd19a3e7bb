"""The scripts of deploy/ on machines other than the one they were written on."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from servers import write_program

REPOSITORY = Path(__file__).resolve().parents[2]


def in_library(code: str, *arguments: str, **environment: str) -> str:
    """The output of shell code that has sourced deploy/lib.sh."""
    command = ["bash", "-c", f'set -euo pipefail; cd "$0"; . deploy/lib.sh; {code}', str(REPOSITORY), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_checkout_is_found_whatever_cdpath_says(tmp_path):
    (tmp_path / "deploy").mkdir()
    for folders in (".", str(tmp_path), f"{tmp_path}:."):
        assert in_library('echo "$headwater_root"', CDPATH=folders) == str(REPOSITORY)


@pytest.mark.parametrize(("version", "found"), [("3, 10", False), ("3, 11", True), ("4, 0", True)])
def test_an_interpreter_that_is_too_old_is_not_taken(tmp_path, version, found):
    # An interpreter of that version which imports everything.
    python = tmp_path / "python"
    write_program(
        python,
        f"#!{sys.executable}\n"
        "import importlib, sys\n"
        f"sys.version_info = ({version})\n"
        "importlib.import_module = lambda name: None\n"
        "exec(sys.argv[2])\n",
    )
    printed = in_library("find_python torch || echo none", HEADWATER_PYTHON=str(python))
    assert printed == (str(python) if found else "none")


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
    for name, text in {"groups": groups, **{f"root/{name}": text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert in_library('control_group_limits "$@"', str(tmp_path / "root"), str(tmp_path / "groups")) == limits


@pytest.mark.parametrize(("limits", "jobs"), [("1 64000000000", "1"), ("2 1000000000", "1"), ("65536 2000000000", "1")])
def test_a_build_keeps_to_the_limits(limits, jobs):
    assert in_library(f'control_group_limits() {{ echo "{limits}"; }}; build_jobs') == jobs


@pytest.fixture
def anyones_folder():
    """One that another user than root can reach and write."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o777)
        yield Path(name)


def install_deps(folder: Path, release: str, *options: str, apt_get: str = "true", status: int = 0, **environment: str) -> str:
    """The stderr of deploy/install-deps, which must end with this status. A user who is not root calls it, and no package is
    installed; apt-get does nothing but `apt_get`."""
    shutil.copytree(REPOSITORY / "deploy", folder / "deploy")
    (folder / "os-release").write_text(release)
    script = folder / "deploy/install-deps"
    text = script.read_text().replace("/etc/os-release", str(folder / "os-release"))
    script.write_text(text.replace("/etc/systemd", str(folder / "systemd")))
    # As sudo does by default: of the environment only the path stays.
    write_program(folder / "tools/sudo", '#!/bin/sh\nshift\nexec env -i PATH="$PATH" "$@"\n')
    write_program(folder / "tools/apt-get", f'#!/bin/sh\n{{ echo "$@"; env; {apt_get}; }} >>"{folder}/apt-get"\n')
    write_program(folder / "tools/dpkg-query", "#!/bin/sh\nexit 1\n")
    environment = {"PATH": f"{folder}/tools:/usr/bin:/bin", "TMPDIR": str(folder), "HEADWATER_PYTHON": "/bin/true", **environment}
    # An unprivileged user, if this is root.
    user = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    done = subprocess.run([str(script), *options], capture_output=True, text=True, env=environment, **user)
    assert done.returncode == status, done.stderr
    return done.stderr


DEBIAN = 'ID=debian\nVERSION_ID="12"\n'


@pytest.mark.parametrize(
    "proxies", [{}, {"http_proxy": "http://proxy:3128", "https_proxy": "http://proxy:3129", "no_proxy": "localhost,.example"}]
)
def test_packages_are_fetched_through_the_callers_proxies_if_there_are_any(anyones_folder, proxies):
    install_deps(anyones_folder, DEBIAN, **proxies)
    calls = (anyones_folder / "apt-get").read_text().splitlines()
    told = sorted(line for line in calls if "proxy" in line)
    assert told == sorted(2 * [f"{name}={value}" for name, value in proxies.items()])  # update, install
    assert not (anyones_folder / "systemd").exists()


def test_the_service_of_prometheus_is_masked_before_the_package_starts_it(anyones_folder):
    unit = anyones_folder / "systemd/system/prometheus.service"
    # apt-get says what there was when it was called.
    assert "systemctl unmask prometheus" in install_deps(anyones_folder, DEBIAN, "prometheus", apt_get=f'readlink "{unit}"')
    assert unit.readlink() == Path("/dev/null")
    calls = (anyones_folder / "apt-get").read_text().splitlines()
    assert calls.count("/dev/null") == 2  # update, install


def test_a_unit_of_somebodys_own_stays_as_it_is(anyones_folder):
    unit = anyones_folder / "systemd/system/prometheus.service"
    write_program(unit, "[Service]\n")
    for folder in (unit.parent.parent, unit.parent):
        folder.chmod(0o777)
    assert "masked" not in install_deps(anyones_folder, DEBIAN, "prometheus")
    assert unit.read_text() == "[Service]\n"


@pytest.mark.parametrize(("release", "told"), [("ID=arch\n", "arch;"), ('ID=fedora\nVERSION_ID="42"\n', "fedora 42;")])
def test_another_distribution_is_told_what_to_do(anyones_folder, release, told):
    words = install_deps(anyones_folder, release, status=1)
    assert f"this is {told}" in words and "--no-install" in words and "libgrpc++-dev" in words
    assert "unbound" not in words


@pytest.mark.parametrize("options", [(), ("--no-torch",)])
def test_pytorch_is_left_out_where_it_is_not_needed(anyones_folder, options):
    # No interpreter has it. As the image is compiled: it would be the larger part of what is fetched.
    install_deps(anyones_folder, DEBIAN, *options, "more", HEADWATER_PYTHON="/bin/false")
    packages = (anyones_folder / "apt-get").read_text().split()
    assert ("python3-torch" in packages) == (not options)
    assert "libgrpc++-dev" in packages and "more" in packages and "--no-torch" not in packages
    assert "deploy/install-deps --no-torch\n" in (REPOSITORY / "deploy/image/compile").read_text()


def test_a_build_of_another_path_is_told(tmp_path):
    shutil.copytree(REPOSITORY / "deploy", tmp_path / "checkout/deploy")
    cache = tmp_path / "checkout/build/release/CMakeCache.txt"
    cache.parent.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "checkout")

    def check(home: Path | None) -> subprocess.CompletedProcess:
        cache.unlink(missing_ok=True)
        if home:
            cache.write_text(f"A:STRING=b\nCMAKE_HOME_DIRECTORY:INTERNAL={home}\nC:STRING=\n")
        command = ["bash", "-c", 'set -euo pipefail; . "$0/deploy/lib.sh"; check_build_folder release', str(tmp_path / "checkout")]
        return subprocess.run(command, capture_output=True, text=True)

    for home in (None, tmp_path / "checkout", tmp_path / "link"):
        assert check(home).returncode == 0
    for home in (tmp_path / "moved away", tmp_path):
        done = check(home)
        assert done.returncode == 1
        assert f"{home};" in done.stderr and f"rm -r '{cache.parent}'" in done.stderr


def make_build(folder: Path, *more: str) -> None:
    """A folder that deploy/bundle takes for a build."""
    (folder / "python/headwater").mkdir(parents=True)
    (folder / "bin").mkdir()
    for name in ("headwaterd", "headwaterctl"):
        shutil.copy("/bin/true", folder / "bin" / name)
    for name in more:
        (folder / name).write_text("")


def bundle(out: Path, build: Path) -> subprocess.CompletedProcess:
    return subprocess.run([str(REPOSITORY / "deploy/bundle"), str(out), str(build)], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("contents", "build", "told"),
    [("CMakeCache.txt", "build", "CMakeCache.txt"), ("share", "build", "share"), ("commit", "out/../out", "same folder")],
)
def test_a_bundle_replaces_nothing_that_is_none(tmp_path, contents, build, told):
    make_build(tmp_path / "build")
    make_build(tmp_path / "out", contents)
    before = sorted(tmp_path.rglob("*"))
    done = bundle(tmp_path / "out", tmp_path / build)
    assert done.returncode == 1 and told in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(shutil.which("patchelf") is None, reason="needs patchelf")
def test_a_bundle_replaces_an_earlier_one(tmp_path):
    make_build(tmp_path / "build", "CMakeCache.txt")
    for _ in range(2):
        done = bundle(tmp_path / "out", tmp_path / "build")
        assert done.returncode == 0, done.stderr
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"bin", "commit", "lib", "python"}
        assert re.fullmatch(r"([0-9a-f]{7,}\+?|unknown)\n", (tmp_path / "out/commit").read_text())
        (tmp_path / "out/bin/old").write_text("")
    assert bundle(tmp_path / "out", tmp_path / "build").returncode == 0
    assert not (tmp_path / "out/bin/old").exists()
