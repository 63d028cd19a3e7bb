"""GPUs of two processes, joined as two hosts would be: they compute what one process with all of them does, and a worker may die.

Marked gpu_group: on as many GPUs as there are, half of them each. Without a GPU the same runs on a stand-in for the CUDA engine's
module, whose ranks are CPU engines: then all but the engine is tested, and NCCL.
"""

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from expectations import eventually
from headwaterd import START_TIMEOUT_S, running_server, server_binary
from loss_oracle import as_float64, error, stored

import headwater

# Large enough for rows that come slice by slice, and for a vocabulary that no number of ranks divides.
VOCAB_SIZE, HIDDEN_SIZE = 8191, 256
ROWS = (37, 600, 5000)
STEPS = 2
# Of gradients that were added up in another order: tensor cores truncate. A contribution that is lost is a tenth of the gradient.
ROWS_GRADIENT = 1e-4
# How often the worker is killed; tests/gpu does it 20 times.
WORKER_KILLS = int(os.environ.get("HEADWATER_WORKER_KILLS", "1"))
# Of processes that are there one after the other: quickly ready, with the same products each time.
FLAGS = ("--engine=cuda", "--notimed_search", "--algorithm_cache=", "--workspace_bytes=536870912", "--threads=1")


@pytest.fixture
def stand_in(fake_module, monkeypatch):
    """Whose devices can do what a test wants of them."""
    # Its ranks are CPU engines; still more rows than the client sends in one chunk.
    monkeypatch.setattr(sys.modules[__name__], "ROWS", (37, 600, 2500))


@pytest.fixture(params=["stand-in", pytest.param("gpus", marks=pytest.mark.gpu_group)])
def ranks(request):
    """How many ranks there are to be, an even number."""
    if request.param == "stand-in":
        request.getfixturevalue("stand_in")
        return 4
    gpus = pytest.importorskip("torch").cuda.device_count()
    if gpus < 2:
        pytest.skip(f"needs two GPUs, there are {gpus}")
    return gpus // 2 * 2


class Group:
    """A leader and a worker process, each with half of the ranks on devices of its own."""

    def __init__(self, leader, ranks: int, worker_flags: tuple[str, ...]):
        self.leader = leader
        self._flags = [f"--gpus={ranks // 2}", f"--device={ranks // 2}", *worker_flags]
        self.start_worker()

    def start_worker(self) -> None:
        flags = ["--engine=cuda", "--group_listen_host=127.0.0.1", "--algorithm_cache=", *self._flags]
        command = [server_binary(), f"--join={self.leader.address}", *flags]
        with (self.leader.directory / "worker-log").open("ab") as log:
            self.worker = subprocess.Popen(command, stderr=log)

    def kill_worker(self) -> None:
        self.worker.send_signal(signal.SIGKILL)
        self.worker.wait(START_TIMEOUT_S)

    def logs(self) -> str:
        return self.leader.log_text() + (self.leader.directory / "worker-log").read_text(errors="replace")

    def await_serving(self, not_in: bytes = b"") -> None:
        """In another incarnation than `not_in`."""

        def serves() -> bool:
            assert self.leader.process.poll() is None, self.logs()
            with contextlib.suppress(headwater.HeadwaterError), headwater.connect(self.leader.address, timeout_s=5) as client:
                return client.health() == "SERVING" and client.server_info().incarnation != not_in
            return False

        eventually(serves, self.logs, 2 * START_TIMEOUT_S)


@contextlib.contextmanager
def running_group(ranks: int, *flags: str, worker_flags: tuple[str, ...] = ()):
    """A leader that serves, with its worker. `flags`: the leader's."""
    half = ranks // 2
    with running_server(*FLAGS, f"--gpus={half}", f"--workers={half}", "--group_listen_host=127.0.0.1", *flags) as leader:
        group = Group(leader, ranks, worker_flags)
        try:
            group.await_serving()
            yield group
        finally:
            group.kill_worker()


def values(rng, rows: int, data_type: str, scale: float = 1.0):
    return stored((rng.standard_normal((rows, HIDDEN_SIZE)) * scale).astype(np.float32), data_type)


def outputs_of(name, out) -> dict:
    """What has come back, by name."""
    fields = ("loss_sum", "token_loss", "lse", "entropy", "argmax", "grad_hidden")
    return {f"{name} {field}": as_float64(value) for field in fields if (value := getattr(out, field)) is not None}


class Training:
    """A student and its teacher, and what a few steps of both losses yield; the same numbers wherever it runs."""

    def __init__(self, client, data_type: str):
        rng = np.random.default_rng(11)
        scale = 3 / np.sqrt(HIDDEN_SIZE)
        self.data_type = data_type
        self.student = client.create_head(
            "student", values(rng, VOCAB_SIZE, data_type, scale), optimizer=headwater.AdamW(weight_decay=0.1)
        )
        self.teacher = client.create_head("teacher", values(rng, VOCAB_SIZE, data_type, scale), trainable=False)
        self.outputs = {}  # by name

    def step(self, step: int) -> None:
        rng = np.random.default_rng([12, step])
        micro_batch = 0
        for rows in ROWS:
            hidden, taught = values(rng, rows, self.data_type), values(rng, rows, self.data_type)
            targets = rng.integers(0, VOCAB_SIZE, rows)
            targets[::7] = -100
            common = {"loss_scale": 1 / rows, "step": step}
            out = self.student.cross_entropy(
                hidden, targets, micro_batch=micro_batch, label_smoothing=0.1, outputs=("token_loss", "lse", "entropy", "argmax"),
                **common,
            )  # fmt: skip
            self.outputs |= outputs_of(f"step {step} cross entropy of {rows}", out)
            out = self.student.jsd(
                hidden, self.teacher, taught, targets=targets, micro_batch=micro_batch + 1, hard_loss_weight=0.25, beta=0.3,
                outputs=("token_loss",), **common,
            )  # fmt: skip
            self.outputs |= outputs_of(f"step {step} divergence of {rows}", out)
            micro_batch += 2
        result = self.student.apply_optimizer_step(
            learning_rate=0.01, expected_micro_batches=micro_batch, max_grad_norm=1.0, step=step
        )
        self.outputs[f"step {step} norm"] = as_float64(result.global_grad_norm)
        self.outputs[f"step {step} weight"] = as_float64(self.student.weight(dtype="float32"))


def train(address: str, data_type: str) -> dict:
    with headwater.connect(address) as client:
        training = Training(client, data_type)
        for step in range(STEPS):
            training.step(step)
        return training.outputs


def assert_same(actual: dict, expected: dict) -> None:
    """To the bit."""
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not np.array_equal(actual[name], expected[name])]
    for name in different:
        distance = np.abs(actual[name] - expected[name])
        print(f"{name}: {np.count_nonzero(distance)} of {distance.size} differ, by up to {distance.max():.2e}")
    assert not different
    for value in expected.values():
        assert np.isfinite(value).all()


@pytest.mark.parametrize("data_type", ("float32", "bfloat16"))
def test_two_processes_compute_what_one_does(ranks, data_type):
    """As two nodes would be joined: losses, gradients and weights to the bit."""
    with running_server(*FLAGS, f"--gpus={ranks}") as server:
        expected = train(server.address, data_type)
    with running_group(ranks) as group:
        with headwater.connect(group.leader.address) as client:
            devices = [device.name for device in client.server_info().devices]
        assert devices == [f"cuda:{rank}" + (f"@{rank}" if rank >= ranks // 2 else "") for rank in range(ranks)]
        actual = train(group.leader.address, data_type)
    assert_same(actual, expected)


def train_by_rows(server) -> tuple[dict, np.ndarray]:
    """Outputs of micro-batches of which each is computed by one rank, several at once, and the step's gradient."""

    def computing() -> list[float]:
        times = server.metrics()
        name = 'headwater_rank_seconds_total{activity="compute",rank="%d"}'
        return [times[name % rank] for rank in range(len(devices)) if name % rank in times]

    with headwater.connect(server.address) as client:
        devices = client.server_info().devices
        rng = np.random.default_rng(13)
        scale = 3 / np.sqrt(HIDDEN_SIZE)
        student = client.create_head("rows", values(rng, VOCAB_SIZE, "bfloat16", scale), parallelism="rows")
        before = computing()
        hidden = [values(rng, ROWS[1], "bfloat16") for _ in range(8 * len(devices))]
        targets = rng.integers(0, VOCAB_SIZE, ROWS[1])
        with concurrent.futures.ThreadPoolExecutor(2 * len(devices)) as callers:
            results = callers.map(
                lambda micro_batch: student.cross_entropy(
                    hidden[micro_batch], targets, micro_batch=micro_batch, loss_scale=1 / ROWS[1], outputs=("token_loss",)
                ),
                range(len(hidden)),
            )
            outputs = {}
            for micro_batch, out in enumerate(results):
                outputs |= outputs_of(micro_batch, out)
        # Workers tell their times twice a second.
        eventually(lambda: all(now > then for now, then in zip(computing(), before, strict=True)), lambda: (before, computing()))
        return outputs, as_float64(student.gradient())


def test_heads_by_rows_are_computed_by_the_ranks_of_both_processes(ranks):
    """Outputs to the bit, whichever rank computes; the gradient within the rounding of sums of another order."""
    metrics = "--metrics_address=127.0.0.1:0"
    with running_server(*FLAGS, f"--gpus={ranks}", metrics) as server:
        expected, gradient = train_by_rows(server)
    with running_group(ranks, metrics) as group:
        actual, other = train_by_rows(group.leader)
    assert_same(actual, expected)
    distance = error(other, gradient)
    print(f"gradients differ by {distance:.2e}")
    assert distance <= ROWS_GRADIENT


def kill_in_a_micro_batch(group: Group, student) -> None:
    """Kills the worker while the leader computes a micro-batch of step 1, which must be answered."""
    hidden = values(np.random.default_rng(1), ROWS[-1], "float32")
    answered = threading.Semaphore(0)

    def submit_until_failure():
        for micro_batch in range(1_000_000):
            student.cross_entropy(hidden, np.zeros(ROWS[-1], np.int64), micro_batch=micro_batch, step=1)
            answered.release()

    with concurrent.futures.ThreadPoolExecutor(1) as callers:
        calls = callers.submit(submit_until_failure)
        try:
            for _ in range(2):
                assert answered.acquire(timeout=START_TIMEOUT_S), group.logs()
            start = time.monotonic()
            group.kill_worker()
            error = calls.exception(START_TIMEOUT_S)
        finally:
            if not calls.done():  # or the pool's end would wait for them
                group.leader.kill()
    print(f"answered after {time.monotonic() - start:.2f} s: {error}")
    assert isinstance(error, headwater.StepLostError), group.logs()
    group.start_worker()
    group.await_serving()
    print(f"back after {time.monotonic() - start:.2f} s")


def test_a_worker_that_is_killed_costs_the_open_step_alone(ranks):
    """Killed in the middle of a micro-batch: it is answered, the group begins anew, and the training ends with the same bits."""
    with running_group(ranks) as group:
        expected = train(group.leader.address, "float32")
    with running_group(ranks, "--rank_timeout=60s") as group:
        with headwater.connect(group.leader.address) as client:
            training = Training(client, "float32")
            training.step(0)
            training.student.save("after-0")
            training.teacher.save("teacher")
            kill_in_a_micro_batch(group, training.student)
        for kills_left in reversed(range(WORKER_KILLS)):
            with headwater.connect(group.leader.address) as client:
                training.student, training.teacher = client.head("student"), client.head("teacher")
                assert training.student.info().restored_checkpoint == "after-0"
                training.student.take()
                if kills_left:
                    kill_in_a_micro_batch(group, training.student)
                else:
                    training.step(1)
        assert_same(training.outputs, expected)
        # The other way round: a worker begins anew by itself, and is there for the next leader.
        start = time.monotonic()
        group.leader.restart()
        group.await_serving()
        print(f"back after {time.monotonic() - start:.2f} s")
        assert group.worker.poll() is None
        with headwater.connect(group.leader.address) as client:
            assert client.head("student").info().restored_checkpoint == "after-0"


def test_a_worker_that_is_asked_to_end_costs_nothing(stand_in):
    """All ranks of its process stay until the leader has saved what nobody had saved, and then the process ends."""
    with running_group(4, "--drain_checkpoint", "--drain_timeout=120s", worker_flags=("--drain_timeout=120s",)) as group:
        weight = np.arange(21, dtype=np.float32).reshape(7, 3)
        with headwater.connect(group.leader.address) as client:
            client.create_head("student", weight)
            incarnation = client.server_info().incarnation
        group.worker.send_signal(signal.SIGTERM)
        assert group.worker.wait(START_TIMEOUT_S) == 0, group.logs()
        assert "event=leaving signal=15" in group.logs()
        group.start_worker()
        group.await_serving(incarnation)
        with headwater.connect(group.leader.address) as client:
            head = client.head("student")
            assert head.info().restored_checkpoint == "drain"
            assert np.array_equal(head.weight(dtype="float32"), weight)
        # Of no group, it ends at once.
        group.leader.kill()
        eventually(lambda: "Connection refused" in group.logs(), group.logs)
        group.worker.send_signal(signal.SIGTERM)
        assert group.worker.wait(START_TIMEOUT_S) == 0, group.logs()


# What the stand-in's devices do with so many rows: they are lost, and say so or only look so; they never come back, and say why or
# do not.
@pytest.mark.parametrize("rows", (13, 14, 15, 16))
def test_leader_and_worker_begin_anew_when_their_devices_are_lost(stand_in, rows):
    flags = ("--device_lost_grace=1s", "--engine_stall_timeout=6s", "--rank_timeout=3s")
    with running_group(4, *flags, worker_flags=("--device_lost_grace=1s",)) as group:
        with headwater.connect(group.leader.address) as client:
            head = client.create_head("student", np.ones((7, 3), np.float32))
            head.save("saved")
            incarnation = client.server_info().incarnation
            assert head.cross_entropy(np.ones((5, 3), np.float32), np.zeros(5, np.int64), micro_batch=0).valid_token_count == 5
            with pytest.raises((headwater.StepLostError, headwater.UnavailableError)):
                head.cross_entropy(np.ones((rows, 3), np.float32), np.zeros(rows, np.int64), micro_batch=1)
        group.await_serving(incarnation)
        assert group.worker.poll() is None
        assert group.leader.process.poll() is None
        with headwater.connect(group.leader.address) as client:
            head = client.head("student")
            assert head.info().restored_checkpoint == "saved"
            head.take()
            assert head.cross_entropy(np.ones((5, 3), np.float32), np.zeros(5, np.int64), micro_batch=0).valid_token_count == 5
