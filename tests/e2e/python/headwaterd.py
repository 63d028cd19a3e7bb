"""The headwaterd that tests and benchmarks start.

HEADWATERD names the program; without it, bin/headwaterd of the build that HEADWATER_BUILD_DIR names. HEADWATER_TEST_ENGINE is its
engine, "cpu" or "cuda"; without it, "cpu".
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

START_TIMEOUT_S = 120
ENGINE = os.environ.get("HEADWATER_TEST_ENGINE", "cpu")
# For headwater.local, too, in this process and in those that the tests start.
if "HEADWATER_BUILD_DIR" in os.environ:
    os.environ.setdefault("HEADWATERD", os.path.join(os.environ["HEADWATER_BUILD_DIR"], "bin", "headwaterd"))


def server_binary() -> str:
    """Path of headwaterd; fails where there is none, because a suite without a server proves nothing."""
    path = os.environ.get("HEADWATERD")
    if not path or not os.access(path, os.X_OK):
        raise RuntimeError(f"set HEADWATERD to headwaterd, or HEADWATER_BUILD_DIR to a build with bin/headwaterd (have {path!r})")
    return path


class Server:
    """A headwaterd in a directory of its own, which flags call {directory}; `process`: options of its Popen."""

    def __init__(self, directory: Path, *flags: str, binary: Path | None = None, **process):
        self.directory = directory
        self.checkpoints = directory / "checkpoints"
        self.load_root = directory / "load"
        self.load_root.mkdir()
        self.log = (directory / "log").open("w+b")
        self.output = directory / "output"
        ready = directory / "ready"
        self._command = [
            str(binary or server_binary()),
            f"--listen_addresses=unix:{directory}/hw.sock",
            f"--port_file={ready}",
            "--metrics_address=",
            f"--checkpoint_directory={self.checkpoints}",
            f"--load_root={self.load_root}",
            "--log_level=warning",
            f"--engine={ENGINE}",
            *(flag.replace("{directory}", str(directory)) for flag in flags),
        ]
        self._ready = ready
        self._process_options = process
        self.start()

    def start(self) -> None:
        """Starts it, for the first time or again: at the same address, on the same checkpoints."""
        self._ready.unlink(missing_ok=True)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(self._command, **{"stdout": output, "stderr": self.log, **self._process_options})
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                log = self.log_text()
                self.stop()
                raise RuntimeError(f"headwaterd did not get ready: {log}")
            time.sleep(0.02)
        self.address = self._ready.read_text().split()[0]

    def metrics_port(self) -> str:
        """The port of its metrics; start it with --metrics_address=127.0.0.1:0."""
        return self.output.read_text().split("metrics on port ")[1].split()[0]

    def metrics_page(self, host: str = "127.0.0.1") -> str:
        with urllib.request.urlopen(f"http://{host}:{self.metrics_port()}/metrics", timeout=10) as page:
            return page.read().decode()

    def metrics(self) -> dict[str, float]:
        """Its metrics by name with labels."""
        lines = self.metrics_page().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def log_text(self) -> str:
        self.log.flush()
        return (self.directory / "log").read_text(errors="replace")

    def log_end(self) -> str:
        return self.log_text()[-4000:]

    @contextlib.contextmanager
    def frozen(self):
        """Stops it for a while: calls hang without depending on how fast the machine is."""
        self.process.send_signal(signal.SIGSTOP)
        # One thread takes the signal and stops the others; on a busy machine they go on until it has its turn.
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it without warning."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        """As a server that has crashed, and that something starts again."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """Ends it in an orderly way; by force if that takes too long."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(START_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self.log.close()


@contextlib.contextmanager
def running_server(*flags: str, **process):
    """A server for a `with` statement. Its socket's path must be short, so it does not live under pytest's directories."""
    with tempfile.TemporaryDirectory(prefix="hw-") as directory:
        server = Server(Path(directory), *flags, **process)
        try:
            yield server
        finally:
            server.stop()
