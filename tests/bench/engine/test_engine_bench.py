"""The benchmarks of the engines run, tiny, on the CPU: every figure of theirs is taken."""

import pathlib

import figures
import pytest

KEPT = pathlib.Path(__file__).resolve().parents[3] / "docs/benchmarks"


def test_every_figure_of_the_cpu_engine_is_taken_again(smoke_run):
    pytest.importorskip("torch")
    values = smoke_run("engine")
    versioned, elsewhere = "eager_pytorch_", (figures.GPU_PREFIX, "cpu_two_cores_")
    kept = {row["case"] for row in figures.read(KEPT / "engine.csv")}
    assert {case for case in kept if not case.startswith((versioned, *elsewhere))} <= set(values)
    assert any(case.startswith(versioned) for case in values)


@pytest.mark.parametrize(
    ("gpus", "name", "kept", "prefix"),
    (("1", "engine_cuda", "engine.csv", "ce_n8192_h4096"), ("2", "many-gpus", "many-gpus.csv", "group2_ce_n8192_h4096")),
)
def test_the_figures_of_gpus_are_taken_by_their_names(smoke_run, gpus, name, kept, prefix):
    values = smoke_run(name, "--gpus", gpus, script="gpu")
    expected = [row["case"][5:] for row in figures.read(KEPT / kept) if row["case"].startswith(f"cuda_{prefix}")]
    assert expected and {f"cpu_{case}" for case in expected} <= set(values)
