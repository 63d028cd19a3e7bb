"""Makes the root folder of the trainer's image: this machine's Python, numpy and cffi, Headwater's package, headwaterd.

    make_trainer_root.py OUT BUILD

Takes the files of the packages in WANTED, with the packages of Python that they depend on, and libraries that their programs and
modules load. python3-pycparser depends on python3-ply by another name.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "deploy/image"))
import make_root

WANTED = ("python3", "python3-cffi", "python3-numpy", "python3-ply", "python3-protobuf")
LEFT_OUT = re.compile(
    r"/usr/share/(doc|man|lintian|bash-completion|applications|pixmaps|menu)/|/tests?/|/(idlelib|lib2to3|ensurepip|f2py)/|\.a$"
)


def closure(names: tuple[str, ...]) -> set[str]:
    """The packages, and all of Python's own that they need."""
    found: set[str] = set()
    queue = list(names)
    while queue:
        name = queue.pop()
        done = subprocess.run(
            ["dpkg-query", "--show", "--showformat", "${db:Status-Status} ${Pre-Depends}, ${Depends}", name],
            capture_output=True,
            text=True,
        )
        if name in found or not done.stdout.startswith("installed"):
            continue
        found.add(name)
        depends = done.stdout.removeprefix("installed")
        queue += [word for word in re.findall(r"[a-z0-9][a-z0-9.+-]+", re.sub(r"\([^)]*\)", "", depends)) if "python3" in word]
    return found


def main() -> None:
    out, build = Path(sys.argv[1]), Path(sys.argv[2])
    for package in sorted(closure(WANTED)):
        for line in make_root.run("dpkg", "--listfiles", package).splitlines():
            source = Path(line)
            if LEFT_OUT.search(line) or not (source.is_file() or source.is_symlink()):
                continue
            target = out / line.removeprefix("/")
            if target.exists() or target.is_symlink():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    shutil.copytree(build / "python", out / "opt/headwater", symlinks=False)
    for link, target in (("lib", "usr/lib"), ("lib64", "usr/lib64"), ("bin", "usr/bin")):
        if (out / link).is_dir():  # a package that does not know of the merged /usr
            shutil.copytree(out / link, out / target, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(out / link)
        (out / target).mkdir(parents=True, exist_ok=True)
        (out / link).symlink_to(target)
    shutil.copy2(build / "bin/headwaterd", out / "usr/bin/headwaterd")  # for headwater.local
    objects = [
        path for path in sorted(out.rglob("*")) if path.is_file() and not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF"
    ]
    libraries = out / "usr/lib" / make_root.run("gcc", "-print-multiarch").strip()
    libraries.mkdir(parents=True, exist_ok=True)
    for name, path in make_root.needed_libraries(objects).items():
        folder = out / "usr/lib64" if name.startswith("ld-linux") else libraries
        if not (folder / name).exists():
            shutil.copyfile(path, folder / name)
            (folder / name).chmod(0o755)
    shutil.copyfile(Path(__file__).with_name("train.py"), out / "train.py")
    (out / "tmp").mkdir()


if __name__ == "__main__":
    main()
