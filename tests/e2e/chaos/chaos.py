"""A training run under disturbances drawn by a seed, and the same run undisturbed: they must end in the same bits.

A server in deterministic mode and two trainers, each a process of its own, each trainer behind a link of its own. Disturbances: the
server or a trainer is killed with SIGKILL and started again; a link is cut, halted, or slow; the disk of the checkpoints is full.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import links
import trainer

sys.path.append(str(Path(__file__).parents[1] / "python"))
from headwaterd import START_TIMEOUT_S, Server

KINDS = {"kill server": 4, "kill trainer": 4, "cut link": 5, "halt link": 2, "slow link": 2, "fill disk": 3}  # with their weights
DISK_BYTES = 4 << 20
# Training that does not get on for so long never will.
STUCK_TIMEOUT_S = 180
FINAL_TIMEOUT_S = 300


class Failure(Exception):
    """The run has not ended as it should have."""


@dataclasses.dataclass(frozen=True)
class Event:
    step: int  # not before this one is worked on
    delay_s: float  # after that
    kind: str
    rank: int  # of the trainer or link
    seconds: float  # how long it lasts


def draw_events(seed: int, count: int, steps: int) -> list[Event]:
    rng = random.Random(seed)
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=count)
    places = sorted(rng.randrange(max(1, steps - 2)) for _ in range(count))
    return [
        Event(step, rng.uniform(0, 0.2), kind, rng.randrange(trainer.WORLD_SIZE), rng.uniform(0.05, 0.8))
        for step, kind in zip(places, kinds, strict=True)
    ]


class Disk:
    """Where checkpoints lie: a small file system of its own where mounting is allowed, else the size of files is bounded."""

    def __init__(self, directory: Path):
        self.directory = directory
        directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)]
        try:
            self.is_mounted = subprocess.run(command, capture_output=True).returncode == 0
        except OSError:
            self.is_mounted = False
        self.kind = "a file system of its own" if self.is_mounted else "a bound on the size of files"
        self._hog = directory / ".hog"

    def fill(self, server: int) -> None:
        if not self.is_mounted:
            self._bound(server, 1024)
            return
        with contextlib.suppress(OSError), self._hog.open("wb", buffering=0) as hog:
            while True:
                hog.write(bytes(1 << 16))

    def empty(self, server: int) -> None:
        if self.is_mounted:
            self._hog.unlink(missing_ok=True)
        else:
            self._bound(server, resource.RLIM_INFINITY)

    @staticmethod
    def _bound(server: int, size: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            hard = resource.prlimit(server, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(server, resource.RLIMIT_FSIZE, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.directory)], capture_output=True)


class Run:
    """One training run, in a directory of its own."""

    def __init__(self, directory: Path, *, seed: int, steps: int, shards: int, link_kind: str):
        directory.mkdir()
        self.directory = directory
        self.steps = steps
        self._seed = seed
        self._closing = contextlib.ExitStack()
        self.disk = Disk(directory / "checkpoints")
        self._closing.callback(self.disk.close)
        port = links.free_port()
        self.links = links.make_links(link_kind, trainer.WORLD_SIZE, port)
        for link in self.links:
            self._closing.callback(link.close)
        addresses = ",".join(sorted({link.listen_address for link in self.links}))
        self.metrics: Counter[str] = Counter()
        self.fired: Counter[str] = Counter()
        self._generations = [-1] * trainer.WORLD_SIZE
        self._trainers: list[subprocess.Popen | None] = [None] * trainer.WORLD_SIZE
        self._go(0)
        self._server = Server(
            directory,
            f"--listen_addresses={addresses}",
            "--metrics_address=127.0.0.1:0",
            f"--checkpoint_directory={self.disk.directory}",
            "--deterministic",
            "--engine=cpu",
            "--threads=2",
            f"--shards={shards}",
            restore_signals=False,  # SIGXFSZ stays ignored, as Python has it: a write beyond the bound fails
        )
        self._closing.callback(self._server.stop)
        self._closing.callback(self._stop)
        for rank in range(trainer.WORLD_SIZE):
            self._start_trainer(rank)
            # The first one makes the head and its first checkpoint.
            self._await(lambda rank=rank: bool(self._statuses(rank)), START_TIMEOUT_S, "the first step of a trainer")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._closing.close()

    # ---- processes ------------------------------------------------------------------------------------------------------------

    def _start_trainer(self, rank: int) -> None:
        self._generations[rank] += 1
        link = self.links[rank]
        options = {"rank": rank, "generation": self._generations[rank], "steps": self.steps, "seed": self._seed}
        options |= {"address": link.address, "directory": str(self.directory)}
        command = [*link.command, sys.executable, trainer.__file__, json.dumps(options)]
        with (self.directory / f"trainer-{rank}-log").open("ab") as log:
            # gRPC would take a proxy of the environment for addresses that are not loopback.
            environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
            self._trainers[rank] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def _stop(self) -> None:
        """Ends the trainers."""
        for process in self._trainers:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    def _check(self, *statuses: int) -> None:
        """That no process has ended, or a trainer with another status than 0 and `statuses`."""
        for rank, process in enumerate(self._trainers):
            if process is not None and process.poll() not in (None, 0, *statuses):
                raise Failure(f"trainer {rank} ended with status {process.returncode}; see {self.directory}/trainer-{rank}-log")
        if self._server.process.poll() is not None:
            raise Failure(f"the server ended with status {self._server.process.returncode}; see {self.directory}/log")

    def _await(self, holds, timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            self._check()
            if time.monotonic() > deadline:
                raise Failure(f"{what} has not come within {timeout_s:.0f} s; logs are in {self.directory}")
            time.sleep(0.01)

    # ---- what the run has come to ---------------------------------------------------------------------------------------------

    def _statuses(self, rank: int) -> list[dict]:
        return [json.loads(file.read_text()) for file in self.directory.glob(f"status-{rank}-*[0-9]") if file.suffix == ""]

    def step(self) -> int:
        """That the slower trainer works on."""
        return min(max((status["step"] for status in self._statuses(rank)), default=0) for rank in range(trainer.WORLD_SIZE))

    def counts(self) -> Counter:
        total: Counter[str] = Counter()
        for rank in range(trainer.WORLD_SIZE):
            for status in self._statuses(rank):
                total.update({key: value for key, value in status.items() if key != "step"})
        return total

    def _scrape(self) -> None:
        """Adds what the server has counted since its start."""
        with contextlib.suppress(OSError):
            metrics = self._server.metrics()
            self.metrics["restored heads"] += int(metrics.get("headwater_restored_heads_total", 0))
            for name, value in metrics.items():
                if found := re.fullmatch(r'headwater_micro_batches_total\{outcome="(\w+)"\}', name):
                    self.metrics[found[1]] += int(value)

    # ---- disturbances ---------------------------------------------------------------------------------------------------------

    def fire(self, event: Event) -> None:
        self.fired[event.kind] += 1
        if event.kind == "kill server":
            self._scrape()
            self._server.kill()
            time.sleep(event.seconds / 4)
            self._server.start()
        elif event.kind == "kill trainer":
            process = self._trainers[event.rank]
            if process.poll() is None:
                process.kill()
                process.wait()
            self._check(-9)
            time.sleep(event.seconds / 4)
            self._start_trainer(event.rank)
        elif event.kind == "fill disk":
            self.disk.fill(self._server.process.pid)
            time.sleep(event.seconds)
            self.disk.empty(self._server.process.pid)
        else:
            link = self.links[event.rank]
            {"cut link": link.cut, "halt link": link.halt, "slow link": link.slow}[event.kind](event.seconds)

    def disturb(self, events: list[Event]) -> None:
        for number, event in enumerate(events):
            self._go(event.step + 1)
            self._await(lambda event=event: self.step() >= event.step, STUCK_TIMEOUT_S, f"step {event.step}, for event {number}")
            time.sleep(event.delay_s)
            print(f"{number:4} step {self.step():4}: {event.kind} {event.rank} {event.seconds:.2f} s", flush=True)
            self.fire(event)
        self._go(self.steps)

    def _go(self, step: int) -> None:
        trainer.write(self.directory / "go", str(step).encode())

    def finish(self) -> dict[str, str]:
        """Waits for the end; digests of all that the run has come to."""
        self._await(
            lambda: all(process.poll() == 0 for process in self._trainers), FINAL_TIMEOUT_S + self.steps, "the end of the run"
        )
        self._scrape()
        result = {}
        final = self.disk.directory / "default" / trainer.HEAD / "final"
        manifest = json.loads((final / "manifest.json").read_text())["manifest"]
        result["step"] = str(manifest["step"])
        result["update_count"] = str(manifest["update_count"])
        for file in sorted(final.glob("*.safetensors")):
            result[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        for rank in range(trainer.WORLD_SIZE):
            body = (self.directory / f"body-{rank}-{self.steps}").read_bytes()
            result[f"body of trainer {rank}"] = hashlib.sha256(body).hexdigest()
        return result


def campaign(directory: Path, *, seed: int, events: int, steps: int, shards: int, link_kind: str) -> dict:
    """Both runs, compared. What there is to report; Failure if they differ, or one does not end."""
    options = {"seed": seed, "steps": steps, "shards": shards}

    def undisturbed() -> dict[str, str]:
        with Run(directory / "undisturbed", link_kind="proxy", **options) as run:
            run.disturb([])
            return run.finish()

    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        expected = beside.submit(undisturbed)
        with Run(directory / "disturbed", link_kind=link_kind, **options) as run:
            run.disturb(draw_events(seed, events, steps))
            actual = run.finish()
            report = {
                "seed": seed,
                "events": sum(run.fired.values()),
                "steps": steps,
                "shards": shards,
                "links": run.links[0].kind,
                "disk": run.disk.kind,
                "seconds": round(time.monotonic() - start),
                "by kind": run.fired,
                "trainers": run.counts(),
                "server": run.metrics,
            }
    if actual != expected.result():
        raise Failure(f"the runs differ: undisturbed {expected.result()}, disturbed {actual}; {directory}")
    return report
