"""The study's figures, read from the rows of study.csv: a point's measures, and how it ended."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import figures
from points import Point

ERROR_BOUND = 0.2  # of grad_hidden: Headwater's error / a peer's
QUANTITIES = ("grad_hidden", "grad_weight", "loss")
# The ways of tests/bench/peers whose errors on the real model's rows are shown, by the study's name.
ERROR_WAYS = {
    "headwater": "headwater_fp32",
    "headwater_dithered": "headwater_tau_2_12",
    "eager": "torch_eager_anew",
    "compile": "torch_compile_anew",
    "liger": "liger_anew",
    "cce": "cce_anew",
}
PEER_ERROR = re.compile(
    r"(?P<prefix>\w+?_)peers_smollm2_n\d+_h\d+_v\d+_(?P<way>\w+?)_(?P<quantity>loss|grad_hidden|grad_weight)_error"
)


def study_rows(rows):
    """The study's rows of a file; the peers' errors on the real model get the study's names, and ratios with their bound."""
    kept, errors = [], {}
    names = {peer: way for way, peer in ERROR_WAYS.items()}
    for row in rows:
        match = PEER_ERROR.fullmatch(row["case"])
        if match and match["way"] in names:
            case = f"{match['prefix']}study_smollm2_{names[match['way']]}_{match['quantity']}_error"
            kept.append(row | {"case": case, "sense": "", "required": ""})
            errors[match["prefix"], names[match["way"]], match["quantity"]] = row
        elif "study_" in row["case"]:
            kept.append(row)
    for (prefix, way, quantity), peer in errors.items():
        ours = errors.get((prefix, "headwater", quantity))
        if ours and way in ("eager", "liger") and quantity == "grad_hidden":
            case = f"{prefix}study_smollm2_headwater_grad_hidden_of_{way}"
            ratio = float(ours["value"]) / float(peer["value"])
            kept.append(figures.row(case, ratio, "x the peer's error", ours["machine"], ours["commit"], ERROR_BOUND))
    return kept


class Study:
    """The rows of one kind of device: those whose cases begin with `prefix`."""

    def __init__(self, rows, prefix: str):
        self.rows = [row for row in rows if row["case"].startswith(f"{prefix}study_")]
        self.by_case = {row["case"][len(prefix) + len("study_") :]: row for row in self.rows}

    def row(self, case: str):
        """A row by its case without the prefix, or None."""
        return self.by_case.get(case)

    def value(self, case: str) -> float | None:
        """A figure, or None."""
        row = self.row(case)
        return None if row is None else float(row["value"])

    def ran_out(self, point: Point) -> bool:
        """Whether the point ran out of memory."""
        return self.value(f"{point.name}_out_of_memory") == 1

    def figure(self, point: Point, measure: str):
        """The row of a point's measure; None where it ran out of memory or has none."""
        return None if self.ran_out(point) else self.row(f"{point.name}_{measure}")

    def is_measured(self, point: Point) -> bool:
        """Whether the point ran, to its end or out of memory."""
        return self.row(f"{point.name}_out_of_memory") is not None
