"""One of two ranks that train by TRL over gloo: `rank_trl.py ADDRESS FOLDER MODEL KIND...`.

KIND is "sft" or "dpo", MODEL the folder of the model. Rank 0 writes KIND.json, the losses, and KIND, the trained model.
"""

import json
import sys
from pathlib import Path

import torch
from test_trl_trainers import losses, made

from headwater.trl import HeadwaterConfig, setup_trainer

if __name__ == "__main__":
    address, folder, model, *kinds = sys.argv[1:]
    torch.set_num_threads(1)
    for kind in kinds:
        trainer = made(kind, model, Path(folder, "run"), per_device_train_batch_size=1, ddp_backend="gloo")
        setup_trainer(trainer, HeadwaterConfig(server=address, head=f"ranks-{kind}"))
        trainer.train()
        assert trainer.accelerator.num_processes == 2
        trainer.save_model(str(Path(folder, kind)))
        if trainer.is_world_process_zero():
            Path(folder, f"{kind}.json").write_text(json.dumps(losses(trainer)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
