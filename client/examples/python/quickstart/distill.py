"""Distils the trained language model into a smaller one, with the Jensen-Shannon divergence over the whole vocabulary.

Teacher and student keep their bodies here; both heads are on the server, the teacher's frozen. At some steps the server's
divergence and gradients are compared with the textbook formula, in fp64 and in this process.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

import heads
import headwater
import headwater.torch
import train
import training
from data import CONTEXT, VOCAB_SIZE, Batches
from model import STUDENT, TEACHER, Body, BodyConfig
from witness import relative_difference

PEAK_LEARNING_RATE = 4e-3
BETA = 0.5
COMPARE_EVERY = 20  # steps
SEED = 21


def divergence(student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """Mean over the rows of beta KL(P || M) + (1 - beta) KL(Q || M), P the teacher, Q the student, M = beta P + (1 - beta) Q."""
    log_p, log_q = teacher_logits.log_softmax(-1), student_logits.log_softmax(-1)
    log_m = torch.logaddexp(log_p + np.log(BETA), log_q + np.log(1 - BETA))
    rows = BETA * (log_p.exp() * (log_p - log_m)).sum(-1) + (1 - BETA) * (log_q.exp() * (log_q - log_m)).sum(-1)
    return rows.mean()


def compare(
    student: headwater.Head, teacher_weight: np.ndarray, hidden: torch.Tensor, teacher_hidden: torch.Tensor, loss: float
) -> dict[str, float]:
    """Relative differences between the server's numbers and the formula's; `hidden.grad` came from the server."""
    own_weight = torch.from_numpy(np.array(student.weight())).double().requires_grad_()
    own_hidden = hidden.detach().double().requires_grad_()
    teacher_logits = teacher_hidden.double() @ torch.from_numpy(teacher_weight).double().T
    own_loss = divergence(own_hidden @ own_weight.T, teacher_logits)
    own_loss.backward()
    return {
        "loss": abs(loss - own_loss.item()) / abs(own_loss.item()),
        "grad_hidden": relative_difference(hidden.grad.numpy(), own_hidden.grad.numpy()),
        "grad_weight": relative_difference(student.gradient(), own_weight.grad.numpy()),
    }


class HeldOut:
    """The held-out text, and the teacher's hidden states for it."""

    def __init__(self, folder: Path, teacher_body: Body) -> None:
        batches = Batches(folder, "held_out", train.SEQUENCES)
        self._batches = [batches[index] for index in range(train.HELD_OUT_BATCHES)]
        with torch.no_grad():
            self._teacher_hidden = [teacher_body(inputs) for inputs, _ in self._batches]

    def measure(
        self, body: Body, jsd: headwater.torch.JSDLoss, cross_entropy: headwater.torch.CrossEntropyLoss
    ) -> tuple[float, float]:
        """Mean divergence from the teacher and mean loss, in nats a token."""
        with torch.no_grad():
            divergences, losses = [], []
            for (inputs, targets), teacher_hidden in zip(self._batches, self._teacher_hidden, strict=True):
                hidden = body(inputs)
                divergences.append(jsd(hidden, teacher_hidden).item())
                losses.append(cross_entropy(hidden, targets).item())
        return float(np.mean(divergences)), float(np.mean(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True, help="address of headwaterd; it holds the trained head")
    parser.add_argument("--threads", type=int, required=True, help="of PyTorch")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="with the prepared text")
    parser.add_argument("--teacher-body", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    teacher_body = Body(BodyConfig(VOCAB_SIZE, context=CONTEXT, **TEACHER), seed=0).eval()
    teacher_body.load_state_dict(torch.load(arguments.teacher_body))
    body = Body(BodyConfig(VOCAB_SIZE, context=CONTEXT, **STUDENT), seed=SEED)
    optimizer = heads.adamw(body.parameters())

    client = headwater.connect(arguments.server)
    teacher_weight = np.array(client.head(train.HEAD_NAME).weight())
    teacher = client.create_head("teacher", teacher_weight, trainable=False)
    initial = heads.initial_weight(VOCAB_SIZE, STUDENT["hidden_size"], SEED)
    student = client.create_head("student", initial, optimizer=heads.remote_rule())
    loop = headwater.torch.TrainingLoop(student, optimizer, max_grad_norm=heads.MAX_GRAD_NORM)
    jsd = headwater.torch.JSDLoss(student, teacher, beta=BETA)
    cross_entropy = headwater.torch.CrossEntropyLoss(student)
    batches = Batches(arguments.folder, "train", train.SEQUENCES, seed=SEED)
    held_out = HeldOut(arguments.folder, teacher_body)

    before = held_out.measure(body, jsd, cross_entropy)
    divergences, parity = [], []
    started = time.monotonic()
    with training.progress(arguments.steps, "distillation") as bar:
        for step in range(arguments.steps):
            inputs, _ = batches[step]
            with torch.no_grad():
                teacher_hidden = teacher_body(inputs)
            hidden = body(inputs)
            hidden.retain_grad()
            loss = jsd(hidden, teacher_hidden)
            loss.backward()
            if step % COMPARE_EVERY == 0:
                parity.append({"step": step, **compare(student, teacher_weight, hidden, teacher_hidden, loss.item())})
            optimizer.param_groups[0]["lr"] = training.learning_rate(step, arguments.steps, PEAK_LEARNING_RATE)
            loop.step()
            divergences.append(loss.item())
            bar.set_postfix(divergence=f"{divergences[-1]:.3f}", refresh=False)
            bar.update()
    after = held_out.measure(body, jsd, cross_entropy)
    training.write_results(
        arguments.results,
        {
            "divergences": divergences,
            "held_out_divergence": [before[0], after[0]],
            "held_out_loss": [before[1], after[1]],
            "parity": parity,
            "seconds": time.monotonic() - started,
        },
    )


if __name__ == "__main__":
    main()
