"""One of two ranks that train the tiny model: `rank_trainer.py ADDRESS FOLDER SHARDING KIND...`.

Over gloo on CPUs, over NCCL on a GPU each (`tiny_trainer.ON_GPU`). SHARDING is "ddp", "fsdp2", or "zero1" to "zero3" for DeepSpeed,
of which several may stand with "+" between them. Rank 0 writes SHARDING-KIND.json: the curve, or the error of a Trainer that is
refused.
"""

import json
import os
import sys
from pathlib import Path

import peft
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from tiny_trainer import ON_GPU, arguments, curve_of, make_trainer, tiny_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

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
    """The model of a kind: under "tied" its last layer has the embedding's weight, under "lora" its body is frozen."""
    model = tiny_model(tied=kind == "tied")
    if kind != "lora":
        return model
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def zero_config(stage: int, kind: str) -> dict:
    """DeepSpeed's configuration. Under "fp16" the first scale is one that overflows."""
    zero = {"stage": stage}
    if kind != "ungathered":
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    # Its own Adam for CPUs is compiled where it runs; torch's does the same.
    config = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
    config |= {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": "auto"}
    if kind.startswith("fp16"):
        config["fp16"] = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    return config


def result(address: str, folder: Path, sharding: str, kind: str) -> dict:
    head = f"{sharding}-{'served' if kind == 'resumed' else kind}"
    config = HeadwaterConfig(server=address, head=head, optimizer="torch" if kind == "torch" else "auto")
    options = {
        "per_device_train_batch_size": 1,
        "ddp_backend": "nccl" if ON_GPU else "gloo",
        "save_strategy": "steps",
        "save_steps": 6,
    }
    if kind.startswith("bf16"):
        options["bf16"] = True
    if sharding == "fsdp2":
        options |= {"fsdp": "full_shard", "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    if sharding.startswith("zero"):
        options |= {"deepspeed": zero_config(int(sharding[-1]), kind), "fp16": kind.startswith("fp16")}
    model = model_of(kind)
    if kind == "partitioned":
        if os.environ["RANK"] == "0":
            model.save_pretrained(folder / "start")
        kept = arguments(folder, **options)  # while it lives, models are loaded in parts
        torch.distributed.barrier()
        model = AutoModelForCausalLM.from_pretrained(folder / "start")
        assert kept.deepspeed and model.lm_head.weight.numel() == 0
    try:
        trainer = make_trainer(folder, model, None if kind.endswith("-stock") else config, **options)
    except headwater.InvalidArgumentError as error:
        return {"refused": str(error)}
    # "resumed" continues with the head that was served, "continued" with the work that one rank has begun.
    begun = {"resumed": folder.with_name(head), "continued": folder}.get(kind)
    trainer.train(resume_from_checkpoint=begun and str(begun / "checkpoint-6"))
    backend = torch.distributed.get_backend(torch.distributed.group.WORLD)
    assert ("nccl" in backend) == (trainer.model.device.type == "cuda") == ON_GPU
    assert any(isinstance(parameter, DTensor) for parameter in trainer.model_wrapped.parameters()) == (sharding == "fsdp2")
    assert (trainer.deepspeed is not None) == sharding.startswith("zero")
    curve = curve_of(trainer)
    trainer.save_model(str(folder / "saved"))
    skipped = trainer.deepspeed.skipped_steps if trainer.deepspeed is not None else 0
    return {"curve": vars(curve), "skipped": skipped}


if __name__ == "__main__":
    address, folder, shardings, *kinds = sys.argv[1:]
    torch.set_num_threads(1)
    if shardings == "fsdp2" and not ON_GPU:
        shard_on_cpus()
    if shardings.startswith("zero"):
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled where it runs, for a minute
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # slow on CPUs, but torch's products are there
    for sharding in shardings.split("+"):
        for kind in kinds:
            name = f"{sharding}-{kind}"
            found = result(address, Path(folder, name), sharding, kind)
            if torch.distributed.get_rank() == 0:
                Path(folder, f"{name}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
