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
FAILED = '<testcase name="D" status="run" result="completed"><failure message="x"/></testcase>'


def ctest(tmp_path, status, gtest=None):
    report = tmp_path / "ctest.xml"
    report.write_text(f'<testsuite><testcase name="one" status="{status}"/></testsuite>')
    if gtest is not None:
        (tmp_path / "one.xml").write_text(gtest)
    return count_results.count_ctest(report, tmp_path)


def test_cases_of_a_program_are_counted(tmp_path):
    assert ctest(tmp_path, "run", GTEST.format(more="")) == {"passed": 1, "skipped": 2}


def test_a_failed_case_is_counted_once(tmp_path):
    counts = ctest(tmp_path, "fail", GTEST.format(more=FAILED))
    assert (counts["passed"], counts["failed"]) == (1, 1)


@pytest.mark.parametrize("gtest", [None, "<testsuites><testsu", GTEST.format(more="")])
def test_a_program_that_fails_without_a_failed_case_is_a_failure(tmp_path, gtest):
    assert ctest(tmp_path, "fail", gtest)["failed"] == 1


def test_a_program_that_could_not_be_started_is_a_failure(tmp_path):
    assert ctest(tmp_path, "notrun") == {"failed": 1}


def test_a_program_that_is_no_googletest_counts_as_one(tmp_path):
    assert ctest(tmp_path, "run") == {"passed": 1}


def test_a_disabled_test_is_skipped(tmp_path):
    assert ctest(tmp_path, "disabled") == {"skipped": 1}


def test_pytest_errors_are_failures(tmp_path):
    report = tmp_path / "pytest.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><error/></testcase><testcase name="c"><failure/></testcase>'
        '<testcase name="d"><skipped/></testcase></testsuite></testsuites>'
    )
    assert count_results.count_pytest(report) == {"passed": 1, "failed": 2, "skipped": 1}


def test_several_pytest_reports_are_added(tmp_path, monkeypatch, capsys):
    for name in ("a.xml", "b.xml"):
        (tmp_path / name).write_text('<testsuite><testcase name="a"/><testcase name="b"><error/></testcase></testsuite>')
    monkeypatch.setattr(sys, "argv", ["count_results.py", "--pytest", str(tmp_path / "a.xml"), str(tmp_path / "b.xml")])
    assert count_results.main() == 0
    assert capsys.readouterr().out.strip() == "2 2 0"


@pytest.mark.parametrize(("gtest", "expected"), [(GTEST.format(more=FAILED), "1 1 2"), (None, "0 1 0"), ("<testsuites/>", "0 1 0")])
def test_a_single_program_is_counted_and_must_have_run_something(tmp_path, monkeypatch, capsys, gtest, expected):
    report = tmp_path / "one.xml"
    if gtest is not None:
        report.write_text(gtest)
    monkeypatch.setattr(sys, "argv", ["count_results.py", "--gtest", str(report)])
    assert count_results.main() == 0
    assert capsys.readouterr().out.strip() == expected
