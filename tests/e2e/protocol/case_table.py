"""The table of what a client does about failures, restarts and lost sessions. exchange.py says how a script reads.

The open step is 5 at first. Epochs have names: `first`, `restored-1` after the first restart, `taken-1` after the
first TakeHead.
"""

CASES: dict[str, str] = {}  # scripts by name; retry_cases.py and recovery_cases.py fill it
REPLAY = "connect replay_bytes=1000000"  # the first line of a client with a replay log


def case(name, script):
    """Adds a case."""
    assert name not in CASES
    CASES[name] = script
