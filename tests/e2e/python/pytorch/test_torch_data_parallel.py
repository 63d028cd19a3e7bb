"""Two data-parallel ranks against one process: the rows of the table of docs/concepts.md, equal ones once.

FSDP and DeepSpeed average gradients as DDP does, in two divisions. A row gives the divisor of the loss, what the
framework multiplies the loss by before backward (it reaches us as the upstream gradient), and our `grad_hidden_scale` and
`gradient_factor`.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.multiprocessing
import torch.nn.functional as F
from torch_model import Problem, check_gradients, relative
from torch_ranks import Ranks

import headwater
import headwater.torch

WORLD_SIZE = 2
# Accumulation: each rank runs two micro-batches, of unequal sizes, so that a mean of means is not the mean.
MICRO_BATCHES = 2
SPLITS = ((0, 2), (2, 7), (7, 9), (9, 16))  # rank 0: the first two, rank 1: the others
NUM_TOKENS = 16
LOSS_SCALE = 1024.0


def average(gradients):
    """DDP: all-reduce, divided by the number of ranks."""
    return sum(gradients) / WORLD_SIZE


@dataclass(frozen=True)
class Row:
    """One line of the table. `divisor` and `upstream` take the tokens of the micro-batch and of the rank."""

    divisor: object
    upstream: float
    grad_hidden_scale: float
    gradient_factor: float
    mean_of_means: object = None  # what the framework computes if that is not the mean over all tokens


def local_mean(tokens):
    return tokens


def all_tokens(tokens):
    return NUM_TOKENS


ROWS = {
    "DDP, tokens of all ranks": Row(all_tokens, 1, WORLD_SIZE, 1),
    "DDP, mean of each micro-batch": Row(local_mean, 1 / MICRO_BATCHES, 1, 1 / WORLD_SIZE, "micro_batch"),
    "DeepSpeed, tokens of all ranks": Row(lambda tokens: NUM_TOKENS / MICRO_BATCHES, 1 / MICRO_BATCHES, WORLD_SIZE, 1),
    "DeepSpeed, fp16 loss scale": Row(local_mean, LOSS_SCALE / MICRO_BATCHES, 1, 1 / (WORLD_SIZE * LOSS_SCALE), "micro_batch"),
    "Trainer, num_items_in_batch over all ranks": Row(all_tokens, WORLD_SIZE, 1, 1 / WORLD_SIZE),
    "Trainer, num_items_in_batch of each rank": Row(lambda tokens: "rank", 1, 1, 1 / WORLD_SIZE, "rank"),
    "GradScaler over DDP, tokens of all ranks": Row(all_tokens, LOSS_SCALE, WORLD_SIZE, 1 / LOSS_SCALE),
}


def objective(problem, row):
    """What one process would compute for the same step."""
    spans = [torch.arange(*span) for span in SPLITS]
    ranks = [torch.cat(spans[:MICRO_BATCHES]), torch.cat(spans[MICRO_BATCHES:])]

    def value(hidden, logits):
        rows = F.cross_entropy(logits, problem.targets, reduction="none")
        if row.mean_of_means == "micro_batch":
            return sum(rows[span].mean() for span in spans) / len(spans)
        if row.mean_of_means == "rank":
            return sum(rows[span].mean() for span in ranks) / len(ranks)
        return rows.mean()

    return value


def run_rank(problem, row, head, rank, trunk):
    """The micro-batches of one rank; returns nothing, leaves gradients on trunk and server."""
    source = headwater.torch.MicroBatchSource(rank, WORLD_SIZE)
    loss_fn = headwater.torch.CrossEntropyLoss(head, grad_hidden_scale=row.grad_hidden_scale, micro_batch_source=source)
    mine = SPLITS[rank * MICRO_BATCHES : (rank + 1) * MICRO_BATCHES]
    rank_tokens = sum(end - start for start, end in mine)
    for start, end in mine:
        divisor = row.divisor(end - start)
        divisor = rank_tokens if divisor == "rank" else divisor
        loss = loss_fn(problem.inputs[start:end] @ trunk.T, problem.targets[start:end], num_items_in_batch=divisor)
        (loss * row.upstream).backward()
    assert loss_fn.micro_batches == [rank, WORLD_SIZE + rank]


@pytest.mark.parametrize("name", ROWS)
def test_two_ranks_equal_one(one_shard, make_head, rng, name):
    row, problem = ROWS[name], Problem(rng)
    expected, _ = problem.reference(objective(problem, row))
    head = problem.head(one_shard.client, make_head, staging_slots=WORLD_SIZE)
    trunks = [problem.parameter() for _ in range(WORLD_SIZE)]
    Ranks(WORLD_SIZE).run(lambda rank: run_rank(problem, row, one_shard.client.head(head.name), rank, trunks[rank]))
    # What the framework's loss scale leaves on the trunk, its optimizer takes off again; ours is in gradient_factor.
    scale = LOSS_SCALE if "scale" in name.lower() else 1
    check_gradients(average([trunk.grad for trunk in trunks]) / scale, head, expected, factor=row.gradient_factor)
    result = head.apply_optimizer_step(
        learning_rate=0.5, expected_micro_batches=WORLD_SIZE * MICRO_BATCHES, gradient_factor=row.gradient_factor
    )
    assert result.totals.valid_token_count == NUM_TOKENS
    assert relative(head.weight(), problem.weight.double() - 0.5 * expected[1]) <= 1e-6
