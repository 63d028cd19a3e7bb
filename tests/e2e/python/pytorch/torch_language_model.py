"""A small transformer whose output layer may be tied to its embedding, its data, and the same training with the head in process."""

import torch
import torch.nn.functional as F

import headwater
import headwater.torch

ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.05}
SERVER_ADAMW = headwater.AdamW(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.05)
RATE = 3e-3
VOCAB_SIZE, HIDDEN_SIZE, CONTEXT = 67, 24, 12


class Block(torch.nn.Module):
    """Causal attention with one head, and an MLP. No biases: that of the keys has no gradient, but AdamW blows up its rounding."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN_SIZE)
        self.qkv = torch.nn.Linear(HIDDEN_SIZE, 3 * HIDDEN_SIZE, bias=False)
        self.up = torch.nn.Linear(HIDDEN_SIZE, 2 * HIDDEN_SIZE, bias=False)
        self.down = torch.nn.Linear(2 * HIDDEN_SIZE, HIDDEN_SIZE, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, -1)
        mask = torch.full((hidden.shape[1], hidden.shape[1]), float("-inf")).triu(1)
        scores = (query @ key.transpose(1, 2) / HIDDEN_SIZE**0.5 + mask).softmax(-1)
        hidden = hidden + scores @ value
        return hidden + self.down(torch.tanh(self.up(hidden)))


class LanguageModel(torch.nn.Module):
    """Embedding, one block of causal attention, final norm, `lm_head`."""

    def __init__(self, *, tied: bool, bias: bool = False, sparse: bool = False, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE, sparse=sparse)
        self.positions = torch.nn.Parameter(torch.randn(CONTEXT, HIDDEN_SIZE) * 0.1)
        self.block = Block()
        self.norm = torch.nn.LayerNorm(HIDDEN_SIZE)
        self.lm_head = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=bias)
        with torch.no_grad():
            self.embedding.weight.mul_(0.3)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def body(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm, (batch, context, hidden_size)."""
        return self.norm(self.block(self.embedding(tokens) + self.positions[: tokens.shape[1]]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The body, for wrappers that call the module."""
        return self.body(tokens)

    def body_parameters(self) -> list[torch.nn.Parameter]:
        """Everything but the head's weight and bias (a tied one is the head's)."""
        mine = {id(parameter) for parameter in self.lm_head.parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in mine]


def micro_batch(step: int, index: int, sequences: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets: counting with random strides, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    start = torch.randint(0, VOCAB_SIZE, (sequences, 1), generator=generator)
    stride = torch.randint(1, 4, (sequences, 1), generator=generator)
    tokens = (start + stride * torch.arange(CONTEXT + 1)) % VOCAB_SIZE
    return tokens[:, :-1], tokens[:, 1:]


def train(model: LanguageModel, steps, loss_fn, backward, close, indices=range(2)) -> list:
    """The mean loss of each step, of the micro-batches with these indices."""
    losses = []
    for step in steps:
        losses.append(0.0)
        for index in indices:
            inputs, targets = micro_batch(step, index)
            loss = loss_fn(model.body(inputs), targets) / len(indices)
            backward(loss)
            losses[-1] += loss.item()
        close()
    return losses


def train_in_process(model: LanguageModel, steps: int, *, max_grad_norm: float | None = None, **options) -> list:
    """Trains all of the model here."""
    optimizer = optimizer_of(model.parameters())

    def loss_fn(hidden, targets):
        logits = F.linear(hidden, model.lm_head.weight, model.lm_head.bias)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def close():
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return train(model, range(steps), loss_fn, torch.Tensor.backward, close, **options)


def optimizer_of(parameters) -> torch.optim.AdamW:
    """PyTorch's AdamW, with the settings of the server's."""
    return torch.optim.AdamW(parameters, lr=RATE, **ADAMW)


def attach_with_loop(client, name, model, owner, *, attach=None, loss=None, body=True, directory=None, **loop_options) -> tuple:
    """(head, loop, loss) of a model whose last layer has AdamW, that of its owner: "trainer" or "server".

    With a `directory` the loop keeps its state there; without `body` it trains the head alone.
    """
    options = dict(attach or {})
    tied = model.lm_head.weight is model.embedding.weight
    if tied:
        options["tied"] = owner
    if owner == "server" or not tied:
        options["optimizer"] = SERVER_ADAMW if owner == "server" else "torch"
    head = headwater.torch.attach(client, name, model.lm_head, model=model, **options)
    optimizer = optimizer_of(model.parameters() if owner == "trainer" else model.body_parameters()) if body else None
    if directory is not None:
        rank = loop_options.get("rank")
        loop_options["state"] = headwater.torch.TrainerState(directory, rank=rank, model=model, optimizer=optimizer)
    loop = headwater.torch.TrainingLoop(head, optimizer, **loop_options)
    return head, loop, headwater.torch.CrossEntropyLoss(head, **(loss or {}))


def train_with(loop, loss_fn, model: LanguageModel, steps) -> list:
    """Trains it over a `headwater.torch.TrainingLoop`."""
    return train(model, steps, loss_fn, loop.backward, loop.step)


def changes(model: LanguageModel, other: LanguageModel, seed: int = 0) -> dict[str, float]:
    """For each parameter: the difference of the two models, by how far the first has moved since the beginning."""
    tied = model.lm_head.weight is model.embedding.weight
    begin = dict(LanguageModel(tied=tied, bias=model.lm_head.bias is not None, seed=seed).named_parameters())
    others = dict(other.named_parameters())
    return {
        name: float((value - others[name]).detach().double().norm() / (value - begin[name]).detach().double().norm())
        for name, value in model.named_parameters()
    }


def check_trained(expected: LanguageModel, model: LanguageModel, tolerance: float) -> None:
    """The first has trained what the second has."""
    for name, change in changes(expected, model).items():
        assert change <= tolerance, f"{name}: {change:.2g}"


class Trainer:
    """A trainer process's objects: made anew, they are a process that was started again. `tied`: None or the owner."""

    def __init__(self, client, name: str, directory=None, *, tied: str | None = "server", seed: int = 0, every: int = 2, **options):
        self.model = LanguageModel(tied=tied is not None, seed=seed)
        options |= {"directory": directory, "checkpoint_every": every}
        self.head, self.loop, self.loss_fn = attach_with_loop(client, name, self.model, tied or "server", **options)
        self.state = self.loop._state
        self.steps = []  # as they were begun

    def contribute(self, step: int, index: int) -> None:
        """One of the two micro-batches of a step."""
        inputs, targets = micro_batch(step, index)
        self.loop.backward(self.loss_fn(self.model.body(inputs), targets) / 2)

    def train_step(self, step: int) -> None:
        """Both of them; the step stays open."""
        self.steps.append(step)
        for index in range(2):
            self.contribute(step, index)

    def train(self, *steps: int) -> None:
        """The steps of range(*steps)."""
        for step in range(*steps):
            self.train_step(step)
            self.loop.step()

    def run(self, steps: int, train_step=None) -> None:
        """All steps until `steps`, by the loop's `run`."""
        self.loop.run(train_step or self.train_step, steps, learning_rate=RATE)

    def parameters(self) -> dict[str, torch.Tensor]:
        """All that is trained, by name."""
        own = {name: value.detach().clone() for name, value in self.model.named_parameters() if not name.startswith("lm_head")}
        return {**own, "head": torch.tensor(self.head.weight())}
