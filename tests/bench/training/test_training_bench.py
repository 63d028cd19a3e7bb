"""The training benchmark runs, tiny, on the CPU: each way has figures and lowers the held-out loss."""

import json

import pytest


def test_every_way_trains(smoke_run, tmp_path):
    pytest.importorskip("torch")
    values = smoke_run("training")
    results = {name: entry["result"] for name, entry in json.loads((tmp_path / "training.json").read_text())["results"].items()}
    ways = ("exact", "tau_12", "tau_10", "tau_8", "tau_6", "torch")
    assert set(results) == {f"tiny/{optimizer}/{way}/{seed}" for optimizer in ("adamw", "sgd") for way in ways for seed in (0, 1)}
    for optimizer in ("adamw", "sgd"):
        for way in ways:
            case = f"cpu_training_tiny_{optimizer}_{way}_"
            assert values[case + "held_out_all"] > 0
            if way != "exact":
                assert values[case + "held_out_gap_of_seeds"] >= 0
                assert 0.2 < values[case + "rare_rows_sums"] < 5
        # The head in process and the exact head on the server train alike.
        assert abs(values[f"cpu_training_tiny_{optimizer}_torch_rare_rows_sums"] - 1) < 0.01
        assert abs(values[f"cpu_training_tiny_{optimizer}_torch_held_out_all_gap"]) < 1e-3
    for result in results.values():
        losses = [evaluation["all"] for evaluation in result["held_out"].values()]
        assert losses[-1] < losses[0]
