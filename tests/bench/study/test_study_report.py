"""The study's pages have no number of their own: each is a row of study.csv, a size of the matrix, or derived in method.md."""

import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys

import figures
import pytest
from points import smoke_points

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tests/lint"))
import check_language  # noqa: E402

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?(?!\w)")
PEERS = {"headwater_fp32": 0.0012, "torch_eager_anew": 0.0105, "liger_anew": 0.0107}  # invented errors of grad_hidden


def numbers(text):
    """The numbers of a page's prose and tables, as they are written. Code, links' targets and front matter are left out."""
    for pattern in (r"\A---\n.*?^---$", r"^```.*?^```$", r"^    .*?$", r"<!--.*?-->", r"`[^`]*`", r"\]\([^)]*\)"):
        text = re.sub(pattern, " ", text, flags=re.MULTILINE | re.DOTALL)
    return [match.group().rstrip(",") for match in NUMBER.finditer(text)]


def strange(text, rows, words):
    """The numbers of a page that are no value of a row in any form, and are not in the words."""
    for row in rows:
        text = text.replace(row["machine"], " ").replace(row["commit"], " ")
    values = [float(row[column]) for row in rows for column in ("value", "required") if row[column]]
    known = set(re.findall(r"\d[\d.]*\d|\d", words))

    def is_value(number):
        digits = len(number.partition("e")[0].partition(".")[2])
        forms = [f".{digits}e"] if "e" in number else [f",.{digits}f", f".{digits}f", ".3g", ".2g"]
        return any(f"{value:{form}}" == number for value in values for form in forms)

    return [number for number in numbers(text) if number not in known and not is_value(number)]


@pytest.fixture
def docs(tmp_path):
    """A folder with the study's first page."""
    folder = tmp_path / "docs"
    shutil.copytree(ROOT / "docs/study", folder / "study")
    return folder


def report(docs, *sources):
    """Runs the script; the rows it wrote, the results page and the slides."""
    pytest.importorskip("matplotlib")
    command = [sys.executable, pathlib.Path(__file__).with_name("report.py"), "--smoke", "--docs", docs, *sources]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [(docs / "study" / name).read_text(encoding="utf-8") for name in ("results.md", "slides.md", "index.md")]
    sentences = [sentence for page in pages for _, sentence in check_language.sentences(page)]
    assert [fault for sentence in sentences for fault in check_language.problems(sentence)] == []
    return figures.read(docs / "benchmarks/study.csv"), *pages


def test_each_number_of_the_pages_is_a_row(smoke_run, docs, tmp_path):
    pytest.importorskip("torch")
    smoke_run("study", "--parts", "loss")
    peers = tmp_path / "peers.csv"
    lines = [
        f"cpu_peers_smollm2_n64_h32_v512_{way}_grad_hidden_error,{error},relative error,,,{sys.platform},unknown"
        for way, error in PEERS.items()
    ]
    eager = next(point for point in smoke_points() if point.part == "batches")
    lines += [f"cpu_study_{eager.name}_out_of_memory,1,yes: 1,,,{sys.platform},unknown"]
    peers.write_text("\n".join(["case,value,unit,sense,required,machine,commit", *lines, ""]))
    rows, results, slides, index = report(docs, tmp_path / "study.csv", peers)
    assert len(rows) > len(PEERS) + 10
    words = " ".join(row["case"] for row in rows) + str([dataclasses.asdict(point) for point in smoke_points()])
    counts = "1 4 16 64"  # micro-batches of exactness.py
    assert strange(results, rows, words + counts) == []
    assert strange(results.replace("1.20e-03", "1.30e-03"), rows, words + counts) != []
    assert "| Headwater | 1.20e-03 | not measured |" in results
    first_page = (ROOT / "docs/study/index.md").read_text(encoding="utf-8")
    assert strange(slides + index, rows, words + counts + first_page) == []
    assert "![Relative errors" in results
    assert (docs / "study/errors.svg").read_text().startswith("<?xml")
    batches = results.partition("## By micro-batch")[2].partition("##")[0]
    assert "| PyTorch eager | out of memory |" in batches
    assert "Not measured: Headwater and Headwater local." in batches


def test_without_figures_nothing_is_claimed(docs):
    _, results, slides, _ = report(docs)
    assert "Nothing is measured yet." in results
    assert "- Not measured." in slides
    assert not list((docs / "study").glob("*.svg"))


def test_numbers_of_the_first_page_are_derived_or_measured():
    index = (ROOT / "docs/study/index.md").read_text(encoding="utf-8")
    index = re.sub(r"^<!-- results -->.*?^<!-- results -->", "", index, flags=re.MULTILINE | re.DOTALL)
    index = re.sub(r"`([A-Z])` (\d+)", r"\1 \2", index)
    method = (ROOT / "docs/study/method.md").read_text(encoding="utf-8")
    assert len(numbers(index)) > 20
    assert strange(index, figures.read(ROOT / "docs/benchmarks/end-to-end.csv"), method) == []
