"""Hugging Face transformers: a model's last layer on a server, in its own training loop or under the Trainer.

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    headwater.transformers.setup_trainer(trainer, HeadwaterConfig(server="localhost:50051"))
    trainer.train()

    headwater.transformers.attach_remote_head(model, HeadwaterConfig(server="localhost:50051"))
    loss = model(input_ids=ids, labels=labels).loss          # no logits; a loop of one's own closes steps

Models are patched where they are, never copied, and by their structure, not by a list of names; `detach_remote_head` undoes it.
Tested with transformers 4.56 and 5.24.
"""

from headwater.torch._remote_head import HeadwaterConfig, RemoteHead
from headwater.transformers._auto import AutoHeadwaterForCausalLM
from headwater.transformers._patch import HeadwaterCausalLMOutput, attach_remote_head, detach_remote_head, local_lm_head
from headwater.transformers._trainer import HeadwaterCallback, setup_trainer

__all__ = [
    "AutoHeadwaterForCausalLM",
    "HeadwaterCallback",
    "HeadwaterCausalLMOutput",
    "HeadwaterConfig",
    "RemoteHead",
    "attach_remote_head",
    "detach_remote_head",
    "local_lm_head",
    "setup_trainer",
]
