"""The table of programs in docs/guides/jax.md: each is right in each place, or refused with the sentence that the table quotes."""

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jax_figures import IS_GPU, write_figures
from jax_programs import PROGRAMS

ENVIRONMENTS = ("jax", "jax_gpu")

FOLDER = Path(__file__).parent
GUIDE = FOLDER.parents[1] / "docs/guides/jax.md"
# By the column of the table that they stand in; on a GPU machine the GPU is the one device.
PLACES = {"one device": "One device"} | ({} if IS_GPU else {"four devices": "Several", "two processes": "Several"})
# All others run in two processes with --long alone.
IN_TWO_PROCESSES = (
    "`jit(value_and_grad)`",
    "`jit` of a whole training step, with donation",
    "`lax.scan`, with `micro_batch=`",
    "the split step, `headwater.jax.value_and_grad`",
    "a pullback that is not called",
    "a sharded batch without `shard_map` (GSPMD)",
)
# XLA's own order, that of the other schedulers, and no order at all.
REORDERING = (
    "",
    "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED",
    "--xla_cpu_enable_concurrency_optimized_scheduler=true --xla_cpu_multi_thread_eigen=false",
)


def table() -> dict[str, dict[str, str]]:
    """The guide's words on each program, by column."""
    section = GUIDE.read_text().split("\n## Which programs work?\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    columns = rows[0][1:]
    return {name: dict(zip(columns, cells, strict=True)) for name, *cells in rows[2:]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that runs a script of this folder in some processes, and returns what the first one prints."""

    def run(script: str, *commands: tuple[object, ...], flags: str = "") -> str:
        environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
        folder = tmp_path_factory.mktemp("run")
        processes = []
        for rank, command in enumerate(commands):
            with (folder / f"{rank}.out").open("w") as out, (folder / f"{rank}.err").open("w") as errors:
                called = [sys.executable, FOLDER / script, *map(str, command)]
                processes.append(subprocess.Popen(called, stdout=out, stderr=errors, env=environment))
        try:
            statuses = [process.wait(timeout=600) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert not any(statuses), "".join((folder / f"{rank}.err").read_text()[-3000:] for rank in range(len(commands)))
        return (folder / "0.out").read_text()

    return run


def two_processes() -> tuple[tuple[object, ...], ...]:
    """The arguments of `mesh_of` in each of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return tuple((2, rank, f"127.0.0.1:{free.getsockname()[1]}") for rank in range(2))


def takes_long(place: str, name: str) -> bool:
    return place == "two processes" and name not in IN_TWO_PROCESSES


@pytest.fixture(scope="module")
def outcomes(server, run, request):
    """The outcomes of the programs that are asked for, by the place's name."""

    @functools.cache
    def get(place: str) -> dict[str, str]:
        places = {"one device": ((1,),), "four devices": ((4,),), "two processes": two_processes()}
        names = [name for name in PROGRAMS if request.config.getoption("--long") or not takes_long(place, name)]
        printed = run("jax_programs.py", *((server.address, json.dumps(names), *arguments) for arguments in places[place]))
        return dict(json.loads(line) for line in printed.splitlines() if line.startswith('["'))

    return get


def test_table_names_every_program():
    assert list(table()) == list(PROGRAMS)


@pytest.mark.parametrize(
    ("place", "name"),
    [pytest.param(place, name, marks=pytest.mark.long if takes_long(place, name) else ()) for place in PLACES for name in PROGRAMS],
)
def test_program_is_right_or_refused_as_the_guide_says(place, name, outcomes):
    said, outcome = table()[name][PLACES[place]], outcomes(place)[name]
    if said == "right":
        assert outcome == "right"
    else:
        assert outcome.startswith("refused: ") and said.strip('"') in outcome, outcome


@pytest.mark.parametrize("place", PLACES)
def test_no_program_is_wrong(place, outcomes):
    kinds = [outcome.split(":")[0] for outcome in outcomes(place).values()]
    prefix = f"{'cuda' if IS_GPU else 'cpu'}_programs_{place.replace(' ', '_')}"
    if len(kinds) == len(PROGRAMS):
        write_figures(*[(f"{prefix}_{kind}", kinds.count(kind), "programs", None) for kind in ("right", "refused")])
        write_figures((f"{prefix}_wrong", kinds.count("wrong"), "programs", 0))
    assert not kinds.count("wrong"), outcomes(place)


@pytest.mark.skipif(IS_GPU, reason="several devices here are those of the CPU")
def test_gradient_has_the_same_bits_in_each_run_on_four_devices(deterministic_server, run):
    digests = json.loads(run("jax_repeats.py", (deterministic_server.address, 4, 20)))
    assert len(digests) == 20
    # Each of the three losses is in a shard_map of its own.
    assert digests[0]["ids"] == [(site << 40) + device for site in range(3) for device in range(4)]
    write_figures(("cpu_four_devices_grad_weight_different_runs", len({digest["head"] for digest in digests}) - 1, "of 20 runs", 0))
    assert len({digest["head"] for digest in digests}) == 1


@pytest.mark.skipif(IS_GPU, reason="the flags are those of XLA's CPU compiler")
def test_order_of_the_compiled_program_does_not_show(deterministic_server, run):
    digests = [json.loads(run("jax_repeats.py", (deterministic_server.address, 1, 2), flags=flags)) for flags in REORDERING]
    different = {json.dumps(digest) for runs in digests for digest in runs}
    write_figures(("cpu_reordering_flags_different_results", len(different) - 1, f"of {len(REORDERING)} sets of flags", 0))
    assert len(different) == 1
