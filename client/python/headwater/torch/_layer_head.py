"""The loss of a model's last layer under frameworks whose loss is given the layer, or its weight, beside the rows."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headwater._errors import FailedPreconditionError, option_refused
from headwater._head import Head
from headwater._loss._micro_batches import distributed_place
from headwater.torch._joint_step import only_makes_state
from headwater.torch._losses import CrossEntropyLoss
from headwater.torch._remote_head import HeadwaterConfig, _barrier
from headwater.torch._trained_layer import TrainedLayer, whole

# Makes the trained head of a layer's weight and bias.
Trainer = Callable[[torch.Tensor, torch.Tensor | None, HeadwaterConfig], TrainedLayer]


def refuse_unknown(keywords: dict[str, Any], ignored: tuple[str, ...] = ()) -> None:
    """Refuses keywords of a call that are not None, except those that do not concern the loss."""
    unknown = [name for name, value in keywords.items() if value is not None and name not in ignored]
    if unknown:
        raise option_refused(", ".join(unknown), "not supported by the loss of a remote head")


class LayerHead:
    """The loss of a head that has the weight of a layer. The head is made or found when the first loss is computed.

    The framework has loaded its weights, and made its optimizer, by then.

    Args:
        config: which head. `head` must name it. `trainable` "auto": whether the layer's weight requires a gradient.
        train: makes a trained head as the framework needs it.
        reduction: "sum", or "none" for a loss of each token.

    Attributes:
        trained: the trained layer of the head; None before the first loss, and for a frozen one.
    """

    def __init__(self, config: HeadwaterConfig, train: Trainer, *, reduction: str = "sum"):
        if not config.head:
            raise option_refused("head", "name the head")
        self.config = config
        self.trained: TrainedLayer | None = None
        self._train = train
        self._reduction = reduction
        self._loss_fn: CrossEntropyLoss | None = None
        self._lock = threading.Lock()
        # The hook is for any optimizer: the framework's is made later, and may have replaced this loss by its own until then.
        check = weakref.WeakMethod(self._check_called)
        self._guard = register_optimizer_step_pre_hook(lambda optimizer, *_: method(optimizer) if (method := check()) else None)

    def _check_called(self, optimizer: torch.optim.Optimizer) -> None:
        if self._loss_fn is None and not only_makes_state(optimizer):
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
        if self.trained is not None and torch.is_grad_enabled():
            self.trained.remote.count_loss()
        loss = self._loss_fn(_plain(hidden), _plain(targets), token_weights=token_weights)
        return loss if divisor is None else loss / divisor

    def detach(self) -> None:
        """Gives the layer the trained weight, and the framework its functions back. The next loss attaches the head again."""
        with self._lock:
            self._guard.remove()
            if self.trained is not None:
                self.trained.detach()
            self.trained = self._loss_fn = None

    def _make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> CrossEntropyLoss:
        config = self.config
        if config.trainable is True or (config.trainable == "auto" and weight.requires_grad):
            self.trained = self._train(weight, bias, config)
            head: Head = self.trained.remote.head
        else:
            head = self._frozen(weight, bias)
        return CrossEntropyLoss(head, reduction=self._reduction, **config.loss_options)

    def _frozen(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Head:
        if weight.requires_grad:
            raise option_refused(
                "trainable", "the layer's weight is trained here, and a frozen head would stay behind: freeze it, or leave this out"
            )
        config = self.config
        tensors = [None if tensor is None else whole(tensor.detach()) for tensor in (weight, bias)]  # on all ranks: they gather
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
        return made or client.head(config.head)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor as this rank has it, of rows that all tensor-parallel ranks have alike."""
    if not hasattr(tensor, "device_mesh"):
        return tensor
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise option_refused("hidden", f"its rows are spread over ranks ({tensor.placements}): gather them first")
    return tensor.to_local()
