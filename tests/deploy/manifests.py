"""The manifests of deploy/kubernetes as Kubernetes would get them, and the rules that every pod among them must keep."""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = sorted(path.parent for path in (ROOT / "deploy/kubernetes/overlays").glob("*/kustomization.yaml"))
# Components need this much of kustomize; what Debian 12 has is older.
OLDEST_KUSTOMIZE = 5
# Containers that are headwaterd, and the probes that each needs: a worker has no port of its own to be asked at.
OURS = {"headwater": ("startupProbe", "readinessProbe", "livenessProbe"), "worker": ()}


@functools.cache
def why_not_rendered() -> str:
    """Why this machine cannot render the manifests; empty if it can."""
    if shutil.which("kubectl") is None:
        return "there is no kubectl"
    versions = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True).stdout
    found = re.search(r"Kustomize Version: v(\d+)", versions)
    if not found or int(found.group(1)) < OLDEST_KUSTOMIZE:
        return f"kubectl's kustomize is older than version {OLDEST_KUSTOMIZE}"
    return ""


@functools.cache
def render(folder: Path) -> str:
    """The objects that `kubectl kustomize` makes of the folder; fails with its message."""
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, f"{folder.name}: {done.stderr}"
    return done.stdout


def documented(page: str, head: str) -> str:
    """The code block of a page of docs whose first line is a comment with this text."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if block.startswith(f"# {head}\n"))
    return block


def overlay(folder: Path, base: str, more: str) -> list[dict[str, Any]]:
    """The objects of an overlay, made in the folder, on one of deploy/kubernetes and with more lines in its kustomization."""
    folder.mkdir(exist_ok=True)
    resource = os.path.relpath(ROOT / "deploy/kubernetes" / base, folder)
    (folder / "kustomization.yaml").write_text(f"resources:\n  - {resource}\n{more}\n")
    return objects(folder)


def objects(folder: Path) -> list[dict[str, Any]]:
    """The objects, as new dictionaries."""
    return [document for document in yaml.safe_load_all(render(folder)) if document]


def overlay_objects(name: str) -> list[dict[str, Any]]:
    """The objects of an overlay of deploy/kubernetes."""
    return objects(ROOT / "deploy/kubernetes/overlays" / name)


def only(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The one object of a kind."""
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


class Pod(NamedTuple):
    """A pod that an object makes."""

    name: str  # KIND/NAME of the object
    spec: dict[str, Any]
    server: dict[str, Any]  # the container that is headwaterd: a server, or a worker of one
    flags: dict[str, str]  # its flags by name; of several the last one, as the program does it


def pods(documents: list[dict[str, Any]]) -> Iterator[Pod]:
    for document in documents:
        name = f"{document['kind']}/{document['metadata']['name']}"
        templates = document["spec"].get("leaderWorkerTemplate", document["spec"]) if "spec" in document else {}
        found = [templates[part]["spec"] for part in ("leaderTemplate", "workerTemplate", "template") if part in templates]
        for spec in [document["spec"]] if document["kind"] == "Pod" else found:
            server = next(container for container in containers(spec) if container["name"] in OURS)
            arguments = (argument.partition("=") for argument in server["args"])
            yield Pod(name, spec, server, {flag.removeprefix("--"): value for flag, _, value in arguments})


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return spec.get("initContainers", []) + spec["containers"]


def seconds(duration: str) -> float:
    """The seconds of a flag such as 2m or 120s."""
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)(ms|s|m|h)", duration))


def quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity such as 20Gi."""
    number, unit = re.fullmatch(r"(\d+)(Ki|Mi|Gi|Ti|)", text).groups()
    return int(number) * 1024 ** ["", "Ki", "Mi", "Gi", "Ti"].index(unit)


def container_violations(container: dict[str, Any]) -> list[str]:
    context, resources = container.get("securityContext", {}), container.get("resources", {})
    is_bounded = {"cpu", "memory"} <= resources.get("requests", {}).keys() and "memory" in resources.get("limits", {})
    is_pinned = container["name"] not in OURS or re.search(r":\d+\.\d+\.\d+-(cpu|cuda)$|@sha256:", container["image"])
    rules = (
        (context.get("allowPrivilegeEscalation") is not False, "may gain privileges"),
        (context.get("privileged"), "is privileged"),
        (context.get("readOnlyRootFilesystem") is not True, "has a root that can be written"),
        (context.get("capabilities", {}) != {"drop": ["ALL"]}, "keeps capabilities"),
        (context.get("runAsUser") == 0 or context.get("runAsNonRoot") is False, "runs as root"),
        (not is_bounded, "has no requests of cpu and memory, or no limit of memory"),
        (not is_pinned, f"has an image that is not pinned: {container.get('image')}"),
        *((probe not in container, f"has no {probe}") for probe in OURS.get(container["name"], ())),
        (any("hostPort" in port for port in container.get("ports", [])), "takes a port of the host"),
    )
    return [what for is_broken, what in rules if is_broken]


def violations(pod: Pod) -> list[str]:
    """Properties of the pod that a platform's reviewers would refuse; empty if there are none."""
    spec = pod.spec
    context, volumes = spec.get("securityContext", {}), spec.get("volumes", [])
    in_memory = [volume for volume in volumes if (volume.get("emptyDir") or {}).get("medium") == "Memory"]
    drain_s = seconds(pod.flags.get("drain_timeout", "30s"))
    rules = (
        *((spec.get(name), f"has {name}") for name in ("hostNetwork", "hostPID", "hostIPC")),
        (context.get("runAsNonRoot") is not True or not context.get("runAsUser"), "may run as root"),
        (context.get("seccompProfile", {}).get("type") != "RuntimeDefault", "has no seccomp profile"),
        (spec.get("automountServiceAccountToken") is not False, "has a token for the Kubernetes API"),
        *(("hostPath" in volume, f"mounts the host's {volume.get('hostPath')}") for volume in volumes),
        *(
            ("sizeLimit" not in volume["emptyDir"], f"has the volume {volume['name']} in memory without a bound")
            for volume in in_memory
        ),
        *((True, f"{container['name']} {what}") for container in containers(pod.spec) for what in container_violations(container)),
        (spec.get("terminationGracePeriodSeconds", 30) <= drain_s, "is killed before --drain_timeout ends"),
    )
    return [what for is_broken, what in rules if is_broken]
