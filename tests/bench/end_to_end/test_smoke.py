"""The end-to-end benchmark runs: tiny, on the CPU, every way that needs no GPU."""

import json

import pytest


def test_trains_with_the_head_in_process_and_remote(smoke_run, tmp_path):
    pytest.importorskip("torch")
    values = smoke_run("end-to-end")
    entries = json.loads((tmp_path / "end-to-end.json").read_text(encoding="utf-8"))["results"]
    results = {name: entry["result"] for name, entry in entries.items()}
    assert set(results) == {"in_process_eager", "remote_grpc", "remote_grpc_overlapped", "remote_shared_memory"}
    # The same weights and text everywhere: the losses agree, at the first step and after a few updates.
    losses = [result["losses"][0] for result in results.values()]
    assert max(losses) - min(losses) < 0.01 * min(losses)
    assert all(result["tokens_per_second"] > 0 and len(result["losses"]) >= 4 + 4 for result in results.values())
    assert values["cpu_end_to_end_remote_grpc_tokens_per_second"] > 0


def test_trains_on_one_gpu_with_a_resolution(smoke_run, tmp_path):
    pytest.importorskip("torch")
    smoke_run("one-gpu", "--one-gpu")
    entries = json.loads((tmp_path / "one-gpu.json").read_text(encoding="utf-8"))["results"]
    exact, coarse = (entries[f"remote_grpc{way}"]["result"]["losses"][:5] for way in ("", "_declared_tau_2_8"))
    assert coarse[0] == exact[0]  # a resolution rounds gradients alone
    assert coarse[1:] != exact[1:] and coarse == pytest.approx(exact, rel=0.01)
