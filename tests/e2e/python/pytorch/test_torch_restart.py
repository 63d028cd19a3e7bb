"""Processes that are killed in mid-step and started again: trainers, the teacher, the server. The final weights do not show it."""

import contextlib
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch_restart as programs
from conftest import running_server
from expectations import refused
from torch_language_model import LanguageModel, micro_batch, train_with

import headwater
import headwater.torch

STEPS = 6
# Of a weight's difference, by how far it has moved. Measured: 2e-7.
TOLERANCE = 1e-5
PATIENCE_S = 25


def final_state(arguments, client):
    """Everything that training has moved, by name."""
    student = client.head(f"{arguments.name}-student")
    assert student.step == arguments.steps
    state = {"weight": torch.tensor(student.weight()), "bias": torch.tensor(student.bias())}
    bodies = [torch.load(Path(arguments.directory) / f"body.{rank}") for rank in range(programs.WORLD_SIZE)]
    for name in bodies[0]:
        assert torch.equal(bodies[0][name], bodies[1][name]), name  # data-parallel ranks stay alike, bit by bit
    return {**state, **{f"body.{name}": value for name, value in bodies[0].items()}}


@contextlib.contextmanager
def deleted_afterwards(arguments, client):
    try:
        yield
    finally:
        for part in ("student", "teacher"):
            with contextlib.suppress(headwater.NotFoundError):
                client.head(f"{arguments.name}-{part}").delete(force=True)


def run_in_threads(arguments):
    """The same programs, undisturbed."""
    errors = []

    def run(program, own):
        try:
            program(own)
        except BaseException as error:
            errors.append(error)

    own = {f"rank {rank}": programs.Arguments(**{**vars(arguments), "rank": rank}) for rank in range(programs.WORLD_SIZE)}
    teacher = threading.Thread(target=run, args=(programs.run_teacher, arguments), daemon=True)
    trainers = [threading.Thread(target=run, args=(programs.run_trainer, each), daemon=True) for each in own.values()]
    for thread in (teacher, *trainers):
        thread.start()
    for thread in trainers:
        thread.join(PATIENCE_S)
    programs.stop_teacher(arguments)
    teacher.join(PATIENCE_S)
    assert not errors, errors[0]


class Processes:
    """Programs of our own; whatever is left of them at the end is killed, by its id."""

    def __init__(self, directory):
        self._directory = directory
        self._running = {}

    def start(self, who, kind, arguments):
        log = (self._directory / f"log.{who}").open("ab")
        self._running[who] = subprocess.Popen(programs.command(kind, arguments), stdout=log, stderr=log)
        log.close()

    def kill_where_it_hangs(self, who):
        """SIGKILL, once the program has reached its place."""
        place = self._directory / f"hangs.{who}"
        deadline = time.monotonic() + PATIENCE_S
        while not place.exists():
            assert self._running[who].poll() is None and time.monotonic() < deadline, self.log(who)
            time.sleep(0.005)
        self._running[who].send_signal(signal.SIGKILL)
        assert self._running[who].wait(PATIENCE_S) == -signal.SIGKILL

    def finish(self, who):
        try:
            assert self._running[who].wait(PATIENCE_S) == 0, self.log(who)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{who} does not end: {self.log(who)}", pytrace=False)

    def log(self, who):
        return (self._directory / f"log.{who}").read_text(errors="replace")

    def stop(self):
        for process in self._running.values():
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.parametrize("ordered", (True, False), ids=("in the order of ids", "as they come"))
def test_two_trainers_and_a_teacher_are_each_killed_in_mid_step(remote, ordered):
    """What a rank had committed is not added twice, what it had not is not missing: every micro-batch is in the gradient once.

    Contributions are added in the order of their commits. If that is the same, the weights are, bit by bit; if it depends on time,
    fp32 sums are rounded in another order.
    """
    with tempfile.TemporaryDirectory(prefix="hw-") as folder, contextlib.ExitStack() as stack:
        runs = {}
        for name in ("undisturbed", "disturbed"):
            directory = Path(folder) / name
            directory.mkdir()
            runs[name] = programs.Arguments(remote.address, str(directory), f"restart-{name}", STEPS, ordered=ordered)
            stack.enter_context(deleted_afterwards(runs[name], remote.client))
        arguments = runs["disturbed"]
        processes = Processes(Path(arguments.directory))
        stack.callback(processes.stop)

        def of(rank, hang=""):
            return programs.Arguments(**{**vars(arguments), "rank": rank, "hang": hang})

        # The teacher has been asked and has not answered; rank 1's second micro-batch waits for its decision; rank 0 has committed
        # its first one.
        processes.start("teacher", "teacher", of(0, "2:1"))
        processes.start("trainer-1", "trainer", of(1, "3:1:staged"))
        processes.start("trainer-0", "trainer", of(0, "4:0:committed"))
        run_in_threads(runs["undisturbed"])
        expected = final_state(runs["undisturbed"], remote.client)
        for who, kind, rank in (("teacher", "teacher", 0), ("trainer-1", "trainer", 1), ("trainer-0", "trainer", 0)):
            processes.kill_where_it_hangs(who)
            processes.start(who, kind, of(rank))
        for who in ("trainer-0", "trainer-1"):
            processes.finish(who)
        programs.stop_teacher(arguments)
        processes.finish("teacher")

        actual = final_state(arguments, remote.client)
        last = remote.client.head(f"{arguments.name}-student").step_state().last_closed
        assert sorted(last.micro_batches) == list(range(programs.WORLD_SIZE * programs.MICRO_BATCHES))
    begin = {
        name: programs.initial(seed, *expected[name].shape)
        for seed, name in enumerate(("weight", "bias", "body.weight", "body.bias"), start=10)
    }
    for name, value in expected.items():
        moved = (value - begin[name]).double().norm()
        difference = float((value - actual[name]).double().norm() / moved)
        assert difference <= (0 if ordered else TOLERANCE), f"{name}: {difference:.2g}"


@pytest.fixture(params=(1, 3))
def server(request):
    with running_server(f"--shards={request.param}") as server:
        yield server


class Trainer:
    """A trainer process's objects."""

    def __init__(self, client, name, directory, *, tied, every, seed=0):
        self.model = LanguageModel(tied=tied is not None, seed=seed)
        options = {"tied": tied} if tied else {}
        if tied != "trainer":
            options["optimizer"] = headwater.AdamW()
        self.head = headwater.torch.attach(client, name, self.model.lm_head, model=self.model, **options)
        parameters = list(self.model.parameters()) if tied == "trainer" else self.model.body_parameters()
        optimizer = torch.optim.AdamW(parameters, lr=3e-3)
        state = headwater.torch.TrainerState(directory, model=self.model, optimizer=optimizer)
        self.loop = headwater.torch.TrainingLoop(self.head, optimizer, state=state, checkpoint_every=every)
        self.loss_fn = headwater.torch.CrossEntropyLoss(self.head)

    def train(self, steps):
        train_with(self.loop, self.loss_fn, self.model, steps, 2)

    def weights(self):
        body = {name: value.detach().clone() for name, value in self.model.named_parameters() if not name.startswith("lm_head")}
        return {**body, "head": torch.tensor(self.head.weight())}


def undisturbed(client, tmp_path, steps=6, **options):
    """The weights after so many steps."""
    trainer = Trainer(client, "undisturbed", tmp_path / "undisturbed", **options)
    assert trainer.loop.resume() == 0
    trainer.train(range(steps))
    return trainer.weights()


def assert_same(trainer, expected):
    """Bit by bit: one trainer commits in order."""
    for name, value in trainer.weights().items():
        assert torch.equal(value, expected[name]), name


def killing(trainer, server, step, moment):
    """Makes the server die in a step of this trainer, once: before its second micro-batch or before it is applied."""
    killed = []
    backward, seal = trainer.loop.backward, trainer.head.seal

    def kill(here):
        if trainer.loop.open_step == step and not killed and moment == here:
            killed.append(step)
            server.restart()

    def dying_backward(loss):
        backward(loss)
        kill("micro-batch")

    def dying_seal(**arguments):
        result = seal(**arguments)
        kill("sealed")
        return result

    trainer.loop.backward, trainer.head.seal = dying_backward, dying_seal
    return killed


@pytest.mark.parametrize("tied", (None, "trainer", "server"))
def test_a_server_that_is_killed_costs_the_steps_since_the_last_checkpoint(server, tmp_path, tied):
    with headwater.connect(server.address) as client:
        expected = undisturbed(client, tmp_path, tied=tied, every=2)
        trainer = Trainer(client, "disturbed", tmp_path / "disturbed", tied=tied, every=2)
        killed = killing(trainer, server, 3, "sealed" if tied else "micro-batch")
        assert trainer.loop.resume() == 0
        with refused("STEP_LOST", headwater.StepLostError) as info:
            trainer.train(range(6))
        assert killed and info.value.restored_step == 2 and info.value.checkpoint == "step-2"
        assert trainer.loop.resume() == 2
        trainer.train(range(2, 6))
        assert_same(trainer, expected)


def test_run_goes_back_by_itself(server, tmp_path):
    """Twice: to a checkpoint when the server was lost, and on with the rest."""
    with headwater.connect(server.address) as client:
        expected = undisturbed(client, tmp_path, tied="trainer", every=2)
        trainer = Trainer(client, "disturbed", tmp_path / "disturbed", tied="trainer", every=2)
        killed = killing(trainer, server, 3, "sealed")
        steps, outcomes = [], []

        def train_step(step):
            steps.append(step)
            for index in range(2):
                inputs, targets = micro_batch(step, index)
                trainer.loop.backward(trainer.loss_fn(trainer.model.body(inputs), targets) / 2)

        trainer.loop.run(train_step, 6, learning_rate=lambda step: 3e-3, on_step=outcomes.append)
        assert killed and steps == [0, 1, 2, 3, 2, 3, 4, 5]
        assert [outcome.checkpoint for outcome in outcomes] == [None, "step-2", None, None, "step-4", None, "step-6"]
        assert_same(trainer, expected)
        trainer.loop.run(train_step, 6)  # there is nothing left to do
        assert len(steps) == 8


@pytest.mark.parametrize("moment", ("micro-batch", "sealed"))
@pytest.mark.parametrize("tied", (None, "trainer", "server"))
def test_a_client_with_a_replay_log_spares_the_trainer_a_killed_server(server, tmp_path, tied, moment):
    with headwater.connect(server.address, replay=True) as client:
        expected = undisturbed(client, tmp_path, 4, tied=tied, every=1)
        trainer = Trainer(client, "disturbed", tmp_path / "disturbed", tied=tied, every=1)
        killed = killing(trainer, server, 2, moment)
        trainer.loop.resume()
        trainer.train(range(4))
        assert killed and trainer.loop.open_step == 4
        assert_same(trainer, expected)


def test_a_trainer_and_the_server_are_both_started_again(server, tmp_path):
    with headwater.connect(server.address) as client:
        expected = undisturbed(client, tmp_path, 5, tied="server", every=2)
        first = Trainer(client, "disturbed", tmp_path / "disturbed", tied="server", every=2)
        first.loop.resume()
        first.train(range(3))
    server.restart()
    with headwater.connect(server.address) as client:
        second = Trainer(client, "disturbed", tmp_path / "disturbed", tied="server", every=2, seed=5)
        assert second.head.info().state == "RESTORED" and second.loop.resume() == 2
        second.train(range(2, 5))
        assert_same(second, expected)


def test_a_frozen_teacher_comes_back_with_the_loop_that_keeps_it(server, tmp_path):
    with headwater.connect(server.address) as client:
        teacher = client.create_head("teacher", programs.initial(2, 67, 20), trainable=False)
        model = LanguageModel(tied=False)
        student = headwater.torch.attach(client, "student", model.lm_head, model=model, optimizer=headwater.AdamW())
        optimizer = torch.optim.AdamW(model.body_parameters(), lr=1e-3)
        loop = headwater.torch.TrainingLoop([student, teacher], optimizer, checkpoint_every=1)
        loss_fn = headwater.torch.JSDLoss(student, teacher)
        hidden, teacher_hidden = programs.initial(3, 9, 24), programs.initial(4, 9, 20)
        assert loop.resume() == 0
        loop.backward(loss_fn(hidden, teacher_hidden))
        server.restart()
        with refused("STEP_LOST", headwater.StepLostError):
            loop.step()
        assert loop.resume() == 0
        loop.backward(loss_fn(hidden, teacher_hidden))
        assert loop.step().applied
