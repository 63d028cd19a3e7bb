"""A pod's manifest, divided: what a stand-in for the kubelet does itself, and what podman reads. The rest is refused.

Podman 4.3 knows no native sidecars (init containers with `restartPolicy: Always`), no startup and readiness probes, no grace
period, no memory volumes. It takes no container ports on the host's network. It passes over in silence what it does not know, so a
manifest may have only what one of the two does.
"""

import copy
import re
from dataclasses import dataclass
from typing import Any

# Kubernetes' default.
GRACE_PERIOD_S = 30

_POD_FIELDS = {
    *("automountServiceAccountToken", "containers", "hostNetwork", "initContainers", "restartPolicy", "securityContext"),
    *("terminationGracePeriodSeconds", "volumes"),
}
_POD_SECURITY_FIELDS = {"fsGroup", "runAsGroup", "runAsNonRoot", "runAsUser", "seccompProfile"}
_CONTAINER_FIELDS = {
    *("args", "command", "env", "image", "imagePullPolicy", "name", "ports", "resources", "securityContext", "volumeMounts"),
    "workingDir",
}
_PROBES = {"startupProbe", "readinessProbe", "livenessProbe"}
_SIDECAR_FIELDS = _CONTAINER_FIELDS | _PROBES | {"restartPolicy"}
# The parts of a container that podman reads.
_ENV_FIELDS = {"name", "value"}
_MOUNT_FIELDS = {"mountPath", "name", "readOnly"}
_RESOURCES = {"cpu", "memory"}
_CONTAINER_SECURITY_FIELDS = {"allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem"}
_PROBE_FIELDS = {"exec", "failureThreshold", "initialDelaySeconds", "periodSeconds", "successThreshold", "timeoutSeconds"}
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


class RefusedError(ValueError):
    """The manifest needs what the stand-in does not know; the message is one sentence."""


@dataclass(frozen=True)
class Probe:
    """A command that is run in a container. Times in seconds."""

    command: tuple[str, ...]
    initial_delay_s: float = 0
    period_s: float = 10
    timeout_s: float = 1
    success_threshold: int = 1  # so often in a row before it counts
    failure_threshold: int = 3


@dataclass(frozen=True)
class Sidecar:
    """A container that starts before those of the pod and ends after them."""

    name: str
    startup: Probe | None = None
    readiness: Probe | None = None
    liveness: Probe | None = None


@dataclass(frozen=True)
class Pod:
    """The parts of a pod that its life depends on."""

    name: str
    sidecars: tuple[Sidecar, ...]  # in the order in which they start
    containers: tuple[str, ...]
    grace_period_s: float


def _only(fields: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(fields.keys() - known):
        raise RefusedError(f"{where} has {', '.join(unknown)}: the stand-in for the kubelet knows only {', '.join(sorted(known))}")


def _probe(container: dict[str, Any], kind: str) -> Probe | None:
    fields = container.get(kind)
    if fields is None:
        return None
    _only(fields, _PROBE_FIELDS, f"the {kind} of container {container['name']}")
    _only(fields.get("exec", {}), {"command"}, f"the {kind}'s exec of container {container['name']}")
    if "exec" not in fields:
        raise RefusedError(f"the {kind} of container {container['name']} has no exec: what would be asked?")
    return Probe(
        command=tuple(fields["exec"]["command"]),
        initial_delay_s=fields.get("initialDelaySeconds", Probe.initial_delay_s),
        period_s=fields.get("periodSeconds", Probe.period_s),
        timeout_s=fields.get("timeoutSeconds", Probe.timeout_s),
        success_threshold=fields.get("successThreshold", Probe.success_threshold),
        failure_threshold=fields.get("failureThreshold", Probe.failure_threshold),
    )


def _check_container(container: dict[str, Any]) -> None:
    name = container["name"]
    _only(container.get("securityContext", {}), _CONTAINER_SECURITY_FIELDS, f"the securityContext of container {name}")
    for variable in container.get("env", []):
        _only(variable, _ENV_FIELDS, f"the variable {variable['name']} of container {name}")
    for mount in container.get("volumeMounts", []):
        _only(mount, _MOUNT_FIELDS, f"the mount {mount['name']} of container {name}")
    resources = container.get("resources", {})
    _only(resources, {"limits", "requests"}, f"resources of container {name}")
    for kind, amounts in resources.items():
        _only(amounts, _RESOURCES, f"resources.{kind} of container {name}")


def _check_security(spec: dict[str, Any]) -> None:
    context = spec.get("securityContext", {})
    _only(context, _POD_SECURITY_FIELDS, "the pod's securityContext")
    # Podman runs a container as whom the manifest says, and does not look who that is.
    if context.get("runAsNonRoot") and not context.get("runAsUser"):
        raise RefusedError("the pod has runAsNonRoot but no runAsUser other than 0: podman does not check who an image's user is")
    # Podman gives a volume to the container's user and group.
    if context.get("fsGroup", context.get("runAsGroup")) != context.get("runAsGroup"):
        raise RefusedError(
            f"the pod's fsGroup is {context['fsGroup']}, its runAsGroup {context.get('runAsGroup')}: podman knows only the latter"
        )
    if context.get("seccompProfile", {}).get("type", "RuntimeDefault") != "RuntimeDefault":
        raise RefusedError(f"the pod's seccompProfile is {context['seccompProfile']['type']}: podman is run with RuntimeDefault")


def read_pod(document: dict[str, Any]) -> Pod:
    """The pod of a manifest. RefusedError if it is none, or one that cannot be played as a kubelet would."""
    if (document.get("apiVersion"), document.get("kind")) != ("v1", "Pod"):
        raise RefusedError(f"the manifest is of {document.get('apiVersion')} {document.get('kind')}: only a v1 Pod is played")
    spec = document["spec"]
    _only(spec, _POD_FIELDS, "the pod")
    _check_security(spec)
    if spec.get("automountServiceAccountToken") is not False:
        raise RefusedError(
            "the pod does not say automountServiceAccountToken: false: there is no Kubernetes whose token could be mounted"
        )
    if spec.get("restartPolicy", "Always") != "Never":
        raise RefusedError(f"the pod's restartPolicy is {spec.get('restartPolicy', 'Always')}: only Never is played")
    if not spec.get("containers"):
        raise RefusedError("the pod has no containers")
    for container in spec["containers"]:
        _only(container, _CONTAINER_FIELDS, f"container {container['name']}")
    for container in spec.get("initContainers", []):
        if container.get("restartPolicy") != "Always":
            raise RefusedError(f"init container {container['name']} has no restartPolicy: Always: only native sidecars are played")
        _only(container, _SIDECAR_FIELDS, f"sidecar {container['name']}")
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        _check_container(container)
    memory_volumes(document)
    return Pod(
        name=document["metadata"]["name"],
        sidecars=tuple(
            Sidecar(container["name"], *(_probe(container, kind) for kind in ("startupProbe", "readinessProbe", "livenessProbe")))
            for container in spec.get("initContainers", [])
        ),
        containers=tuple(container["name"] for container in spec["containers"]),
        grace_period_s=spec.get("terminationGracePeriodSeconds", GRACE_PERIOD_S),
    )


def volumes(document: dict[str, Any]) -> list[str]:
    """The names of the pod's volumes."""
    return [volume["name"] for volume in document["spec"].get("volumes", [])]


def memory_volumes(document: dict[str, Any]) -> dict[str, int]:
    """The volumes in memory, with their sizes in bytes. RefusedError for other kinds than emptyDir, or without a bound."""
    sizes = {}
    for volume in document["spec"].get("volumes", []):
        _only(volume, {"name", "emptyDir"}, f"volume {volume['name']}")
        entry = volume.get("emptyDir") or {}
        if entry.get("medium", "") != "Memory":
            _only(entry, {"medium"}, f"the emptyDir of volume {volume['name']}")
            continue
        size = re.fullmatch(r"(\d+)(Ki|Mi|Gi|)", str(entry.get("sizeLimit", "")))
        if size is None:
            raise RefusedError(
                f"volume {volume['name']} is in memory and its sizeLimit is {entry.get('sizeLimit')}: expected bytes, Ki, Mi or Gi"
            )
        sizes[volume["name"]] = int(size[1]) * _UNITS[size[2]]
    return sizes


def for_podman(document: dict[str, Any]) -> dict[str, Any]:
    """The manifest as `podman kube play` takes it: sidecars among the containers, and no ports on the host's network.

    The stand-in starts all of them when their time has come. Container ports say nothing there, and podman refuses them.
    """
    taken = copy.deepcopy(document)
    spec = taken["spec"]
    sidecars = spec.pop("initContainers", [])
    for container in sidecars:
        del container["restartPolicy"]
    spec["containers"] = sidecars + spec["containers"]
    if spec.get("hostNetwork"):
        for container in spec["containers"]:
            container.pop("ports", None)
    return taken
