"""The manifests of deploy/kubernetes as Kubernetes would get them, and the rules that every pod among them must keep."""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def pod_specs(documents: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The pods that the objects make, with their names."""
    for document in documents:
        name = f"{document['kind']}/{document['metadata']['name']}"
        if document["kind"] == "Pod":
            yield name, document["spec"]
        elif document["kind"] == "LeaderWorkerSet":
            template = document["spec"]["leaderWorkerTemplate"]
            for part in ("leaderTemplate", "workerTemplate"):
                if part in template:
                    yield f"{name}/{part}", template[part]["spec"]
        elif "template" in document.get("spec", {}):
            yield name, document["spec"]["template"]["spec"]


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return spec.get("initContainers", []) + spec["containers"]


def server(spec: dict[str, Any]) -> dict[str, Any]:
    """The container that is headwaterd: a server, or a worker of one."""
    return next(container for container in containers(spec) if container["name"] in OURS)


def flags(container: dict[str, Any]) -> dict[str, str]:
    """Its flags by name; of several the last one, as the program does it."""
    return {name.removeprefix("--"): value for name, _, value in (argument.partition("=") for argument in container["args"])}


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
    wrong = []
    if context.get("allowPrivilegeEscalation") is not False:
        wrong.append("may gain privileges")
    if context.get("privileged"):
        wrong.append("is privileged")
    if context.get("readOnlyRootFilesystem") is not True:
        wrong.append("has a root that can be written")
    if context.get("capabilities", {}) != {"drop": ["ALL"]}:
        wrong.append("keeps capabilities")
    if context.get("runAsUser") == 0 or context.get("runAsNonRoot") is False:
        wrong.append("runs as root")
    if not {"cpu", "memory"} <= resources.get("requests", {}).keys() or "memory" not in resources.get("limits", {}):
        wrong.append("has no requests of cpu and memory, or no limit of memory")
    if container["name"] in OURS and not re.search(r":\d+\.\d+\.\d+-(cpu|cuda)$|@sha256:", container["image"]):
        wrong.append(f"has an image that is not pinned: {container['image']}")
    wrong += [f"has no {probe}" for probe in OURS.get(container["name"], ()) if probe not in container]
    if any("hostPort" in port for port in container.get("ports", [])):
        wrong.append("takes a port of the host")
    return wrong


def violations(spec: dict[str, Any]) -> list[str]:
    """Properties of the pod that a platform's reviewers would refuse; empty if there are none."""
    context = spec.get("securityContext", {})
    wrong = [f"has {name}" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
        wrong.append("may run as root")
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        wrong.append("has no seccomp profile")
    if spec.get("automountServiceAccountToken") is not False:
        wrong.append("has a token for the Kubernetes API")
    wrong += [f"mounts the host's {volume['hostPath']}" for volume in spec.get("volumes", []) if "hostPath" in volume]
    mounted = {volume["name"]: volume.get("emptyDir") for volume in spec.get("volumes", [])}
    in_memory = {name: entry for name, entry in mounted.items() if entry and entry.get("medium") == "Memory"}
    wrong += [f"has the volume {name} in memory without a bound" for name, entry in in_memory.items() if "sizeLimit" not in entry]
    for container in containers(spec):
        wrong += [f"{container['name']} {what}" for what in container_violations(container)]
    if spec.get("terminationGracePeriodSeconds", 30) <= seconds(flags(server(spec)).get("drain_timeout", "30s")):
        wrong.append("is killed before --drain_timeout ends")
    return wrong
