"""Trains the tiny model over the head of a server, and kills itself at a step: `killed_trainer.py ADDRESS FOLDER KIND STEP`."""

import os
import signal
import sys

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
    address, folder, kind, step = sys.argv[1:]
    torch.set_num_threads(1)
    config = HeadwaterConfig(server=address, head=f"killed-{kind}")
    model = tiny_model(tied=kind == "tied")
    make_trainer(folder, model, config, callbacks=[Kill(int(step))], save_strategy="steps", save_steps=4).train()
