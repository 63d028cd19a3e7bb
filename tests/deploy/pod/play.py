"""Plays a pod with native sidecars on this machine with podman, and stands in for the kubelet where podman lacks something.

    play.py MANIFEST FOLDER

Podman reads the manifest and makes the containers of it: images, arguments, environment, users, capabilities, limits, mounts. This
program starts them in the kubelet's order, and asks the probes by their commands in the containers. It restarts sidecars and ends
them after the rest (pod_life.py), and puts memory under memory volumes, as large as their limits. Container ports are left out on
the host's network.

Events are printed on stdout, one line of JSON each. When the pod has ended, FOLDER has each container's output (NAME.out, NAME.err)
and podman's description of it (NAME.json). The pod is then removed. SIGTERM and SIGINT delete the pod, as a person would. The exit
status is 0 if the pod has succeeded, 1 if it has failed, 2 if it cannot be played (a sentence on stderr).

Needs root, podman and PyYAML. Podman is configured by its environment (CONTAINERS_CONF, CONTAINERS_STORAGE_CONF).
"""

import argparse
import asyncio
import datetime
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from pod_life import PodLife
from pod_manifest import RefusedError, for_podman, memory_volumes, read_pod, volumes


class PodmanError(RuntimeError):
    """Podman, or mount, has failed; the message is what it says."""


async def run(*command: str, check: bool = True) -> tuple[int, str, str]:
    """Runs a command: its status, stdout and stderr. It gets none of this program's signals, and SIGKILL when this is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # Podman would have systemd's timers ask what it knows of the probes; they are asked here.
        env={**os.environ, "DISABLE_HC_SYSTEMD": "true"},
    )
    try:
        out, errors = (output.decode(errors="replace") for output in await process.communicate())
    except asyncio.CancelledError:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    status = await process.wait()
    if check and status:
        raise PodmanError(f"{' '.join(command)}: status {status}: {errors.strip() or out.strip()}")
    return status, out, errors


class Podman:
    """The containers of one pod that podman has made; a pod_life.Runtime."""

    def __init__(self, pod: str):
        self._pod = pod

    def _name(self, container: str) -> str:
        return f"{self._pod}-{container}"

    async def start(self, name: str) -> None:
        await run("podman", "start", self._name(name))

    async def wait(self, name: str) -> int:
        return int((await run("podman", "wait", self._name(name)))[1])

    async def execute(self, name: str, command: tuple[str, ...]) -> tuple[int, str]:
        status, out, errors = await run("podman", "exec", self._name(name), *command, check=False)
        return status, (out + errors).strip()

    async def signal(self, name: str, signal: str) -> None:
        status, _, errors = await run("podman", "kill", "--signal", signal, self._name(name), check=False)
        if status and (await self.inspect(name))["State"]["Running"]:
            raise PodmanError(f"podman kill --signal {signal} {self._name(name)}: {errors.strip()}")

    async def inspect(self, name: str) -> dict[str, Any]:
        return json.loads((await run("podman", "container", "inspect", self._name(name)))[1])[0]

    async def keep_output(self, name: str, folder: Path) -> None:
        """Writes the container's output and its description."""
        _, out, errors = await run("podman", "logs", self._name(name))
        (folder / f"{name}.out").write_text(out)
        (folder / f"{name}.err").write_text(errors)
        (folder / f"{name}.json").write_text(json.dumps(await self.inspect(name), indent=1) + "\n")


def record(event: str, **details: Any) -> None:
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    print(json.dumps({"time": time, "event": event, **details}), flush=True)


async def is_there(kind: str, name: str) -> bool:
    """Whether podman has a pod or a volume of that name."""
    return (await run("podman", kind, "exists", name, check=False))[0] == 0


async def make(document: dict[str, Any], folder: Path) -> None:
    """Has podman make the pod, nothing of which runs yet."""
    for name, size_bytes in memory_volumes(document).items():
        place = folder / "memory" / name
        place.mkdir(parents=True)
        await run("mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0777,nosuid,nodev", "tmpfs", str(place))
        # Podman takes a volume that is there for the emptyDir of its name.
        await run("podman", "volume", "create", "--opt", "type=none", "--opt", "o=bind", "--opt", f"device={place}", name)
    if document["spec"].get("hostNetwork"):
        for container in document["spec"].get("initContainers", []) + document["spec"]["containers"]:
            if "ports" in container:
                record("ports_left_out", container=container["name"], ports=container["ports"])
    manifest = folder / "podman.yaml"
    manifest.write_text(yaml.safe_dump(for_podman(document), sort_keys=False))
    await run("podman", "kube", "play", "--start=false", str(manifest))


async def remove(document: dict[str, Any], folder: Path) -> None:
    """Removes what is there of the pod, however far it has come."""
    name = document["metadata"]["name"]
    if await is_there("pod", name):
        await run("podman", "pod", "rm", "--force", "--time", "0", name)
    for volume in volumes(document):
        if await is_there("volume", volume):
            await run("podman", "volume", "rm", volume)
    for volume in memory_volumes(document):
        place = folder / "memory" / volume
        if place.is_mount():
            await run("umount", str(place))


async def play(document: dict[str, Any], folder: Path) -> bool:
    """Leads the pod through its whole life: whether it has succeeded."""
    pod = read_pod(document)
    for kind, names in (("pod", [pod.name]), ("volume", volumes(document))):
        for name in names:
            if await is_there(kind, name):
                raise RefusedError(f"podman has a {kind} that is called {name}; it is not touched")
    podman = Podman(pod.name)
    life = PodLife(pod, podman, record)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, life.delete)
    try:
        await make(document, folder)
        try:
            return await life.run()
        finally:
            for name in (*(sidecar.name for sidecar in pod.sidecars), *pod.containers):
                await podman.keep_output(name, folder)
    finally:
        await remove(document, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plays a pod with native sidecars with podman.")
    parser.add_argument("manifest", type=Path, help="one v1 Pod")
    parser.add_argument("folder", type=Path, help="a new folder for what is left of the pod")
    arguments = parser.parse_args()
    try:
        documents = [document for document in yaml.safe_load_all(arguments.manifest.read_text()) if document]
        if len(documents) != 1:
            raise RefusedError(f"{arguments.manifest} has {len(documents)} objects: exactly one Pod is played")
        arguments.folder.mkdir(parents=True)
        return 0 if asyncio.run(play(documents[0], arguments.folder.resolve())) else 1
    except* (RefusedError, PodmanError, OSError) as group:
        for error in group.exceptions:
            print(f"play: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
