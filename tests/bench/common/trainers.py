"""The common parts of the benchmarks' trainers: heads in process and on a server, the optimizer, ranks, and how steps are timed."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import headwater
import headwater.torch

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
MIB = 2.0**20


def use_device(kind: str, rank: int = 0) -> str:
    """A rank's device, which becomes its current one."""
    if kind == "cpu":
        return kind
    torch.cuda.set_device(rank)
    return f"cuda:{rank}"


def make_optimizer(parameters: Iterable[torch.Tensor], device: str) -> torch.optim.Optimizer:
    """PyTorch's AdamW, fused on a GPU."""
    return torch.optim.AdamW(parameters, **ADAMW, **({} if device == "cpu" else {"fused": True}))


def server_optimizer() -> headwater.AdamW:
    """A server's AdamW with the settings of make_optimizer()."""
    return headwater.AdamW(*ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"])


# ---- heads -----------------------------------------------------------------------------------------------------------------------


def eager_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The textbook's mean loss: logits in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def loss_of_rows(way: str, dynamic: bool = False) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function (hidden [N, H], weight [V, H], targets [N]) -> mean loss; `dynamic`: for changing N."""
    if way == "eager":
        return eager_loss
    if way == "compile":
        return torch.compile(eager_loss, dynamic=dynamic)
    if way == "liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()
        return lambda hidden, weight, targets: loss(weight, hidden, targets)
    if way == "cce":
        from cut_cross_entropy import linear_cross_entropy

        return linear_cross_entropy
    if way == "trl":
        from trl.kernels import ChunkedLogProbFunction

        def chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return -ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16384, None, 1.0, ())[0].mean()

        return chunked
    raise ValueError(f"{way} has no function of rows")


class LocalHead(nn.Module):
    """A last layer beside the body, of which the mean loss is computed in one of the ways of loss_of_rows().

    With a `shift` the targets are the ids of the sequences, and row i predicts number i + shift.
    """

    def __init__(self, way: str, weight: torch.Tensor, shift: int = 0):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.of_rows = loss_of_rows(way)
        self._shift = shift

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._shift:
            hidden, targets = hidden[:, : -self._shift], targets[:, self._shift :]
        return self.of_rows(hidden.flatten(0, -2), self.weight, targets.flatten())


class RemoteHead(nn.Module):
    """A last layer on a server, which has its optimizer as well. `options` are the loss's."""

    def __init__(self, client: headwater.Client, name: str, weight: torch.Tensor, optimizer: Any = None, **options: Any):
        super().__init__()
        # Where the loss's gradient is declared, nothing is staged.
        slots = 0 if "loss_scale" in options else None
        optimizer = optimizer or server_optimizer()
        self.head = client.create_head(name, weight.cpu(), optimizer=optimizer, staging_slots=slots, if_exists="replace")
        self.loss = headwater.torch.CrossEntropyLoss(self.head, **options)

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(hidden, targets)

    def step(self, micro_batches: int = 1, rate: float = ADAMW["lr"]) -> Any:
        """Starts the server's step; its future."""
        return self.head.apply_optimizer_step_future(learning_rate=rate, expected_micro_batches=micro_batches)


def update(optimizer: torch.optim.Optimizer, heads: Sequence[nn.Module], micro_batches: int = 1, steps: bool = True) -> None:
    """The optimizer's step, while a server takes those of its heads. Without `steps` the optimizer's gradients are dropped."""
    futures = [head.step(micro_batches) for head in heads if isinstance(head, RemoteHead)]
    if steps:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for future in futures:
        future.result()


class Residual(nn.Module):
    """The block before the last layer of one of Medusa's heads: hidden states plus a layer of them, at first nothing."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.layer = nn.Linear(hidden_size, hidden_size)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.silu(self.layer(hidden))


class ManyHeads(nn.Module):
    """Several heads over one body, each a block and a last layer with a shift of its own. The loss is the sum of theirs."""

    def __init__(self, blocks: Iterable[nn.Module], layers: Iterable[nn.Module]):
        super().__init__()
        self.blocks, self.layers = nn.ModuleList(blocks), nn.ModuleList(layers)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        losses = [layer(block(hidden), ids) for block, layer in zip(self.blocks, self.layers, strict=True)]
        return torch.stack([loss.float() for loss in losses]).sum()


# ---- steps -----------------------------------------------------------------------------------------------------------------------


def timed(
    step: Callable[[], Any], device: str, *, warm_up: int = 0, least: int, most: float = math.inf, seconds: float = 0
) -> dict[str, Any]:
    """Times steps, which return their loss: `least` of them, and up to `most` until so many seconds are over.

    Steps that warm up come before, and count neither for the times nor for the peak of PyTorch's memory.
    """
    losses: list[float] = []
    times: list[float] = []
    while len(times) < least or (len(times) < most and sum(times) < seconds):
        if device != "cpu" and len(losses) == warm_up:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(float(step()))
        if device != "cpu":
            torch.cuda.synchronize()
        if len(losses) > warm_up:
            times.append(time.perf_counter() - start)
    median = statistics.median(times)
    return {
        "step_ms": 1000 * median,
        "spread": (max(times) - min(times)) / median,
        "losses": losses,
        "peak_mib": 0.0 if device == "cpu" else torch.cuda.max_memory_allocated() / MIB,
    }


def run_ranks(work: Callable[..., None], count: int, device: str, *arguments: Any) -> None:
    """Calls work(rank, *arguments) in so many processes, which are one process group. A single rank is this process."""
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        group = ("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", f"file://{folder}/ranks", count)
        if count == 1:
            _run_rank(0, work, group, arguments)
        else:
            # Nothing has touched a GPU yet, so the ranks need not import all again.
            torch.multiprocessing.start_processes(_run_rank, (work, group, arguments), nprocs=count, start_method="fork")


def _run_rank(rank: int, work: Callable[..., None], group: tuple[str, str, int], arguments: tuple[Any, ...]) -> None:
    backend, place, count = group
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=count)
    work(rank, *arguments)
    dist.destroy_process_group()
