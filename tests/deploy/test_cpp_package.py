"""The C++ client as a package: installed, for CMake and for pkg-config, and as a part of another CMake project."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from servers import running_server

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ["HEADWATER_BUILD_DIR"])
EXAMPLE = REPOSITORY / "client/examples/cpp/training_run.cc"
VERSION = re.search(r"project\(headwater VERSION ([0-9.]+)", (REPOSITORY / "CMakeLists.txt").read_text())[1]


def run(*command: object, fails: bool = False, **environment: str) -> str:
    """The output of the command, which must succeed, or fail."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([str(word) for word in command], **both, timeout=600, env=os.environ | environment)
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def configure(build: Path, *options: str, fails: bool = False) -> str:
    source = REPOSITORY / "tests/deploy/cpp_package"
    return run("cmake", "-G", "Ninja", "-S", source, "-B", build, f"-DEXAMPLE={EXAMPLE}", *options, fails=fails)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    prefix = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", prefix)
    return prefix


@pytest.fixture(scope="module")
def server(prefix):
    """Address of the installed headwaterd."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWATERD", str(prefix / "bin/headwaterd"))
        with running_server() as server:
            yield server.address


def check_example(program: Path, server: str) -> None:
    assert "step 30: loss" in run(program, server)


def test_a_project_finds_the_installed_package(prefix, server, tmp_path):
    configure(tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}", f"-DHEADWATER_WANTED={VERSION}")
    run("cmake", "--build", tmp_path)
    check_example(tmp_path / "training_run", server)


def test_another_minor_version_is_not_taken(prefix, tmp_path):
    major, minor, _ = VERSION.split(".")
    wanted = f"-DHEADWATER_WANTED={major}.{int(minor) + 1}"
    assert f"version: {VERSION}" in configure(tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}", wanted, fails=True)


def test_pkg_config_knows_the_installed_package(prefix, server, tmp_path):
    files = list(prefix.rglob("pkgconfig"))
    assert len(files) == 1, files
    path = {"PKG_CONFIG_PATH": str(files[0])}
    assert run("pkg-config", "--modversion", "headwater", **path).strip() == VERSION
    flags = shlex.split(run("pkg-config", "--cflags", "--libs", "headwater", **path))
    run("c++", "-std=c++20", EXAMPLE, "-o", tmp_path / "training_run", *flags)
    check_example(tmp_path / "training_run", server)


def test_a_part_of_another_project_is_the_client_alone(tmp_path):
    """Nothing of the engines is built, so no OpenBLAS; nlohmann-json and GoogleTest are not looked for; warnings are no errors."""
    absent = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{package}=ON" for package in ("nlohmann_json", "GTest")]
    configure(tmp_path, f"-DHEADWATER_SOURCE={REPOSITORY}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *absent)
    targets = set(re.findall(r"^(\w+): phony$", run("cmake", "--build", tmp_path, "--target", "help"), re.MULTILINE))
    ours = {f"headwater_{name}" for name in ("client", "client_core", "core", "machine", "proto", "row_chunk_wire")}
    assert {target for target in targets if target.startswith("headwater_")} - {"headwater_build_flags"} == ours
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    folders = {
        str(Path(command["file"]).relative_to(REPOSITORY)).split("/")[0]
        for command in commands
        if REPOSITORY in Path(command["file"]).parents
    }
    assert folders <= {"client", "kernels", "proto"}, folders
    assert not [command["command"] for command in commands if "-Werror" in command["command"]]
