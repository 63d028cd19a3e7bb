"""A failure, a crash or a skip in any report shows in the counts of tests/run."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import count_results

GTEST = """<testsuites><testsuite>
  <testcase name="A" status="run" result="completed"/>
  <testcase name="B" status="run" result="skipped"><skipped message="no"/></testcase>
  <testcase name="C" status="notrun" result="suppressed"/>
  <testcase name="DISABLED_ChildOfA" status="notrun" result="suppressed"/>
  {more}
</testsuite></testsuites>"""
PASSED = GTEST.format(more="")
FAILED = GTEST.format(more='<testcase name="D" status="run" result="completed"><failure message="x"/></testcase>')
CUT = "<testsuites><testsu"
PYTEST = (
    '<testsuites><testsuite><testcase name="a"/><testcase name="b"><error/></testcase><testcase name="c"><failure/></testcase>'
    '<testcase name="d"><skipped/></testcase></testsuite></testsuites>'
)


def counted(monkeypatch, capsys, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", ["count_results.py", *map(str, arguments)])
    assert count_results.main() == 0
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("status", "gtest", "counts"),
    [
        ("run", PASSED, "1 0 2"),
        ("fail", FAILED, "1 1 2"),
        # A program that fails without a failed case.
        ("fail", None, "0 1 0"),
        ("fail", CUT, "0 1 0"),
        ("fail", PASSED, "1 1 2"),
        # One that is not of GoogleTest, one that could not be started, and one that is disabled.
        ("run", None, "1 0 0"),
        ("notrun", None, "0 1 0"),
        ("disabled", None, "0 0 1"),
    ],
)
def test_programs_of_ctest_and_their_cases_are_counted(tmp_path, monkeypatch, capsys, status, gtest, counts):
    (tmp_path / "ctest.xml").write_text(f'<testsuite><testcase name="one" status="{status}"/></testsuite>')
    if gtest is not None:
        (tmp_path / "one.xml").write_text(gtest)
    assert counted(monkeypatch, capsys, "--ctest", tmp_path / "ctest.xml", tmp_path) == counts


def test_pytest_errors_are_failures_and_reports_are_added(tmp_path, monkeypatch, capsys):
    (tmp_path / "pytest.xml").write_text(PYTEST)
    assert counted(monkeypatch, capsys, "--pytest", tmp_path / "pytest.xml", tmp_path / "pytest.xml") == "2 4 2"


@pytest.mark.parametrize(("gtest", "counts"), [(FAILED, "1 1 2"), (None, "0 1 0"), ("<testsuites/>", "0 1 0")])
def test_a_single_program_is_counted_and_must_have_run_something(tmp_path, monkeypatch, capsys, gtest, counts):
    if gtest is not None:
        (tmp_path / "one.xml").write_text(gtest)
    assert counted(monkeypatch, capsys, "--gtest", tmp_path / "one.xml") == counts
