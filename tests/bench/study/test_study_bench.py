"""The study runs, tiny, on the CPU, to its pages; every way has PyTorch's loss, and the matrix keeps its size."""

import json

import pytest
from points import ERRORS, EXACT, PARTS, WAYS, all_points

BATCH = "tiny_b2_t32_v512"


def test_ways_have_pytorchs_loss(smoke_run):
    pytest.importorskip("transformers")
    values = smoke_run("study", "--parts", "batches,accumulation")
    for way in ("headwater", "headwater_local"):
        assert values[f"cpu_study_batches_{BATCH}_{way}_first_loss_to_eager"] <= 1e-3
        assert values[f"cpu_study_batches_{BATCH}_{way}_server_planned_mib"] > 0
    assert values["cpu_study_accumulation_tiny_b2_t32_a4_v512_checkpointed_headwater_trainer_step_ms"] > 0


@pytest.mark.parametrize("part", ("medusa", "fsdp"))
def test_several_heads_and_several_ranks_have_pytorchs_loss(smoke_run, part):
    pytest.importorskip("transformers")
    values = smoke_run("study", "--parts", part)
    assert values[f"cpu_study_{part}_{BATCH}_checkpointed_headwater_first_loss_to_eager"] <= 1e-3
    assert values[f"cpu_study_{part}_{BATCH}_checkpointed_headwater_rate_of_eager"] > 0


def test_a_run_is_resumed_and_ends_with_the_pages(smoke_run, tmp_path):
    pytest.importorskip("torch")
    first = smoke_run("study", "--parts", "exact", "--commit", "first")
    assert sum(case.startswith("cpu_study_exact_") for case in first) == 15
    second = smoke_run("study", "--parts", "loss,exact", "--commit", "second")
    assert second.items() > first.items()
    assert second[f"cpu_study_loss_{BATCH}_headwater_first_loss_to_eager"] <= 1e-3
    results = json.loads((tmp_path / "study.json").read_text())["results"]
    commits = {name: entry["commit"] for name, entry in results.items()}
    assert commits == {"exact": "first", f"loss_{BATCH}_eager": "second", f"loss_{BATCH}_headwater": "second"}
    pytest.importorskip("matplotlib")
    page = (tmp_path / "docs/study/results.md").read_text()
    assert "## Exactness of accumulation" in page
    assert "## The loss alone" in page
    assert json.loads((tmp_path / "docs/benchmarks/study.json").read_text())["results"] == results


def test_the_matrix_is_small():
    points = all_points()
    assert len(points) <= 120
    assert len({point.name for point in points}) == len(points)
    assert {point.way for point in points} <= set(WAYS)
    assert {point.part for point in points} | {EXACT, ERRORS} == set(PARTS)
