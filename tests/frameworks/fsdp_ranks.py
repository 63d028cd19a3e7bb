"""Program of test_fsdp_ranks.py: fsdp_ranks.py ADDRESS FOLDER: trains the tiny model under FSDP2; rank 0 writes curve.json."""

import json
import sys
from pathlib import Path

import torch
from tiny_trainer import curve_of, make_trainer
from transformers import LlamaForCausalLM

from headwater.transformers import HeadwaterConfig

address, folder = sys.argv[1:]
torch.set_num_threads(1)
trainer = make_trainer(
    folder,
    config=HeadwaterConfig(server=address, head="fsdp2"),
    per_device_train_batch_size=1,
    ddp_backend="gloo",
    save_strategy="steps",
    save_steps=6,
    fsdp="full_shard",
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)
trainer.train()
curve = curve_of(trainer)
trainer.save_model(Path(folder) / "saved")
if trainer.is_world_process_zero():
    head = LlamaForCausalLM.from_pretrained(Path(folder) / "saved").lm_head.weight
    (Path(folder) / "curve.json").write_text(json.dumps({**vars(curve), "head": head.tolist()}))
trainer.accelerator.end_training()
