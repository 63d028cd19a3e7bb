"""A Trainer or its server is killed in mid-step, and the run continues with the curve of an undisturbed run."""

import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from tiny_trainer import curve_of, make_trainer, tiny_model, train

import headwater
from headwater.transformers import HeadwaterConfig

LOSS_TOLERANCE = 1e-5
SAVES = {"save_strategy": "steps", "save_steps": 4}


@pytest.fixture(scope="module")
def stock():
    return {tied: train(tiny_model(tied))[0] for tied in (False, True)}


def test_killed_trainer_resumes(server, stock, tmp_path):
    script, kinds = Path(__file__).with_name("killed_trainer.py"), ("served", "tied")
    done = subprocess.run(
        [sys.executable, script, server.address, tmp_path, "6", *kinds], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr

    for kind in kinds:
        config = HeadwaterConfig(server=server.address, head=f"killed-{kind}")
        curve, _ = train(tiny_model(kind == "tied"), config, resume=True, folder=tmp_path / kind, **SAVES)
        assert curve.gap(stock[kind == "tied"]) <= LOSS_TOLERANCE


class KillServer(transformers.TrainerCallback):
    def __init__(self, server):
        self.server = server

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 6:
            self.server.kill()
            self.server.start()


@pytest.mark.parametrize("kind", ["served", "tied"])
def test_client_that_replays_follows_a_killed_server(own_server, stock, tmp_path, kind):
    config = HeadwaterConfig(server=own_server.address, head="followed", replay=True, timeout_s=60.0)
    killer = KillServer(own_server)
    curve, _ = train(tiny_model(kind == "tied"), config, folder=tmp_path, callbacks=[killer], **SAVES)
    assert curve.gap(stock[kind == "tied"]) <= LOSS_TOLERANCE


@pytest.mark.parametrize("kind", ["served", "tied"])
def test_run_resumes_after_its_server_was_killed(own_server, stock, tmp_path, kind):
    config = HeadwaterConfig(server=own_server.address, head="resumed", replay=False, timeout_s=20.0)
    trainer = make_trainer(tmp_path, tiny_model(kind == "tied"), config, callbacks=[KillServer(own_server)], **SAVES)
    with pytest.raises(headwater.HeadwaterError):
        trainer.train()
    again = make_trainer(tmp_path, tiny_model(kind == "tied"), config, **SAVES)
    again.train(resume_from_checkpoint=True)
    assert curve_of(again).gap(stock[kind == "tied"]) <= LOSS_TOLERANCE
