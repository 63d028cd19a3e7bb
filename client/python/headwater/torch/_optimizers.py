"""The optimizer of a head that corresponds to one of PyTorch's."""

from __future__ import annotations

import torch

from headwater._errors import NotFoundError, refused
from headwater._loss._micro_batches import distributed_place
from headwater._types import SGD, AdamW
from headwater.torch._remote_head import HeadwaterConfig, RemoteHead, _barrier, _name_of


def matching_optimizer(optimizer: torch.optim.Optimizer, weight: torch.Tensor, group: int | None = None) -> AdamW | SGD | None:
    """`optimizer`'s settings for a weight, as the server has them; None for an optimizer that no head has.

    Args:
        weight: the layer's; its group of the optimizer's is taken, or the first one if it is in none.
        group: index of the group to take instead.
    """
    groups = optimizer.param_groups
    owners = [index for index, entry in enumerate(groups) if any(parameter is weight for parameter in entry["params"])]
    settings = groups[group if group is not None else owners[0] if owners else 0]
    kind = type(optimizer)
    if kind is torch.optim.AdamW and not settings.get("amsgrad") and not settings.get("maximize"):
        beta1, beta2 = settings["betas"]
        return AdamW(beta1=beta1, beta2=beta2, epsilon=settings["eps"], weight_decay=settings["weight_decay"])
    if kind is torch.optim.SGD and not settings.get("maximize"):
        return SGD(**{name: settings[name] for name in ("momentum", "dampening", "nesterov", "weight_decay")})
    return None


def optimizer_like(optimizer: torch.optim.Optimizer, weight: torch.Tensor, group: int | None = None) -> AdamW | SGD:
    """`matching_optimizer`.

    Raises:
        InvalidArgumentError: an optimizer that no head has.
    """
    found = matching_optimizer(optimizer, weight, group)
    if found is None:
        raise refused(
            f"a head has AdamW or SGD, and the optimizer is {type(optimizer).__name__}: pass HeadwaterConfig(optimizer="
            'headwater.AdamW(...)), or optimizer="torch", with which it updates the weight of the head, too',
            "optimizer",
        )
    return found


def known_optimizer(model: torch.nn.Module, config: HeadwaterConfig) -> AdamW | SGD | None:
    """The optimizer of the head that a model would be attached to, if it is there; the trainer's may not be known yet."""
    try:
        return config.connect().head(config.head or _name_of(model)).spec.optimizer
    except NotFoundError:
        return None


def follow_optimizer(remote: RemoteHead, trainers: torch.optim.Optimizer) -> None:
    """Trains a head whose optimizer is "auto" as the trainer's optimizer trains; a head that is not trained yet is created again.

    Raises:
        InvalidArgumentError: an optimizer that no head has; the head has been trained by another one.
    """
    if not remote.served or remote.config.optimizer != "auto":
        return
    wanted, spec = optimizer_like(trainers, remote.layer.weight, remote.config.param_group), remote.head.spec
    if spec.optimizer == wanted:
        return
    if remote.head.step != spec.initial_step:
        raise refused(
            f"{remote.head.name} is at step {remote.head.step} and was trained by {spec.optimizer}, and the trainer's optimizer is "
            f"{wanted}: give that the same settings, or pass HeadwaterConfig(optimizer={spec.optimizer})",
            "optimizer",
        )
    remote.pull_weight()
    _barrier()
    if distributed_place()[0] == 0:
        remote.head.delete(force=True)  # one of another optimizer cannot be replaced
    remote._options["optimizer"] = wanted
    remote.recreate()
