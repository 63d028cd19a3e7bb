"""The comments of C++, CUDA and protobuf sources and the comments and docstrings of Python sources, as paragraphs.

A paragraph is a list of lines, each with its number. It ends before a blank line, an item of a list, an entry `name: text` of a
section such as `Args:`, and a line with columns. Indented text after a blank line is code or a drawing and no paragraph; neither
are lines with columns, commands to tools such as `NOLINT`, and licence lines.
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
SECTION = re.compile(r"\w+( \w+)?:$")
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
    open_paragraph = False
    section_indent = -1
    for number, line in block:
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if not stripped or COMMAND.match(stripped) or COLUMNS.search(stripped):
            open_paragraph = False
            continue
        if SECTION.match(stripped) and not open_paragraph:
            section_indent = indent + 4
            continue
        in_section = section_indent >= 0 and indent == section_indent
        if indent < section_indent:
            section_indent = -1
        if in_section or ITEM.match(stripped) or (not open_paragraph and indent < 3):
            found.append([(number, line)])
            open_paragraph = True
        elif open_paragraph:
            found[-1].append((number, line))
    return found


def plain(line: str) -> str:
    """A paragraph's first line without the mark or name that it begins with."""
    stripped = line.strip()
    for pattern in (ITEM, ENTRY):
        match = pattern.match(stripped)
        if match:
            stripped = stripped[match.end() :]
    return stripped
