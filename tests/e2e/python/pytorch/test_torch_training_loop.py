"""`headwater.torch.TrainingLoop`: closing steps, overflow, several heads and ranks. test_torch_run.py has checkpoints."""

import gc
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from expectations import refused
from torch_language_model import SERVER_ADAMW, LanguageModel, attach_with_loop, check_trained, micro_batch, train_in_process
from torch_model import Problem, Ranks, check_gradients, relative

import headwater
import headwater.torch

# ---- closing a step -----------------------------------------------------------------------------------------------------


@pytest.fixture
def loop(head, trunk):
    return headwater.torch.TrainingLoop(head, torch.optim.SGD([trunk], lr=0.1))


@pytest.fixture
def loss(head, trunk, problem):
    """A function that submits a micro-batch and returns its loss."""
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    return lambda inputs=problem.inputs: loss_fn(inputs @ trunk.T, problem.targets)


def test_two_heads_are_clipped_by_one_global_norm(client, make_head, problem, trunk, rng):
    other = Problem(rng)
    before = problem.trunk, problem.weight, problem.bias, other.weight, other.bias
    expected = [torch.nn.Parameter(tensor.double()) for tensor in before]
    hidden = problem.inputs.double() @ expected[0].T
    first = F.cross_entropy(hidden @ expected[1].T + expected[2], problem.targets)
    (20 * (first + 0.5 * F.cross_entropy(hidden @ expected[3].T + expected[4], other.targets))).backward()
    norm = torch.nn.utils.clip_grad_norm_(expected, 1.0)
    torch.optim.SGD(expected, lr=0.1).step()

    heads = [p.head(client, make_head) for p in (problem, other)]
    loop = headwater.torch.TrainingLoop(heads, torch.optim.SGD([trunk], lr=0.1), max_grad_norm=1.0)
    first, second = (headwater.torch.CrossEntropyLoss(head) for head in heads)
    hidden = problem.inputs @ trunk.T
    loop.backward(20 * (first(hidden, problem.targets) + 0.5 * second(hidden, other.targets)))
    outcome = loop.step()
    assert outcome.applied and outcome.step == 0 and loop.open_step == 1 and outcome.learning_rate == 0.1
    assert abs(outcome.global_grad_norm / float(norm) - 1) <= 1e-5
    assert abs(outcome.clip_factor * (float(norm) + 1e-6) - 1) <= 1e-5
    assert [totals.valid_token_count for totals in outcome.totals] == [16, 16]
    after = [trunk.detach()] + [torch.tensor(v) for head in heads for v in (head.weight(), head.bias())]
    for new, old, reference in zip(after, before, expected, strict=True):
        assert relative(new.double() - old, reference.detach() - old) <= 1e-4
    assert trunk.grad is None


def test_a_head_that_the_trainer_owns_is_clipped_whichever_parameters_are_named(client, names):
    outcomes, models = [], []
    for body_alone in (False, True):
        model = LanguageModel(tied=False, bias=True)
        head = headwater.torch.attach(client, names(client), model.lm_head, optimizer="torch")
        options = {"parameters": model.body_parameters() if body_alone else None, "max_grad_norm": 1e-3}
        loop = headwater.torch.TrainingLoop(head, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        inputs, targets = micro_batch(0, 0)
        loop.backward(headwater.torch.CrossEntropyLoss(head)(model.body(inputs), targets))
        outcomes.append(loop.step())
        models.append(model)
    assert outcomes[1].clip_factor < 1
    assert math.isclose(outcomes[0].global_grad_norm, outcomes[1].global_grad_norm, rel_tol=1e-6)
    for (name, first), (_, second) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        assert torch.allclose(first, second, rtol=1e-6, atol=1e-9), name


def test_a_gradient_that_is_not_finite_waits_for_skip(loop, loss, trunk, problem):
    inputs = problem.inputs.clone()
    inputs[3] = float("inf")
    loop.backward(loss(inputs))
    with refused("NON_FINITE_GRADIENT", headwater.FailedPreconditionError):
        loop.step()
    with refused("INVALID_COMBINATION", headwater.FailedPreconditionError, "skip()"):
        loop.step()
    loop.skip()
    assert loop.open_step == 1 and trunk.grad is None and torch.equal(trunk.detach(), problem.trunk)
    loop.backward(loss())
    assert loop.step().applied


def test_a_skip_that_some_heads_have_missed_is_not_repeated(new_head, monkeypatch):
    heads = [new_head() for _ in range(2)]

    def away(**options):
        raise headwater.UnavailableError("the server is away")

    for count in (1, 2):
        loop = headwater.torch.TrainingLoop(heads[:count])
        with monkeypatch.context() as patch:
            patch.setattr(heads[count - 1], "discard_gradient", away)
            with pytest.raises(headwater.UnavailableError):
                loop.skip()
        if count == 1:  # nothing was closed yet
            loop.skip()
            heads[1].discard_gradient()
            continue
        with refused("INVALID_COMBINATION", headwater.FailedPreconditionError, "resume()"):
            loop.skip()
    assert [head.info().open_step for head in heads] == [2, 1]


def test_a_step_without_micro_batches_is_closed_only_if_asked_for(head, loop, loss):
    """One that is not finished can be."""
    with torch.no_grad():
        loss()
    for nothing in (None, 0, []):
        with refused("MISSING_FIELD", ValueError, "skip()"):
            loop.step(expected_micro_batches=nothing)
    assert head.step_state().open.step == 0
    unfinished = loss()
    with refused("MICRO_BATCH_UNCOMMITTED", headwater.FailedPreconditionError):
        loop.step()
    unfinished.backward()
    assert loop.step().applied
    assert loop.step(expected_micro_batches=0, allow_empty=True).applied
    assert loop.step(allow_empty=True).applied
    loop.skip()
    assert loop.open_step == 4


def test_an_error_in_mid_step_asks_for_resume(loop, loss, monkeypatch):
    loop.backward(loss())
    with monkeypatch.context() as patch:
        patch.setattr(loop._optimizer, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.step()
    # The head has been updated, the body has not.
    for call in (loop.step, loop.skip, loop.save_checkpoint):
        with refused("INVALID_COMBINATION", headwater.FailedPreconditionError, "resume()"):
            call()
    assert loop.resume() == 1
    loop.backward(loss())
    assert loop.step().applied


def test_what_does_not_fit_together_is_refused(client, new_head, head, trunk, names, problem):
    frozen, accumulating = new_head(trainable=False, optimizer=None), new_head(optimizer=None)
    model = LanguageModel(tied=True)
    ours = headwater.torch.attach(client, names(client), model.lm_head, model=model, tied="trainer")
    served = headwater.torch.attach(client, names(client), model.lm_head, model=model, tied="server", optimizer=SERVER_ADAMW)
    everything, nothing = torch.optim.SGD(model.parameters(), lr=1), torch.optim.SGD([trunk], lr=1)
    for arguments in (
        {"heads": frozen},
        {"heads": accumulating},
        {"heads": ours, "optimizer": nothing},
        {"heads": ours},
        {"heads": served, "optimizer": everything},
        {"heads": ours, "optimizer": everything, "rank": 0, "world_size": 2, "barrier": print, "shared_gradients": "partial"},
    ):
        with refused("INVALID_COMBINATION", ValueError):
            headwater.torch.TrainingLoop(**arguments)
    with refused("MISSING_FIELD", ValueError):
        headwater.torch.TrainingLoop(head, world_size=2, rank=0)
    with refused("INVALID_NAME", ValueError):
        headwater.torch.TrainingLoop(head, checkpoint_name="last")
    with refused("INVALID_FIELD", ValueError):
        headwater.torch.TrainingLoop(head, shared_gradients="some")
    with refused("MISSING_FIELD", ValueError):
        loop = headwater.torch.TrainingLoop(head)
        headwater.torch.cross_entropy(head, problem.inputs @ trunk.T, problem.targets).backward()
        loop.step()


# ---- several trainers ---------------------------------------------------------------------------------------------------


def _ddp_rank(rank, address, name, flow, directory):
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    try:
        model = LanguageModel(tied=True)
        options = {"attach": {"staging_slots": 2}, "loss": {"grad_hidden_scale": 2.0}, "max_grad_norm": 0.5}
        with headwater.connect(address) as client:
            _, loop, loss_fn = attach_with_loop(client, name, model, flow, **options)
            assert (loop.rank, loop.world_size) == (rank, 2) and loop.resume() == 0
            body = torch.nn.parallel.DistributedDataParallel(model)
            for step in range(4):
                inputs, targets = micro_batch(step, rank)
                loop.backward(loss_fn(body(inputs), targets) / 2)
                loop.step()
        torch.save(model.state_dict(), f"{directory}/{rank}")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("flow", ("trainer", "server"))
def test_a_tied_model_under_real_ddp(remote, names, tmp_path, flow):
    """Rank, world size, barrier and how the embedding's gradient is shared come from torch.distributed."""
    expected = LanguageModel(tied=True)
    train_in_process(expected, 4, max_grad_norm=0.5)
    name = names(remote.client)
    torch.multiprocessing.spawn(_ddp_rank, (remote.address, name, flow, str(tmp_path)), nprocs=2)
    states = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    model = LanguageModel(tied=True)
    model.load_state_dict(states[0])
    check_trained(expected, model, 2e-4)
    np.testing.assert_array_equal(remote.client.head(name).weight(), states[0]["embedding.weight"])


@pytest.mark.parametrize("dropped", (0, 1), ids=("the first", "the last"))
def test_a_rank_that_has_dropped_losses_needs_to_be_told_which_there_are(new_head, trunk, problem, dropped):
    """Without, the ranks would expect different ids, and wait for what does not come."""
    head = new_head(staging_slots=2)
    loop = headwater.torch.TrainingLoop(head, torch.optim.SGD([trunk], lr=0.1), rank=0, world_size=2, barrier=lambda: None)
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    for index in range(2):
        loss = loss_fn(problem.inputs @ trunk.T, problem.targets)
        if index != dropped:
            loop.backward(loss)
        del loss
    gc.collect()
    with refused("MISSING_FIELD", ValueError, "say which there are"):
        loop.step()
    assert loop.open_step == 0


@pytest.mark.parametrize("shared_gradients", ("reduced", "partial"))
@pytest.mark.parametrize("dropped", ((5,), (3, 4, 5)), ids=str)
def test_ranks_whose_last_losses_were_dropped_add_the_embeddings_gradient_beside_them(client, names, shared_gradients, dropped):
    """Rank 0 does not know which ids rank 1 has drawn and dropped; none of them may be taken for the embedding's part."""
    kept = [index for index in range(6) if index not in dropped]
    expected = LanguageModel(tied=True)
    train_in_process(expected, 2, indices=kept)
    ranks, name, models = Ranks(2), names(client), [LanguageModel(tied=True) for _ in range(2)]
    states = []

    def trainer(rank):
        model = models[rank]
        options = {"attach": {"staging_slots": 2}, "loss": {"grad_hidden_scale": 2.0}, "shared_gradients": shared_gradients}
        options |= {"rank": rank, "world_size": 2, "barrier": ranks.barrier.wait}
        head, loop, loss_fn = attach_with_loop(client, name, model, "server", **options)
        for step in range(2):
            for index in range(rank, 6, 2):
                inputs, targets = micro_batch(step, index)
                loss = loss_fn(model.body(inputs), targets)
                if index in kept:
                    loop.backward(loss / len(kept))
                del loss
            gc.collect()
            if shared_gradients == "partial":
                model.lm_head.weight.grad /= 2
                ranks.average(rank, model.body_parameters())
            else:
                ranks.average(rank, [*model.body_parameters(), model.lm_head.weight])
            assert loop.step(expected_micro_batches=kept).applied
            if rank == 0:
                states.append({id_: entry.state for id_, entry in head.step_state().last_closed.micro_batches.items()})

    ranks.run(trainer)
    own = range(6, 7 if shared_gradients == "reduced" else 8)
    committed = dict.fromkeys((*kept, *own), "COMMITTED")
    assert states == [{**committed, **dict.fromkeys(dropped, "DISCARDED")}] * 2
    check_trained(expected, models[0], 2e-4)


# ---- the rows of the table of docs/concepts.md, equal ones once ------------------------------------------------------------

# FSDP and DeepSpeed average gradients as DDP does, in two divisions.
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
