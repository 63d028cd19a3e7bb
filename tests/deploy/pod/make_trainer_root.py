"""Makes the root folder of the trainer's image: this machine's Python, numpy and cffi, Headwater's package, headwaterd.

    make_trainer_root.py OUT BUILD

Takes Python's own modules and the packages of WANTED from where this interpreter finds them, and the libraries that these load.
"""

import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "deploy/image"))
import make_root

WANTED = ("_cffi_backend", "cffi", "google.protobuf", "numpy", "ply", "pycparser")
LEFT_OUT = shutil.ignore_patterns("tests", "idlelib", "lib2to3", "ensurepip", "f2py", "dist-packages", "config-*", "__pycache__")


def main() -> None:
    out, build = Path(sys.argv[1]), Path(sys.argv[2])
    standard = sysconfig.get_path("stdlib")
    shutil.copytree(standard, out / standard.removeprefix("/"), ignore=LEFT_OUT)
    packages = out / "opt/headwater"
    shutil.copytree(build / "python", packages, symlinks=False)
    for name in WANTED:
        source = Path(importlib.util.find_spec(name).origin)
        if source.name == "__init__.py":
            shutil.copytree(source.parent, packages / name.replace(".", "/"), ignore=LEFT_OUT)
        else:
            shutil.copy(source, packages)
    (out / "usr/bin").mkdir()
    shutil.copy(sys.executable, out / "usr/bin/python3")
    shutil.copy(build / "bin/headwaterd", out / "usr/bin")  # for headwater.local
    libraries = out / "usr/lib" / make_root.run("gcc", "-print-multiarch").strip()
    for folder in (libraries, out / "usr/lib64", out / "tmp"):
        folder.mkdir(parents=True)
    for link in ("lib", "lib64", "bin"):
        (out / link).symlink_to(f"usr/{link}")
    objects = [path for path in sorted(out.rglob("*")) if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]
    for name, path in make_root.needed_libraries(objects).items():
        shutil.copyfile(path, target := (out / "usr/lib64" if name.startswith("ld-linux") else libraries) / name)
        target.chmod(0o755)
    shutil.copyfile(Path(__file__).with_name("train.py"), out / "train.py")


if __name__ == "__main__":
    main()
