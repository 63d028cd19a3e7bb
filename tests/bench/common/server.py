"""A headwaterd for a benchmark in Python."""

import contextlib
import pathlib
import sys
import tempfile
import types

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "e2e/python"))
import headwaterd

CPU_ENGINE = ("--engine=cpu", "--threads=1")
# The server's defaults in the place of those of the tests.
DEFAULTS = ("--checkpoint_directory=", "--load_root=", "--log_level=info")
# In the place of a server where none is wanted.
NO_SERVER = types.SimpleNamespace(address="", log_end=lambda: "")


@contextlib.contextmanager
def running(build, folder, *engine, listen=None):
    """A build's headwaterd, by default on a Unix socket in `folder`; it ends with the context.

    `engine` are its flags of the engine: without, the CPU engine and one thread.
    """
    listening = [f"--listen_addresses={listen}"] if listen else []
    started = headwaterd.Server(folder, *DEFAULTS, *listening, *(engine or CPU_ENGINE), binary=build / "bin/headwaterd")
    try:
        yield started
    finally:
        started.stop()


@contextlib.contextmanager
def sharing(build, *engine, listen=None, wanted=True):
    """As running(), in a folder of its own, with memory that it shares with its clients. No server if none is wanted."""
    if not wanted:
        yield NO_SERVER
        return
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        folder = pathlib.Path(name)
        with running(build, folder, *(engine or CPU_ENGINE), f"--descriptor_socket={folder}/memory", listen=listen) as started:
            yield started
