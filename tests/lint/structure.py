"""Measures the structure of a checkout: prints rows of docs/benchmarks/server.csv, or a table with the largest of each kind.

    structure.py [--csv COMMIT]

Lines are those of tracked files, blank ones and comments included. A declaration is a statement at the depth of a class's body: a
member, a method, an alias or a nested type. A folder's files are those directly in it.
"""

import argparse
import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = {".h", ".cc", ".cu", ".cuh", ".proto", ".py", ".cmake", ".txt"}
CLASS = re.compile(
    r"\b(?:class|struct)\s+(?:\[\[\w+\]\]\s*)?(?:ABSL_\w+(?:\([^)]*\))?\s+)?([\w:]+)\s*(?:final\s*)?"
    r"(?::[^;{()]*(?:\([^)]*\))?[^;{()]*)?\{"
)
# The most that is allowed. What was before, at d466ba5, stands in docs/benchmarks/server.md.
BOUNDS = {
    "server_lines": 26500,
    "tests_lines_without_frameworks": 76000,
    "largest_class": 40,
    "largest_file": 600,
    "fullest_folder": 30,
}


def tracked(*folders: str) -> list[str]:
    """Tracked files below the folders, without links."""
    names = subprocess.run(["git", "-C", ROOT, "ls-files", "--", *folders], check=True, capture_output=True, text=True).stdout
    return [name for name in names.splitlines() if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def lines(name: str) -> int:
    """Lines of one file."""
    return (ROOT / name).read_bytes().count(b"\n")


def without_comments(text: str) -> str:
    """C++ without comments, the contents of literals, and directives."""
    text = re.sub(r"/\*.*?\*/", "", re.sub(r"//[^\n]*", "", text), flags=re.DOTALL)
    text = re.sub(r"(?<![0-9a-fA-F])'(?:\\.|[^'\\])'", "0", re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text))
    return re.sub(r"^[ \t]*#(?:.*\\\n)*.*$", "", text, flags=re.MULTILINE)


def declarations(body: str) -> int:
    """Statements at the depth of a class's body, which begins after its brace."""
    depth, parentheses, found = 1, 0, 0
    for i, character in enumerate(body):
        if character in "([":
            parentheses += 1
        elif character in ")]":
            parentheses -= 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                break
            # A method's body ends a declaration; an initialiser's does not, since more follows it.
            found += depth == 1 and parentheses == 0 and body[i + 1 :].lstrip()[:1] not in tuple(";,({).")
        elif character == ";" and depth == 1 and parentheses == 0:
            found += 1
    return found


def classes(names: list[str]) -> list[tuple[int, str]]:
    """The classes of C++ files, with their declarations, most first."""
    found = []
    for name in names:
        if Path(name).suffix in {".h", ".cc", ".cu", ".cuh"}:
            text = without_comments((ROOT / name).read_text(encoding="utf-8"))
            found += [(declarations(text[match.end() :]), f"{match.group(1)} ({name})") for match in CLASS.finditer(text)]
    return sorted(found, reverse=True)


def main() -> None:
    """Prints the measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", metavar="COMMIT", help="rows of docs/benchmarks/server.csv instead of a table")
    arguments = parser.parse_args()
    code = {folder: [name for name in tracked(folder) if Path(name).suffix in CODE] for folder in ("server", "kernels", "client")}
    product = [name for names in code.values() for name in names]
    folders = Counter(name.rpartition("/")[0] for name in product)
    server_files = sorted(((lines(name), name) for name in code["server"]), reverse=True)
    measures = {
        "server_lines": [(sum(map(lines, code["server"])), "server")],
        "kernels_lines": [(sum(lines(name) for name in code["kernels"] if "/lab/" not in name), "kernels without lab")],
        "client_lines": [(sum(map(lines, code["client"])), "client")],
        "tests_lines": [(sum(map(lines, tracked("tests"))), "tests")],
        "tests_lines_without_frameworks": [
            (sum(lines(name) for name in tracked("tests") if not name.startswith("tests/frameworks/")), "tests")
        ],
        "largest_class": classes(code["server"]),
        "largest_file": server_files,
        "fullest_folder": [(count, folder) for folder, count in folders.most_common()],
    }
    for case, found in measures.items():
        value, where = found[0]
        required = BOUNDS.get(case)
        if arguments.csv:
            unit = "lines" if "lines" in case or case == "largest_file" else "files" if "folder" in case else "declarations"
            print(f"{case},{value},{unit},{'le' if required else ''},{required or ''},,{arguments.csv}")
        else:
            more = "; then " + ", ".join(f"{v} {w}" for v, w in found[1:6]) if len(found) > 1 else ""
            print(f"{case:32} {value:7}  {f'at most {required}' if required else '':14}  {where}{more}")


if __name__ == "__main__":
    main()
