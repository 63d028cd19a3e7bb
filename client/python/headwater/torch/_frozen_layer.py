"""The loss of a frozen last layer under frameworks whose loss is given the layer, or its weight, beside the rows."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headwater._errors import FailedPreconditionError, option_refused
from headwater._head import Head
from headwater.torch._losses import CrossEntropyLoss
from headwater.torch._micro_batches import distributed_place
from headwater.torch._remote_head import HeadwaterConfig, _barrier


def refuse_unknown(keywords: dict[str, Any], ignored: tuple[str, ...] = ()) -> None:
    """Refuses keywords of a call that are not None, but for those that say nothing of the loss."""
    unknown = [name for name, value in keywords.items() if value is not None and name not in ignored]
    if unknown:
        raise option_refused(", ".join(unknown), "not supported by the loss of a remote head")


class FrozenLayer:
    """A head with the weight of a frozen layer, which is made or found when the first loss is computed: the weight is loaded then.

    Args:
        config: which head. `head` must name it.
        reduction: "sum", or "none" for a loss of each token.
    """

    def __init__(self, config: HeadwaterConfig, *, reduction: str = "sum"):
        if not config.head:
            raise option_refused("head", "name the head")
        if config.trainable is True:
            raise option_refused(
                "trainable", "the framework's optimizer does not close the steps of a head here: only a frozen one goes"
            )
        self.config = config
        self._reduction = reduction
        self._loss_fn: CrossEntropyLoss | None = None
        self._lock = threading.Lock()
        # Of any optimizer: the framework's is made later, and may have replaced this loss by one of its own until then.
        check = weakref.WeakMethod(self._check_called)
        register_optimizer_step_pre_hook(lambda *_: method() if (method := check()) else None)

    def _check_called(self) -> None:
        if self._loss_fn is None:
            raise FailedPreconditionError(
                f"an optimizer is about to step, but no loss of {self.config.head} was computed: the framework has replaced this "
                "loss by one of its own, as Automodel does under pipeline parallelism or for a model without logits_to_keep",
                reason="MISSING_FIELD",
                metadata={"field": "loss"},
            )

    def loss(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        divisor: float | torch.Tensor | None,
        token_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """() float32: the sum of the tokens' losses, or (...) those losses; divided by `divisor` unless that is None.

        Args:
            weight: (vocab_size, hidden_size) of the layer, a DTensor too.
            bias: (vocab_size,) or None.
            hidden: (..., hidden_size), replicated over tensor-parallel ranks.
            targets: (...) ids or -100, aligned with `hidden`.
            divisor: number of tokens of the step, over all ranks.
            token_weights: (...) or None.
        """
        with self._lock:
            if self._loss_fn is None:
                self._loss_fn = self._make(weight, bias)
        loss = self._loss_fn(_plain(hidden), _plain(targets), token_weights=token_weights)
        return loss if divisor is None else loss / divisor

    def _make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> CrossEntropyLoss:
        if weight.requires_grad:
            raise option_refused(
                "lm_head", "its weight is trained here, and the head's would stay behind: freeze it (requires_grad_(False))"
            )
        config = self.config
        tensors = [None if tensor is None else _whole(tensor.detach()) for tensor in (weight, bias)]  # on all ranks: they gather
        client = config.connect()

        def head() -> Head:
            return client.create_head(
                config.head,
                *tensors,
                trainable=False,
                if_exists=config.if_exists,
                dtype=config.dtype,
                timeout_s=config.timeout_s,
                **config.logit_options,
            )

        made = head() if distributed_place()[0] == 0 else None
        _barrier()
        made = made or client.head(config.head)
        return CrossEntropyLoss(
            made,
            reduction=self._reduction,
            label_smoothing=config.label_smoothing,
            z_loss=config.z_loss,
            timeout_s=config.timeout_s,
        )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor as this rank has it, of rows that all tensor-parallel ranks have alike."""
    if not hasattr(tensor, "device_mesh"):
        return tensor
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise option_refused("hidden", f"its rows are spread over ranks ({tensor.placements}): gather them first")
    return tensor.to_local()
