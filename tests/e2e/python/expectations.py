"""What tests expect: errors, what comes about in time, and programs that end as they should."""

import contextlib
import subprocess
import sys
import time

import pytest

import headwater

# A server that was killed takes a while to come back.
PATIENT = headwater.RetryPolicy(max_attempts=200, initial_backoff=0.05, max_backoff=0.25)


@contextlib.contextmanager
def refused(reason, kind=headwater.HeadwaterError, *told, **metadata):
    """Expects an error of this class with this reason, these texts and these metadata; yields what pytest.raises does."""
    with pytest.raises(kind) as info:
        yield info
    assert info.value.reason == reason, f"expected {reason}, got {info.value}"
    assert all(text in str(info.value) for text in told), f"expected {told} in {info.value}"
    assert metadata.items() <= info.value.metadata.items(), info.value.metadata


def eventually(condition, told="", timeout_s=60):
    """The first true value of the condition, whose OSErrors count as false, but for the client's; fails later, saying `told`."""
    deadline, last = time.monotonic() + timeout_s, None
    while True:
        try:
            if value := condition():
                return value
        except headwater.HeadwaterError:
            raise
        except OSError as error:
            last = error
        assert time.monotonic() < deadline, told() if callable(told) else f"waited {timeout_s} s for {told}; last: {last}"
        time.sleep(0.01)


def run(command, **options):
    """The output of a program that ends without an error."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_python(program, *arguments):
    """The output of a Python program, text or a file, that ends without an error."""
    return run([sys.executable, *(["-c", program] if isinstance(program, str) else [program]), *arguments])


class ClientProgram:
    """A process whose client has connected, and which does `work` after finish() or go_on().

    The work's names are `client` and `head`; options of `connect` may be given.
    """

    TEXT = """
import signal, sys, threading
import headwater, numpy

address, name, options = sys.argv[1:]
client = headwater.connect(address, **eval(options))
head = client.head(name)
print("connected", flush=True)
sys.stdin.readline()
"""

    def __init__(self, address, work, head="scripted", **options):
        command = [sys.executable, "-c", self.TEXT + work, address, head, repr(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "connected\n", self.process.communicate()

    def go_on(self):
        """Lets it go on by a line."""
        self.process.stdin.write("go on\n")
        self.process.stdin.flush()

    def finish(self, timeout_s):
        """Lets it go on to its end, which comes in time and without an error; its output. `errors` is what else it says."""
        try:
            output, self.errors = self.process.communicate("go on\n", timeout=timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail("the process does not end", pytrace=False)
        finally:
            self.process.kill()
            self.process.wait()
        assert self.process.returncode == 0 and "Traceback" not in self.errors and "Exception" not in self.errors, self.errors
        return output
