"""Hugging Face transformers: a model's last layer on a server, in its own training loop or under the Trainer.

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    headwater.transformers.setup_trainer(trainer, HeadwaterConfig(server="localhost:50051"))
    trainer.train()

    headwater.transformers.attach_remote_head(model, HeadwaterConfig(server="localhost:50051"))
    loss = model(input_ids=ids, labels=labels).loss          # no logits; a loop of one's own closes steps

Models are patched where they are, never copied, and by their structure, not by a list of names; `detach_remote_head` undoes it.
Tested with transformers 4.56 and 5.24.
"""

from headwater.torch._remote_head import HeadwaterConfig as HeadwaterConfig, RemoteHead as RemoteHead
from headwater.transformers._auto import AutoHeadwaterForCausalLM as AutoHeadwaterForCausalLM
from headwater.transformers._patch import (
    HeadwaterCausalLMOutput as HeadwaterCausalLMOutput,
    attach_remote_head as attach_remote_head,
    detach_remote_head as detach_remote_head,
    local_lm_head as local_lm_head,
)
from headwater.transformers._trainer import HeadwaterCallback as HeadwaterCallback, setup_trainer as setup_trainer
