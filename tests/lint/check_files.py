"""Checks what no formatter does: the length of files, marks of unfinished work, header guards, clocks, that scripts can be run."""

import re
import subprocess
import sys
from pathlib import Path

from lint import ROOT, finish

MAX_LINES = 850
# Spelled apart, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b")
TEXT_SUFFIXES = {".h", ".cc", ".c", ".cu", ".cuh", ".py", ".proto", ".cmake", ".txt", ".toml", ".md", ".json", ".yaml", ""}
CODE_SUFFIXES = {".h", ".cc", ".c", ".cu", ".cuh", ".py", ".proto", ""}
# Durations in the server go by observability::MonotonicNow(), whose times have the same type. These files tell the time of day.
WALL_CLOCK = re.compile(r"\babsl::Now\(\)|WithDeadline\(")
WALL_CLOCK_FILES = {
    "server/heads/head.h",
    "server/observability/call_trace.cc",
    "server/observability/logging.cc",
    "server/observability/metrics.cc",
    "server/observability/monotonic_clock.h",
    "server/service/call/rpc_scope.cc",
    "server/service/server_core.cc",
    "server/checkpoint/checkpoint_store.cc",
    "server/service/access/ports.cc",
}


def guard_pattern(path: str) -> re.Pattern:
    """A header guard begins with the project's name and ends with the file's; between them stand its folders."""
    stem = re.sub(r"\W", "_", Path(path).name.upper())
    return re.compile(rf"^#ifndef (HEADWATER_(\w+_)?{stem}_)\n#define \1\n", re.MULTILINE)


def check_file(path: str, text: str) -> list[str]:
    """The errors of one file; `path` is relative to the root."""
    errors = []
    lines = text.splitlines()
    if Path(path).suffix in CODE_SUFFIXES and Path(path).name != "LICENSE" and len(lines) > MAX_LINES:
        errors.append(f"{path}: {len(lines)} lines, at most {MAX_LINES}; give each part its own file")
    if text and not text.endswith("\n"):
        errors.append(f"{path}: the last line has no end")
    for number, line in enumerate(lines, start=1):
        if UNFINISHED.search(line):
            errors.append(f"{path}:{number}: a mark of unfinished work")
        if line != line.rstrip():
            errors.append(f"{path}:{number}: white space at the end of the line")
        if path.startswith("server/") and path not in WALL_CLOCK_FILES and WALL_CLOCK.search(line):
            errors.append(f"{path}:{number}: a duration by the wall clock; take observability::MonotonicNow()")
    # A file to be included more than once, or in one place only, says so in its first lines.
    once = "included by" not in "".join(lines[:8])
    if path.endswith(".h") and once and not guard_pattern(path).search(text):
        errors.append(f"{path}: no header guard of the form HEADWATER_FOLDERS_FILE_H_")
    return errors


def check_mode(path: str, text: str, mode: int) -> list[str]:
    """A script can be run by its name, and what can be run says by what."""
    executable = bool(mode & 0o111)
    if text.startswith("#!") == executable:
        return []
    return [f"{path}: " + ("executable, but no #! in its first line" if executable else "begins with #!, but is not executable")]


def main() -> int:
    # safe.directory: the checkout may belong to another user, as in a container.
    git = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT)]
    listing = [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    paths = [path for path in subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split("\0") if path]
    errors, count = [], 0
    for path in sorted(paths):
        file = ROOT / path
        if file.suffix in TEXT_SUFFIXES and file.is_file() and not file.is_symlink():
            count += 1
            text = file.read_text(encoding="utf-8")
            errors += check_file(path, text)
            errors += check_mode(path, text, file.stat().st_mode)
    return finish("files", f"{count} checked", errors)


if __name__ == "__main__":
    sys.exit(main())
