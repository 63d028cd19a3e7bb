"""Trains the tiny model over the head of a server, and is killed at a step: `killed_trainer.py ADDRESS FOLDER STEP KIND...`.

Each KIND is trained in FOLDER/KIND by a fork, because imports take longer than the training.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import transformers
from tiny_trainer import make_trainer, tiny_model

from headwater.transformers import HeadwaterConfig


class Kill(transformers.TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:  # between two micro-batches
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    address, folder, step, *kinds = sys.argv[1:]
    torch.set_num_threads(1)
    for kind in kinds:
        if os.fork() == 0:
            config = HeadwaterConfig(server=address, head=f"killed-{kind}")
            model = tiny_model(tied=kind == "tied")
            options = {"callbacks": [Kill(int(step))], "save_strategy": "steps", "save_steps": 4}
            make_trainer(Path(folder, kind), model, config, **options).train()
            sys.exit("it was not killed")
        assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
