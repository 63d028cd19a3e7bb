"""LLaMA-Factory: a model's last layer on a server, by another launcher.

    HEADWATER_SERVER=localhost:50051 python -m headwater.llamafactory train recipe.yaml       # llamafactory-cli train recipe.yaml
    HEADWATER_SERVER=localhost:50051 torchrun --nproc-per-node 8 -m headwater.llamafactory train recipe.yaml

For the stages pt and sft with their plain loss, whole or with adapters; others are refused by name. The loss stays fused under
gradient accumulation, and where a stage switches Liger's off. Tested with LLaMA-Factory 0.9.5.
"""

from __future__ import annotations

import sys
from typing import Any

from headwater._errors import option_refused

__all__ = ["main"]

_OTHER_LOSS = "its loss is not the cross entropy of a head"
_LOGITS = "it needs logits"
_OTHER_TRAINER = "it has a training loop of its own"
# Options of the recipe that are refused where they are set, and why.
_REFUSED = {
    **dict.fromkeys(("use_dft_loss", "use_eaft_loss", "use_asft_loss"), _OTHER_LOSS),
    **dict.fromkeys(("use_mca", "use_hyper_parallel", "use_kt", "use_ray"), _OTHER_TRAINER),
    "compute_accuracy": f"{_LOGITS}: HeadwaterConfig(outputs=...) has token accuracies",
    "enable_liger_kernel": "it computes the loss with the model's own last layer",
    "use_unsloth": "it computes the loss with the model's own last layer",
    "use_badam": "it trains a part of the model at a time, and clips by itself",
    "fp8": "it quantises the last layer",
}


def main(arguments: list[str] | None = None) -> None:
    """The command: `train` and the arguments of `llamafactory-cli train`.

    Raises:
        InvalidArgumentError: an option or a stage that is not supported, before anything is loaded.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] != "train":
        raise SystemExit("usage: python -m headwater.llamafactory train RECIPE.yaml [KEY=VALUE]...")
    sys.argv[1:] = words[1:]  # which LLaMA-Factory reads

    from llamafactory.hparams import get_ray_args, get_train_args, read_args
    from llamafactory.train.tuner import run_exp

    from headwater.transformers import HeadwaterCallback

    given = read_args()
    ray, every = get_ray_args(given), get_train_args(given)
    _refuse([ray, *every])
    run_exp(given, callbacks=[HeadwaterCallback()])


def _refuse(every: list[Any]) -> None:
    options: dict[str, Any] = {}
    for group in every:
        options.update(vars(group))
    if options["stage"] not in ("pt", "sft"):
        raise option_refused("stage", f"{options['stage']} is not supported: pt and sft are")
    for option, why in _REFUSED.items():
        if options.get(option):
            raise option_refused(option, f"{options[option]!r} is not supported: {why}")
    if options.get("sequence_parallel_size", 1) > 1:  # of 360-LLaMA-Factory, whose default is 1
        raise option_refused(
            "sequence_parallel_size", f"{options['sequence_parallel_size']} is not supported: {_LOGITS} for a loss of its own"
        )
    if options["predict_with_generate"] and options["do_train"] and options["eval_strategy"] != "no":
        raise option_refused(
            "predict_with_generate", "it generates between two steps, when the last layer of this process is stale"
        )


if __name__ == "__main__":
    main()
