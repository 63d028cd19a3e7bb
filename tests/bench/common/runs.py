"""The common parts of each benchmark's `run`: its arguments, the machine's name, and the processes that it starts."""

import argparse
import contextlib
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import traceback
import types

import figures

HERE = pathlib.Path(__file__).resolve().parent


def make_parser(doc, smoke, required=("build", "output")):
    """A parser with the arguments of every benchmark; `smoke` is the help of --smoke."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in (("build", "bundle (deploy/bundle), or build folder"), ("output", "folder for the figures")):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=name in required, help=text)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--smoke", action="store_true", help=smoke)
    return parser


def chosen(parser, what, names, known):
    """The names in a list with commas, or all that are known where it is empty."""
    wanted = names.split(",") if names else list(known)
    if unknown := set(wanted) - set(known):
        parser.error(f"unknown {what}: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return wanted


def environment_of(build, *folders, **others):
    """The environment of a process that imports a build's client, and modules of this folder and others."""
    path = os.pathsep.join([str(build / "python"), *map(str, (HERE, *folders)), os.environ.get("PYTHONPATH", "")])
    places = {"HEADWATER_BUILD_DIR": str(build), "HEADWATERD": str(build / "bin/headwaterd"), "PYTHONPATH": path}
    return {**os.environ, **places, **others}


def machine_name():
    """The GPUs, or the processor. Asked in another process: this one must take nothing of a GPU's memory."""
    script = (
        "import os, torch; count = torch.cuda.device_count(); "
        "print(f'{count} x ' * (count > 1) + torch.cuda.get_device_name() if count else os.uname().machine, "
        "f'PyTorch {torch.__version__}', *([f'CUDA {torch.version.cuda}'] if count else []), sep='; ')"
    )
    return subprocess.run((sys.executable, "-c", script), check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def memory_of(process, field="VmRSS"):
    """The kernel's VmRSS (resident now) or VmHWM (most so far) of a process, in bytes."""
    status = pathlib.Path(f"/proc/{process}/status").read_text(encoding="ascii")
    if not (found := re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)):
        raise RuntimeError(f"process {process} has ended")
    return 1024 * int(found[1])


def start_trainer(script, environment):
    """Starts a program that waits for its trainer_options() and prints lines of JSON; its process."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A group of its own, so that a trainer that hangs is killed with the processes that it has started.
    return subprocess.Popen([sys.executable, str(script)], env=environment, start_new_session=True, **pipes)


def trainer_results(process, options, seconds):
    """Gives a started program its options: (values of the lines that it prints, why it failed or "", its standard error)."""
    try:
        out, error = process.communicate(json.dumps(options), timeout=seconds)
        why = f"it ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, error = process.communicate()
        why = f"it took more than {seconds:.0f} s"
    results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return results, "" if results and process.returncode == 0 else why, error


def run_trainer(script, options, environment, seconds):
    """start_trainer() and trainer_results()."""
    return trainer_results(start_trainer(script, environment), options, seconds)


def trainer_options():
    """In a trainer: its options as attributes. The process ends where none are left to be run."""
    text = sys.stdin.read()
    return types.SimpleNamespace(**json.loads(text)) if text else sys.exit()


def say(result):
    """In a trainer: prints a result."""
    print(json.dumps(result), flush=True)


class Worker:
    """A process that answers each line with a line."""

    def __init__(self, command, environment=None, silence=None):
        """`silence`: seconds after which one that does not answer is killed."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._command, self._silence = [*map(str, command)], silence
        self._process = subprocess.Popen(self._command, env=environment, **pipes)

    def read(self):
        """Its next line, without the end."""
        if self._silence and not select.select([self._process.stdout], [], [], self._silence)[0]:
            self._process.kill()
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise SystemExit(f"{self._command[0]} ended with status {self._process.wait()}")
        return line.strip()

    def send(self, *words):
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def ask(self, *words):
        """Sends a line of words; the answer."""
        self.send(*words)
        return self.read()

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Record:
    """The results of a benchmark by name: NAME.json and TABLE.csv (default: NAME) of --output, written after each.

    `figures_of` makes the CSV's rows of {name: {"machine", "commit", "result"}}. Results of an earlier run on this machine stand if
    `keep` says so of them.
    """

    def __init__(self, options, name, figures_of, keep=None, table=None):
        options.output.mkdir(parents=True, exist_ok=True)
        self.machine, self._commit, self._figures_of = machine_name(), options.commit, figures_of
        self.document, self.table = options.output / f"{name}.json", options.output / f"{table or name}.csv"
        earlier = read_results(self.document) if keep else {}
        self.found = {name: entry for name, entry in earlier.items() if entry["machine"] == self.machine and keep(name, entry)}
        print(self.machine, flush=True)

    def add(self, name, result, **more):
        """Adds a result; {"failed": why} is one."""
        self.found[name] = {"machine": self.machine, "commit": self._commit, "result": result, **more}
        self.document.write_text(json.dumps({"results": self.found}) + "\n", encoding="utf-8")
        figures.merge(self.table, self._figures_of(self.found))

    def failed(self):
        return [name for name, entry in self.found.items() if "failed" in entry["result"]]


def read_results(document):
    """The results in the file of a Record; none if there is no file."""
    return json.loads(document.read_text(encoding="utf-8"))["results"] if document.exists() else {}


class Service(Worker):
    """A worker that says `ready`, and answers `COMMAND NAME=VALUE...` with `ok WORD...` or `error WHY`: by serve.h or serve()."""

    def __init__(self, command, environment=None):
        super().__init__(command, environment, silence=330)  # longer than a group waits for its ranks
        if (first := self.read()) != "ready":
            self.close()
            raise RuntimeError(first)

    def words(self, command, **values):
        """The answer to a request."""
        assigned = (f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in values.items())
        status, _, answer = self.ask(command, *assigned).partition(" ")
        if status != "ok":
            raise RuntimeError(answer)
        return answer

    def numbers(self, command, **values):
        """The numbers of the answer to a request."""
        return [*map(float, self.words(command, **values).split())]


def serve(prepare, unavailable=()):
    """Answers as a Service: `prepare()` returns a function of the command and its values, strings, which returns words.

    Errors of the kinds `unavailable` say that this machine cannot. The output of libraries goes to standard error.
    """
    with contextlib.redirect_stdout(sys.stderr):

        def say(line):
            sys.__stdout__.write(line.replace("\n", " ") + "\n")
            sys.__stdout__.flush()

        try:
            answer = prepare()
        except unavailable as error:
            say(f"unavailable: {error}")
            return
        say("ready")
        for line in sys.stdin:
            command, *values = line.split()
            try:
                say(" ".join(["ok", *map(str, answer(command, **dict(value.split("=", 1) for value in values)) or ())]))
            except Exception as error:  # reported to the benchmark
                traceback.print_exc()
                say(f"error {type(error).__name__}: {error}")
