"""Mutants of C++ sources, all in one compilation: each change stands beside the original, and a number chooses between them.

`mutate(text)` finds the places by tokens alone: conditions of if, while and for, what is returned or assigned, and statements that
only act. It returns the changed text and the mutants in it. In the text HEADWATER_MUTANT(n) is true if the program runs as mutant
n; the line numbers stay those of the original, so that a compiler's complaint leads to the mutants that it is about.
"""

import dataclasses
import re

TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<preprocessor>^[ \t]*\#(?:[^\n\\]|\\.)*)
      | (?P<string>(?:u8|L)?"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)+')
      | (?P<number>\d[\w.']*(?:[eE][+-]\d+)?\w*)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<operator><=>|->\*|<<=|>>=|\.\.\.|::|->|\+\+|--|<=|>=|==|!=|&&|\|\||\+=|-=|\*=|/=|%=|&=|\|=|\^=|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)

SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&"}
WORD_SWAPS = {"true": "false", "false": "true", "min": "max", "max": "min"}
OPENING = {"(": ")", "[": "]", "{": "}"}
ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^="}


@dataclasses.dataclass
class Token:
    kind: str
    text: str
    start: int
    line: int

    @property
    def end(self):
        return self.start + len(self.text)


@dataclasses.dataclass
class Mutant:
    number: int
    first_line: int
    last_line: int
    what: str  # the change, for people


@dataclasses.dataclass
class Edit:
    """Tokens [first, last) get other forms: by `variants` (what, tokens' texts), or the statement is left out."""

    first: int
    last: int
    variants: list
    removes: bool = False


def tokenize(text):
    tokens, line = [], 1
    for match in TOKEN.finditer(text):
        kind = match.lastgroup
        if kind != "space" and kind != "preprocessor":
            tokens.append(Token(kind, match.group(), match.start(), line))
        line += match.group().count("\n")
    return tokens


class Finder:
    def __init__(self, tokens):
        self.tokens = tokens
        self.match = self._match_brackets()
        self.edits = []

    def _match_brackets(self):
        match, stack = {}, []
        for index, token in enumerate(self.tokens):
            if token.kind != "operator":
                continue
            if token.text in OPENING:
                stack.append(index)
            elif stack and token.text == OPENING[self.tokens[stack[-1]].text]:
                match[stack[-1]] = index
                match[index] = stack.pop()
        return match

    def text(self, index):
        return self.tokens[index].text if 0 <= index < len(self.tokens) else ""

    def find(self):
        self.scopes(0, len(self.tokens))
        return self.edits

    def scopes(self, first, last):
        """Namespaces and classes: looks for functions."""
        index = first
        while index < last:
            if self.text(index) == "{" and index in self.match:
                end = self.match[index]
                if self.is_function(index):
                    self.block(index + 1, end)
                elif self.text(self.head(index)) in ("namespace", "class", "struct"):
                    self.scopes(index + 1, end)
                index = end
            index += 1

    def head(self, brace):
        """The first token of what the brace belongs to."""
        index = brace - 1
        while index >= 0 and self.text(index) not in (";", "}", "{", ":"):
            index = self.match[index] - 1 if self.text(index) in (")", "]") and index in self.match else index - 1
            if self.text(index) == ":" and self.text(index - 1) in ("public", "private", "protected"):
                break
        return index + 1

    def is_function(self, brace):
        head = self.head(brace)
        words = [self.text(i) for i in range(head, brace)]
        if words and words[0] in ("namespace", "class", "struct", "enum", "union", "constexpr", "template"):
            return False
        if "constexpr" in words[:3] or "=" in words:
            return False
        return ")" in words or self.text(brace - 1) == ")"

    def block(self, first, last):
        """Statements."""
        index = first
        while index < last:
            index = self.statement(index, last)

    def statement(self, index, last):
        """Looks through one statement; returns where the next one begins."""
        word = self.text(index)
        if word == "{":
            self.block(index + 1, self.match[index])
            return self.match[index] + 1
        if word in ("if", "while", "switch"):
            opening = index + (2 if self.text(index + 1) == "constexpr" else 1)
            if [self.text(opening + 1), self.text(opening + 2)] == ["true", ")"]:
                # What follows a loop without an end is never reached: without the loop a function would have no answer to give.
                return self.statement(self.match[opening] + 1, last)
            if word != "switch" and opening == index + 1:
                self.condition(opening, self.match[opening])
            return self.statement(self.match[opening] + 1, last)
        if word == "for":
            opening, closing = index + 1, self.match[index + 1]
            parts = self.split(opening + 1, closing, ";")
            if len(parts) == 3:
                self.expression(*parts[1], negate=False)
            return self.statement(closing + 1, last)
        if word in ("else", "do"):
            return self.statement(index + 1, last)
        if word in ("case", "default"):
            while self.text(index) != ":":
                index += 1
            return index + 1
        end = self.statement_end(index, last)
        self.simple(index, end)
        return end + 1

    def statement_end(self, index, last):
        while index < last and self.text(index) != ";":
            index = self.match[index] + 1 if self.text(index) in OPENING and index in self.match else index + 1
        return index

    def split(self, first, last, separator):
        parts, start, index = [], first, first
        while index < last:
            if self.text(index) in OPENING and index in self.match:
                index = self.match[index]
            elif self.text(index) == separator:
                parts.append((start, index))
                start = index + 1
            index += 1
        return [*parts, (start, last)]

    def has_top_level(self, first, last, wanted):
        index = first
        while index < last:
            if self.text(index) in OPENING and index in self.match:
                index = self.match[index]
            elif self.text(index) in wanted:
                return index
            index += 1
        return -1

    def condition(self, opening, closing):
        first, last = self.split(opening + 1, closing, ";")[-1]
        if self.has_top_level(first, last, {"="}) < 0:
            self.expression(first, last, negate=True)
        for part in self.split(opening + 1, closing, ";")[:-1]:
            assigned = self.has_top_level(*part, {"="})
            if assigned >= 0:
                self.expression(assigned + 1, part[1], negate=False)

    def simple(self, first, last):
        """A statement without statements in it, but for lambdas."""
        word = self.text(first)
        self.lambdas(first, last)
        if word == "return":
            if last > first + 1:
                if self.text(first + 1) != "{":
                    self.expression(first + 1, last, negate=False)
            if self.text(first - 1) == ")":  # of an if: the check is left out
                self.edits.append(Edit(first, last, [], removes=True))
            return
        if word in ("break", "continue"):
            self.edits.append(Edit(first, last, [], removes=True))
            return
        if word in ("static_assert", "using", "static", "constexpr", "public", "private", "delete") or first == last:
            return
        assigned = self.has_top_level(first, last, ASSIGNMENTS)
        if self.is_declaration(first, last if assigned < 0 else assigned):
            if assigned >= 0:
                self.expression(assigned + 1, last, negate=False, to=f"{self.text(assigned - 1)} = ")
            return
        if word == "HEADWATER_ASSIGN_OR_RETURN":  # declares a variable
            return
        if (
            assigned >= 0
            or self.text(last - 1) == ")"
            or "++" in (word, self.text(last - 1))
            or "--" in (word, self.text(last - 1))
        ):
            self.edits.append(Edit(first, last, [], removes=True))
            if assigned >= 0:
                self.expression(assigned + 1, last, negate=False)

    def is_declaration(self, first, last):
        """Two words beside each other, or a type's & * > before a word."""
        index, before = first, None
        while index < last:
            token = self.tokens[index]
            if token.kind == "word" and before is not None and (before.kind == "word" or before.text in (">", "&", "*", "&&")):
                return before.text not in ("return", "new", "*") or index > first + 1
            before = token
            if token.text in OPENING and index in self.match:
                index = self.match[index]
                before = self.tokens[index]
            index += 1
        return self.text(first) == "auto" or (self.text(first) == "const")

    def lambdas(self, first, last):
        for index in range(first, last):
            if self.text(index) != "{" or index not in self.match:
                continue
            before = self.text(index - 1)
            opening = self.match.get(index - 1) if before == ")" else None
            if before == "]" or (opening is not None and self.text(opening - 1) == "]"):
                self.block(index + 1, self.match[index])

    def expression(self, first, last, negate, to=""):
        """The other forms of an expression. What contains braces is left to its statements. `to`: what it is assigned to."""
        if first >= last or any(self.text(i) in ("{", "}") for i in range(first, last)):
            return
        texts = [self.text(i) for i in range(first, last)]
        variants = []
        comparisons = 0
        for offset, word in enumerate(texts):
            index = first + offset
            other = None
            if self.tokens[index].kind == "operator":
                other = SWAPS.get(word)
                if word in ("<", ">") and not self.is_comparison(index):
                    other = None
                comparisons += other is not None
                if word in ("+", "-") and self.text(index + 1) == "1":
                    other = "-" if word == "+" else "+"
            elif self.tokens[index].kind == "word":
                other = WORD_SWAPS.get(word)
                if word in ("min", "max") and self.text(index - 1) != "::":
                    other = None
            elif (
                self.tokens[index].kind == "number"
                and re.fullmatch(r"\d+", word)
                and self.text(index - 1) not in ("+", "-", "<", ">=")
            ):
                other = str(int(word) + 1)
            if other is not None:
                changed = [*texts[:offset], other, *texts[offset + 1 :]]
                variants.append((f"{word} -> {other} in {to}{' '.join(texts)}", changed))
        if negate and not (comparisons == 1 and len(variants) == 1 and "!" not in texts):
            variants.insert(0, (f"negated: {' '.join(texts)}", ["!", "(", *texts, ")"]))
        if variants:
            self.edits.append(Edit(first, last, variants))

    def is_comparison(self, index):
        """Not the bracket of a template: clang-format puts spaces around comparisons alone."""
        token, before, after = self.tokens[index], self.tokens[index - 1], self.tokens[index + 1]
        return before.end < token.start and token.end < after.start


def mutate(text, first_number, left_out=frozenset()):
    """The text with its mutants, numbered from first_number on, and the mutants; those with a number in left_out are not there."""
    tokens = tokenize(text)
    edits = Finder(tokens).find()
    mutants, changes = [], []  # changes: (position, order, text to put in)
    number = first_number
    for edit in edits:
        first, last = tokens[edit.first], tokens[edit.last - 1]
        lines = (first.line, last.line)
        alternatives = ""
        for what, words in edit.variants:
            if number not in left_out:
                alternatives += f"HEADWATER_MUTANT({number}) ? ({' '.join(words)}) : "
                mutants.append(Mutant(number, *lines, what))
            number += 1
        if alternatives:
            changes.append((first.start, 1, f"({alternatives}("))
            changes.append((last.end, -1, "))"))
        if edit.removes:
            if number not in left_out:
                words = " ".join(token.text for token in tokens[edit.first : edit.last])
                changes.append((first.start, 0, f"if (!HEADWATER_MUTANT({number})) "))
                mutants.append(Mutant(number, *lines, f"left out: {words}"))
            number += 1
    pieces, position = [], 0
    for place, _, added in sorted(changes, key=lambda change: change[:2]):
        pieces += [text[position:place], added]
        position = place
    return "".join(pieces) + text[position:], mutants, number
