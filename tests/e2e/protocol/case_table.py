"""The table of what a client does about failures, restarts and lost sessions. exchange.py says how a script reads.

The open step is 5 at first. Epochs have names: `first`, `restored-1` after the first restart, `taken-1` after the
first TakeHead.
"""

import textwrap

CASES: dict[str, str] = {}  # scripts by name; retry_cases.py and recovery_cases.py fill it


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
