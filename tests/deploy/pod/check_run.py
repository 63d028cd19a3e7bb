"""Checks the output of play.py for the sidecar's pod against the manifest and against a trainer without a server.

    check_run.py MANIFEST LOCAL FOLDER [--killed_in_step=STEP]

LOCAL is the trainer's output with a local server; FOLDER that of play.py, beside which FOLDER.events has its events.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from train import STEPS, STEPS_PER_CHECKPOINT

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import manifests

SIDECAR, TRAINER = "headwater", "trainer"
KILLED = 128 + 9


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def server_log(path: Path) -> list[dict[str, Any]]:
    """The lines of the server's log; of a server that was killed the last one may be cut."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{") and line.endswith("}")]


def moment(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


class Told:
    """The events that play.py has reported, in order."""

    def __init__(self, events: list[dict[str, Any]]):
        self._events = events

    def all(self, event: str, **details: Any) -> list[int]:
        """The positions of the events that have these details."""
        wanted = {"event": event, **details}
        return [number for number, told in enumerate(self._events) if wanted.items() <= told.items()]

    def one(self, event: str, **details: Any) -> int:
        found = self.all(event, **details)
        assert len(found) == 1, f"{event} {details} was told {len(found)} times: {self._events}"
        return found[0]

    def time(self, number: int) -> datetime.datetime:
        return moment(self._events[number]["time"])


def check_losses(local: list[dict[str, Any]], remote: list[dict[str, Any]]) -> str:
    """Every loss is that of the local server, bit for bit, and every row went through shared memory."""
    assert len(local) == len(remote) == STEPS, (len(local), len(remote))
    for here, there in zip(local, remote, strict=True):
        assert here["step"] == there["step"] and here["loss"] == there["loss"], (here, there)
        assert here["transport"] == there["transport"] == ["shared_memory"], (here, there)
    first, last = remote[0]["loss"], remote[-1]["loss"]
    assert last < 0.7 * first, f"nothing was learned: {first} to {last}"
    return f"{STEPS} losses equal, from {first:.4f} to {last:.4f} nats, through shared memory"


def check_container(made: dict[str, Any], spec: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The container is what the manifest says."""
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


def check_start(told: Told, log: list[dict[str, Any]], trainer: dict[str, Any]) -> str:
    """The sidecar served before the trainer began: by its probe, and by its own clock."""
    probed = told.all("probe_passed", container=SIDECAR, probe="startup", output="SERVING")[0]
    began = told.one("container_started", container=TRAINER)
    assert told.all("container_started", container=SIDECAR)[0] < probed < began
    served = moment(next(line for line in log if line["event"] == "serving")["time"])
    started = moment(trainer["State"]["StartedAt"])
    assert served < started, (served, started)
    return f"serving {(started - served).total_seconds():.2f} s before the trainer began"


def check_drain(told: Told, log: list[dict[str, Any]], grace_period_s: float) -> str:
    """The trainer's end, and nothing else, has drained the sidecar, within the grace period."""
    ended = told.one("container_ended", container=TRAINER, status=0)
    terminating = told.one("terminating", container=SIDECAR)
    drained = told.one("container_ended", container=SIDECAR, status=0)
    assert ended < terminating < drained and not told.all("killing")
    took_s = (told.time(drained) - told.time(terminating)).total_seconds()
    assert took_s < grace_period_s, took_s
    assert [line["checkpoint"] for line in log if line["event"] == "head_saved"][-1] == "drain"
    assert (log[-1]["event"], log[-1]["clean"]) == ("drained", True), log[-1]
    return f"drained in {took_s:.1f} s of {grace_period_s} s, with status 0"


def check_restart(told: Told, log: list[dict[str, Any]], step: int) -> str:
    """The sidecar was killed in that step and came back, with the newest checkpoint of the head, which the trainer took."""
    killed = told.one("container_ended", container=SIDECAR, status=KILLED)
    restarting = told.one("restarting", container=SIDECAR, wait_s=0)
    started = told.all("container_started", container=SIDECAR)
    assert len(started) == 2 and killed < restarting < started[1] < told.one("container_ended", container=TRAINER)
    newest = step - step % STEPS_PER_CHECKPOINT
    second = log[[number for number, line in enumerate(log) if line["event"] == "starting"][1] :]
    (restored,) = (line for line in second if line["event"] == "head_restored")
    assert restored["checkpoint"] == f"step-{newest}", restored
    assert [line for line in second if line.get("method") == "TakeHead" and line["code"] == "OK"], "nobody took the head"
    away_s = (moment(next(line for line in second if line["event"] == "serving")["time"]) - told.time(killed)).total_seconds()
    return f"killed in step {step}, served again {away_s:.2f} s after its end, from the checkpoint of step {newest}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("manifest", type=Path)
    parser.add_argument("local", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--killed_in_step", type=int, metavar="STEP")
    arguments = parser.parse_args()
    spec = yaml.safe_load(arguments.manifest.read_text())["spec"]
    told = Told(json_lines(arguments.folder.with_suffix(".events")))
    log = server_log(arguments.folder / f"{SIDECAR}.err")
    made = {name: json.loads((arguments.folder / f"{name}.json").read_text()) for name in (SIDECAR, TRAINER)}
    remote = json_lines(arguments.folder / f"{TRAINER}.out")

    for container in manifests.containers(spec):
        check_container(made[container["name"]], spec, container)
    print(check_start(told, log, made[TRAINER]))
    if arguments.killed_in_step is None:
        told.one("container_started", container=SIDECAR)
    else:
        assert {"paused": arguments.killed_in_step} in remote
        print(check_restart(told, log, arguments.killed_in_step))
    print(check_losses(json_lines(arguments.local), [line for line in remote if "paused" not in line]))
    print(check_drain(told, log, spec["terminationGracePeriodSeconds"]))


if __name__ == "__main__":
    main()
