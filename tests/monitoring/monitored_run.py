"""A headwaterd that trains a little and is scraped by a real Prometheus."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np

import headwater

sys.path.append(str(Path(__file__).resolve().parents[1] / "deploy"))

from servers import start_server, wait_until

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "monitoring" / "headwater.rules.yaml"
SCRAPE_INTERVAL_S = 0.5


def find_prometheus() -> tuple[str, str] | None:
    """prometheus and promtool, of Debian's package `prometheus`; None without them."""
    found = shutil.which("prometheus"), shutil.which("promtool")
    return found if all(found) else None


def configuration(metrics_port: int) -> str:
    """The configuration that docs/operations.md shows, with short intervals."""
    return f"""\
global:
  scrape_interval: {int(SCRAPE_INTERVAL_S * 1000)}ms
  evaluation_interval: 1s
rule_files:
  - {RULES}
scrape_configs:
  - job_name: headwater
    static_configs:
      - targets: ["127.0.0.1:{metrics_port}"]
"""


class Prometheus:
    """A Prometheus of our own, on a port that the system draws."""

    def __init__(self, directory: Path, metrics_port: int):
        self.config = directory / "prometheus.yml"
        self.config.write_text(configuration(metrics_port))
        log = directory / "prometheus.log"
        storage = f"--storage.tsdb.path={directory / 'data'}"
        command = [find_prometheus()[0], f"--config.file={self.config}", storage, "--web.listen-address=127.0.0.1:0"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

        def is_ready() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"Prometheus did not start: {log.read_text()[-2000:]}")
            found = re.search(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', log.read_text())
            self.port = int(found[1]) if found else 0
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=10) as answer:
                return answer.status == 200

        wait_until(is_ready, "Prometheus")

    def get(self, path: str, **parameters: object):
        """The `data` of an answer of its HTTP API."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        return document["data"]

    def query(self, expression: str) -> list[dict]:
        return self.get("query", query=expression)["result"]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


class Server:
    """A headwaterd with metrics."""

    def __init__(self, directory: Path, *flags: str):
        self.address, self.log = f"unix:{directory}/hw.sock", directory / "log"
        own = [
            f"--listen_addresses={self.address}",
            f"--port_file={directory / 'ready'}",
            "--metrics_address=127.0.0.1:0",
            f"--checkpoint_directory={directory / 'checkpoints'}",
            f"--descriptor_socket={directory / 'fd.sock'}",
            "--engine=cpu",
            "--log_level=warning",
        ]
        self.process = start_server([*own, *flags], directory / "ready", self.log, out=f"{directory}/out")
        self.metrics_port = int((directory / "out").read_text().split("metrics on port ")[1].split()[0])

    def scrape(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as page:
            return page.read().decode()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


class Training(threading.Thread):
    """Trains until it is stopped, by gRPC and by shared memory in turns.

    A step has eager and explicit micro-batches, a repeat, a discard, a distillation and an optimizer step.
    """

    VOCAB_SIZE, HIDDEN_SIZE, TOKENS = 2000, 64, 256

    def __init__(self, address: str):
        super().__init__(daemon=True)
        self._address = address
        self._stopping = threading.Event()
        self.steps = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            rng = np.random.default_rng(0)
            with contextlib.ExitStack() as stack:
                clients = [
                    stack.enter_context(headwater.connect(self._address, transport=transport))
                    for transport in ("grpc", "shared_memory")
                ]
                weight = rng.standard_normal((self.VOCAB_SIZE, self.HIDDEN_SIZE)).astype(np.float32)
                clients[0].create_head("student", weight, optimizer=headwater.AdamW(), staging_slots=2)
                clients[0].create_head("teacher", weight, trainable=False)
                heads = [(client.head("student"), client.head("teacher")) for client in clients]
                while not self._stopping.is_set():
                    self._step(*heads[self.steps % len(heads)], rng)
                    self.steps += 1
        except BaseException as error:
            self.error = error

    def _step(self, student, teacher, rng) -> None:
        step = self.steps
        hidden = rng.standard_normal((self.TOKENS, self.HIDDEN_SIZE)).astype(np.float32)
        targets = rng.integers(0, self.VOCAB_SIZE, self.TOKENS)
        student.cross_entropy(hidden, targets, micro_batch=0, step=step)
        student.cross_entropy(hidden, targets, micro_batch=0, step=step)  # a retry
        student.cross_entropy(hidden, targets, micro_batch=1, step=step, commit="explicit").commit(1.0)
        student.cross_entropy(hidden, targets, micro_batch=2, step=step, commit="explicit").discard()
        student.jsd(hidden, teacher, hidden[::-1].copy(), micro_batch=3, step=step)
        student.apply_optimizer_step(learning_rate=1e-3, step=step, expected_micro_batches=[0, 1, 3])

    def stop(self) -> None:
        self._stopping.set()
        self.join()
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def monitored_training():
    """A server, a training run on it and a Prometheus that scrapes it, for a `with` statement."""
    # The socket's path must be short.
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hw-")))
        server = Server(directory)
        stack.callback(server.stop)
        prometheus = Prometheus(directory, server.metrics_port)
        stack.callback(prometheus.stop)
        training = Training(server.address)
        training.start()
        stack.callback(training.stop)
        yield server, prometheus, training
