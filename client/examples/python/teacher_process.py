"""Distils with the teacher in a process of its own: it streams its hidden states, and the trainer's micro-batches join them.

python teacher_process.py unix:/run/headwater/headwater.sock       # a server; the teacher is a second process
python teacher_process.py                                          # a server of its own; the teacher is a thread

The two agree on nothing but the data's order and the keys. Neither waits for the other: the server keeps rows or micro-batches that
come first, for as long as its max_join_wait. A teacher that is far ahead is slowed down by max_join_bytes; this one waits for the
step instead.
"""

import multiprocessing
import sys
import threading

import torch

import headwater
import headwater.local
import headwater.torch

VOCAB_SIZE, STUDENT_SIZE, TEACHER_SIZE, NUM_TOKENS, STEPS, MICRO_BATCHES = 1000, 32, 64, 128, 20, 2
TEACHER_NAME, STUDENT_NAME = "joined-example-teacher", "joined-example-student"


def features(micro_batch: int) -> torch.Tensor:
    """The data, which both sides read for themselves."""
    return torch.randn(NUM_TOKENS, TEACHER_SIZE, generator=torch.Generator().manual_seed(micro_batch))


def key(step: int, micro_batch: int) -> str:
    """The name of a micro-batch on both sides."""
    return f"example/step-{step}/micro-batch-{micro_batch}"


def teach(client: headwater.Client) -> None:
    """The teacher's side: a frozen body, whose last hidden states go to the server and nowhere else."""
    body = torch.nn.Identity()
    with torch.no_grad():
        for step in range(STEPS):
            sent = [
                client.teacher(key(step, index), total_rows=NUM_TOKENS).stream_future(body(features(index)))
                for index in range(MICRO_BATCHES)
            ]
            for future in sent:
                future.result()


def teacher_process(address: str) -> None:
    """The program of the second process."""
    with headwater.connect(address) as client:
        teach(client)


def train(client: headwater.Client) -> None:
    """The trainer's side. It never sees a hidden state of the teacher."""
    teacher = client.head(TEACHER_NAME)
    student = client.create_head(STUDENT_NAME, torch.randn(VOCAB_SIZE, STUDENT_SIZE) / 4, optimizer=headwater.AdamW())
    body = torch.nn.Linear(TEACHER_SIZE, STUDENT_SIZE)
    optimizer = torch.optim.AdamW(body.parameters(), lr=1e-2)
    loss_fn = headwater.torch.JSDLoss(student, teacher, beta=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for index in range(MICRO_BATCHES):
            loss = loss_fn(body(features(index)), headwater.JOIN, join_key=key(step, index), total_rows=NUM_TOKENS)
            (loss / MICRO_BATCHES).backward()
            total += loss.item() / MICRO_BATCHES
        optimizer.step()
        student.apply_optimizer_step(learning_rate=1e-2, expected_micro_batches=loss_fn.micro_batches)
        if step in (0, STEPS - 1):
            print(f"step {step}: divergence {total:.4f} nats")
    student.delete()


def main() -> None:
    torch.manual_seed(0)
    address = sys.argv[1] if len(sys.argv) > 1 else None
    with headwater.local.connect() if address is None else headwater.connect(address) as client:
        head = client.create_head(TEACHER_NAME, torch.randn(VOCAB_SIZE, TEACHER_SIZE) / 4, trainable=False)
        if address is None:
            teacher = threading.Thread(target=teach, args=(client,))
        else:
            teacher = multiprocessing.get_context("spawn").Process(target=teacher_process, args=(address,))
        teacher.start()
        try:
            train(client)
        finally:
            teacher.join()
            head.delete()


if __name__ == "__main__":
    main()
