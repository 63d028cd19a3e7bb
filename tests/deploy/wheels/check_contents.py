"""Checks what the wheels in a folder contain and say of themselves, and prints their sizes. Needs readelf and auditwheel."""

import email
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
VERSION = re.search(r"project\(headwater VERSION ([0-9.]+)", (REPOSITORY / "CMakeLists.txt").read_text())[1]
LIBC = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
CXX = LIBC | {"libstdc++.so.6", "libgcc_s.so.1"}
# The extras of each package that install others of ours, or what these need, and what the wheel contains of ours beside Python.
PACKAGES = {
    "headwater": ({"server", "cuda13", "multi-gpu", "grpc"}, ["headwater/libheadwater_client.so"]),
    "headwater_server": (set(), ["headwater_server/bin/headwaterctl", "headwater_server/bin/headwaterd"]),
    "headwater_cuda13": ({"multi-gpu"}, ["headwater_cuda13/libheadwater_cuda.so"]),
}


def readelf(option: str, path: Path) -> str:
    return subprocess.run(["readelf", "-W", option, path], check=True, capture_output=True, text=True).stdout


def needed(path: Path) -> set[str]:
    """The shared libraries that a file names."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("-d", path)))


def exported(path: Path) -> set[str]:
    """The symbols that a shared library defines for others."""
    lines = (line.split() for line in readelf("--dyn-syms", path).splitlines())
    return {
        line[7].split("@")[0] for line in lines if len(line) == 8 and line[4] in ("GLOBAL", "WEAK", "UNIQUE") and line[6] != "UND"
    }


def check(wheel: Path, folder: Path) -> None:
    """Raises AssertionError, saying what is wrong with the wheel, which is unpacked in `folder`."""
    name, version, *tag = wheel.stem.split("-")
    extras, objects = PACKAGES[name]
    assert version == VERSION, f"version {version}, CMake's is {VERSION}"
    assert re.fullmatch(r"py3-none-manylinux_2_([12]\d|3[0-6])_\w+", "-".join(tag)), tag
    shown = subprocess.run(["auditwheel", "show", wheel], check=True, capture_output=True, text=True).stdout
    assert f'"{tag[-1]}"' in " ".join(shown.split()), shown

    information = folder / f"{name}-{version}.dist-info"
    metadata = email.message_from_string((information / "METADATA").read_text())
    assert metadata["Requires-Python"] == ">=3.11" and metadata["License-Expression"] == "Apache-2.0", metadata.items()
    assert set(metadata.get_all("Provides-Extra", [])) >= extras, metadata.get_all("Provides-Extra")
    assert metadata["Description-Content-Type"] == "text/markdown" and "# headwater" in metadata.get_payload()
    licences = {path.name for path in (information / "licenses").iterdir()}
    assert {"LICENSE", "libgrpc-dev.txt", "libprotobuf-dev.txt", "libabsl-dev.txt", "libssl-dev.txt"} <= licences, licences
    assert name != "headwater_cuda13" or "nvidia-cuda-runtime.txt" in licences, licences

    inside = {path.name for path in folder.rglob("*.so*")}
    elves = [path for path in folder.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]
    ours = sorted(str(path.relative_to(folder)) for path in elves if not path.parent.name.endswith(".libs"))
    assert ours == objects, ours
    for elf in elves:
        outside = needed(elf) - inside - CXX
        assert not {library for library in outside if not library.startswith("libcublasLt.so.13")}, f"{elf.name} needs {outside}"
    if name == "headwater":
        assert needed(folder / objects[0]) <= LIBC, needed(folder / objects[0])
        # Python closes it at its end, where gRPC's threads still run in it.
        assert "NODELETE" in readelf("-d", folder / objects[0])
        strange = {symbol for symbol in exported(folder / objects[0]) if not symbol.startswith("hw_client_")}
        assert not strange, sorted(strange)[:10]


def main() -> int:
    wheels = sorted(Path(sys.argv[1]).glob("headwater*.whl"))
    assert {wheel.name.split("-")[0] for wheel in wheels} >= {"headwater", "headwater_server"}, wheels
    for wheel in wheels:
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
            check(wheel, Path(folder))
            unpacked = sum(info.file_size for info in archive.infolist())
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {unpacked / 1e6:.1f} MB installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
