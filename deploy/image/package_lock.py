"""The versions of packages that images are made of: packages.lock, by distribution.

    package_lock.py

says whether an image of this machine's packages would pass, as far as it is known before anything is compiled. It passes if there
are versions for its distribution, and the installed ones of the locked packages have them. Ends with one sentence if not.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import make_sbom

LOCK_FILE = Path(__file__).with_name("packages.lock")
OS_RELEASE = Path("/etc/os-release")
# The versions of these packages come from the files that are found for --variant cuda, which need not come with packages of these
# names.
NVIDIA = ("libcublaslt", "libnccl2")
REMEDY = (
    "take any by --lock none, or lock what a machine of this distribution has: run deploy/image/build --prebuilt BUILD --lock "
    "update there, look at what has changed in packages.lock, and commit it"
)


def distribution() -> str:
    """This machine's, as packages.lock names it: debian-12."""
    release = dict(line.split("=", 1) for line in OS_RELEASE.read_text().splitlines() if "=" in line)
    return release["ID"].strip('"') + "-" + release.get("VERSION_ID", "").strip('"')


def read() -> dict[str, dict[str, str]]:
    return json.loads(LOCK_FILE.read_text()) if LOCK_FILE.exists() else {}


def check(have: dict[str, str], system: str) -> None:
    """Ends the program if a package has another version than the locked one, or is not locked."""
    locked = read()
    if system not in locked:
        sys.exit(f"package_lock: {LOCK_FILE.name} has no versions for {system}, only for {', '.join(sorted(locked))}; {REMEDY}")
    want = locked[system]
    wrong = [f"{name} {version}, locked {want.get(name)}" for name, version in have.items() if want.get(name) != version]
    if wrong:
        sys.exit(f"package_lock: versions of {system} differ from {LOCK_FILE.name}: {'; '.join(wrong)}; {REMEDY}")


def check_or_update(packages: Iterable[make_sbom.Package], system: str, mode: str) -> None:
    """The mode of --lock: "check", "update" or "none"."""
    have = {package.name: package.version for package in packages}
    if mode == "update":
        locked = read()
        locked[system] = dict(sorted({**locked.get(system, {}), **have}.items()))
        LOCK_FILE.write_text(json.dumps(locked, indent=1, sort_keys=True) + "\n")
    elif mode == "check":
        check(have, system)


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of those that this machine has."""
    command = ["dpkg-query", "--show", "--showformat", "${Package}\t${Version}\t${db:Status-Status}\n", *names]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return {name: version for name, version, status in (line.split("\t") for line in lines) if status == "installed"}


def main() -> None:
    system = distribution()
    names = [name for name in read().get(system, {}) if name not in NVIDIA]
    check(installed(names) if names else {}, system)


if __name__ == "__main__":
    main()
