"""A headwaterd for a benchmark in Python."""

import contextlib
import dataclasses
import pathlib
import subprocess
import tempfile
import time

CPU_ENGINE = ("--engine=cpu", "--threads=1")


@dataclasses.dataclass
class Server:
    """A headwaterd that runs; without anything, none."""

    process: subprocess.Popen | None = None
    address: str = ""
    log: pathlib.Path | None = None

    def log_end(self):
        """The last 4000 characters of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-4000:] if self.log else ""


@contextlib.contextmanager
def running(build, folder, *engine, listen=None):
    """A build's headwaterd, by default on a Unix socket in `folder`; it ends with the context.

    `engine` are its flags of the engine: without, the CPU engine and one thread.
    """
    ready, log = folder / "ready", folder / "log"
    listen = listen or f"unix:{folder}/hw.sock"
    command = [build / "bin" / "headwaterd", f"--listen_addresses={listen}", f"--port_file={ready}", "--metrics_address="]
    with log.open("wb") as output:
        process = subprocess.Popen([*map(str, command), *(engine or CPU_ENGINE)], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 120
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("headwaterd did not start:\n" + log.read_text())
            time.sleep(0.05)
        yield Server(process, ready.read_text().split()[0], log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def sharing(build, *engine, listen=None, wanted=True):
    """As running(), in a folder of its own, with memory that it shares with its clients. No server if none is wanted."""
    if not wanted:
        yield Server()
        return
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        folder = pathlib.Path(name)
        with running(build, folder, *(engine or CPU_ENGINE), f"--descriptor_socket={folder}/memory", listen=listen) as started:
            yield started
