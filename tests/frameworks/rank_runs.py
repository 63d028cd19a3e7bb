"""Runs a script of this folder on two ranks of this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def run_two_ranks(script: str, folder: Path, *arguments: object) -> None:
    """Runs `script ARGUMENT...` with the environment of torchrun's ranks; what rank R has written is folder/rank-R.log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, Path(__file__).with_name(script), *map(str, arguments)]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = []
    for rank in range(2):
        environment = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"rank-{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        statuses = [rank.wait(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert statuses == [0, 0], "".join((folder / f"rank-{rank}.log").read_text()[-3000:] for rank in range(2))
