"""The comments of C++, CUDA and protobuf sources and the comments and docstrings of Python sources, as paragraphs.

A paragraph is a list of lines, each with its number. It ends before a blank line, an item of a list, an entry `name: text` of a
section such as `Args:`, and a line with columns. Indented text after a blank line is code or a drawing and no paragraph. Lines with
columns, commands to tools such as `NOLINT`, and licence lines are none either.
"""

import re
from pathlib import PurePath

Line = tuple[int, str]  # the number of a line in its file, and its text from the comment's first column on
Paragraph = list[Line]

CPP = re.compile(
    r"""//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/|R"(?P<tag>\w*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'""",
    re.DOTALL,
)
PYTHON = re.compile(
    r'''\#(?P<line>[^\n]*)|[rRfFbBuU]{0,2}(?:"""(?P<block>(?:\\.|[^\\])*?)"""|\'\'\'(?:\\.|[^\\])*?\'\'\''''
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""",
    re.DOTALL,
)
COMMAND = re.compile(
    r"NOLINT|clang-format o|SPDX|Copyright|IWYU|!|noqa|type: ignore|ruff: |fmt: |pragma|ty: |mypy: |-\*-|#|----|====|\W*$"
)
ITEM = re.compile(r"([-*+]|\d+\.) +")
ENTRY = re.compile(r"(?!Errors: )[\w.*`]+(, [\w.*`]+)*( \([^)]*\))?: ")
COLUMNS = re.compile(r"\S {2,}\S")  # a row of a table or drawing
SECTION = re.compile(r"[A-Z]\w+:$")
SECTION_ENDS_CODE = re.compile(r"[(\[{,=\\]$|\breturn$")


def blocks(text: str, name: str) -> list[list[Line]]:
    """The comments: whole lines that follow one another at one column, and each comment beside code with its continuation."""
    python = PurePath(name).suffix == ".py"
    found: list[list[Line]] = []
    last_line, last_column = -1, -1
    number, start = 1, 0
    for match in (PYTHON if python else CPP).finditer(text):
        number += text.count("\n", start, match.start())
        start = match.start()
        line_start = text.rfind("\n", 0, start) + 1
        column, alone = start - line_start, not text[line_start:start].strip()
        if match["line"] is not None:
            body = match["line"]
            if alone and last_line == number - 1 and last_column == column:
                found[-1].append((number, body))
            else:
                found.append([(number, body)])
            last_line, last_column = number, column
        elif match["block"] is not None and (not python or (alone and not SECTION_ENDS_CODE.search(text[:line_start].rstrip()))):
            cut = " " * column
            lines = match["block"].split("\n") if python else re.sub(r"\n *\* ?", "\n ", match["block"]).split("\n")
            found.append([(number + i, " " + (line.removeprefix(cut) if i else line)) for i, line in enumerate(lines)])
    return found


def paragraphs(block: list[Line]) -> list[Paragraph]:
    """The paragraphs of a comment."""
    found: list[Paragraph] = []
    is_open = hangs = False
    section_indent = -1
    last = ""
    for number, line in block:
        stripped = line.strip()
        indent, last_indent = len(line) - len(line.lstrip()), len(last) - len(last.lstrip())
        is_entry = indent == section_indent and (not is_open or ENTRY.match(stripped) is not None)
        if SECTION.match(stripped):
            is_open, section_indent = False, indent + 4
        elif not stripped or COMMAND.match(stripped) or COLUMNS.search(stripped):
            is_open = False
        elif is_open and not hangs and last.endswith(":") and indent >= last_indent + 2:
            is_open = False  # code or a drawing
        elif is_entry or ITEM.match(stripped) or (not is_open and indent < 3):
            found.append([(number, line)])
            is_open, hangs = True, is_entry or ITEM.match(stripped) is not None
        elif is_open:
            found[-1].append((number, line))
        if stripped and indent < section_indent and not SECTION.match(stripped):
            section_indent = -1
        last = line
    return found


def plain(line: str) -> str:
    """A paragraph's first line without the mark or name that it begins with."""
    stripped = line.strip()
    for pattern in (ITEM, ENTRY):
        match = pattern.match(stripped)
        if match:
            stripped = stripped[match.end() :]
    return stripped
