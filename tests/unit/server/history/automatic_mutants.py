#!/usr/bin/env python3
"""How many mechanical changes to server/heads and server/scheduler do their tests notice?

    automatic_mutants.py BUILD_DIR [--sample N] [--seed S] [--file NAME]... [--only N,N...] [--jobs N] [--histories N]
                         [--histories-alone] [--required PERCENT] [--report FILE]

Every condition is negated, every comparison, `&&`, min and max swapped, every number off by one, every statement that only acts
left out (schemata.py). All mutants are compiled in one go, into copies of the sources that lie in BUILD_DIR/automatic_mutants; the
environment variable HEADWATER_MUTANT chooses one. For each the unit tests of both folders run, then histories; the first that
fails, crashes or does not end kills it. The survivors are printed with file and line. Those of EQUIVALENT are no faults: nothing
that a caller can see tells them from the original; they are neither killed nor counted. Exits non-zero if fewer than PERCENT (90)
are killed.

--sample N tries N of them, chosen by --seed; without it all are tried. With --histories-alone no unit test runs: the share that is
killed is then the histories' own.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shlex
import subprocess
import sys
import time

import schemata
from equivalent_mutants import EQUIVALENT

TESTS = (
    "step_ledger_test",
    "session_registry_test",
    "head_test",
    "head_transactions_test",
    "head_flow_test",
    "head_registry_test",
    "head_comeback_test",
    "head_weights_test",
    "head_details_test",
    "head_entry_test",
    "sequencer_test",
    "waiting_test",
    "work_queue_test",
    "head_ordered_test",
)
HISTORY_TEST = "server_history_test"
HEADER = """#pragma once
extern const int headwater_mutant;
#define HEADWATER_MUTANT(number) (headwater_mutant == (number))
"""
CHOICE = """#include <cstdlib>
extern const int headwater_mutant;
const int headwater_mutant = std::getenv("HEADWATER_MUTANT") != nullptr ? std::atoi(std::getenv("HEADWATER_MUTANT")) : 0;
"""


def compile_commands(build):
    """The entry of compile_commands.json for each source, by its path; in a unity build that of the file that includes it."""
    entries = {entry["file"]: entry for entry in json.loads((build / "compile_commands.json").read_text())}
    for file, entry in list(entries.items()):
        if "/Unity/unity_" in file:
            entries.update(dict.fromkeys(re.findall(r'#include "(.+)"', pathlib.Path(file).read_text()), entry))
    return entries


class Build:
    def __init__(self, build_dir, names):
        self.build = pathlib.Path(build_dir).resolve()
        self.root = pathlib.Path(__file__).resolve().parents[4]
        self.out = self.build / "automatic_mutants"
        self.out.mkdir(exist_ok=True)
        self.sources = [
            source for folder in ("heads", "scheduler") for source in sorted((self.root / "server" / folder).rglob("*.cc"))
        ]
        if names:
            self.sources = [source for source in self.sources if source.name in names]
        self.commands = compile_commands(self.build)
        self.mutants = {}  # number -> (source, mutant)

    def make(self, jobs):
        # What is linked beside the mutants must be of today.
        self.call(["ninja", "-C", str(self.build), "-j", str(jobs), *TESTS, HISTORY_TEST])
        (self.out / "mutant.h").write_text(HEADER)
        (self.out / "choice.cc").write_text(CHOICE)
        starts, number = [], 1
        for source in self.sources:
            starts.append(number)
            number = schemata.mutate(source.read_text(), number)[2]
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            made = list(pool.map(self.make_object, self.sources, starts))
        left_out = 0
        for source, (mutants, uncompilable) in zip(self.sources, made, strict=True):
            left_out += uncompilable
            for mutant in mutants:
                self.mutants[mutant.number] = (source, mutant)
        choice = self.out / "choice.o"
        subprocess.run(["c++", "-c", str(self.out / "choice.cc"), "-o", str(choice)], check=True)
        objects = " ".join(str(self.out / f"{source.stem}.o") for source in self.sources) + f" {choice}"
        for test in (*TESTS, HISTORY_TEST):
            self.link(test, objects)
        return left_out

    def make_object(self, source, first_number):
        """Compiles; what the compiler does not take is left out, and the rest tried again."""
        text = source.read_text()
        left_out = set()
        while True:
            changed, mutants, _ = schemata.mutate(text, first_number, left_out)
            copy = self.out / source.name
            copy.write_text(changed)
            entry = self.commands[str(source)]
            words = shlex.split(entry["command"])
            if "ccache" in pathlib.Path(words[0]).name:
                words = words[1:]
            words[words.index("-o") + 1] = str(copy.with_suffix(".o"))
            words[words.index("-c") + 1] = str(copy)
            words += ["-w", "-O1", "-include", str(self.out / "mutant.h")]
            compiled = subprocess.run(words, cwd=entry["directory"], capture_output=True, text=True, check=False)
            if compiled.returncode == 0:
                return mutants, len(left_out)
            lines = {int(line) for line in re.findall(rf"{re.escape(str(copy))}:(\d+):\d+: error", compiled.stderr)}
            guilty = {mutant.number for mutant in mutants if any(mutant.first_line <= line <= mutant.last_line for line in lines)}
            if not guilty:
                sys.exit(f"{source} does not compile with its mutants:\n{compiled.stderr[:4000]}")
            left_out |= guilty

    def link(self, test, objects):
        listing = subprocess.run(
            ["ninja", "-C", str(self.build), "-t", "commands", test], check=True, capture_output=True, text=True
        )
        line = next(line for line in reversed(listing.stdout.splitlines()) if f"-o tests/{test} " in line)
        # Before the library that has the originals: the linker takes the first.
        line = line.replace(f"-o tests/{test} ", f"{objects} -o {self.out / test} ", 1)
        self.call(line, shell=True, cwd=self.build)

    @staticmethod
    def call(command, **options):
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        if done.returncode != 0:
            sys.exit(f"{command} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")

    def run(self, test, mutant, timeout, variables):
        environment = {"PATH": "/usr/bin:/bin", "HEADWATER_MUTANT": str(mutant), **variables}
        words = [str(self.out / test), "--gtest_brief=1", "--gtest_fail_fast"]
        if test == HISTORY_TEST:
            words.append("--gtest_filter=*AgreesWithTheModel*")
        start = time.monotonic()
        try:
            ran = subprocess.run(words, capture_output=True, timeout=timeout, env=environment, cwd=self.out, check=False)
            status = ran.returncode
        except subprocess.TimeoutExpired:
            status = "never ends"
        return status, time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build_dir")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--file", action="append", default=[])
    parser.add_argument("--only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    # Fewer than those whose coverage the test checks.
    parser.add_argument("--histories", type=int, default=900)
    parser.add_argument("--histories-alone", action="store_true")
    parser.add_argument("--required", type=float, default=90)
    parser.add_argument("--report")
    arguments = parser.parse_args()

    build = Build(arguments.build_dir, arguments.file)
    uncompilable = build.make(arguments.jobs)
    stages = [] if arguments.histories_alone else [(test, {}) for test in TESTS]
    for count, first in ((100, 1), (arguments.histories, 101)):
        stages.append(
            (HISTORY_TEST, {"HISTORIES": str(count), "FIRST_SEED": str(first), "HISTORY_THREADS": "1", "HISTORY_CUT": "0"})
        )
    timeouts = []
    for test, variables in stages:
        status, seconds = build.run(test, 0, 600, variables)
        if status != 0:
            sys.exit(f"{test} fails without a mutant: {status}")
        timeouts.append(10 + 10 * seconds)

    def place(number):
        source, mutant = build.mutants[number]
        return f"{source.relative_to(build.root)}:{mutant.first_line}"

    def is_equivalent(number):
        source, mutant = build.mutants[number]
        return any(name in ("*", source.name) and re.search(pattern, mutant.what) for name, pattern, _ in EQUIVALENT)

    numbers = sorted(build.mutants)
    equivalent = {number for number in numbers if is_equivalent(number)}
    chosen = [number for number in numbers if number not in equivalent]
    if arguments.only:
        wanted = {int(number) for number in arguments.only.split(",")}
        chosen = [number for number in numbers if number in wanted]
    if arguments.sample is not None and arguments.sample < len(chosen):
        chosen = sorted(random.Random(arguments.seed).sample(chosen, arguments.sample))
    print(
        f"{len(numbers)} mutants of {len(build.sources)} sources, {uncompilable} more do not compile, {len(equivalent)} are "
        f"equivalent; {len(chosen)} are tried",
        flush=True,
    )

    def verdict(number):
        for (test, variables), timeout in zip(stages, timeouts, strict=True):
            status, _ = build.run(test, number, timeout, variables)
            if status != 0:
                return test, status
        return None, 0

    survivors, by_test, report = [], {}, open(arguments.report, "w", encoding="utf-8") if arguments.report else None
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for number, (test, status) in zip(chosen, pool.map(verdict, chosen), strict=True):
            what = build.mutants[number][1].what
            if test is None:
                survivors.append(number)
                print(f"survives: {place(number)}: mutant {number}: {what}", flush=True)
            by_test[test] = by_test.get(test, 0) + 1
            if report is not None:
                print(number, place(number), test or "SURVIVES", status, what, sep="\t", file=report, flush=True)
    killed = len(chosen) - len(survivors)
    percent = 100 * killed / max(1, len(chosen))
    for test, count in sorted(by_test.items(), key=lambda item: str(item[0])):
        print(f"{count:6} {'survive' if test is None else 'killed by ' + test}")
    print(f"{killed} of {len(chosen)} mutants killed: {percent:.1f} %")
    return 0 if percent >= arguments.required else 1


if __name__ == "__main__":
    sys.exit(main())
