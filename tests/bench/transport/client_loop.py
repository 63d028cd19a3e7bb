"""The common parts of the benchmark's clients in Python: their arguments, and the lines of their conversation with
transport_bench."""

import argparse
import sys
import traceback


def say(line):
    """A line for the benchmark."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def serve(description, transports, prepare, unavailable):
    """Says `ready`, or `unavailable: why`, and does what the lines `submit STEP FIRST_ID COUNT` ask for.

    `prepare(options)` makes the function that submits micro-batches, of these three numbers; one of the errors `unavailable` says
    that this machine cannot.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--address", required=True)
    parser.add_argument("--transport", required=True, choices=transports)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    options = parser.parse_args()
    try:
        submit = prepare(options)
    except unavailable as error:
        say(f"unavailable: {error}".replace("\n", " "))
        return
    say("ready")
    for line in sys.stdin:
        try:
            submit(*map(int, line.split()[1:]))
        except Exception as error:  # reported to the benchmark, which ends
            traceback.print_exc()
            say(f"{type(error).__name__}: {error}".replace("\n", " "))
            return
        say("done")
