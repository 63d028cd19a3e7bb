"""Servers and trainers that are killed and started again around `headwater.train`: the run ends where an undisturbed one does."""

import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import grpc
import numpy as np
import pytest
from expectations import PATIENT, eventually, refused, run_python
from headwater.v1 import head_service_pb2, head_service_pb2_grpc
from headwaterd import START_TIMEOUT_S, running_server

import headwater
import headwater.local
from headwater import _recovery
from headwater._recovery import Meeting

STEPS = 7
PATIENCE_S = 600.0
VOCAB_SIZE, HIDDEN_SIZE, FEATURES, TOKENS, MICRO_BATCHES = 40, 16, 8, 12, 2
CHECKPOINT_EVERY = 2


def initial(seed, rows):
    """Numbers that every process makes alike."""
    return (np.random.default_rng(seed).standard_normal((rows, HIDDEN_SIZE)) * 0.3).astype(np.float32)


def batch(step, micro_batch, columns=HIDDEN_SIZE):
    """Rows and targets of a micro-batch, the same whenever it is done."""
    rng = np.random.default_rng([step, micro_batch])
    return rng.standard_normal((TOKENS, columns)).astype(np.float32), rng.integers(0, VOCAB_SIZE, TOKENS)


class Trainer:
    """A linear body with momentum in numpy, under a head with the server's AdamW. `interrupt(step, place)` is called in between."""

    def __init__(self, client, directory):
        self.head = client.create_head(
            "student", initial(1, VOCAB_SIZE), optimizer=headwater.AdamW(), staging_slots=1, if_exists="attach"
        )
        self.body, self.momentum = initial(2, FEATURES), np.zeros((FEATURES, HIDDEN_SIZE), np.float32)
        self.state = headwater.StateFiles(directory, save=self._save, load=self._load)
        self.steps = []  # as they were done
        self.interrupt = lambda step, place: None

    def _save(self, path):
        with path.open("wb") as file:
            np.savez(file, body=self.body, momentum=self.momentum)

    def _load(self, path):
        with np.load(path) as arrays:
            self.body, self.momentum = arrays["body"], arrays["momentum"]

    def train_step(self, step):
        self.steps.append(step)
        self.interrupt(step, "begun")
        gradient = np.zeros_like(self.body)
        for micro_batch in range(MICRO_BATCHES):
            features, targets = batch(step, micro_batch, FEATURES)
            out = self.head.cross_entropy(features @ self.body, targets, micro_batch=micro_batch, loss_scale=1 / TOKENS)
            gradient += features.T @ out.grad_hidden
            self.interrupt(step, "micro-batch")
        sealed = self.head.seal(expected_micro_batches=MICRO_BATCHES)
        self.interrupt(step, "sealed")
        result = self.head.apply_optimizer_step(
            learning_rate=0.01, max_grad_norm=0.5, other_grad_norm_squared=float(np.sum(gradient.astype(np.float64) ** 2))
        )
        assert sealed.totals.micro_batch_count == MICRO_BATCHES
        self.momentum = 0.9 * self.momentum + np.float32(result.clip_factor) * gradient
        self.body = self.body - 0.05 * self.momentum
        self.interrupt(step, "closed")

    def run(self, steps):
        """Trains until this step is open; the weights of head and body."""
        headwater.train(self.head, self.train_step, steps, state=self.state, checkpoint_every=CHECKPOINT_EVERY, patience_s=60)
        return self.head.weight(), self.body, self.momentum


@pytest.fixture(scope="module")
def undisturbed():
    """Weights of head and body after all steps, and the body's momentum."""
    with running_server() as server, headwater.connect(server.address) as client:
        return Trainer(client, server.directory / "state").run(STEPS)


def assert_same(actual, expected):
    for value, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(value, other)


def test_a_server_that_is_killed_now_and_then(undisturbed):
    """The trainer goes back to its checkpoint and the head's of the same name. test_replay.py has a client with a log."""
    with running_server() as server, headwater.connect(server.address, retries=PATIENT) as client:
        trainer = Trainer(client, server.directory / "state")
        places = [(0, "begun"), (2, "micro-batch"), (4, "closed"), (5, "sealed")]

        def interrupt(*place):
            if place in places:
                places.remove(place)
                server.restart()

        trainer.interrupt = interrupt
        assert_same(trainer.run(STEPS), undisturbed)
        assert not places
        assert len(trainer.steps) > STEPS


def test_a_server_that_is_away_for_a_while(undisturbed):
    """Longer than the client tries by itself."""
    with running_server() as server:
        with headwater.connect(server.address, retries=None, timeout_s=20) as client:
            trainer = Trainer(client, server.directory / "state")
            killed = []

            def interrupt(step, where):
                if (step, where) == (3, "micro-batch") and not killed:
                    killed.append(step)
                    server.kill()
                    threading.Timer(0.5, server.start).start()

            trainer.interrupt = interrupt
            assert_same(trainer.run(STEPS), undisturbed)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(undisturbed):
    """At the server's start, where log and metric say so, and when a trainer asks for it."""
    with running_server("--metrics_address=127.0.0.1:0", "--keep_checkpoints=2") as server:
        with headwater.connect(server.address) as client:
            trainer = Trainer(client, server.directory / "state")
            trainer.head.save("best")  # no part of the series
            trainer.run(5)
        saved = server.checkpoints / "default" / "student"
        assert sorted(path.name for path in saved.iterdir() if path.is_dir()) == ["best", "step-2", "step-4"]
        server.stop()
        shard = next((saved / "step-4").glob("*.safetensors"))
        damaged = bytearray(shard.read_bytes())
        damaged[-1] ^= 1
        shard.write_bytes(damaged)
        server.log = (server.directory / "log").open("a+b")
        server.start()
        assert "checkpoint_skipped" in server.log_text() and "step-4" in server.log_text()
        assert server.metrics()["headwater_skipped_checkpoints_total"] == 1
        with headwater.connect(server.address) as client:
            head = client.head("student")
            assert head.info().restored_checkpoint == "step-2"
            with refused("STEP_LOST", headwater.StepLostError) as info:
                head.gradient()
            assert info.value.checkpoints == {"step-4": 4, "step-2": 2, "best": 0}
            trainer = Trainer(client, server.directory / "state")
            assert_same(trainer.run(STEPS), undisturbed)
            assert trainer.steps[0] == 2


def test_a_trainer_and_a_server_that_have_no_step_in_common_are_told(undisturbed):
    with running_server() as server, headwater.connect(server.address) as client:
        trainer = Trainer(client, server.directory / "state")
        trainer.run(3)
        for path in (server.directory / "state").iterdir():
            path.unlink()
        (server.directory / "state" / "step-9").write_bytes(b"")
        known = {"checkpoints": "step-2=2,step-0=0"}
        with refused("STEP_MISMATCH", headwater.FailedPreconditionError) as info:
            trainer.run(STEPS)
        assert info.value.metadata == {"openStep": "3", "trainerSteps": "9", **known}
        head = client.head("student")
        head.step = 8
        with refused("STEP_MISMATCH", headwater.StepMismatchError, openStep="3") as info:
            head.gradient()
        assert info.value.checkpoints == {"step-2": 2, "step-0": 0}
        with refused("CHECKPOINT_NOT_FOUND", headwater.NotFoundError, **known):
            head.restore("step-9")


@pytest.mark.parametrize("replay", (False, True), ids=("told", "replayed"))
def test_a_server_that_is_told_to_end_saves_what_has_changed(replay):
    """SIGTERM: the next server opens the step that was open, and a client with a log of that step goes on."""
    rows, targets = batch(0, 0)
    with (
        running_server("--drain_checkpoint", "--drain_timeout=60s") as server,
        headwater.connect(server.address, retries=PATIENT, replay=replay, replay_steps=0) as client,
    ):
        head = client.create_head("student", initial(1, VOCAB_SIZE), optimizer=headwater.AdamW())
        head.save("step-0")
        teacher = client.create_head("teacher", initial(2, VOCAB_SIZE), trainable=False)  # never saved
        head.cross_entropy(rows, targets, micro_batch=0)
        head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=1)
        weight = head.weight()
        head.cross_entropy(rows, targets, micro_batch=0)
        expected = head.gradient()
        server.process.terminate()
        assert server.process.wait(START_TIMEOUT_S) == 0
        server.start()
        np.testing.assert_array_equal(client.head("student").weight(), weight)
        np.testing.assert_array_equal(client.head("teacher").weight(), teacher.weight())
        if replay:
            np.testing.assert_array_equal(head.weight(), weight)
            np.testing.assert_array_equal(head.gradient(), expected)
            assert head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=1).open_step == 2
        else:
            with refused("STEP_LOST", headwater.StepLostError):
                head.weight()
            with refused("STEP_LOST", headwater.StepLostError) as info:
                head.gradient()
            assert (info.value.restored_step, info.value.checkpoint) == (1, "drain")
            assert info.value.checkpoints == {"drain": 1, "step-0": 0}


def test_a_call_that_does_not_end_does_not_keep_heads_from_being_saved():
    """Half of the time is for saving; the call is cancelled at the end of the other half, which the exit status says."""
    flags = ("--drain_checkpoint", "--drain_timeout=4s", "--metrics_address=127.0.0.1:0")
    with running_server(*flags) as server, headwater.connect(server.address, retries=PATIENT) as client:
        head = client.create_head("student", initial(1, VOCAB_SIZE), optimizer=headwater.SGD())
        head.discard_gradient()
        header = head_service_pb2.AddGradientHeader(micro_batch=0, row_count=1, factor=1)
        header.head.head, header.head.head_epoch, header.head.step = head.name, head.epoch, 1
        released = threading.Event()

        def requests():
            yield head_service_pb2.AddGradientRequest(header=header)
            released.wait(START_TIMEOUT_S)

        with grpc.insecure_channel(server.address) as channel:
            call = head_service_pb2_grpc.HeadServiceStub(channel).AddGradient.future(requests())
            eventually(lambda: server.metrics()["headwater_in_flight_bytes"] or call.done())
            assert not call.done()
            server.process.terminate()
            assert server.process.wait(START_TIMEOUT_S) == 1
            released.set()
        assert "calls were cancelled" in server.log_text()
        server.start()
        info = head.info()
        assert (info.state, info.open_step, info.restored_checkpoint) == ("RESTORED", 1, "drain")


def test_the_loop_needs_no_server(undisturbed, tmp_path):
    with headwater.local.connect(checkpoint_dir=tmp_path / "heads") as client:
        first = Trainer(client, tmp_path / "state")

        def interrupt(step, where):
            if (step, where) == (4, "sealed"):
                raise KeyboardInterrupt

        first.interrupt = interrupt
        with pytest.raises(KeyboardInterrupt):
            first.run(STEPS)
        second = Trainer(client, tmp_path / "state")
        for value, other in zip(second.run(STEPS), undisturbed, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5)
        assert second.steps[0] == 4


def test_the_example_may_be_killed(tmp_path):
    example = Path(__file__).resolve().parents[4] / "client" / "examples" / "python" / "recover.py"
    weights = []
    with running_server() as server:
        for name in ("undisturbed", "disturbed"):
            command = [example, tmp_path / name, server.address, "15"]
            if name == "disturbed":
                with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
                    next(line for line in process.stdout if line.startswith("step 7:"))
                    process.kill()
            weights.append(re.search(r"weights (\w+)", run_python(*command))[1])
            with headwater.connect(server.address) as client:
                client.head("example-recover").delete(force=True)
    assert weights[0] == weights[1]


def files(folder, **options):
    """A trainer's state without content."""
    return headwater.StateFiles(folder, save=lambda path: path.touch(), load=lambda path: None, **options)


@pytest.fixture
def heads(tmp_path):
    with headwater.local.connect(checkpoint_dir=tmp_path / "heads") as client:
        yield [client.create_head(name, np.ones((5, 4), np.float32)) for name in ("a", "b")]


def test_a_step_that_is_not_closed_and_heads_that_part_are_told(heads, tmp_path):
    for reason, kind, told, arguments in (
        ("INVALID_COMBINATION", headwater.FailedPreconditionError, "step 0 was not closed", (heads, lambda step: None)),
        ("INVALID_COMBINATION", headwater.FailedPreconditionError, "every head", (heads, lambda step: heads[0].discard_gradient())),
        ("INVALID_COMBINATION", headwater.InvalidArgumentError, "", ([], lambda step: None)),
    ):
        with refused(reason, kind, told):
            headwater.train(*arguments, 1, state=files(tmp_path / "state"), checkpoint_every=1)
    with refused("INVALID_NAME", headwater.InvalidArgumentError):
        headwater.train(heads, print, 1, checkpoint_name="latest", state=files(tmp_path / "state"), checkpoint_every=1)


def test_heads_that_were_moved_in_vain_are_brought_to_one_step(heads, tmp_path):
    """One of two heads has a whole checkpoint of the newest step: it is there by the time the step before is tried."""
    state = files(tmp_path / "state")
    for step, saved in ((1, heads), (2, heads[:1])):
        for head in heads:
            head.discard_gradient()
        for head in saved:
            head.save(f"step-{step}")
        state.save(step)
    for head in heads:
        head.restore("step-1")
    meeting = Meeting(heads, state, "step-{step}", None)
    for _ in range(2):
        assert meeting.bring_heads_back(None) == 1
        assert [head.step for head in heads] == [head.info().open_step for head in heads] == [1, 1]


def test_what_a_killed_process_has_left_unfinished_goes(tmp_path):
    for name in (".1.step-7.pt", ".999.step-8.pt", ".1.step-7.rank-1.pt", ".1.step-7.pt.mine", "step-3.pt"):
        (tmp_path / name).touch()
    files(tmp_path, suffix=".pt").save(9)
    assert {path.name for path in tmp_path.iterdir()} == {".1.step-7.rank-1.pt", ".1.step-7.pt.mine", "step-3.pt", "step-9.pt"}
    files(tmp_path, suffix=".rank-1.pt").save(9)
    assert not (tmp_path / ".1.step-7.rank-1.pt").exists()


class Steps:
    """Five steps for `follow`, of `seconds` each: `fail(step)` returns the error in which the step ends, or None.

    Time passes in sleeps alone.
    """

    def __init__(self, monkeypatch, fail, *, seconds=0.0):
        self.now, self.open, self.resumed = 0.0, 0, 0
        self._fail, self._seconds = fail, seconds
        monkeypatch.setattr(_recovery, "time", types.SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def _sleep(self, seconds):
        self.now += seconds

    def _advance(self, step):
        self._sleep(self._seconds)
        error = self._fail(step)
        if error is not None:
            raise error
        self.open = step + 1

    def _resume(self):
        self.resumed += 1
        self.open = 0
        return self.open

    def run(self):
        _recovery.follow(self._resume, self._advance, lambda: self.open, 5, PATIENCE_S)


def once(error, *at):
    """Fails in these steps, each the first time that it comes to them."""
    left = list(at)

    def fail(step):
        if step not in left:
            return None
        left.remove(step)
        return error

    return fail


AWAY = headwater.UnavailableError("the server is away")
RESTARTING = headwater.InternalError("the GPU is lost", reason="ENGINE_FAILED", metadata={"serverRestarts": "true"})


@pytest.mark.parametrize("error", (AWAY, RESTARTING), ids=("away", "restarting"))
def test_patience_is_for_each_time_that_the_server_is_away(monkeypatch, error):
    """Steps that take longer than that, and those that are done again, are no part of it."""
    steps = Steps(monkeypatch, once(error, 3, 2, 3), seconds=700.0)
    steps.run()
    assert (steps.open, steps.resumed) == (5, 4)


def test_patience_ends(monkeypatch):
    steps = Steps(monkeypatch, lambda step: AWAY)
    with pytest.raises(headwater.UnavailableError):
        steps.run()
    assert PATIENCE_S < steps.now < PATIENCE_S + 20


# The first three get no further than step 3, the others are errors that no restart mends.
@pytest.mark.parametrize(
    ("error", "at", "resumed"),
    (
        (headwater.StepLostError("lost", reason="STEP_LOST"), 3, 9),
        (AWAY, 3, 9),
        (RESTARTING, 3, 9),
        (headwater.InternalError("no", reason="ENGINE_FAILED"), 0, 1),
        (headwater.ClientClosedError("closed"), 0, 1),
    ),
    ids=("lost", "away", "restarting", "an engine that fails", "closed"),
)
def test_a_run_ends_in_an_error_that_comes_again_or_that_is_final(monkeypatch, error, at, resumed):
    steps = Steps(monkeypatch, lambda step: error if step == at else None)
    with pytest.raises(type(error)):
        steps.run()
    assert steps.resumed == resumed


def test_state_files_are_whole_or_not_there(tmp_path):
    with refused("INVALID_FIELD", headwater.InvalidArgumentError):
        files(tmp_path, keep=1)  # the heads' checkpoint of the newest step comes after the state, or never
    written = []

    def save(path):
        path.write_text("state")
        written.append(path)
        if len(written) == 4:
            raise OSError("no space left")

    read = []
    state = headwater.StateFiles(tmp_path / "deep" / "state", save=save, load=lambda path: read.append(path.read_text()), keep=2)
    assert state.steps() == []
    for step in (1, 2, 10):
        state.save(step)
    assert state.steps() == [2, 10]
    with pytest.raises(OSError, match="no space"):
        state.save(11)
    assert state.steps() == [2, 10]
    assert len(list((tmp_path / "deep" / "state").iterdir())) == 2
    state.save(2)  # older than the other one, and what is to be loaded next
    assert state.steps() == [2, 10]
    state.load(10)
    assert read == ["state"]
    with refused("CHECKPOINT_NOT_FOUND", headwater.NotFoundError):
        state.load(11)
