"""The quickstart's main job against a running server: train with both heads, distil, compare, report.

Each training run is a child process, because its peak memory is part of the report. Exits with 1 if a bound is missed.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import data
import heads
import report
from model import TEACHER

FOLDER_OF_PROGRAMS = Path(__file__).resolve().parent
STEPS = 200
DISTILLATION_STEPS = 150


def child(program: str, *arguments: object) -> list[str]:
    """The command line of one of the programs beside this one."""
    return [sys.executable, str(FOLDER_OF_PROGRAMS / program), *map(str, arguments)]


def create_head(server: str, data_type: str = "float32") -> None:
    """Creates the head that the trainer will find on the server, so that the trainer never holds its weights."""
    import headwater
    from train import HEAD_NAME, SEED

    weight = heads.initial_weight(data.VOCAB_SIZE, TEACHER["hidden_size"], SEED)
    with headwater.connect(server) as client:
        client.create_head(HEAD_NAME, weight, trainable=True, optimizer=heads.remote_rule(), dtype=data_type)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True, help="address of headwaterd, without heads of our names")
    parser.add_argument("--folder", type=Path, required=True, help="for everything that is written")
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    # OpenMP's threads sleep when they wait: with more threads than cores, or two runs at once, spinning would double the time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    sizes = data.prepare(folder)
    print(
        "text: {text_bytes} bytes of Python's library, {train_tokens} tokens and {held_out_tokens} held out".format(**sizes),
        flush=True,
    )
    create_head(arguments.server)

    body = folder / "body.pt"
    common = ["--folder", folder, "--steps"]
    for name, options in {
        "own-1": ["--head", "own", "--threads", 1],
        "own-2": ["--head", "own", "--threads", 2],
        "remote": ["--head", "remote", "--threads", 1, "--server", arguments.server, "--save-body", body],
    }.items():
        subprocess.run(child("train.py", *options, *common, STEPS, "--results", folder / f"{name}.json"), check=True)
    options = ["--server", arguments.server, "--threads", 1, "--teacher-body", body, *common, DISTILLATION_STEPS]
    subprocess.run(child("distill.py", *options, "--results", folder / "distillation.json"), check=True)
    return report.write(folder, {name: json.loads((folder / f"{name}.json").read_text()) for name in report.RUNS})


if __name__ == "__main__":
    sys.exit(main())
