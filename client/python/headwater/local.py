"""A server of this process's own: `headwaterd` as a child process, behind a private Unix socket. It ends with this process.

client = headwater.local.connect(shards=2)
head = client.create_head("student", weight, optimizer=headwater.AdamW())     # and so on, as with headwater.connect
"""

from __future__ import annotations

import importlib
import os
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import headwater
from headwater._client import DEFAULT_TIMEOUT_S, Client
from headwater._errors import HeadwaterError, UnavailableError, invalid_argument, make_error, must_be, wrong_shape
from headwater._loss._requests import check_bool
from headwater._types import check_integer

__all__ = ["connect"]

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
_QUOTED_BYTES = 2000  # of the output of a server that does not start


def connect(
    shards: int = 1,
    threads: int = 0,
    workspace_bytes: int = 0,
    *,
    memory_budget_bytes: int = 0,
    token_chunk_rows: int = 0,
    shard_weights: Sequence[int] | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    load_root: str | os.PathLike[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    tenant: str = "default",
    engine: str = "cpu",
    device: int = 0,
    timed_search: bool = True,
    algorithm_cache: str | os.PathLike[str] | None = "auto",
) -> Client:
    """Starts a server for this process, or joins the one that runs with the same options, and connects to it.

    The program is `headwaterd` of the package headwater-server (`pip install "headwater[server]"`), else the one on PATH. The
    environment variable HEADWATERD names another. It opens no TCP port, logs nothing, and its flags have their defaults except the
    options here; its limits (docs/flags.md) hold.

    PyTorch's threads spin while they wait, on the server's cores. Before PyTorch is imported, a "cpu" server's `connect` sets
    OMP_WAIT_POLICY=PASSIVE, with which they sleep. Afterwards it warns if nothing in the environment says how long they spin.

    Args:
        shards: number of vocabulary shards, >= 1.
        threads: CPU threads over all shards; 0: the cores that this process may use. "cpu" only.
        workspace_bytes: bounds the logits that are held at once; 0: the engine's default.
        memory_budget_bytes: for all heads; 0: 80 % of the machine's memory, or of the GPU's.
        token_chunk_rows: only 0. A server takes its rows from the workspace.
        shard_weights: relative sizes of the shards; None: even.
        checkpoint_dir: where `Head.save` writes; None: checkpoints are refused. Heads come back by `Head.restore` alone.
        load_root: folder where `Head.load` reads; None: loading is refused.
        timeout_s: bound of every call that does not bring its own, in seconds.
        tenant: whose heads short names mean. Clients of one server share the heads of a tenant.
        engine: "cpu", or "cuda": one NVIDIA GPU.
        device: index of the GPU, as CUDA counts the visible ones. "cuda" only.
        timed_search: try the matrix products out when a head is created; False: those that the library proposes, the same ones at
            every start. "cuda" only.
        algorithm_cache: file that keeps found algorithms from start to start; "auto": headwater/cublaslt.json in $XDG_CACHE_HOME,
            else in ~/.cache; None: none is kept. "cuda" only.
    Returns:
        A Client. The server ends, and its heads with it, when the last client of its options is closed or forgotten, and when this
        process ends. A process that is forked from this one gets a server of its own.
    Raises:
        InvalidArgumentError: an option is out of range, or the server refuses it.
        FeatureNotBuiltError: the CUDA engine's module or a usable GPU is not there; the message says which.
        UnavailableError: there is no headwaterd, or it does not start; the message quotes it.
    """
    for name, value in {
        "threads": threads,
        "workspace_bytes": workspace_bytes,
        "memory_budget_bytes": memory_budget_bytes,
        "token_chunk_rows": token_chunk_rows,
        "device": device,
    }.items():
        check_integer(value, name)
    if token_chunk_rows:
        raise must_be("token_chunk_rows", "0 (a server takes workspace_bytes)", token_chunk_rows)
    check_integer(shards, "shards", low=1)
    if shard_weights is not None and len(shard_weights) != shards:
        raise wrong_shape("shard_weights", (shards,), (len(shard_weights),))
    if engine not in ("cpu", "cuda"):
        raise must_be("engine", '"cpu" or "cuda"', engine)
    options = {
        "engine": engine,
        "device": device,
        "timed_search": str(check_bool(timed_search, "timed_search")).lower(),
        "algorithm_cache": algorithm_cache if algorithm_cache == "auto" else _path(algorithm_cache),
        "shards": shards,
        "shard_weights": ",".join(str(check_integer(weight, "shard_weights", low=1)) for weight in shard_weights or ()),
        "threads": threads,
        "workspace_bytes": workspace_bytes,
        "memory_budget_bytes": memory_budget_bytes,
        "checkpoint_directory": _path(checkpoint_dir),
        "restore_heads": "false",
        "load_root": _path(load_root),
    }
    if engine == "cpu":
        _wait_passively(threads)
    server = _running(_binary(), *(f"--{name}={value}" for name, value in options.items()))
    client = headwater.connect(server.address, timeout_s=timeout_s, tenant=tenant)
    client._backend.connection.owner = server  # which ends with its last client
    return client


# Any of them says how long OpenMP's threads spin before they sleep.
_SPIN_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def _wait_passively(threads: int) -> None:
    """Lets the waiting threads of PyTorch sleep: those that spin take the cores from the server's threads.

    OpenMP reads the environment once, when PyTorch is imported.
    """
    if any(name in os.environ for name in _SPIN_VARIABLES):
        return
    torch = sys.modules.get("torch")
    if torch is None:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        return
    cores, own = len(os.sched_getaffinity(0)), torch.get_num_threads()
    if own > 1 and own + (threads or cores) > cores:
        warnings.warn(
            f"headwater.local: {own} threads of PyTorch and {threads or cores} of the server share {cores} cores. PyTorch's "
            "spin while they wait, which may slow a step down: set the environment variable OMP_WAIT_POLICY=PASSIVE "
            "before the program starts, or call headwater.local.connect before torch is imported",
            RuntimeWarning,
            stacklevel=3,
        )


def _path(path: str | os.PathLike[str] | None) -> str:
    return "" if path is None else os.path.abspath(path)


def _binary() -> str:
    """Path of headwaterd."""
    if named := os.environ.get("HEADWATERD"):
        return named
    try:
        return str(importlib.import_module("headwater_server").binary("headwaterd"))
    except ModuleNotFoundError:
        found = shutil.which("headwaterd")
    if found is None:
        raise UnavailableError('headwater.local needs headwaterd, which is not on PATH: pip install "headwater[server]"')
    return found


class _Process(subprocess.Popen[bytes]):
    def __del__(self, *_: Any) -> None:
        """No warning that it still runs: at the interpreter's exit it ends by itself."""


class _Server:
    """A running headwaterd, which ends when this object does."""

    def __init__(self, command: tuple[str, ...]):
        # The address of a socket has at most 107 bytes.
        folder = tempfile.mkdtemp(prefix="headwater-", dir=None if len(os.fsencode(tempfile.gettempdir())) < 75 else "/tmp")
        self.address = f"unix:{folder}/grpc"
        with tempfile.TemporaryFile() as log:
            try:
                self._process = _Process(
                    [
                        *command,
                        f"--listen_addresses={self.address}",
                        f"--descriptor_socket={folder}/memory",
                        "--metrics_address=",
                        "--log_level=warning",
                        f"--parent_pid={os.getpid()}",
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for this process alone
                )
            except OSError as error:
                shutil.rmtree(folder, ignore_errors=True)
                raise UnavailableError(f"{command[0]} cannot be started: {error.strerror}") from None
            end = weakref.finalize(self, _end, self._process, folder, os.getpid())
            if not _says_it_is_ready(self._process):
                end()
                log.seek(0)
                raise _start_error(self._process.returncode, log.read(_QUOTED_BYTES).decode(errors="replace").strip())

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None


_servers: weakref.WeakValueDictionary[tuple[str, ...], _Server] = weakref.WeakValueDictionary()
_starting = threading.Lock()


def _forget_servers_of_parent() -> None:
    global _starting
    _starting = threading.Lock()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_servers_of_parent)


def _running(*command: str) -> _Server:
    """The server of this command, started if it does not run."""
    with _starting:
        server = _servers.get(command)
        if server is None or not server.is_running:
            server = _servers[command] = _Server(command)
        return server


def _says_it_is_ready(process: _Process) -> bool:
    assert process.stdout is not None
    with process.stdout as output, selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        return bool(selector.select(_START_TIMEOUT_S)) and output.readline() != b""


def _start_error(status: int, said: str) -> HeadwaterError:
    said = said.removeprefix("headwaterd: ")
    if said.startswith("--engine=cuda: "):
        return make_error("UNIMPLEMENTED", "FEATURE_NOT_BUILT", said)
    if re.match(r"(--)?[a-z_]+: expected ", said):
        return invalid_argument("INVALID_FIELD", said)
    return UnavailableError(f"headwaterd did not start (status {status}): {said}")


def _end(process: _Process, folder: str, pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork: the server is the parent's
    process.terminate()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
