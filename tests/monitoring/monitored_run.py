"""A headwaterd with metrics that trains a little and is scraped by a real Prometheus."""

import concurrent.futures
import contextlib
import json
import re
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np

import headwater

sys.path.append(str(Path(__file__).resolve().parents[1] / "deploy"))

from servers import Server, eventually, running_server

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "monitoring" / "headwater.rules.yaml"


def running(*flags: str):
    """A server with metrics and a log in JSON that shares memory, for a `with` statement."""
    own = ("--metrics_address=127.0.0.1:0", "--descriptor_socket={directory}/fd.sock", "--log_format=json")
    return running_server(*own, *flags)


class Prometheus:
    """A Prometheus of our own, on a port that the system draws, for a `with` statement.

    Its configuration is the one that docs/operations.md shows, with short intervals.
    """

    def __init__(self, server: Server):
        self.config = server.directory / "prometheus.yml"
        self.config.write_text(
            f"""\
global:
  scrape_interval: 500ms
  evaluation_interval: 1s
rule_files:
  - {RULES}
scrape_configs:
  - job_name: headwater
    static_configs:
      - targets: ["127.0.0.1:{server.metrics_port()}"]
"""
        )
        log = server.directory / "prometheus.log"
        storage = f"--storage.tsdb.path={server.directory / 'data'}"
        command = ["prometheus", f"--config.file={self.config}", storage, "--web.listen-address=127.0.0.1:0"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)

        def is_ready() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(f"Prometheus did not start: {log.read_text()[-2000:]}")
            found = re.search(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', log.read_text())
            self._port = int(found[1]) if found else 0
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=10) as answer:
                return answer.status == 200

        eventually(is_ready, "Prometheus")

    def get(self, path: str, **parameters: object):
        """The `data` of an answer of its HTTP API."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        return document["data"]

    def query(self, expression: str) -> list[dict]:
        return self.get("query", query=expression)["result"]

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        self._process.wait()


VOCAB_SIZE, HIDDEN_SIZE, TOKENS = 2000, 64, 256


@contextlib.contextmanager
def training(address: str):
    """Trains within a `with` statement, by gRPC and by shared memory in turns; the number of steps so far, as a function.

    An error ends the training: the function raises it. A step has eager and explicit micro-batches, a repeat, a discard, a
    distillation and an optimizer step.
    """
    stopping, done = threading.Event(), []

    def train() -> None:
        rng = np.random.default_rng(0)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(headwater.connect(address, transport=way)) for way in ("grpc", "shared_memory")]
            weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
            clients[0].create_head("student", weight, optimizer=headwater.AdamW(), staging_slots=2)
            clients[0].create_head("teacher", weight, trainable=False)
            heads = [(client.head("student"), client.head("teacher")) for client in clients]
            while not stopping.is_set():
                train_step(*heads[len(done) % len(heads)], rng, len(done))
                done.append(None)

    def steps() -> int:
        return len(done) if not future.done() else future.result()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(train)
        try:
            yield steps
        finally:
            stopping.set()
            future.result()


def train_step(student, teacher, rng, step: int) -> None:
    hidden = rng.standard_normal((TOKENS, HIDDEN_SIZE)).astype(np.float32)
    targets = rng.integers(0, VOCAB_SIZE, TOKENS)
    student.cross_entropy(hidden, targets, micro_batch=0, step=step)
    student.cross_entropy(hidden, targets, micro_batch=0, step=step)  # a retry
    student.cross_entropy(hidden, targets, micro_batch=1, step=step, commit="explicit").commit(1.0)
    student.cross_entropy(hidden, targets, micro_batch=2, step=step, commit="explicit").discard()
    student.jsd(hidden, teacher, hidden[::-1].copy(), micro_batch=3, step=step)
    student.apply_optimizer_step(learning_rate=1e-3, step=step, expected_micro_batches=[0, 1, 3])
