"""Axolotl: a model's last layer on a server, by a line in the YAML file.

    plugins: [headwater.axolotl.HeadwaterPlugin]
    headwater:                          # not needed where the environment has HEADWATER_SERVER
      server: localhost:50051           # the fields of headwater.transformers.HeadwaterConfig

For pretraining and plain supervised fine-tuning, whole or with adapters; other stages are refused by name. Tested with Axolotl
0.19.
"""

from __future__ import annotations

from typing import Any

import pydantic
from axolotl.integrations.base import BasePlugin

from headwater._errors import option_refused
from headwater.transformers import HeadwaterConfig, setup_trainer

__all__ = ["HeadwaterArgs", "HeadwaterPlugin"]

_OTHER_LOSS = "its loss is not the cross entropy of a head, or needs logits"
_OTHER_HEAD = "it computes the loss with the model's own last layer"
_GENERATES = "it generates between two steps, when the last layer of this process is stale"
# Options of the YAML file that are refused where they are set, and why.
_REFUSED = {
    **dict.fromkeys(
        (
            "rl",
            "reward_model",
            "process_reward_model",
            "kd_trainer",
            "orpo_alpha",
            "use_eaft",
            "diffusion",
            "num_labels",
        ),
        _OTHER_LOSS,
    ),
    **dict.fromkeys(
        (
            "chunked_cross_entropy",
            "cut_cross_entropy",
            "liger_cross_entropy",
            "liger_fused_linear_cross_entropy",
            "liger_use_token_scaling",
            "unsloth_cross_entropy_loss",
        ),
        _OTHER_HEAD,
    ),
    **dict.fromkeys(("do_causal_lm_eval", "generate_samples"), _GENERATES),
    **dict.fromkeys(("relora", "lisa_step_interval"), "it restarts the optimizer between two steps"),
    "qat": "it quantises the last layer",
}


class HeadwaterArgs(pydantic.BaseModel):
    """The plugin's keys in the YAML file."""

    headwater: dict[str, Any] | None = None


class HeadwaterPlugin(BasePlugin):  # type: ignore[misc]
    """`setup_trainer` for the Trainer that Axolotl makes."""

    def get_input_args(self) -> str:
        return "headwater.axolotl.HeadwaterArgs"

    def pre_model_load(self, cfg: Any) -> None:
        """Refuses options that the head does not support, before anything is loaded."""
        for option, why in _REFUSED.items():
            if cfg[option]:
                raise option_refused(option, f"{cfg[option]!r} is not supported: {why}")
        if (cfg.context_parallel_size or 1) > 1:
            raise option_refused("context_parallel_size", "rows of one sequence on several ranks are not supported")
        config_of(cfg)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        setup_trainer(trainer, config_of(cfg))


def config_of(cfg: Any) -> HeadwaterConfig:
    """The YAML file's entry `headwater`."""
    entry = dict(cfg.headwater or {})
    try:
        return HeadwaterConfig(**entry)
    except TypeError as error:
        raise option_refused("headwater", str(error)) from None
