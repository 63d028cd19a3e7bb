"""Sentences that begin wrongly, words with a plain synonym and sentences that are too long are found, and code is not read."""

import pytest

import check_language


@pytest.fixture
def errors(tmp_path):
    def check(text, name="page.md"):
        (tmp_path / name).write_text(text)
        return check_language.check_page(tmp_path, tmp_path / name)

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
