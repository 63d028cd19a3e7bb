"""Checks the Markdown pages: links and anchors resolve, files that the text names exist, commands can be run, the README keeps its
length.

A file name is a code span that begins with a top-level folder of the project (`docs/math.md`, `deploy/quickstart`). Only the first
word of a span is looked at, and none that holds a wildcard or an ellipsis. A span of several words, or a line of a code block, is a
command if it begins with a file of the project, perhaps after variables. The file must be executable. A row of a
table that names one source file and functions (`Head::Commit()`) says that they are in it.
"""

import os
import re
import sys
from pathlib import Path

from lint import ROOT, blank, finish, pages

TOP_LEVEL = ("client", "deploy", "docs", "kernels", "proto", "server", "tests", ".ci")
README_LINES = 150
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
SOURCES = {".h", ".cc", ".cu", ".cuh", ".py", ".proto"}
FUNCTION = re.compile(r"(?:\w+::)*(~?\w+)\(\)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors that the headings of a page get: lower case, punctuation dropped, spaces to hyphens, repeats numbered."""
    found: dict[str, int] = {}
    result = set()
    for heading in HEADING.findall(FENCE.sub(blank, text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        repeat = found.get(slug, 0)
        found[slug] = repeat + 1
        result.add(f"{slug}-{repeat}" if repeat else slug)
    return result


def named_path(span: str) -> str | None:
    """The path that a code span names, or None."""
    word = span.split()[0].rstrip(".,:;") if span.split() else ""
    word = re.sub(r":\d+$", "", word).removeprefix("./")
    if not word.startswith(tuple(top + "/" for top in TOP_LEVEL)) or re.search(r"[*{}<>…$|]|\.\.\.", word):
        return None
    return word.split("#")[0]


def commands(text: str) -> list[tuple[int, str]]:
    """The lines of a page's code blocks, and its code spans of several words, each with its line number."""
    found = []
    for match in FENCE.finditer(text):
        first = text.count("\n", 0, match.start()) + 1
        found += list(enumerate(match.group().splitlines(), start=first))[1:-1]
    prose = FENCE.sub(blank, text)
    for match in CODE.finditer(prose):
        if len(match.group(1).split()) > 1:
            found.append((prose.count("\n", 0, match.start()) + 1, match.group(1)))
    return found


def missing_functions(root: Path, row: str) -> list[str]:
    """The functions of a table's row that are not in the source file that it names; none if it names no file, or several."""
    spans = CODE.findall(row)
    paths = {path for span in spans if (path := named_path(span)) and Path(path).suffix in SOURCES and (root / path).exists()}
    if len(paths) != 1:
        return []
    path = paths.pop()
    text = (root / path).read_text(encoding="utf-8")
    functions = [match for span in spans if (match := FUNCTION.fullmatch(span))]
    return [f"{path} has no {match.group()}" for match in functions if not re.search(rf"\b{re.escape(match.group(1))}\(", text)]


def check_command(root: Path, command: str) -> str | None:
    """The fault of a command, if it begins with a file of the project."""
    words = command.split()
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        words.pop(0)
    path = named_path(words[0]) if words else None
    if not path or (root / path).is_dir():
        return None
    if not (root / path).exists():
        return f"runs {path}, which does not exist"
    return None if os.access(root / path, os.X_OK) else f"runs {path}, which is not executable"


def check_page(root: Path, page: Path) -> list[str]:
    """The errors of one page."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(root).as_posix()
    prose = FENCE.sub(blank, text)
    errors = []
    for match in LINK.finditer(re.sub(r"`[^`\n]+`", lambda span: " " * len(span.group()), prose)):
        target = match.group(1)
        line = prose.count("\n", 0, match.start()) + 1
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            errors.append(f"{name}:{line}: links to {target}, which does not exist")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
            errors.append(f"{name}:{line}: links to {target}, a page without that heading")
    for match in CODE.finditer(prose):
        path = named_path(match.group(1))
        several = len(match.group(1).split()) > 1
        if path and not several and not (root / path).exists() and not (root / "proto" / path).exists():
            line = prose.count("\n", 0, match.start()) + 1
            errors.append(f"{name}:{line}: names {path}, which does not exist")
    for line, command in commands(text):
        error = check_command(root, command)
        if error:
            errors.append(f"{name}:{line}: {error}")
    for line, row in enumerate(prose.splitlines(), start=1):
        if row.startswith("|"):
            errors += [f"{name}:{line}: {error}" for error in missing_functions(root, row)]
    if name == "README.md" and text.count("\n") > README_LINES:
        errors.append(f"{name}: {text.count(chr(10))} lines, at most {README_LINES} are wanted")
    return errors


if __name__ == "__main__":
    sys.exit(finish("docs", f"{len(pages())} pages", [error for page in pages() for error in check_page(ROOT, page)]))
