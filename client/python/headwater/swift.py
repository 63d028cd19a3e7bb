"""ms-swift: a model's last layer on a server, by two options of `swift sft` and `swift pt`.

    echo 'import headwater.swift' > plugin.py
    HEADWATER_SERVER=localhost:50051 swift sft ... --external_plugins plugin.py --callbacks headwater

For pretraining and plain supervised fine-tuning, whole or with adapters; other stages are refused by name. Tested with ms-swift
4.6.
"""

from __future__ import annotations

from typing import Any

from headwater._errors import option_refused

if __name__ != "headwater.swift":
    # swift puts the folder of the file among those that modules are looked for in, where this package's hide PyTorch and others.
    raise ImportError("--external_plugins takes a file of your own, in which `import headwater.swift` stands")

import swift.callbacks

from headwater.transformers import HeadwaterCallback, HeadwaterConfig

__all__ = ["SwiftCallback"]

_OTHER_LOSS = "its loss is not the cross entropy of a head, or needs logits"
# Options of the command line that are refused where they are set, and why.
_REFUSED = {
    "enable_dft_loss": _OTHER_LOSS,
    "enable_channel_loss": _OTHER_LOSS,
    "loss_type": _OTHER_LOSS,
    "use_liger_kernel": "it computes the loss with the model's own last layer",
    "predict_with_generate": "it generates between two steps, when the last layer of this process is stale",
}


class SwiftCallback(HeadwaterCallback):
    """`--callbacks headwater`: `setup_trainer` for swift's Trainer, which makes its callbacks before it is one."""

    def __init__(self, args: Any, trainer: Any):
        super().__init__(HeadwaterConfig())
        self._swifts = trainer
        kind = type(trainer)
        if (kind.__module__, kind.__name__) != ("swift.trainers.seq2seq_trainer", "Seq2SeqTrainer"):
            name = getattr(args, "rlhf_type", None) or getattr(args, "task_type", None) or kind.__name__
            raise option_refused("rlhf_type, task_type", f"{name} is not supported: `swift pt` and `swift sft` with causal_lm are")
        for option, why in _REFUSED.items():
            if getattr(args, option, None):
                raise option_refused(option, f"{getattr(args, option)!r} is not supported: {why}")
        if trainer.template.sequence_parallel_size > 1:
            raise option_refused("sequence_parallel_size", "rows of one sequence on several ranks are not supported")
        binary = trainer.template.is_binary_loss_scale
        if not (trainer.template.loss_scale.is_binary_loss_scale if binary is None else binary):
            raise option_refused("loss_scale", f"it weights tokens, and {_OTHER_LOSS}")

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.install(self._swifts)


swift.callbacks.callbacks_map["headwater"] = SwiftCallback
