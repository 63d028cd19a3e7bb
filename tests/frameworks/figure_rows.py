"""Figures of tests, as rows of docs/benchmarks/frameworks.csv, in the file that HEADWATER_FIGURES names (tests/gpu --bench)."""

import importlib.util
import os
from pathlib import Path

import torch
import transformers

_spec = importlib.util.spec_from_file_location("figures", Path(__file__).parents[1] / "bench/common/figures.py")
_figures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_figures)


def write_figures(*rows: tuple[str, float, str, float | None]) -> None:
    """Rows of case, value, unit and what the value may be at most; nothing without HEADWATER_FIGURES."""
    file = os.environ.get("HEADWATER_FIGURES")
    if not file:
        return
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU engine"
    machine = f"{where}; PyTorch {torch.__version__}; transformers {transformers.__version__}"
    commit = os.environ.get("HEADWATER_FIGURES_COMMIT", "unknown")
    made = [_figures.row(case, value, unit, machine, commit, most) for case, value, unit, most in rows]
    _figures.merge(Path(file).with_name("frameworks.csv"), made)
