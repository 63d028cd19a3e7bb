"""Makes the root folder of the image out of a build: the programs, the libraries that the loader wants for them, and an SBOM.

OUT/root is owned by root and never written to; OUT/state belongs to the server's user. The libraries are this machine's, so
this runs in the container that compiled, or on a machine with the same distribution. Needs dpkg, ldd, strip and patchelf.
"""

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import make_sbom
import package_lock

USER = 65532
REPOSITORY = Path(__file__).resolve().parents[2]
CERTIFICATES_TOOL = Path("/usr/sbin/update-ca-certificates")  # whose package the certificates are of
ROOT_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# NVIDIA's container runtime mounts the driver's part into the container.
DRIVER_LIBRARIES = re.compile(r"lib(cuda|nvidia-.*)\.so.*")
# The engine's module opens it by this name when several GPUs are to work together; nothing is linked with it.
NCCL = "libnccl.so.2"
# Package names for NVIDIA's files that did not come as packages of the distribution: those of NVIDIA's own packages.
NVIDIA_PACKAGES = (("cublasLt", "libcublaslt"), ("nccl", "libnccl2"))


def run(*command: str | Path) -> str:
    """Its output; ends the program with its complaint if it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"make_root: {' '.join(map(str, command))}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def needed_libraries(objects: list[Path]) -> dict[str, Path]:
    """The files that the loader would open for the objects, by the name it looks for; with the loader itself."""
    found: dict[str, Path] = {}
    for file in objects:
        for line in run("ldd", file).splitlines():
            name, _, path = line.strip().partition(" => ")
            if path == "not found" and not DRIVER_LIBRARIES.fullmatch(name):
                sys.exit(f"make_root: {file.name} needs {name}, which is not on this machine")
            loader = re.match(r"(/\S+/ld-linux\S+) \(", name)
            if loader:
                found[Path(loader.group(1)).name] = Path(loader.group(1))
            elif path.startswith("/"):
                found[name] = Path(path.rsplit(" (", 1)[0])
    return found


def find_nccl(wanted: str, module: Path, libraries: dict[str, Path]) -> Path | None:
    """The NCCL for the image: the file that `wanted` names, for "auto" the one that this machine has, None for "none"."""
    if wanted == "none":
        return None
    if NCCL.encode() not in module.read_bytes():
        sys.exit(
            f"make_root: {module.name} was built without NCCL's header; build it with, or say --nccl none: no --gpus above 1 then"
        )
    if wanted != "auto":
        if not Path(wanted).is_file():
            sys.exit(f"make_root: --nccl: expected auto, none or a file, got {wanted}")
        return Path(wanted)
    cached = subprocess.run(["/sbin/ldconfig", "--print-cache"], capture_output=True, text=True).stdout
    places = [Path(line.split(" => ")[1]) for line in cached.splitlines() if line.strip().startswith(f"{NCCL} ")]
    # Beside the toolkit's other libraries, and where the wheels nvidia-nccl-cu12 and -cu13 have it.
    places += [path.parent / NCCL for name, path in libraries.items() if name.startswith("libcublasLt")]
    places += [Path(folder, "nvidia/nccl/lib", NCCL) for folder in sys.path]
    for place in places:
        if place.is_file():
            return place
    sys.exit(
        f"make_root: there is no {NCCL} on this machine, which --gpus needs: install libnccl2 of NVIDIA's package repository or "
        "the wheel nvidia-nccl-cu12 or -cu13, name the file by --nccl FILE, or say --nccl none: no --gpus above 1 then"
    )


def nvidia_version(file: Path) -> str:
    """The version of a library that did not come as a package, as the library itself gives it, whatever its file is called."""
    library = ctypes.CDLL(str(file))
    if "nccl" in file.name:
        number = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(number)):
            sys.exit(f"make_root: {file} does not state its version")
        version = number.value
    else:
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        version = library.cublasLtGetVersion()
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def owners(paths: set[Path]) -> dict[Path, make_sbom.Package]:
    """The distribution's package that each file came with."""
    names: dict[str, str] = {}
    # The merged /usr hides what dpkg knows a file by: both names are asked for, and one of them is not found.
    known = {str(path.resolve()): path for path in paths} | {
        "/" + str(path.resolve()).removeprefix("/usr/"): path for path in paths
    }
    for line in subprocess.run(["dpkg-query", "--search", *known], capture_output=True, text=True).stdout.splitlines():
        package, _, file = line.partition(": ")
        if file in known:
            names[str(known[file])] = package.split(",")[0]
    shown = run(
        "dpkg-query", "--show", "--showformat", "${Package}\t${Version}\t${Architecture}\t${source:Package}\n", *set(names.values())
    )
    packages = {line.split("\t")[0]: make_sbom.Package(*line.split("\t")) for line in shown.splitlines()}
    found = {path: packages[names[str(path)].split(":")[0]] for path in paths if str(path) in names}
    for path in paths - found.keys():
        real = path.resolve()
        names = [name for part, name in NVIDIA_PACKAGES if part in real.name]
        if not names:
            sys.exit(f"make_root: no package of this machine owns {real}; the SBOM would be wrong without it")
        # CUDA need not have been installed as packages.
        found[path] = make_sbom.Package(
            name=names[0], version=nvidia_version(real), architecture="", source="", supplier="Organization: NVIDIA"
        )
    return found


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def copy_programs(build: Path, variant: str, root: Path) -> list[Path]:
    """The product's own files, without symbols and without the build's folders in them."""
    programs = root / "usr/local/bin"
    programs.mkdir(parents=True)
    names = ["headwaterd", "headwaterctl"] + (["libheadwater_cuda.so"] if variant == "cuda" else [])
    for name in names:
        if not (build / "bin" / name).exists():
            sys.exit(f"make_root: {build}/bin has no {name}")
        shutil.copyfile(build / "bin" / name, programs / name)
        (programs / name).chmod(0o755)
    return [programs / name for name in names]


def copy_system_files(root: Path, state: Path, packages: list[make_sbom.Package]) -> None:
    """The files that a process expects of a system: users, host names, authorities. Also those that scanners and licences ask
    for."""
    write(
        root / "etc/passwd",
        f"root:x:0:0:root:/root:/sbin/nologin\nheadwater:x:{USER}:{USER}:headwater:/var/lib/headwater:/sbin/nologin\n",
    )
    write(root / "etc/group", f"root:x:0:\nheadwater:x:{USER}:\n")
    write(root / "etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
    write(root / "etc/os-release", package_lock.OS_RELEASE.read_text())
    (root / "etc/ssl/certs").mkdir(parents=True)
    shutil.copyfile(ROOT_CERTIFICATES, root / "etc/ssl/certs/ca-certificates.crt")
    ours = [package for package in packages if not package.supplier]
    for entry in run("dpkg-query", "--status", *(package.name for package in ours)).strip().split("\n\n"):
        name = entry.splitlines()[0].removeprefix("Package: ")
        write(root / f"var/lib/dpkg/status.d/{name}", entry + "\n")
    for package in ours:
        licence = Path(f"/usr/share/doc/{package.name}/copyright")
        if licence.exists():
            write(root / f"usr/share/doc/{package.name}/copyright", licence.read_text(errors="replace"))
    write(root / "usr/share/doc/headwater/LICENSE", (REPOSITORY / "LICENSE").read_text())
    (root / "tmp").mkdir()
    for folder in ("var/lib/headwater", "run/headwater"):
        (state / folder).mkdir(parents=True)


def settle(folder: Path, epoch: int) -> None:
    """Sets equal times and modes on any machine."""
    for path in [*sorted(folder.rglob("*"), reverse=True), folder]:
        if not path.is_symlink():
            executable = path.is_dir() or path.stat().st_mode & 0o100
            path.chmod(0o755 if executable else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--build", type=Path, required=True, help="folder with bin/headwaterd")
    parser.add_argument("--variant", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--version", required=True)
    parser.add_argument("--revision", required=True, help="commit that was built")
    parser.add_argument("--epoch", type=int, default=0, help="time of all files, in seconds since 1970")
    parser.add_argument("--nccl", default="auto", help="auto, none or the file of NCCL that the image gets; of --variant cuda")
    parser.add_argument("--lock", choices=("check", "update", "none"), default="check")
    arguments = parser.parse_args()
    if arguments.variant != "cuda" and arguments.nccl not in ("auto", "none"):
        sys.exit("make_root: --nccl: expected --variant cuda with a file: the other one has no GPUs")

    root, state = arguments.out / "root", arguments.out / "state"
    root.mkdir(parents=True)
    objects = copy_programs(arguments.build, arguments.variant, root)
    # Asked of the build's files, whose paths to libraries are still in them.
    libraries = needed_libraries([arguments.build / "bin" / file.name for file in objects])
    if arguments.variant == "cuda":
        nccl = find_nccl(arguments.nccl, arguments.build / "bin" / objects[-1].name, libraries)
        if nccl is None:
            print("make_root: without NCCL: the server will refuse --gpus above 1", file=sys.stderr)
        else:
            libraries |= {**needed_libraries([nccl]), NCCL: nccl}

    (root / "usr/lib64").mkdir()
    for link, target in (("lib", "usr/lib"), ("lib64", "usr/lib64"), ("bin", "usr/local/bin")):
        (root / link).symlink_to(target)
    multiarch = run("gcc", "-print-multiarch").strip()
    folder = root / "usr/lib" / multiarch
    folder.mkdir(parents=True)
    contents: dict[make_sbom.Package, list[str]] = {}
    owner_of = owners({*libraries.values(), CERTIFICATES_TOOL})
    for name, path in sorted(libraries.items()):
        target = (root / "usr/lib64" if name.startswith("ld-linux") else folder) / name
        shutil.copyfile(path, target)
        target.chmod(0o755)
        contents.setdefault(owner_of[path], []).append("/" + str(target.relative_to(root)))
    # Libraries are where the loader looks by default.
    for file in objects:
        run("strip", "--strip-unneeded", file)
        run("patchelf", "--remove-rpath", file)
    contents.setdefault(owner_of[CERTIFICATES_TOOL], []).append("/etc/ssl/certs/ca-certificates.crt")
    packages = sorted(contents, key=lambda package: package.name)

    distribution = package_lock.distribution()
    package_lock.check_or_update(packages, distribution, arguments.lock)
    copy_system_files(root, state, packages)
    own = make_sbom.Package(
        name="headwater", version=arguments.version, architecture="", source="", supplier="Organization: Headwater"
    )
    contents[own] = ["/" + str(file.relative_to(root)) for file in objects]
    document = make_sbom.document(
        root, own, contents, f"headwater-{arguments.variant}", arguments.revision, arguments.epoch, distribution
    )
    write(root / "usr/share/doc/headwater/sbom.spdx.json", json.dumps(document, indent=1) + "\n")
    settle(root, arguments.epoch)
    (root / "tmp").chmod(0o1777)
    settle(state, arguments.epoch)
    shutil.copyfile(root / "usr/share/doc/headwater/sbom.spdx.json", arguments.out / "sbom.spdx.json")


if __name__ == "__main__":
    main()
