"""Remote heads for TRL's trainers (1.16 and newer).

    from headwater.trl import (HeadwaterConfig as HeadwaterConfig, setup_trainer as setup_trainer)

    trainer = SFTTrainer(model=model, args=args, train_dataset=dataset)
    setup_trainer(trainer, HeadwaterConfig(server="localhost:50051", head="student"))
    trainer.train()

`setup_trainer` serves SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer. It gives their models `add_fused_lm_head`,
with the signature of TRL's function. `RemoteDistillationTrainer` distils on-policy from teachers here or elsewhere.
"""

from headwater.torch._remote_head import HeadwaterConfig as HeadwaterConfig
from headwater.torch.teachers import JoinedTeacher as JoinedTeacher, LocalTeacher as LocalTeacher, serve_teacher as serve_teacher
from headwater.trl._distillation import RemoteDistillationTrainer as RemoteDistillationTrainer
from headwater.trl._fused_head import add_fused_lm_head as add_fused_lm_head
from headwater.trl._setup import setup_trainer as setup_trainer
