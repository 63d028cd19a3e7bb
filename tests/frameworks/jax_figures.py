"""Figures of tests, as rows of docs/benchmarks/jax.csv beside the file that HEADWATER_FIGURES names."""

import importlib.util
import os
from pathlib import Path

import jax

_spec = importlib.util.spec_from_file_location("figures", Path(__file__).parents[1] / "bench/common/figures.py")
_figures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_figures)

IS_GPU = "cuda" in os.environ.get("JAX_PLATFORMS", "")


def write_figures(*rows: tuple[str, float, str, float | None]) -> None:
    """Rows of case, value, unit and what the value may be at most; nothing without HEADWATER_FIGURES."""
    file = os.environ.get("HEADWATER_FIGURES")
    if not file:
        return
    machine = f"{jax.devices()[0].device_kind if IS_GPU else 'CPU engine'}; JAX {jax.__version__}"
    commit = os.environ.get("HEADWATER_FIGURES_COMMIT", "unknown")
    made = [_figures.row(case, value, unit, machine, commit, most) for case, value, unit, most in rows]
    _figures.merge(Path(file).with_name("jax.csv"), made)
