"""Checks the language of the Markdown pages: words that begin no sentence, words with a plain synonym, the length of sentences.

A full stop, an exclamation mark, the end of a table's cell, of an item or of a paragraph ends a sentence. A code span counts as one
word. Code, headings, the first row of a table and printed text (`<!-- flags:` to `<!-- end of flags -->`, docs/metrics.md) are not
read. A question may begin with any word. The laboratory's log (kernels/lab) is a record of its time and is left out.
"""

import re
import sys
from pathlib import Path

MAX_WORDS = 25
LEFT_OUT = ("docs/metrics.md", "kernels/lab/README.md")
START = re.compile(r"(Of|What|Who|Whoever|Likewise|The same(?= (of|for|holds|is|are|goes|with|in|as|applies|to|on)\b))\b")
WORDS = {
    re.compile(r"\b(tells?|telling|told)\b", re.IGNORECASE): "report, say, show",
    re.compile(r"\bbeg[aiu]ns?\b (anew|again)\b|\bbegin(s|ning)? (anew|again)\b", re.IGNORECASE): "restart, start again",
    re.compile(r"\bfor ever\b", re.IGNORECASE): "forever",
    re.compile(r"\bwho(m)?ever\b", re.IGNORECASE): "name the actor",
    re.compile(r"\bg(et|ets|ot|etting) on\b", re.IGNORECASE): "make progress",
    re.compile(r"\blikewise\b", re.IGNORECASE): "name the thing again",
}
PRINTED = re.compile(r"<!-- flags:.*?<!-- end of flags -->", re.DOTALL)
FENCE = re.compile(r"^[ \t]*(```|~~~).*?^[ \t]*\1\s*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_\[]*([A-Z0-9`]|gRPC))")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|approx|no)\.$|\b[A-Z]\.$")


def blank(match: re.Match) -> str:
    """As many line ends as the match had, so that line numbers stay right."""
    return "\n" * match.group().count("\n")


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
    found = []
    for line, block in blocks(text):
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


def check_page(root: Path, page: Path) -> list[str]:
    """The errors of one page."""
    name = page.relative_to(root).as_posix()
    errors = []
    for line, sentence in sentences(page.read_text(encoding="utf-8")):
        plain = sentence.lstrip("*_(\"'[ ")
        if length(plain) > MAX_WORDS:
            errors.append(f"{name}:{line}: a sentence of {length(plain)} words, at most {MAX_WORDS} are wanted: {plain[:60]}...")
        start = START.match(plain)
        if start and not plain.rstrip("*_)").endswith("?"):
            errors.append(f"{name}:{line}: a sentence begins with {start.group(1)!r}: {plain[:60]}")
        for pattern, instead in WORDS.items():
            match = pattern.search(plain)
            if match:
                errors.append(f"{name}:{line}: says {match.group()!r}, say instead: {instead}")
    return errors


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    pages = [page for page in sorted(root.rglob("*.md")) if not {"build", ".git", ".venv"} & set(page.relative_to(root).parts)]
    pages = [page for page in pages if page.relative_to(root).as_posix() not in LEFT_OUT]
    errors = [error for page in pages for error in check_page(root, page)]
    for error in errors:
        print(error, file=sys.stderr)
    print(f"language: {len(pages)} pages, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
