"""Trains a small language model whose output layer is tied to its embedding, and continues where it was stopped.

python train.py DIRECTORY unix:/run/headwater/headwater.sock [STEPS]     # a server
python train.py DIRECTORY local [STEPS]                                  # a server of its own

Kill it, or the server, at any moment: the next start, or the next step, finds back to the last checkpoint that both have.
"""

import sys
from pathlib import Path

import torch

import headwater
import headwater.local
import headwater.torch

VOCAB_SIZE, HIDDEN_SIZE, CONTEXT, MICRO_BATCHES, CHECKPOINT_EVERY = 500, 48, 32, 2, 10


class Model(torch.nn.Module):
    """A recurrent body between an embedding and the layer that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.recurrence = torch.nn.GRU(HIDDEN_SIZE, HIDDEN_SIZE, batch_first=True)
        self.lm_head = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False)
        torch.nn.init.normal_(self.embedding.weight, std=0.1)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states, (batch, context, hidden_size); the logits are the head's business."""
        return self.recurrence(self.embedding(tokens))[0]


def batch(step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, the same for a step whenever it is done: sequences that count by a stride."""
    generator = torch.Generator().manual_seed(step * MICRO_BATCHES + micro_batch)
    start = torch.randint(0, VOCAB_SIZE, (8, 1), generator=generator)
    stride = torch.randint(1, 4, (8, 1), generator=generator)
    tokens = (start + stride * torch.arange(CONTEXT + 1)) % VOCAB_SIZE
    return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    directory, place = Path(sys.argv[1]), sys.argv[2]
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 40
    torch.manual_seed(0)
    model = Model()
    if place == "local":
        client = headwater.local.connect(checkpoint_dir=directory / "head")
    else:
        client = headwater.connect(place)
    with client:
        # PyTorch's AdamW owns the shared weight; tied="server" with optimizer=headwater.AdamW() would leave it to the head's.
        head = headwater.torch.attach(client, "example-tied", model.lm_head, model=model, tied="trainer")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        state = headwater.torch.TrainerState(directory, keep=3, model=model, optimizer=optimizer)
        loop = headwater.torch.TrainingLoop(head, optimizer, state=state, checkpoint_every=CHECKPOINT_EVERY, max_grad_norm=1.0)
        loss_fn = headwater.torch.CrossEntropyLoss(head)

        def train_step(step: int) -> None:
            total = 0.0
            for micro_batch in range(MICRO_BATCHES):
                inputs, targets = batch(step, micro_batch)
                loss = loss_fn(model(inputs), targets) / MICRO_BATCHES
                loop.backward(loss)
                total += loss.item()
            if step % CHECKPOINT_EVERY == 0 or step == steps - 1:
                print(f"step {step}: loss {total:.4f} nats", flush=True)

        loop.run(train_step, steps)


if __name__ == "__main__":
    main()
