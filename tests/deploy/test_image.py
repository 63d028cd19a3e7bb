"""The files of the image: complete, nothing else, equal in every build, and listed in full by the SBOM."""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from servers import write_program

IMAGE = Path(__file__).resolve().parents[2] / "deploy/image"
pytestmark = pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="the image is made of Debian's or Ubuntu's packages")


def make_root(out: Path, *options: str, status: int = 0) -> str:
    """Its standard error; it must end with this status."""
    command = [sys.executable, "-B", str(IMAGE / "make_root.py"), "--build", os.environ["HEADWATER_BUILD_DIR"]]
    command += ["--version", "1.2.3", "--revision", "0" * 40, "--epoch", "1700000000", "--lock", "none", *options, str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "there is no libnccl.so.2 on this machine" in done.stderr:
        pytest.skip("this machine has no NCCL")
    assert done.returncode == status, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("image") / "out"
    make_root(out)
    return out


def listing(folder: Path) -> dict[str, tuple]:
    """Each file by name: its type, mode and time, and a digest of its contents."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        contents = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime, hashlib.sha256(contents).hexdigest())
    return found


def test_two_runs_make_the_same_files(made, tmp_path):
    make_root(tmp_path / "again")
    for folder in ("root", "state"):
        assert listing(tmp_path / "again" / folder) == listing(made / folder)


def test_nothing_but_the_programs_can_be_started(made):
    root = made / "root"
    programs = {path.name for path in (root / "usr/local/bin").iterdir()}
    assert programs == {"headwaterd", "headwaterctl"}
    assert [path for path in root.rglob("*") if "bin" in path.parts and path.is_file() and path.name not in programs] == []
    assert [
        path for path in root.rglob("*") if not path.is_symlink() and path.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID)
    ] == []
    writable = [path.name for path in root.rglob("*") if not path.is_symlink() and path.lstat().st_mode & stat.S_IWOTH]
    assert writable == ["tmp"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its root")
def test_the_programs_find_all_they_need_in_it(made):
    for program in ("headwaterd", "headwaterctl"):
        done = subprocess.run(
            ["/usr/sbin/chroot", str(made / "root"), f"/usr/local/bin/{program}", "--help"], capture_output=True, text=True, env={}
        )
        assert "error while loading" not in done.stderr
        assert f"{program}" in done.stdout
        assert "--" in done.stdout, "no flags"


def test_the_sbom_tells_every_library_and_program(made):
    root = made / "root"
    document = json.loads((made / "sbom.spdx.json").read_text())
    assert document["spdxVersion"] == "SPDX-2.3" and document == json.loads(
        (root / "usr/share/doc/headwater/sbom.spdx.json").read_text()
    )
    told = {file["fileName"].removeprefix("./"): file for file in document["files"]}
    there = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"}
    assert there <= told.keys() and len(there) > 10
    for name, file in told.items():
        sums = {entry["algorithm"]: entry["checksumValue"] for entry in file["checksums"]}
        assert sums["SHA256"] == hashlib.sha256((root / name).read_bytes()).hexdigest()
    identifiers = [entry["SPDXID"] for entry in document["packages"] + document["files"]]
    assert len(set(identifiers)) == len(identifiers)
    owned = {link["relatedSpdxElement"] for link in document["relationships"] if link["relationshipType"] == "CONTAINS"}
    assert owned == {file["SPDXID"] for file in document["files"]}
    # Each package is as dpkg knows it, and its licence is in the image.
    packages = {package["name"]: package for package in document["packages"]}
    assert packages["headwater"]["versionInfo"] == "1.2.3" and packages["headwater"]["sourceInfo"].endswith("0" * 40)
    for name, package in packages.items():
        if name != "headwater":
            shown = subprocess.run(["dpkg-query", "--show", "--showformat", "${Version}", name], capture_output=True, text=True)
            assert package["versionInfo"] == shown.stdout and package["externalRefs"][0]["referenceLocator"].startswith("pkg:deb/")
            assert (root / f"usr/share/doc/{name}/copyright").stat().st_size > 0


MODULE = Path(os.environ.get("HEADWATER_BUILD_DIR", ""), "bin/libheadwater_cuda.so")
has_nccl = MODULE.exists() and b"libnccl.so.2" in MODULE.read_bytes()
needs_nccl_build = pytest.mark.skipif(not has_nccl, reason="this build has no CUDA engine for several GPUs")


@needs_nccl_build
def test_the_image_with_the_cuda_engine_has_the_nccl_that_gpus_need(tmp_path):
    assert make_root(tmp_path / "out", "--variant", "cuda") == ""
    (library,) = (tmp_path / "out/root/usr/lib").glob("*/libnccl.so.2")
    document = json.loads((tmp_path / "out/sbom.spdx.json").read_text())
    packages = {package["name"]: package for package in document["packages"]}
    for name in ("libnccl2", "libcublaslt"):
        assert [int(part) for part in packages[name]["versionInfo"].split(".")] > [2]
        assert packages[name]["supplier"] == "Organization: NVIDIA" or "externalRefs" in packages[name]
    assert any(file["fileName"].endswith("/libnccl.so.2") for file in document["files"])
    if os.geteuid() == 0:
        # In the root alone the engine finds it, and goes on to what is not there: a GPU.
        command = ["/usr/sbin/chroot", str(tmp_path / "out/root"), "/usr/local/bin/headwaterd", "--engine=cuda", "--gpus=2"]
        environment = {"HEADWATER_CUDA_MODULE": "/usr/local/bin/libheadwater_cuda.so"}

        def refusal() -> str:
            return subprocess.run([*command, "--metrics_address="], capture_output=True, text=True, env=environment).stderr

        assert refusal().startswith("headwaterd: --engine=cuda: ") and "cannot be loaded" not in refusal()
        library.unlink()
        assert "GPUs cannot work together here: libnccl.so.2 cannot be loaded" in refusal()


@needs_nccl_build
@pytest.mark.parametrize(
    "variant, complaint",
    [("cuda", "--nccl: expected auto, none or a file, got /nowhere"), ("cpu", "--nccl: expected --variant cuda with a file")],
)
def test_another_nccl_must_be_there(variant, complaint, tmp_path):
    assert complaint in make_root(tmp_path / "out", "--variant", variant, "--nccl", "/nowhere/libnccl.so.2", status=1)


def test_nccl_is_found_beside_the_toolkit_or_as_a_wheel_or_the_build_ends(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(IMAGE))
    import make_root as scripts

    monkeypatch.setattr(scripts, "NCCL", "libnccl-of-this-test.so.2")
    module, toolkit, wheels = tmp_path / "module.so", tmp_path / "toolkit", tmp_path / "wheels"
    module.write_bytes(b"...libnccl-of-this-test.so.2...")
    wheel = wheels / "nvidia/nccl/lib"
    for folder in (toolkit, wheel):
        folder.mkdir(parents=True)
    libraries = {"libcublasLt.so.13": toolkit / "libcublasLt.so.13"}
    monkeypatch.syspath_prepend(str(wheels))
    with pytest.raises(SystemExit, match=r"there is no libnccl-of-this-test\.so\.2 on this machine, which --gpus needs"):
        scripts.find_nccl("auto", module, libraries)
    (wheel / "libnccl-of-this-test.so.2").touch()
    assert scripts.find_nccl("auto", module, libraries) == wheel / "libnccl-of-this-test.so.2"
    (toolkit / "libnccl-of-this-test.so.2").touch()
    assert scripts.find_nccl("auto", module, libraries) == toolkit / "libnccl-of-this-test.so.2"
    assert scripts.find_nccl(str(module), module, libraries) == module
    module.write_bytes(b"without")
    assert scripts.find_nccl("none", module, libraries) is None
    with pytest.raises(SystemExit, match="was built without NCCL's header"):
        scripts.find_nccl("auto", module, libraries)


def test_a_build_passes_with_the_versions_that_an_update_has_locked(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(IMAGE))
    import make_sbom
    import package_lock

    old, new = (
        [make_sbom.Package("libc6", libc, "amd64", "libc6"), make_sbom.Package("libgrpc29", "1.0", "amd64", "libgrpc29")]
        for libc in ("0.9", "1.0")
    )
    monkeypatch.setattr(package_lock, "LOCK_FILE", tmp_path / "packages.lock")
    for packages in (old, new):
        package_lock.check_or_update(packages, "debian-12", "update")
        package_lock.check_or_update(packages, "debian-12", "check")
    with pytest.raises(SystemExit, match=r": libc6 0\.9, locked 1\.0; take any"):
        package_lock.check_or_update(old, "debian-12", "check")
    package_lock.check_or_update(old, "debian-12", "none")


def test_nothing_is_compiled_in_a_base_whose_versions_are_not_the_locked_ones(tmp_path):
    # The view that deploy/image/compile has of the image in which it compiles. Nothing is installed or compiled but noted.
    shutil.copytree(IMAGE.parent, tmp_path / "deploy")
    (tmp_path / "os-release").write_text('ID=ubuntu\nVERSION_ID="24.04"\n')
    lock = tmp_path / "deploy/image/packages.lock"
    lock.write_text(json.dumps({"debian-12": {"libc6": "1"}}))
    script = tmp_path / "deploy/image/package_lock.py"
    script.write_text(script.read_text().replace("/etc/os-release", str(tmp_path / "os-release")))
    for program in (tmp_path / "deploy/install-deps", tmp_path / "tools/cmake"):
        write_program(program, f'#!/bin/sh\necho "{program.name}" >>"{tmp_path}/calls"\n')

    def compile_in_it(*arguments: str) -> tuple[subprocess.CompletedProcess, list[str]]:
        """Its output, and the commands that it called."""
        (tmp_path / "calls").write_text("")
        environment = {**os.environ, "PATH": f"{tmp_path}/tools:{os.environ['PATH']}"}
        command = [str(tmp_path / "deploy/image/compile"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        return done, (tmp_path / "calls").read_text().split()

    done, calls = compile_in_it("cpu", "auto", "check")
    assert done.returncode == 1 and calls == ["install-deps"]
    assert "no versions for ubuntu-24.04, only for debian-12" in done.stderr
    # The remedies that it names are options of the script that the user has called, and work.
    assert "--lock none" in done.stderr and "--prebuilt BUILD --lock update" in done.stderr
    done, calls = compile_in_it("cpu", "auto", "none")
    assert (done.returncode, calls) == (0, ["install-deps", "cmake", "cmake"]), done.stderr
    (tmp_path / "os-release").write_text('ID=debian\nVERSION_ID="12"\n')
    done, calls = compile_in_it("cpu")
    assert done.returncode == 1 and calls == ["install-deps"] and ", locked 1; " in done.stderr
    # The versions that are installed pass, whatever else is locked.
    query = ["dpkg-query", "--show", "--showformat", "${Version}", "libc6"]
    installed = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    lock.write_text(json.dumps({"debian-12": {"libc6": installed, "a-package-that-is-not-there": "1"}}))
    done, calls = compile_in_it("cpu")
    assert (done.returncode, calls) == (0, ["install-deps", "cmake", "cmake"]), done.stderr
    assert 'compile "$VARIANT" "$NCCL" "$LOCK"' in (IMAGE / "Containerfile").read_text()


def test_versions_of_a_base_are_locked_on_a_machine_of_its_kind():
    command = [str(IMAGE / "build"), "--base", "localhost/x", "--lock", "update", "--tool", "buildah"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "--lock update is for --prebuilt, on a machine of the base's distribution" in done.stderr
