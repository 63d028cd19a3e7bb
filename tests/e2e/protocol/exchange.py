"""What a client does about failures, restarts and lost sessions: cases, and how the script of one is run.

It has operations on a client in another process, and actions and checks on the scripted server in this one. The open step is 5 at
first. Epochs have names: `first`, `restored-1` after the first restart, `taken-1` after the first TakeHead.

A script has a line, or a part of one that `;` ends, for each of
    OPERATION ... [-> OUTCOME]   what the client does (protocol_driver.cc) and what comes of it: nothing or `attempt=1` and the
                                 like where it succeeds; else the reason, with what its message has in quotes
    ! ACTION ...                 what the server does: a method of ScriptedServer, or one of `Exchange._action_...`
    ? CHECK ...                  what must hold: one of VALUES, or of `Exchange._check_...`
"""

import itertools
import json
import os
import re
import select
import shlex
import subprocess
import textwrap
import time

from expectations import eventually
from google.protobuf.json_format import MessageToDict
from scripted_server import LIMIT_S, ScriptedServer, answer, message_of, name_of

CASES: dict[str, str] = {}  # scripts by name; retry_cases.py and recovery_cases.py fill it
# What takes longer hangs.
OPERATION_LIMIT_S = 30

# Checks of values, which the script has in their order.
VALUES = {
    "attempts": lambda it, method: [message_of(call).attempt for call in it._server.calls[method]],
    "epoch": lambda it, handle: [it._driver.run(f"epoch {handle}")["epoch"]],
    "leases": lambda it: [call.lease.ToMilliseconds() for call in it._server.calls["OpenSession"]],
    "open_sessions": lambda it: [len(it._server.open_sessions)],
    "recovers": lambda it: [name_of(epoch) for epoch in it._server.head("h").recovers],
    # By number, as they were opened; `-`: none.
    "sessions": lambda it, method: [int.from_bytes(message_of(c).session_id, "big") or "-" for c in it._server.calls[method]],
}


def cases(text, first="connect"):
    """Adds the cases of a text: names, with scripts indented below them. A script begins with `first` unless it connects itself."""
    for line in filter(str.strip, textwrap.dedent(text).splitlines()):
        if not line.startswith(" "):
            name = line
            assert name not in CASES
            CASES[name] = ""
        else:
            connects = CASES[name] or line.lstrip().startswith("connect")
            CASES[name] += f"{line}\n" if connects else f"{first}\n{line}\n"


def replayed(text):
    """Adds cases of clients with a replay log."""
    cases(text, first="connect replay_bytes=1000000")


class Driver:
    """A client process. One at a time runs, for all cases until one fails."""

    def __init__(self):
        command = [os.path.join(os.environ["HEADWATER_BUILD_DIR"], "tests", "protocol_driver")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, line):
        """The outcome of an operation."""
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], OPERATION_LIMIT_S)[0]:
            raise AssertionError(f"{line}: no outcome within {OPERATION_LIMIT_S} s")
        outcome = self._process.stdout.readline()
        assert outcome, f"{line}: the client's process has ended ({self._process.wait()})"
        return json.loads(outcome)

    def kill(self):
        self._process.kill()
        self._process.communicate()


class Exchange:
    """One case with one client."""

    def __init__(self, driver):
        self._driver = driver
        self._server = ScriptedServer()
        self._took_s = 0.0

    def run(self, script):
        """Runs all lines, then closes the clients; raises AssertionError with the line that failed."""
        try:
            for line in filter(None, map(str.strip, re.split("[;\n]", script))):
                try:
                    self._run_line(line)
                except AssertionError as error:
                    raise AssertionError(f"{line}\n{error}") from None
            self._driver.run("reset")
        finally:
            self._server.release()
            self._server.stop()

    def _run_line(self, line):
        if line[0] == "!":
            self._act(line[1:])
        elif line[0] == "?":
            name, _, expected = line[1:].partition(":")
            check, *arguments = name.split()
            if check in VALUES:
                actual = [str(value) for value in VALUES[check](self, *arguments)]
                assert actual == expected.split(), actual
            else:
                getattr(self, f"_check_{check}")(expected.strip(), *arguments)
        else:
            self._operate(*(part.strip() for part in (*line.split("->", 1), "")[:2]))

    def _operate(self, operation, expected):
        if operation.startswith("connect"):
            operation += f" target={self._server.address}"
        began = time.monotonic()
        outcome = self._driver.run(operation)
        self._took_s = time.monotonic() - began
        words = shlex.split(expected)
        reason = words.pop(0) if words and "=" not in words[0] else None
        actual = None if outcome["ok"] else outcome["reason"]
        assert actual is reason or actual in (reason or "").split("|"), outcome
        for word in words:
            if reason is None or "=" in word.partition(" ")[0]:
                name, _, value = word.partition("=")
                assert str(outcome[name]) == value, outcome
            else:
                assert word in outcome["message"], outcome["message"]

    # ---- what the server does -----------------------------------------------------------------------------------------

    def _act(self, line):
        head, _, rest = line.partition(":")
        name, *words = head.split()
        if name == "answers":
            for word in rest.split():
                failure, _, times = word.partition("*")
                if "*" in word and not times:
                    self._server.fail_always(words[0], answer(failure))
                else:
                    self._server.fail(words[0], *[answer(failure)] * int(times or 1))
        elif name == "before":
            self._server.fail(words[0], lambda: self._act(rest))
        elif name == "sleep":
            time.sleep(float(words[0]))
        else:
            options = dict(word.split("=", 1) for word in words if "=" in word)
            getattr(self._server, name)(*(word for word in words if "=" not in word), **options)

    # ---- what must hold -----------------------------------------------------------------------------------------------

    def _check_accepted(self, expected, order=""):
        """What the server has accepted since it was last restarted, or the `first` of it; `once`: without what adds nothing."""
        actual = list(self._server.accepted)
        wanted = [line.strip() for line in expected.split(",") if line.strip()]
        if order == "once":
            actual = list(dict.fromkeys(actual))
        elif order == "first":
            actual = actual[:1]
        elif order == "in_any_order":
            actual, wanted = sorted(actual), sorted(wanted)
        assert actual == wanted, actual

    def _check_calls(self, expected, method):
        least, _, most = expected.partition("-")
        assert int(least) <= self._server.count(method) <= int(most or least), self._server.count(method)

    def _check_same(self, _, method):
        """All requests of a method are equal, but for their attempts."""
        requests = [MessageToDict(message_of(call)) for call in self._server.calls[method]]
        for request in requests:
            request.pop("attempt", None)
        assert len(requests) > 1 and all(request == requests[0] for request in requests), requests

    def _check_pending(self, expected):
        assert self._driver.run(f"pending {expected}")["pending"]

    def _check_took(self, expected):
        """Seconds that the last operation took: `0.4-2`."""
        least, most = map(float, expected.split("-"))
        assert least <= self._took_s <= most, self._took_s

    def _gaps(self, method):
        """Seconds between the calls of a method."""
        return [after - before for before, after in itertools.pairwise(self._server.times[method])]

    def _check_gaps(self, expected, method):
        """At least so many seconds lie between the calls of a method."""
        gaps, least = self._gaps(method), [float(word) for word in expected.split()]
        assert len(gaps) == len(least) and all(gap >= bound for gap, bound in zip(gaps, least, strict=True)), gaps

    def _check_least_gap(self, expected, method):
        assert min(self._gaps(method)) >= float(expected), self._gaps(method)

    def _check_until(self, expected, method):
        """Waits until there were so many calls."""
        eventually(lambda: self._server.count(method) >= int(expected), lambda: self._server.count(method), LIMIT_S)

    def _check_until_accepted(self, expected):
        eventually(lambda: expected in self._server.accepted, lambda: self._server.accepted, LIMIT_S)

    def _check_other_connection(self, _, method, other):
        peers = self._server.peers
        assert peers[method] and not set(peers[method]) & set(peers[other]), peers
