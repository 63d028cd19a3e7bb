"""Programs that test_torch_restart.py kills: two data-parallel trainers that distil, and the process of their teacher.

python torch_restart.py trainer|teacher JSON

Nothing here is told that it was started again: a trainer sees that its own state is there, and joins the run. The trainers reduce
their body's gradients and meet at barriers through files, so that one of them can go and come back.
"""

import contextlib
import json
import multiprocessing.connection
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import headwater
import headwater.torch

WORLD_SIZE, MICRO_BATCHES, TOKENS = 2, 2, 12
FEATURES, STUDENT_SIZE, TEACHER_SIZE, VOCAB_SIZE = 10, 16, 20, 61
PATIENCE_S = 25
HANG_S = 60  # what is to be killed waits for it; the test has long been over then


@dataclass(frozen=True)
class Arguments:
    """Where the run lives, and where this process is to hang."""

    address: str  # of the server
    directory: str
    name: str  # prefix of the heads
    steps: int
    rank: int = 0  # trainers only
    ordered: bool = False  # commit a step's micro-batches in the order of their ids
    hang: str = ""  # "step:index:phase" of a trainer, "step:micro_batch" of the teacher


def tokens(step: int, micro_batch: int) -> torch.Tensor:
    """Features of a micro-batch, (TOKENS, FEATURES)."""
    return torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(100 * step + micro_batch))


def initial(seed: int, *shape: int) -> torch.Tensor:
    """Weights that every process makes alike."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


class Files:
    """What the trainers tell each other. Every file is written once and whole, or again with the same content."""

    def __init__(self, directory: Path, rank: int):
        self._directory = directory
        self._rank = rank
        self.label = "start"
        self._count = 0

    def begin(self, label: str) -> None:
        """The barriers that follow are this part's first ones, in a process that was started again as well."""
        self.label, self._count = label, 0

    def barrier(self) -> None:
        """Returns when all ranks have been here."""
        self._exchange(f"barrier-{self.label}-{self._count}", None)
        self._count += 1

    def total(self, parameters: list[torch.nn.Parameter]) -> None:
        """Sums the gradients over the ranks, in the order of the ranks."""
        for parameter, gradients in zip(
            parameters, zip(*self._exchange(f"sum-{self.label}", [p.grad for p in parameters]), strict=True), strict=True
        ):
            parameter.grad = sum(gradients)

    def wait(self, micro_batch: int) -> None:
        """Returns when a micro-batch of this part is done."""
        self._until([self._directory / f"done-{self.label}.{micro_batch}"])

    def done(self, micro_batch: int) -> None:
        """A micro-batch of this part is committed."""
        (self._directory / f"done-{self.label}.{micro_batch}").touch()

    def _exchange(self, what: str, value: object) -> list:
        path = self._directory / f"{what}.{self._rank}"
        unfinished = path.with_name(f"{path.name}.tmp")
        torch.save(value, unfinished)
        unfinished.replace(path)
        paths = [self._directory / f"{what}.{rank}" for rank in range(WORLD_SIZE)]
        self._until(paths)
        return [torch.load(other) for other in paths]

    def _until(self, paths: list[Path]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not all(path.exists() for path in paths):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._rank} waits for {', '.join(path.name for path in paths)}")
            time.sleep(0.005)


def hang(arguments: Arguments, who: str) -> None:
    """Says that the place is reached, and waits to be killed."""
    (Path(arguments.directory) / f"hangs.{who}").touch()
    time.sleep(HANG_S)
    raise TimeoutError(f"{who} was not killed")


def patiently(attempt, *errors: type[BaseException]):
    """What `attempt` returns, once it does not raise one of these errors."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return attempt()
        except errors:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def teacher_socket(arguments: Arguments) -> str:
    """Path of the socket that the teacher listens on."""
    return str(Path(arguments.directory) / "teacher.sock")


def ask_teacher(arguments: Arguments, step: int, micro_batch: int) -> torch.Tensor:
    """The teacher's hidden states of a micro-batch; asked again if the teacher goes away in between."""

    def ask():
        with multiprocessing.connection.Client(teacher_socket(arguments), "AF_UNIX") as connection:
            connection.send((step, micro_batch))
            return torch.from_numpy(connection.recv())

    return patiently(ask, OSError, EOFError)


def run_teacher(arguments: Arguments) -> None:
    """Holds the teacher's body: creates its frozen head, and answers for its hidden states until it is told to stop."""
    body = initial(1, TEACHER_SIZE, FEATURES)
    with headwater.connect(arguments.address) as client:
        weight = initial(2, VOCAB_SIZE, TEACHER_SIZE)
        client.create_head(f"{arguments.name}-teacher", weight, trainable=False, if_exists="attach")
        path = Path(teacher_socket(arguments))
        path.unlink(missing_ok=True)
        with multiprocessing.connection.Listener(str(path), "AF_UNIX") as listener:
            while True:
                with listener.accept() as connection, contextlib.suppress(OSError, EOFError):
                    request = connection.recv()
                    if request is None:
                        return
                    if ":".join(map(str, request)) == arguments.hang:
                        hang(arguments, "teacher")
                    connection.send(np.ascontiguousarray((tokens(*request) @ body.T).numpy()))


def stop_teacher(arguments: Arguments) -> None:
    """Ends a teacher that answers."""
    with multiprocessing.connection.Client(teacher_socket(arguments), "AF_UNIX") as connection:
        connection.send(None)


def run_trainer(arguments: Arguments) -> None:
    """One of the data-parallel trainers."""
    directory = Path(arguments.directory)
    files = Files(directory, arguments.rank)
    layer = torch.nn.Linear(STUDENT_SIZE, VOCAB_SIZE)
    body = torch.nn.Linear(FEATURES, STUDENT_SIZE)
    with torch.no_grad():
        for seed, parameter in enumerate([*layer.parameters(), *body.parameters()], start=10):
            parameter.copy_(initial(seed, *parameter.shape))
    optimizer = torch.optim.AdamW(body.parameters(), lr=1e-2)
    with headwater.connect(arguments.address) as client:
        teacher = patiently(lambda: client.head(f"{arguments.name}-teacher"), headwater.NotFoundError)
        head = headwater.torch.attach(
            client, f"{arguments.name}-student", layer, optimizer=headwater.AdamW(), staging_slots=WORLD_SIZE
        )
        state = headwater.torch.TrainerState(directory / "state", rank=arguments.rank, body=body, optimizer=optimizer)
        loop = headwater.torch.TrainingLoop(
            [head, teacher],
            optimizer,
            state=state,
            checkpoint_every=1,
            max_grad_norm=0.5,
            rank=arguments.rank,
            world_size=WORLD_SIZE,
            barrier=files.barrier,
        )
        loss_fn = headwater.torch.JSDLoss(head, teacher, beta=0.5)
        for step in range(loop.resume(take=not state.steps()), arguments.steps):
            files.begin(str(step))
            for index in range(MICRO_BATCHES):
                micro_batch = index * WORLD_SIZE + arguments.rank
                teacher_hidden = ask_teacher(arguments, step, micro_batch)
                loss = loss_fn(torch.tanh(body(tokens(step, micro_batch))), teacher_hidden) / (WORLD_SIZE * MICRO_BATCHES)
                if arguments.hang == f"{step}:{index}:staged":
                    hang(arguments, f"trainer-{arguments.rank}")
                if arguments.ordered and micro_batch:
                    files.wait(micro_batch - 1)
                loop.backward(loss)
                if arguments.hang == f"{step}:{index}:committed":
                    hang(arguments, f"trainer-{arguments.rank}")
                files.done(micro_batch)
            files.total(list(body.parameters()))
            loop.step(learning_rate=1e-2)
        torch.save(body.state_dict(), directory / f"body.{arguments.rank}")


def command(kind: str, arguments: Arguments) -> list[str]:
    """The command line of one of the programs."""
    return [sys.executable, __file__, kind, json.dumps(asdict(arguments))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"trainer": run_trainer, "teacher": run_teacher}[sys.argv[1]](Arguments(**json.loads(sys.argv[2])))
