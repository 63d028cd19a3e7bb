"""`headwater.local`: a server of this process's own, which ends with it; how it is found, shared, and what it is given."""

import concurrent.futures
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
from expectations import eventually, refused
from headwaterd import server_binary

import headwater
import headwater.local

ENDS_IN_S = 20


def pid_of(client):
    return client._backend.connection.owner._process.pid


def is_running(pid):
    """Whether the process runs; one that has ended and is not waited for does not."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for_end(pid):
    eventually(lambda: not is_running(pid), "the server's end", ENDS_IN_S)


# ---- the cores that the server shares ------------------------------------------------------------------------------------


@pytest.fixture
def nothing_says_how_to_wait(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")  # so that the end of the test takes off what it sets
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("nothing_says_how_to_wait")
def test_threads_of_a_torch_that_comes_later_wait_passively(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with headwater.local.connect(threads=1):
        assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.usefixtures("nothing_says_how_to_wait")
@pytest.mark.parametrize(("threads_of_torch", "variable", "warns"), [(2, "", True), (2, "GOMP_SPINCOUNT", False), (1, "", False)])
def test_threads_that_spin_on_the_servers_cores_are_warned_of(monkeypatch, threads_of_torch, variable, warns):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(get_num_threads=lambda: threads_of_torch))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    if variable:
        monkeypatch.setenv(variable, "0")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        headwater.local.connect(threads=1).close()
    found = [str(warning.message) for warning in said if "OMP_WAIT_POLICY" in str(warning.message)]
    assert len(found) == warns
    assert "OMP_WAIT_POLICY" not in os.environ


# ---- the server and its clients ------------------------------------------------------------------------------------------


def test_clients_of_equal_options_share_a_server_until_the_last_is_closed():
    first, second = headwater.local.connect(threads=1), headwater.local.connect(threads=1, tenant="other")
    with headwater.local.connect(threads=2) as elsewhere:
        assert pid_of(first) == pid_of(second) != pid_of(elsewhere)
    assert first.transports()["shared_memory"] is None
    pid = pid_of(first)
    first.create_head("kept", np.ones((8, 4), np.float32))
    first.close()
    third = headwater.local.connect(threads=1)
    assert [head.name for head in third.heads()] == ["tenants/default/heads/kept"] and second.health() == "SERVING"
    second.close()
    third.close()
    assert not is_running(pid)
    with headwater.local.connect(threads=1) as fourth:
        assert fourth.heads() == []


def test_a_server_ends_when_its_clients_are_forgotten():
    """Not before: a contribution that waits for its decision refers to all of it."""
    client = headwater.local.connect()
    pid, folder = pid_of(client), Path(client._backend.connection.owner.address.removeprefix("unix:")).parent
    out = client.create_head("head", np.ones((7, 3), np.float32)).cross_entropy(
        np.ones((5, 3), np.float32), np.arange(5), micro_batch=0, commit="explicit"
    )
    del client
    gc.collect()
    out.commit()
    assert is_running(pid)
    del out
    gc.collect()
    wait_for_end(pid)
    assert not folder.exists()


def test_many_threads_start_one_server():
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        clients = list(threads.map(lambda _: headwater.local.connect(), range(4)))
    assert len({pid_of(client) for client in clients}) == 1
    assert [client.health() for client in clients] == ["SERVING"] * 4  # although the thread that has started it is gone
    for client in clients:
        client.close()


def test_a_server_that_was_killed_is_not_shared():
    with headwater.local.connect() as client:
        os.kill(pid_of(client), signal.SIGKILL)
        client._backend.connection.owner._process.wait(ENDS_IN_S)
        with headwater.local.connect() as other:
            assert other.health() == "SERVING"
        with pytest.raises(headwater.UnavailableError):
            client.server_info(timeout_s=5)


def test_it_is_reached_by_its_sockets_alone():
    with headwater.local.connect() as client:
        client.server_info()
        sockets = {os.readlink(file) for file in Path(f"/proc/{pid_of(client)}/fd").iterdir()}
        for table in ("tcp", "tcp6", "udp", "udp6"):
            lines = Path(f"/proc/{pid_of(client)}/net/{table}").read_text().splitlines()[1:]
            assert not {f"socket:[{line.split()[9]}]" for line in lines} & sockets
        folder = Path(client._backend.connection.owner.address.removeprefix("unix:")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert os.getsid(pid_of(client)) == pid_of(client)  # a terminal's Ctrl-C is for this process


def test_the_folder_for_temporary_files_may_have_a_long_path(monkeypatch, tmp_path):
    folder = tmp_path / ("folder" * 20)  # longer than the address of a socket
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with headwater.local.connect() as client:
        assert client.health() == "SERVING"


# ---- the end of the process ----------------------------------------------------------------------------------------------

LEFT_OPEN = """
import headwater.local, threading
clients = []
thread = threading.Thread(target=lambda: clients.append(headwater.local.connect()))
thread.start()
thread.join()
print(clients[0]._backend.connection.owner._process.pid, flush=True)
"""


@pytest.mark.parametrize("end", ("killed", "interrupted", "returns"))
def test_the_server_ends_with_its_process(end):
    """Whatever thread has started it, and without a word."""
    wait = "" if end == "returns" else "import time\ntime.sleep(100)\n"
    program = [sys.executable, "-W", "error", "-c", LEFT_OPEN + wait]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        if end != "returns":
            assert is_running(pid)
            process.send_signal(signal.SIGKILL if end == "killed" else signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    wait_for_end(pid)
    assert said == ""


def test_the_process_that_the_server_watches_must_be_its_parent():
    done = subprocess.run(
        [server_binary(), "--parent_pid=1", "--metrics_address=", "--engine=cpu"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr == f"headwaterd: --parent_pid: expected the parent of this process, {os.getpid()}, got 1\n"


# ---- options -------------------------------------------------------------------------------------------------------------


def test_options_become_flags(tmp_path):
    options = {
        "shards": (2, "--shards=2"),
        "threads": (3, "--threads=3"),
        "workspace_bytes": (1 << 20, f"--workspace_bytes={1 << 20}"),
        "memory_budget_bytes": (1 << 30, f"--memory_budget_bytes={1 << 30}"),
        "shard_weights": ([1, 4], "--shard_weights=1,4"),
        "timed_search": (False, "--timed_search=false"),
        "algorithm_cache": (tmp_path / "algorithms", f"--algorithm_cache={tmp_path}/algorithms"),
        "device": (0, "--device=0"),
        "checkpoint_dir": (tmp_path / "checkpoints", f"--checkpoint_directory={tmp_path}/checkpoints"),
        "load_root": (str(tmp_path), f"--load_root={tmp_path}"),
    }
    with headwater.local.connect(**{name: value for name, (value, _) in options.items()}) as client:
        flags = Path(f"/proc/{pid_of(client)}/cmdline").read_text().split("\0")
    assert {"--engine=cpu", *(flag for _, flag in options.values())} <= set(flags)


BAD_OPTIONS = {
    "engine": ("tpu", None),
    "device": (-1, 1.5),
    "shards": (0,),
    "threads": (-1,),
    "token_chunk_rows": (4,),
    "shard_weights": ([1, 2], [0]),
    "load_root": ("/nonexistent-folder",),
    "timeout_s": (0,),
    "tenant": ("No Tenant",),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_OPTIONS.items() for value in values])
def test_options_are_checked(name, value):
    running = set(headwater.local._servers)
    with pytest.raises(headwater.InvalidArgumentError, match=name):
        headwater.local.connect(**{name: value})
    assert set(headwater.local._servers) == running


def test_a_checkpoint_of_version_0_1_is_refused_by_name(tmp_path):
    old = tmp_path / "default" / "head" / "step-3"
    old.mkdir(parents=True)
    (old / "manifest.json").write_text(json.dumps({"format": "headwater.local/1", "spec": {}, "step": 3, "sha256": ""}))
    with headwater.local.connect(checkpoint_dir=tmp_path) as client:
        head = client.create_head("head", np.ones((8, 4), np.float32))
        with refused("CHECKPOINT_SPEC_MISMATCH", headwater.FailedPreconditionError, "step-3: ", "headwater.local 0.1", "Head.load"):
            head.restore("step-3")


# ---- the program ---------------------------------------------------------------------------------------------------------


def test_the_program_is_the_one_of_the_package_else_the_one_on_path(monkeypatch, tmp_path):
    program = server_binary()
    monkeypatch.delenv("HEADWATERD")
    monkeypatch.setitem(sys.modules, "headwater_server", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(headwater.UnavailableError, match=r'pip install "headwater\[server\]"'):
        headwater.local.connect()
    (tmp_path / "headwaterd").symlink_to(program)
    assert headwater.local._binary() == str(tmp_path / "headwaterd")
    monkeypatch.setitem(sys.modules, "headwater_server", types.SimpleNamespace(binary=lambda name: f"/package/{name}"))
    assert headwater.local._binary() == "/package/headwaterd"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "cannot be started: No such file"),
        ("#!/bin/sh\necho 'no such library' >&2\nexit 3\n", r"did not start \(status 3\): no such library"),
        ("#!/bin/sh\nexec sleep 100 >&-\n", "did not start"),
    ],
)
def test_a_program_that_does_not_start_is_quoted(monkeypatch, tmp_path, script, said):
    program = tmp_path / "program"
    if script is not None:
        program.write_text(script)
        program.chmod(0o755)
    monkeypatch.setenv("HEADWATERD", str(program))
    with pytest.raises(headwater.UnavailableError, match=said):
        headwater.local.connect()


# ---- the CUDA engine, by a stand-in for its module, which needs no GPU -------------------------------------------------------


def test_a_cuda_engine_that_cannot_be_had_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setenv("HEADWATER_CUDA_MODULE", "/nonexistent-folder/module.so")
    with pytest.raises(headwater.FeatureNotBuiltError, match="there is no file where HEADWATER_CUDA_MODULE says"):
        headwater.local.connect(engine="cuda")


def test_the_module_is_loaded_and_computes(fake_module):
    with headwater.local.connect(engine="cuda", algorithm_cache=None) as client:
        assert client.server_info().engine == "cuda"
        head = client.create_head("head", np.ones((8, 4), np.float32))
        out = head.cross_entropy(np.ones((2, 4), np.float32), [1, 2], micro_batch=0)
        assert out.loss_sum == pytest.approx(2 * np.log(8))


def test_the_device_reaches_the_engine(fake_module):
    with pytest.raises(headwater.FeatureNotBuiltError, match="no fake GPU is visible"):
        headwater.local.connect(engine="cuda", device=7)
