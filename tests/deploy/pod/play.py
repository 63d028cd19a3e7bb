"""Plays the sidecar's pod with podman as a kubelet would, and checks the trainer's losses, the container's rights, and the drain.

    play.py MANIFEST LOCAL FOLDER [--kill_in_step=STEP]

MANIFEST is the rendered Pod, LOCAL the trainer's output with a local server. FOLDER is new, and gets each container's output.
Podman makes the containers: arguments, environment, users, capabilities, limits, mounts. This program starts and ends them, asks
the probes, and mounts the memory: podman 4.3 knows no native sidecars, startup probes or memory volumes. With --kill_in_step, the
sidecar gets SIGKILL in the middle of that step and starts again.

Needs root, podman and PyYAML. Podman is configured by its environment (CONTAINERS_CONF, CONTAINERS_STORAGE_CONF).
"""

import argparse
import contextlib
import copy
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from train import STEPS, STEPS_PER_CHECKPOINT

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import manifests

SIDECAR, TRAINER = "headwater", "trainer"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
# Fields that podman or this program follows. Podman ignores others without a word.
POD_FIELDS = set("automountServiceAccountToken containers initContainers restartPolicy securityContext volumes".split())
POD_FIELDS.add("terminationGracePeriodSeconds")
CONTAINER_FIELDS = set("args env image imagePullPolicy name ports resources restartPolicy securityContext volumeMounts".split())
TIMEOUT_S = 120


def run(*command: str, check: bool = True, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
    assert not check or done.returncode == 0, f"{' '.join(command)}: status {done.returncode}: {done.stderr or done.stdout}"
    return done


def await_condition(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S, period_s: float = 0.2) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(period_s)


def for_podman(document: dict[str, Any], trainer_arguments: list[str]) -> dict[str, Any]:
    """The manifest for `podman kube play`: the sidecar is a container, images are local, and the network is the host's."""
    taken = copy.deepcopy(document)
    spec = taken["spec"]
    spec["containers"] += spec.pop("initContainers")
    spec["hostNetwork"] = True
    for container in spec["containers"]:
        for field in ("restartPolicy", "ports", *PROBES):
            container.pop(field, None)
        container["image"] = f"localhost/{container['image'].split(':')[0]}:pod-test"
        container["imagePullPolicy"] = "Never"
        if container["name"] == TRAINER:
            container["args"] = trainer_arguments
    return taken


def podman_name(name: str) -> str:
    return f"trainer-{name}"  # the pod is called trainer


def inspect(name: str) -> dict[str, Any]:
    return json.loads(run("podman", "container", "inspect", podman_name(name)).stdout)[0]


def wait(name: str, timeout_s: float = TIMEOUT_S) -> int:
    """The exit status of a container that ends."""
    return int(run("podman", "wait", podman_name(name), timeout_s=timeout_s).stdout)


def json_lines(text: str) -> list[dict[str, Any]]:
    """The objects among the lines; a process that was killed may leave its last line cut."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]


@contextlib.contextmanager
def made(document: dict[str, Any], folder: Path, trainer_arguments: list[str]) -> Iterator[None]:
    """The pod's containers, none of which runs yet. Keeps their output at the end, and removes them."""
    volumes = {volume["name"]: volume["emptyDir"] for volume in document["spec"]["volumes"]}
    in_memory = {name: folder / "memory" / name for name, volume in volumes.items() if volume.get("medium") == "Memory"}
    try:
        for name, place in in_memory.items():
            place.mkdir(parents=True)
            size = manifests.quantity(volumes[name]["sizeLimit"])
            run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0777,nosuid,nodev", "tmpfs", str(place))
            # Podman takes an existing volume for the emptyDir of that name.
            run("podman", "volume", "create", "--opt", "type=none", "--opt", "o=bind", "--opt", f"device={place}", name)
        (folder / "podman.yaml").write_text(yaml.safe_dump(for_podman(document, trainer_arguments)))
        run("podman", "kube", "play", "--start=false", str(folder / "podman.yaml"))
        yield
    finally:
        for name in (SIDECAR, TRAINER):
            done = run("podman", "logs", podman_name(name), check=False)
            (folder / f"{name}.out").write_text(done.stdout)
            (folder / f"{name}.err").write_text(done.stderr)
        run("podman", "pod", "rm", "--force", "--time", "0", "trainer", check=False)
        for name in volumes:
            run("podman", "volume", "rm", "--force", name, check=False)
        for place in in_memory.values():
            run("umount", str(place), check=False)


def probe(container: dict[str, Any], kind: str) -> bool:
    """Whether the probe passes; prints why it does not."""
    fields = container[kind]
    command = ["podman", "exec", podman_name(SIDECAR), *fields["exec"]["command"]]
    try:
        run(*command, timeout_s=fields["timeoutSeconds"])
    except (AssertionError, subprocess.TimeoutExpired) as error:
        print(f"{kind}: {error}", file=sys.stderr)
        return False
    return True


def start_sidecar(sidecar: dict[str, Any]) -> None:
    """Starts the sidecar, and returns when its startup probe passes."""
    fields = sidecar["startupProbe"]
    bound_s = fields["failureThreshold"] * fields["periodSeconds"]
    run("podman", "start", podman_name(SIDECAR))
    await_condition(lambda: probe(sidecar, "startupProbe"), "the startup probe fails", bound_s, fields["periodSeconds"])


def kill_sidecar(sidecar: dict[str, Any], step: int) -> None:
    """Kills the sidecar when the trainer has paused in the step, and starts it again. The trainer continues."""

    def paused() -> bool:
        return {"paused": step} in json_lines(run("podman", "logs", podman_name(TRAINER)).stdout)

    await_condition(paused, "the trainer does not pause")
    os.kill(inspect(SIDECAR)["State"]["Pid"], signal.SIGKILL)
    assert wait(SIDECAR) == 128 + signal.SIGKILL
    run("podman", "kill", "--signal", "USR1", podman_name(TRAINER))
    start_sidecar(sidecar)


def check_container(made: dict[str, Any], spec: dict[str, Any], wanted: dict[str, Any]) -> None:
    security = spec["securityContext"]
    assert made["Config"]["User"] == f"{security['runAsUser']}:{security['runAsGroup']}", made["Config"]["User"]
    assert made["HostConfig"]["ReadonlyRootfs"] is wanted["securityContext"]["readOnlyRootFilesystem"] is True
    assert "no-new-privileges" in made["HostConfig"]["SecurityOpt"], made["HostConfig"]["SecurityOpt"]
    assert not made["EffectiveCaps"] and not made["BoundingCaps"], (made["EffectiveCaps"], made["BoundingCaps"])
    assert made["HostConfig"]["Memory"] == manifests.quantity(wanted["resources"]["limits"]["memory"]), made["HostConfig"]["Memory"]
    binds = {tuple(bind.split(":")[:2]) for bind in made["HostConfig"]["Binds"]}
    assert binds == {(mount["name"], mount["mountPath"]) for mount in wanted["volumeMounts"]}, binds
    if "args" in wanted:
        assert made["Config"]["Cmd"] == wanted["args"], made["Config"]["Cmd"]
    environment = {f"{variable['name']}={variable['value']}" for variable in wanted.get("env", [])}
    assert environment <= set(made["Config"]["Env"]), made["Config"]["Env"]


def check_losses(local: list[dict[str, Any]], remote: list[dict[str, Any]]) -> None:
    """Every loss is that of the local server, bit for bit, and every row went through shared memory."""
    assert len(local) == len(remote) == STEPS, (len(local), len(remote))
    for here, there in zip(local, remote, strict=True):
        assert here == there and there["transport"] == ["shared_memory"], (here, there)
    assert remote[-1]["loss"] < 0.7 * remote[0]["loss"], "nothing was learned"


def check_restart(log: list[dict[str, Any]], step: int) -> None:
    """The sidecar's second life has the newest checkpoint of the head, which the trainer took."""
    _, start = (number for number, line in enumerate(log) if line["event"] == "starting")
    (restored,) = (line for line in log[start:] if line["event"] == "head_restored")
    assert restored["checkpoint"] == f"step-{step - step % STEPS_PER_CHECKPOINT}", restored
    assert any(line.get("method") == "TakeHead" and line["code"] == "OK" for line in log[start:]), "nothing took the head"


def play(document: dict[str, Any], local: str, folder: Path, killed_in: int | None) -> None:
    spec = document["spec"]
    (sidecar,), (trainer,) = spec["initContainers"], spec["containers"]
    assert (sidecar["name"], sidecar["restartPolicy"], trainer["name"]) == (SIDECAR, "Always", TRAINER)
    assert spec.keys() <= POD_FIELDS and trainer.keys() <= CONTAINER_FIELDS, (spec.keys(), trainer.keys())
    assert sidecar.keys() <= CONTAINER_FIELDS | set(PROBES), sidecar.keys()
    with made(document, folder, [f"--pause_at={killed_in}"] if killed_in is not None else []):
        start_sidecar(sidecar)
        run("podman", "start", podman_name(TRAINER))
        for container in (sidecar, trainer):
            check_container(inspect(container["name"]), spec, container)
        if killed_in is not None:
            kill_sidecar(sidecar, killed_in)
        assert probe(sidecar, "readinessProbe") and probe(sidecar, "livenessProbe")
        assert wait(TRAINER) == 0
        run("podman", "kill", "--signal", "TERM", podman_name(SIDECAR))
        assert wait(SIDECAR, spec["terminationGracePeriodSeconds"]) == 0
        started = datetime.datetime.fromisoformat(inspect(TRAINER)["State"]["StartedAt"])
    log = json_lines((folder / f"{SIDECAR}.err").read_text())
    served = datetime.datetime.fromisoformat(next(line["time"] for line in log if line["event"] == "serving"))
    assert served < started, (served, started)
    remote = json_lines((folder / f"{TRAINER}.out").read_text())
    check_losses(json_lines(local), [line for line in remote if "paused" not in line])
    if killed_in is not None:
        check_restart(log, killed_in)
    # The trainer's end has drained the sidecar, and nothing before has.
    assert [line["checkpoint"] for line in log if line["event"] == "head_saved"][-1] == "drain"
    assert (log[-1]["event"], log[-1]["clean"]) == ("drained", True), log[-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("manifest", type=Path)
    parser.add_argument("local", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill_in_step", type=int, metavar="STEP")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the pod is removed
    arguments.folder.mkdir()
    document = yaml.safe_load(arguments.manifest.read_text())
    play(document, arguments.local.read_text(), arguments.folder.resolve(), arguments.kill_in_step)
    print(f"{STEPS} losses equal those of a local server; drained with status 0")


if __name__ == "__main__":
    main()
