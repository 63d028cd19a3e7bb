"""One of two ranks that train the tiny model over gloo: `rank_trainer.py ADDRESS FOLDER SHARDING KIND...`.

SHARDING is "ddp" or "fsdp2". Rank 0 writes SHARDING-KIND.json: the curve, or the error of a Trainer that is refused.
"""

import json
import sys
from pathlib import Path

import peft
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from tiny_trainer import curve_of, make_trainer, tiny_model
from torch.distributed.tensor import DTensor

import headwater
from headwater.transformers import HeadwaterConfig


def shard_on_cpus():
    """Lets accelerate shard as it does on GPUs; on CPUs it ignores `fsdp`, although FSDP2 itself runs there."""
    original = AcceleratorState.__init__

    def __init__(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
        if "fsdp_plugin" in vars(self):
            self.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = __init__


def model_of(kind: str):
    """The model of "served", "resumed", "tied", "torch" (whose weight the Trainer's optimizer owns) or "lora"."""
    model = tiny_model(tied=kind == "tied")
    if kind != "lora":
        return model
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def result(address: str, folder: Path, sharding: str, kind: str) -> dict:
    config = HeadwaterConfig(server=address, head=f"{sharding}-{kind}", optimizer="torch" if kind == "torch" else "auto")
    options = {"per_device_train_batch_size": 1, "ddp_backend": "gloo", "save_strategy": "steps", "save_steps": 6}
    if sharding == "fsdp2":
        options |= {"fsdp": "full_shard", "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    try:
        trainer = make_trainer(folder, model_of(kind), config, **options)
    except headwater.InvalidArgumentError as error:
        return {"refused": str(error)}
    # What one rank has begun is continued.
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-6") if kind == "resumed" else None)
    assert any(isinstance(parameter, DTensor) for parameter in trainer.model_wrapped.parameters()) == (sharding == "fsdp2")
    curve = curve_of(trainer)
    trainer.save_model(str(folder / "saved"))
    return vars(curve)


if __name__ == "__main__":
    address, folder, sharding, *kinds = sys.argv[1:]
    torch.set_num_threads(1)
    if sharding == "fsdp2":
        shard_on_cpus()
    for kind in kinds:
        name = f"{sharding}-{kind}"
        found = result(address, Path(folder, name), sharding, kind)
        if torch.distributed.get_rank() == 0:
            Path(folder, f"{name}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
