"""Checks the language of pages and of comments: words that begin no sentence, words with a plain synonym, the length of sentences.

A full stop, an exclamation mark, the end of a table's cell, of an item or of a paragraph ends a sentence. A code span counts as one
word. Code, headings, the first row of a table and printed text (`<!-- flags:` to `<!-- end of flags -->`, docs/metrics.md) are not
read. A question may begin with any word. The laboratory's log (kernels/lab) is a record of its time and is left out.

Comments and docstrings are read in the folders of DONE, a list that only grows, and have further words to avoid (CODE_WORDS).
"""

import re
import sys
from pathlib import Path

import code_comments
from lint import ROOT, blank, finish, pages

MAX_WORDS = 25
LEFT_OUT = (
    *("docs/metrics.md", "kernels/lab/README.md", "tests/deploy/wire_descriptors.py"),
    *(f"client/ctl/{name}" for name in ("arguments.h", "head_flags.cc", "head_flags.h", "main.cc")),  # to be replaced
)
DONE = (
    "client/**/*",
    "deploy/**/*",
    "kernels/comm/*",
    "kernels/core/**/*",
    "kernels/cpu/**/*",
    "kernels/cuda/**/*",
    "kernels/include/headwater/kernels/*",
    "kernels/reference/*",
    "proto/**/*",
    "server/**/*",
    "tests/bench/**/*",
    "tests/deploy/**/*",
    "tests/frameworks/*",
    "tests/kernels/**/*",
    "tests/monitoring/*",
    "tests/sanitizers/*",
    "tests/unit/client/*",
    "tests/unit/kernels/*",
)
SOURCES = {".h", ".cc", ".cu", ".cuh", ".py", ".proto"}
START = re.compile(r"(Of|What|Who|Whoever|Likewise|The same(?= (of|for|holds|is|are|goes|with|in|as|applies|to|on)\b))\b")
WORDS = {
    re.compile(r"\b(tells?|telling|told)\b", re.IGNORECASE): "report, say, show",
    re.compile(r"\bbeg[aiu]ns?\b (anew|again)\b|\bbegin(s|ning)? (anew|again)\b", re.IGNORECASE): "restart, start again",
    re.compile(r"\bfor ever\b", re.IGNORECASE): "forever",
    re.compile(r"\bwho(m)?ever\b", re.IGNORECASE): "name the actor",
    re.compile(r"\bg(et|ets|ot|etting) on\b", re.IGNORECASE): "make progress",
    re.compile(r"\blikewise\b", re.IGNORECASE): "name the thing again",
}
CODE_START = re.compile(r"(what|who|whoever|That (of|the)|Those)\b")
CODE_WORDS = {
    re.compile(r"\b(no|some|any)body\b", re.IGNORECASE): "name the actor",
    re.compile(r"\b(go|goes|went|gone|going) on\b(?! (the|a|to)\b)", re.IGNORECASE): "continue",
    re.compile(r"\blet(s|ting)? go\b", re.IGNORECASE): "drop, release",
    re.compile(r"\banew\b", re.IGNORECASE): "again",
    re.compile(r"\bbut for\b", re.IGNORECASE): "except",
    re.compile(r"\bin vain\b", re.IGNORECASE): "name the result",
    re.compile(r"\bnone (is|are) (there|here)\b|\bthat (is|are) none\b"): "without a, absent",
}
PRINTED = re.compile(r"<!-- flags:.*?<!-- end of flags -->", re.DOTALL)
FENCE = re.compile(r"^[ \t]*(```|~~~).*?^[ \t]*\1\s*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_\[]*([A-Z0-9`]|[a-z]+[A-Z0-9_(/\[]|[a-z]+\.[a-z])|\"[a-z_]+\")")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|approx|no)\.$|\b[A-Z]\.$")


def blocks(text: str) -> list[tuple[int, str]]:
    """The paragraphs, items of lists and cells of tables, each with the number of its first line."""
    for pattern in (PRINTED, FENCE, COMMENT):
        text = pattern.sub(blank, text)
    found: list[tuple[int, str]] = []
    open_block = False
    lines = [*text.splitlines(), ""]
    for number, line in enumerate(lines[:-1], start=1):
        stripped = line.strip()
        heads_a_table = re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", lines[number].strip())
        if not stripped or stripped.startswith("#") or heads_a_table or (line.startswith("    ") and not open_block):
            open_block = False
        elif stripped.startswith("|"):
            cells = re.split(r"(?<!\\)\|", re.sub(r"`[^`]*`", "`code`", stripped))
            found += [(number, cell.strip()) for cell in cells if cell.strip(" :-")]
            open_block = False
        else:
            item = re.match(r"([-*+]|\d+\.)\s+", stripped)
            if item or not open_block:
                found.append((number, stripped[item.end() :] if item else stripped))
            else:
                found[-1] = (found[-1][0], found[-1][1] + "\n" + stripped)
            open_block = True
    return found


def sentences(text: str) -> list[tuple[int, str]]:
    """The sentences of a page, as plain text, each with the number of the line on which it begins."""
    return [sentence for line, block in blocks(text) for sentence in sentences_of(line, block)]


def sentences_of(line: int, block: str) -> list[tuple[int, str]]:
    """The sentences of a paragraph that begins on a line."""
    found = []
    block = re.sub(r"`[^`]*`", lambda code: "`code`" + "\n" * code.group().count("\n"), block)
    block = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
    start = 0
    for end in [*(match.start() for match in END.finditer(block)), len(block)]:
        if end < len(block) and ABBREVIATION.search(block[start:end]):
            continue
        sentence = block[start:end].strip()
        lines = block.count("\n", 0, start + len(block[start:end]) - len(block[start:end].lstrip()))
        if sentence:
            found.append((line + lines, " ".join(sentence.split())))
        start = end
    return found


def length(sentence: str) -> int:
    """The number of its words."""
    return sum(1 for word in sentence.split() if re.search(r"\w", word))


def problems(sentence: str, code: bool = False) -> list[str]:
    """The faults of a sentence, of a page or of a comment in code."""
    found = []
    plain = sentence.lstrip("*_(\"'[ ")
    if length(plain) > MAX_WORDS and not (code and plain.startswith("Errors: ")):  # a list of names
        found.append(f"a sentence of {length(plain)} words, at most {MAX_WORDS} are wanted: {plain[:60]}...")
    start = START.match(plain) or (CODE_START.match(plain) if code else None)
    if start and not plain.rstrip("*_)").endswith("?"):
        found.append(f"a sentence begins with {start.group(1)!r}: {plain[:60]}")
    for pattern, instead in [*WORDS.items(), *(CODE_WORDS.items() if code else ())]:
        match = pattern.search(plain)
        if match:
            found.append(f"says {match.group()!r}, say instead: {instead}")
    return found


def check_page(page: Path) -> list[str]:
    """The errors of one page."""
    name = page.relative_to(ROOT).as_posix()
    found = sentences(page.read_text(encoding="utf-8"))
    return [f"{name}:{line}: {problem}" for line, sentence in found for problem in problems(sentence)]


def check_source(path: Path) -> list[str]:
    """The errors of one source's comments and docstrings."""
    name = path.relative_to(ROOT).as_posix()
    errors = []
    for block in code_comments.blocks(path.read_text(encoding="utf-8"), name):
        for paragraph in code_comments.paragraphs(block):
            text = "\n".join([code_comments.plain(paragraph[0][1]), *(line.strip() for _, line in paragraph[1:])])
            for line, sentence in sentences_of(paragraph[0][0], text):
                errors += [f"{name}:{line}: {problem}" for problem in problems(sentence, code=True)]
    return errors


def main() -> int:
    read = [page for page in pages() if page.relative_to(ROOT).as_posix() not in LEFT_OUT]
    sources = [path for done in DONE for path in sorted(ROOT.glob(done)) if path.suffix in SOURCES]
    sources = [path for path in sources if path.relative_to(ROOT).as_posix() not in LEFT_OUT]
    errors = [error for page in read for error in check_page(page)]
    errors += [error for source in sources for error in check_source(source)]
    return finish("language", f"{len(read)} pages, {len(sources)} sources", errors)


if __name__ == "__main__":
    sys.exit(main())
