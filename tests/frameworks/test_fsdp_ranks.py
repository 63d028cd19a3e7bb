"""Two ranks under FSDP2 (gloo, CPU) with a head that the server trains follow the curve of stock transformers on one rank."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_trainer import tiny_model, train


def test_fsdp2_follows_the_curve_of_one_rank(server, tmp_path):
    stock, model = train()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    program = [sys.executable, Path(__file__).with_name("fsdp_ranks.py"), server.address, tmp_path]
    ranks = []
    for rank in range(2):
        environment = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(text[-4000:] for text in said)

    ours = json.loads((tmp_path / "curve.json").read_text())
    assert ours["losses"] == pytest.approx(stock.losses, abs=1e-5)
    assert ours["norms"] == pytest.approx(stock.norms, abs=1e-4)
    assert ours["evaluation"] == pytest.approx(stock.evaluation, abs=1e-5)
    # What was saved has the trained weight.
    head = torch.tensor(ours["head"])
    assert torch.allclose(head, model.lm_head.weight, rtol=0, atol=2e-4)
    assert not torch.allclose(head, tiny_model().lm_head.weight, rtol=0, atol=1e-2)
