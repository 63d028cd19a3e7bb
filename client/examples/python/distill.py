"""Distils a teacher into a student over remote heads: a few optimizer steps on made-up data.

python distill.py unix:/run/headwater/headwater.sock       # a server
python distill.py                                          # a server of its own
"""

import sys

import torch

import headwater
import headwater.local
import headwater.torch

VOCAB_SIZE, STUDENT_SIZE, TEACHER_SIZE, NUM_TOKENS, STEPS = 1000, 32, 64, 128, 20


def main() -> None:
    torch.manual_seed(0)
    client = headwater.connect(sys.argv[1]) if len(sys.argv) > 1 else headwater.local.connect()
    with client:
        teacher = client.create_head("example-teacher", torch.randn(VOCAB_SIZE, TEACHER_SIZE) / 4, trainable=False)
        student = client.create_head("example-student", torch.randn(VOCAB_SIZE, STUDENT_SIZE) / 4, optimizer=headwater.AdamW())
        features = torch.randn(NUM_TOKENS, TEACHER_SIZE)
        body = torch.nn.Linear(TEACHER_SIZE, STUDENT_SIZE)
        optimizer = torch.optim.AdamW(body.parameters(), lr=1e-2)
        loss_fn = headwater.torch.JSDLoss(student, teacher, beta=0.5)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_fn(body(features), features)
            loss.backward()
            optimizer.step()
            student.apply_optimizer_step(learning_rate=1e-2, expected_micro_batches=loss_fn.micro_batches)
            if step in (0, STEPS - 1):
                print(f"step {step}: divergence {loss.item():.4f} nats")
        student.delete()
        teacher.delete()


if __name__ == "__main__":
    main()
