"""A machine that has IPv6 alone: a group of two processes forms, trains and is scraped, with the addresses of the manifests.

The machine is a network namespace of the test's own, in which the loopback device has ::1 and not 127.0.0.1. This file is also the
program that runs there, because a namespace is entered by a process that has one thread.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
NOT_PERMITTED = 77
TIMEOUT_S = 120


def enter_namespace() -> bool:
    """Whether this process is in a namespace of its own, whose loopback device has ::1 alone."""
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    if unshare(CLONE_NEWNET) != 0 and unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return False
    for command in ("link set lo up", "addr del 127.0.0.1/8 dev lo"):
        subprocess.run(["ip", *command.split()], check=True)
    addresses = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    return "inet6 ::1" in addresses and "inet " not in addresses


def train_in_a_group(join: str) -> None:
    """Forms a group whose worker joins at `join`, and trains a step."""
    from expectations import eventually
    from headwaterd import running_server, server_binary
    from loss_oracle import check_training

    import headwater

    flags = ("--listen_addresses=0.0.0.0:0,unix:{directory}/join", "--metrics_address=0.0.0.0:0", "--workers=1")
    with running_server(*flags) as leader:
        tcp, local = (leader.directory / "ready").read_text().split()
        port = tcp.rsplit(":", 1)[1]
        address = local if join == "unix" else f"{join}:{port}"
        worker = subprocess.Popen([server_binary(), f"--join={address}", "--log_level=warning"])
        try:
            with headwater.connect(f"[::1]:{port}", connect_timeout_s=TIMEOUT_S / 2) as client:
                assert len(check_training(client).shards) == 2
            eventually(lambda: "headwater_steps" in leader.metrics_page("[::1]"), lambda: leader.metrics_page("[::1]"))
        finally:
            worker.kill()
            worker.wait()


@pytest.mark.parametrize("join", ("[::1]", "unix"))
def test_a_group_forms_and_is_scraped(join):
    result = subprocess.run([sys.executable, __file__, join], capture_output=True, text=True, timeout=TIMEOUT_S)
    if result.returncode == NOT_PERMITTED:
        pytest.skip("this process may not make a network namespace, or the system has no IPv6")
    assert result.returncode == 0, result.stdout + result.stderr


if __name__ == "__main__":
    if not enter_namespace():
        sys.exit(NOT_PERMITTED)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    train_in_a_group(sys.argv[1])
