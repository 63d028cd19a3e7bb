"""Trains the language model with one of the two heads; a process of its own, so that its peak memory is its own.

With the remote head in float32, a witness process looks at every tenth step: see witness.py. In bfloat16 there is nothing to hold
that to: what it computes would be rounded elsewhere.
"""

import argparse
import contextlib
import time
from pathlib import Path

import torch

import heads
import training
from data import CONTEXT, VOCAB_SIZE, Batches
from model import TEACHER, Body, BodyConfig
from witness import Witness

SEQUENCES = 8  # of CONTEXT tokens each, in one micro-batch
MICRO_BATCHES = 2  # accumulated in a step
PEAK_LEARNING_RATE = 1.5e-3
HELD_OUT_BATCHES = 4
PARITY_EVERY = 10  # steps
HEAD_NAME = "language-model"
SEED = 20


def held_out_loss(body: Body, head: heads.OwnHead | heads.RemoteHead, batches: Batches) -> float:
    """Mean loss in nats a token over the first held-out batches."""
    with torch.no_grad():
        total = 0.0
        for index in range(HELD_OUT_BATCHES):
            inputs, targets = batches[index]
            total += head.loss(body(inputs), targets).item()
    return total / HELD_OUT_BATCHES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", choices=("own", "remote"), required=True)
    parser.add_argument("--server", help="address of headwaterd, for the remote head")
    parser.add_argument("--data-type", choices=("float32", "bfloat16"), default="float32", help="of the remote head and its rows")
    parser.add_argument("--threads", type=int, required=True, help="of PyTorch")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="with the prepared text")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--save-body", type=Path)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    train_batches = Batches(arguments.folder, "train", SEQUENCES)
    held_out_batches = Batches(arguments.folder, "held_out", SEQUENCES)
    body = Body(BodyConfig(VOCAB_SIZE, context=CONTEXT, **TEACHER), seed=SEED)
    remote = arguments.head == "remote"
    # The state of a trainer before it has computed anything: libraries, data and body, but nothing of a head.
    head: heads.OwnHead | heads.RemoteHead
    if remote:
        head = heads.RemoteHead(arguments.server, HEAD_NAME, body, getattr(torch, arguments.data_type))
        baseline = training.memory_bytes("VmRSS")
    else:
        baseline = training.memory_bytes("VmRSS")
        head = heads.OwnHead(heads.initial_weight(VOCAB_SIZE, TEACHER["hidden_size"], SEED), body)

    losses: list[float] = []
    held_out: list[tuple[int, float]] = []
    started = time.monotonic()
    description = f"{arguments.head} head, {arguments.threads} thread{'s' if arguments.threads > 1 else ''}"
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(training.progress(arguments.steps, description))
        watches = remote and arguments.data_type == "float32"
        witness = stack.enter_context(Witness(arguments.server, HEAD_NAME)) if watches else None
        for step in range(arguments.steps):
            if step % 50 == 0:
                held_out.append((step, held_out_loss(body, head, held_out_batches)))
            watched = witness is not None and step % PARITY_EVERY == 0
            step_loss = 0.0
            for micro_batch in range(MICRO_BATCHES):
                inputs, targets = train_batches[step * MICRO_BATCHES + micro_batch]
                hidden = body(inputs)
                if watched:
                    hidden.retain_grad()
                loss = head.loss(hidden, targets) / MICRO_BATCHES
                loss.backward()
                step_loss += loss.item()
                if watched:
                    witness.show(hidden.detach().numpy(), targets.numpy(), loss.item(), hidden.grad.numpy(), 1 / MICRO_BATCHES)
                del hidden, loss
            if watched:
                head.head.seal(expected_micro_batches=MICRO_BATCHES)
                witness.judge(step)
            head.step(training.learning_rate(step, arguments.steps, PEAK_LEARNING_RATE))
            losses.append(step_loss)
            bar.set_postfix(loss=f"{step_loss:.3f}", refresh=False)
            bar.update()
        held_out.append((arguments.steps, held_out_loss(body, head, held_out_batches)))
        parity = witness.verdicts if witness else []
    training.write_results(
        arguments.results,
        {
            "head": arguments.head,
            "threads": arguments.threads,
            "losses": losses,
            "held_out": held_out,
            "parity": parity,
            "peak_bytes": training.memory_bytes("VmHWM"),
            "baseline_bytes": baseline,
            "server_bytes": head.head.info().memory_plan.total_bytes if remote else 0,
            "seconds": time.monotonic() - started,
            "tokens_a_step": SEQUENCES * CONTEXT * MICRO_BATCHES,
        },
    )
    if arguments.save_body:
        torch.save(body.state_dict(), arguments.save_body)


if __name__ == "__main__":
    main()
