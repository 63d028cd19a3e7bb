"""Sentences that begin wrongly, words with a plain synonym and sentences that are too long are found, in pages and in comments."""

import pytest

import check_language


@pytest.fixture
def errors(tmp_path):
    def check(text, name="page.md"):
        path = tmp_path / name
        path.write_text(text)
        return check_language.check_page(tmp_path, path) if path.suffix == ".md" else check_language.check_source(tmp_path, path)

    return check


LONG = "The server " + "really " * check_language.MAX_WORDS + "computes."


@pytest.mark.parametrize(
    "text",
    [
        "The server reports an error. It restarts.",
        "What is a head?",
        "| What | Who |\n|---|---|\n| a head | a trainer |",
        "The same step is repeated.",
        "```\nOf this nobody is told.\n```\n",
        "<!-- flags: printed -->\nWhat is told.\n<!-- end of flags -->\n",
        "Call `tell whoever`. Then stop.",
        "    Of indented code nobody reads a word.",
        "It takes " + "`a long span of code`, " * (check_language.MAX_WORDS - 2),
        "- " + "- ".join(["The server computes rows.\n"] * check_language.MAX_WORDS),
        f"[{'The server computes rows. ' * 9}](page.md#{'x' * 99})",
        "# What " + "and " * check_language.MAX_WORDS + "who",
    ],
)
def test_good_pages_pass(errors, text):
    assert errors(text) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("It stops.\n\nOf two heads one stops.", 3),
        ("It stops. What is left stops, too.", 1),
        ("It stops.\nWho calls it waits.", 2),
        ("- **Whose** head\n- **Who calls** waits.", 2),
        ("The same holds for heads.", 1),
        ("| Head | Rule |\n|---|---|\n| a | Of these one stops. |", 3),
        ("It stops: the client is told.", 1),
        ("It begins\nanew.", 1),
        ("It waits for ever.", 1),
        ("Anybody, whoever it is, waits.", 1),
        ("It stops.\n" + LONG, 2),
        ("- It stops.\n- " + LONG, 2),
        ("| a |\n|---|\n| " + LONG + " |", 3),
    ],
)
def test_bad_pages_do_not(errors, text, line):
    found = errors(text)
    assert len(found) == 1
    assert found[0].startswith(f"page.md:{line}: ")


CPP = [
    "// Returns rows.\nint x = 1;  // a number\n",
    'const char* text = "// Of a string nobody reads a word.";\n',
    "// Reads a row:\n//     Of whom = nobody\n",
    "// a   Of a table\n// b   nobody reads a word\n",
    "// NOLINTNEXTLINE(tells)\n",
    "int x = 1'000;  // rows\nint y = 1'000;  // columns\n",
    "// Errors: " + "A, " * check_language.MAX_WORDS + "B.\n",
    "// - The server computes.\n" * check_language.MAX_WORDS,
    "// The first.\n\n// " + "row " * (check_language.MAX_WORDS - 1) + "\n\n// row\n",
]
PYTHON = [
    'text = """Of a string nobody reads a word."""\n',
    'call(\n    """What is told to whoever asks."""\n)\n',
    '"""Reads rows.\n\n    program OF what  # nobody\n\nEnds.\n"""\n',
    'def f(x):\n    """Reads rows.\n\n    Args:\n' + "        x: the rows.\n" * check_language.MAX_WORDS + '    """\n',
]


@pytest.mark.parametrize(("text", "name"), [*((text, "a.cc") for text in CPP), *((text, "a.py") for text in PYTHON)])
def test_good_comments_pass(errors, text, name):
    assert errors(text, name) == []


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        ("// Of two heads one stops.\n", "a.cc", 1),
        ("int x = 1;  // the head that nobody has\n", "a.cu", 1),
        ("int x = 1;  // rows\n            // of whoever asks\n", "a.h", 1),
        ("/* Stops.\n * What is left stops, too. */\n", "a.h", 2),
        ("// Goes on.\n\n// Stops.\n// Goes on.\n", "a.proto", 1),
        ("// " + LONG + "\n", "a.cuh", 1),
        ("x = 1  # what the caller is told\n", "a.py", 1),
        ('"""Stops.\n\nWhat is left stops, too.\n"""\n', "a.py", 3),
        ('def f(x):\n    """Stops.\n\n    Args:\n        x: rows.\n        y: for ever.\n    """\n', "a.py", 6),
        ('class A:\n    x: int = 1\n    """Of two heads one."""\n', "a.py", 3),
    ],
)
def test_bad_comments_do_not(errors, text, name, line):
    found = errors(text, name)
    assert found
    assert found[0].startswith(f"{name}:{line}: ")
