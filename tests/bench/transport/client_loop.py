"""The common parts of the workers in Python of `run`: their arguments and answers."""

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
import runs


def serve(description, choice, known, prepare, unavailable):
    """Answers requests (runs.Service) that name a function's arguments with the milliseconds of one of `count`.

    `choice` is the argument that is one of `known`. `prepare(options)` makes the function, or raises one of the errors
    `unavailable` where this machine cannot.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--address", default="", help="of the server, for its clients")
    parser.add_argument(choice, required=True, choices=known)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    options = parser.parse_args()

    def begin():
        work = prepare(options)

        def answer(_, count, **values):
            start = time.perf_counter()
            work(count=int(count), **{name: int(value) for name, value in values.items()})
            return ((time.perf_counter() - start) * 1000 / int(count),)

        return answer

    runs.serve(begin, unavailable)
