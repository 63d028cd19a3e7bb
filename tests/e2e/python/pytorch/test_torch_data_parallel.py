"""Two data-parallel ranks against one process: the rows of the table of docs/concepts.md, equal ones once.

FSDP and DeepSpeed average gradients as DDP does, in two divisions.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch_model import check_gradients, relative
from torch_ranks import Ranks

import headwater
import headwater.torch

WORLD_SIZE = 2
# Accumulation: each rank runs two micro-batches, of unequal sizes, so that a mean of means is not the mean.
MICRO_BATCHES = 2
SPLITS = ((0, 2), (2, 7), (7, 9), (9, 16))  # rank 0: the first two, rank 1: the others
RANKS = ((0, 7), (7, 16))
ALL = ((0, 16),)
LOSS_SCALE = 1024.0


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    divisor: float | str  # of a loss: a number of tokens, or of the "micro-batch", or of the "rank"
    upstream: float  # what the framework multiplies a loss by before backward: it reaches us as the upstream gradient
    grad_hidden_scale: float
    gradient_factor: float
    means: tuple = ALL  # what the framework computes: the mean of the means over these tokens


ROWS = {
    "DDP, tokens of all ranks": Row(16, 1, WORLD_SIZE, 1),
    "DDP, mean of each micro-batch": Row("micro-batch", 1 / MICRO_BATCHES, 1, 1 / WORLD_SIZE, SPLITS),
    "DeepSpeed, tokens of all ranks": Row(16 / MICRO_BATCHES, 1 / MICRO_BATCHES, WORLD_SIZE, 1),
    "DeepSpeed, fp16 loss scale": Row("micro-batch", LOSS_SCALE / MICRO_BATCHES, 1, 1 / (WORLD_SIZE * LOSS_SCALE), SPLITS),
    "Trainer, num_items_in_batch over all ranks": Row(16, WORLD_SIZE, 1, 1 / WORLD_SIZE),
    "Trainer, num_items_in_batch of each rank": Row("rank", 1, 1, 1 / WORLD_SIZE, RANKS),
    "GradScaler over DDP, tokens of all ranks": Row(16, LOSS_SCALE, WORLD_SIZE, 1 / LOSS_SCALE),
}


def run_rank(problem, row, head, rank, trunk):
    """The micro-batches of one rank; returns nothing, leaves gradients on trunk and server."""
    source = headwater.torch.MicroBatchSource(rank, WORLD_SIZE)
    loss_fn = headwater.torch.CrossEntropyLoss(head, grad_hidden_scale=row.grad_hidden_scale, micro_batch_source=source)
    for start, end in SPLITS[rank * MICRO_BATCHES : (rank + 1) * MICRO_BATCHES]:
        divisor = {"micro-batch": end - start, "rank": RANKS[rank][1] - RANKS[rank][0]}.get(row.divisor, row.divisor)
        loss = loss_fn(problem.inputs[start:end] @ trunk.T, problem.targets[start:end], num_items_in_batch=divisor)
        (loss * row.upstream).backward()
    assert loss_fn.micro_batches == [rank, WORLD_SIZE + rank]


@pytest.mark.parametrize("name", ROWS)
def test_two_ranks_equal_one(client, new_head, problem, name):
    row = ROWS[name]

    def objective(hidden, logits):
        rows = F.cross_entropy(logits, problem.targets, reduction="none")
        return torch.stack([rows[start:end].mean() for start, end in row.means]).mean()

    expected, _ = problem.reference(objective)
    head = new_head(staging_slots=WORLD_SIZE)
    trunks = [problem.parameter() for _ in range(WORLD_SIZE)]
    Ranks(WORLD_SIZE).run(lambda rank: run_rank(problem, row, client.head(head.name), rank, trunks[rank]))
    # What the framework's loss scale leaves on the trunk, its optimizer takes off again; ours is in gradient_factor.
    scale = LOSS_SCALE if "scale" in name.lower() else 1
    average = sum(trunk.grad for trunk in trunks) / WORLD_SIZE  # DDP: all-reduce, divided by the number of ranks
    check_gradients(average / scale, head, expected, factor=row.gradient_factor)
    result = head.apply_optimizer_step(
        learning_rate=0.5, expected_micro_batches=WORLD_SIZE * MICRO_BATCHES, gradient_factor=row.gradient_factor
    )
    assert result.totals.valid_token_count == 16
    assert relative(head.weight(), problem.weight.double() - 0.5 * expected[1]) <= 1e-6
