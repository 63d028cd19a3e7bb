"""The common parts of the benchmark's workers in Python: their arguments, and the lines of their conversation with
transport_bench."""

import argparse
import contextlib
import sys
import traceback


def say(line):
    """A line for the benchmark."""
    sys.__stdout__.write(line.replace("\n", " ") + "\n")
    sys.__stdout__.flush()


def serve(description, choice, known, prepare, unavailable):
    """Says `ready`, or `unavailable: why`, and does what the lines `WORD NUMBER...` ask for.

    `choice` is the argument that is one of `known`. `prepare(options)` makes the function of the lines' numbers; one of the errors
    `unavailable` says that this machine cannot. The output of libraries goes to standard error.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--address", default="", help="of the server, for its clients")
    parser.add_argument(choice, required=True, choices=known)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    options = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):
        try:
            work = prepare(options)
        except unavailable as error:
            say(f"unavailable: {error}")
            return
        say("ready")
        for line in sys.stdin:
            try:
                work(*map(int, line.split()[1:]))
            except Exception as error:  # reported to the benchmark, which ends
                traceback.print_exc()
                say(f"{type(error).__name__}: {error}")
                return
            say("done")
