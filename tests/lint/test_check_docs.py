"""Dead links, missing headings and names of files that are not there are found."""

import pytest

import check_docs


@pytest.fixture
def root(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests").mkdir()
    for name, mode in (("run", 0o755), ("data", 0o644)):
        (tmp_path / "tests" / name).write_text("")
        (tmp_path / "tests" / name).chmod(mode)
    (tmp_path / "docs" / "math.md").write_text("# Math\n\n## One `formula`, twice\n\n```\n# no heading\n```\n")
    return tmp_path


def errors(root, text, name="docs/index.md"):
    (root / name).write_text(text)
    return check_docs.check_page(root, root / name)


@pytest.mark.parametrize(
    "text",
    [
        "[math](math.md)",
        "[formula](math.md#one-formula-twice)",
        "[here](#there)\n\n# There",
        "[outside](https://example.org/x)",
        "`docs/math.md` and `docs/math.md:3`, `docs/*.md`, `docs/<name>.md`",
        "`[not](a-link.md)`",
        "```\n[not](a-link.md) `docs/nothing.md`\n```",
        "`tests/data`, `tests/run --long`, `NAME=value tests/run --long`, `cat tests/data`",
        "```sh\nNAME=value tests/run --long | tail\ntests/    some\n```",
    ],
)
def test_good_pages_pass(root, text):
    assert errors(root, text) == []


@pytest.mark.parametrize(
    "text",
    [
        "[gone](gone.md)",
        "[no heading](math.md#two)",
        "[no heading](math.md#no-heading)",
        "see `docs/gone.md`",
        "run `tests/gone --long`",
        "run `tests/data --long`",
        "run `NAME=value OTHER= tests/data --long`",
        "```sh\ntests/run\ntests/data --long\n```",
        "```sh\nNAME=value tests/data\n```",
        "```\ntests/gone\n```",
    ],
)
def test_bad_pages_do_not(root, text):
    assert len(errors(root, text)) == 1


def test_functions_of_a_row_are_in_its_file(root):
    (root / "tests" / "code.cc").write_text("void Head::Commit() {}\n")
    assert errors(root, "| `tests/code.cc` | `Head::Commit()` |\n| `tests/code.cc` | |\n| `Other()` |") == []
    assert errors(root, "| `tests/code.cc` | `Head::Seal()`, `Commit()` |") == [
        "docs/index.md:1: tests/code.cc has no Head::Seal()"
    ]


def test_an_overlong_readme_is_an_error(root):
    assert errors(root, "line\n" * check_docs.README_LINES, "README.md") == []
    assert len(errors(root, "line\n" * (check_docs.README_LINES + 1), "README.md")) == 1
