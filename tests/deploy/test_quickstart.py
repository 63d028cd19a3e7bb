"""deploy/quickstart starts and ends its server, whatever the checkout's path and however the one before it ended.

The server is the real one. Building and training are left out. A cmake that only counts is on the PATH, and the example is a few
lines that the test writes.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from servers import eventually, write_program

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Says that it runs, and waits for its standard input to end.
WAITING = """
import argparse, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--server")
parser.add_argument("--folder", type=pathlib.Path)
arguments = parser.parse_args()
(arguments.folder / "address").write_text(arguments.server)
(arguments.folder / "running").write_text("")
while not (arguments.folder / "go on").exists():
    time.sleep(0.02)
"""
# Makes the head that the real one makes, and saves it as the reader of "talk to it" may.
SAVING = """
import argparse, headwater, numpy
parser = argparse.ArgumentParser()
parser.add_argument("--server")
parser.add_argument("--folder")
head = headwater.connect(parser.parse_args().server).create_head("language-model", numpy.zeros((8, 4), numpy.float32))
head.save("mine", overwrite=True)
"""


class Checkout:
    """The parts of a checkout that quickstart uses, at a path with a space in it that is reached through a link."""

    def __init__(self, folder: Path):
        real = folder / "real checkout"
        shutil.copytree(REPOSITORY / "deploy", real / "deploy")
        programs = Path(os.environ["HEADWATER_BUILD_DIR"])
        (real / "build/release/bin").mkdir(parents=True)
        for name in ("headwaterd", "headwaterctl"):
            shutil.copy(programs / "bin" / name, real / "build/release/bin")
        (real / "build/release/python").symlink_to(programs / "python")
        self.example = real / "client/examples/python/quickstart/run.py"
        self.example.parent.mkdir(parents=True)
        self.example.touch()
        tools = folder / "tools"
        write_program(tools / "cmake", "#!/bin/sh\necho '[1/2] Building'\necho '[2/2] Linking'\n")
        # Whatever the real example imports is said to be there.
        write_program(tools / "python", f'#!/bin/sh\nif [ "$1" = -c ]; then exit 0; fi\nexec "{sys.executable}" "$@"\n')
        self.started: list[subprocess.Popen] = []
        self.path = folder / "link"
        self.path.symlink_to(real)
        self.output = real / "build/quickstart"
        self._program = str((real / "build/release/bin/headwaterd").resolve())
        self._environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "HEADWATER_PYTHON": f"{tools}/python"}

    def start(self, *options: str, folder: Path | None = None) -> subprocess.Popen:
        command = [str(self.path / "deploy/quickstart"), "--no-install", "--engine", "cpu", *options]
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        # Signals that are ignored where the tests run, as under nohup, could not be trapped.
        how["preexec_fn"] = lambda: [signal.signal(number, signal.SIG_DFL) for number in INTERRUPTIONS]
        self.started.append(subprocess.Popen(command, env=self._environment, cwd=folder, **how))
        return self.started[-1]

    def run(self, *options: str, folder: Path | None = None, status: int = 0) -> str:
        """The output of a run that must end with this status."""
        process = self.start(*options, folder=folder)
        text, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == status, text
        return text

    def start_until_running(self) -> subprocess.Popen:
        """The example has begun, and continues until `go_on`."""
        self.example.write_text(WAITING)
        process = self.start()
        eventually(lambda: (self.output / "running").exists() or process.poll() is not None, "the example", TIMEOUT_S)
        assert process.poll() is None, process.stdout.read()
        return process

    def go_on(self) -> None:
        (self.output / "go on").write_text("")

    def servers(self) -> list[int]:
        """The processes that run this checkout's headwaterd."""
        found = []
        for program in Path("/proc").glob("[0-9]*/exe"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if os.readlink(program) == self._program:
                    found.append(int(program.parent.name))
        return found

    def socket_folder(self) -> Path:
        return Path((self.output / "address").read_text().removeprefix("unix:")).parent


@pytest.fixture
def checkout(tmp_path):
    checkout = Checkout(tmp_path)
    yield checkout
    # The remains of a test that fails.
    for process in checkout.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for pid in checkout.servers():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [None, *INTERRUPTIONS])
def test_no_server_stays(checkout, number):
    process = checkout.start_until_running()
    assert len(checkout.servers()) == 1
    if number is None:
        checkout.go_on()
    else:
        os.killpg(process.pid, number)  # as a terminal does it: to all of the foreground
    text, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode == 0) == (number is None), text
    assert checkout.servers() == []
    assert not checkout.socket_folder().exists()


def test_a_server_that_a_killed_one_left_is_ended_by_the_next(checkout):
    process = checkout.start_until_running()
    left, folder = checkout.servers(), checkout.socket_folder()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)
    assert checkout.servers() == left and len(left) == 1
    checkout.go_on()
    checkout.run()
    assert checkout.servers() == []
    assert not folder.exists()


def test_a_second_one_at_the_same_time_is_refused(checkout):
    process = checkout.start_until_running()
    assert "another quickstart is running" in checkout.run(status=1)
    assert len(checkout.servers()) == 1
    checkout.go_on()
    text, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, text


def test_what_was_saved_on_a_kept_server_is_in_the_way_of_no_later_run(checkout):
    checkout.example.write_text(SAVING)
    checkout.run("--keep")
    first = checkout.servers()
    assert len(first) == 1
    assert (checkout.output / "checkpoints/default/language-model/mine").is_dir()
    # The next one ends the server that was kept, and makes the same head again.
    checkout.run("--keep")
    assert len(checkout.servers()) == 1 and checkout.servers() != first
    checkout.run()
    assert checkout.servers() == []


def test_the_build_shows_its_progress_and_fails_with_its_output(checkout, tmp_path):
    text = checkout.run()
    assert "  [1/2]\n" in text, text
    assert "docs/guides/torch.md" in text  # the next step
    log = checkout.output / "build.log"
    assert f"tail -f '{log}'" in text and "[2/2] Linking" in log.read_text()
    (tmp_path / "tools/cmake").write_text("#!/bin/sh\necho '[1/2] broken'\nexit 1\n")
    text = checkout.run(status=1)
    assert "[1/2] broken" in text and "the build failed" in text


def test_a_file_that_was_cut_short_stops_nobody(checkout):
    checkout.output.mkdir(parents=True)
    (checkout.output / "server.pid").write_text("")
    checkout.run()


def test_a_bundle_is_looked_for_where_one_is(checkout, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/bundle").symlink_to(checkout.path / "build/release")
    checkout.run("--bundle", "bundle", folder=tmp_path / "elsewhere")
    assert "bundle is no bundle" in checkout.run("--bundle", "bundle", folder=tmp_path, status=1)
    assert checkout.servers() == []
