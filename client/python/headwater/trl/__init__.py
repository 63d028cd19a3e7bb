"""Remote heads for TRL's trainers (1.16 and newer).

    from headwater.trl import HeadwaterConfig, setup_trainer

    trainer = SFTTrainer(model=model, args=args, train_dataset=dataset)
    setup_trainer(trainer, HeadwaterConfig(server="localhost:50051", head="student"))
    trainer.train()

`setup_trainer` serves SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer; `add_fused_lm_head` is what it gives their
models, with the signature of TRL's function. `RemoteDistillationTrainer` distils on-policy from teachers here or elsewhere.
"""

from headwater.torch._remote_head import HeadwaterConfig
from headwater.torch.teachers import JoinedTeacher, LocalTeacher, serve_teacher
from headwater.trl._distillation import RemoteDistillationTrainer
from headwater.trl._fused_head import add_fused_lm_head
from headwater.trl._setup import setup_trainer

__all__ = [
    "HeadwaterConfig",
    "JoinedTeacher",
    "LocalTeacher",
    "RemoteDistillationTrainer",
    "add_fused_lm_head",
    "serve_teacher",
    "setup_trainer",
]
