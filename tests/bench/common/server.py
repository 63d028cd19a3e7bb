"""A headwaterd for a benchmark in Python."""

import contextlib
import subprocess
import time


@contextlib.contextmanager
def running(build, folder, *engine):
    """The address of a build's headwaterd, on a Unix socket in `folder`; it ends with the context.

    `engine` are its flags of the engine: without, the CPU engine and one thread.
    """
    ready, log = folder / "ready", folder / "log"
    address = f"unix:{folder}/hw.sock"
    command = [build / "bin" / "headwaterd", f"--listen_addresses={address}", f"--port_file={ready}", "--metrics_address="]
    with log.open("wb") as output:
        process = subprocess.Popen([*map(str, command), *(engine or ("--engine=cpu", "--threads=1"))], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("headwaterd did not start:\n" + log.read_text())
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait(60)
