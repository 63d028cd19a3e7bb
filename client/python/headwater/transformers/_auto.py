"""`AutoHeadwaterForCausalLM`: `AutoModelForCausalLM` with its last layer on a server."""

from __future__ import annotations

from typing import Any

import transformers

from headwater.torch._remote_head import HeadwaterConfig
from headwater.transformers._patch import attach_remote_head


class AutoHeadwaterForCausalLM:
    """Loads models as `transformers.AutoModelForCausalLM` does, and attaches their last layers."""

    @classmethod
    def from_pretrained(
        cls, name_or_path: Any, *args: Any, headwater: HeadwaterConfig | None = None, **options: Any
    ) -> transformers.PreTrainedModel:
        """The model, patched as by `attach_remote_head`.

        Args:
            name_or_path, args, options: of `AutoModelForCausalLM.from_pretrained`.
            headwater: which head. None: the server of the environment, and a head of the model's name.
        """
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(name_or_path, *args, **options)
        attach_remote_head(model, headwater)
        return model
