"""The manifest of tests/deploy/pod is the product's. tests/deploy/pod/run plays the pod."""

import copy
import sys
from pathlib import Path
from typing import Any

import manifests
import pytest

sys.path.insert(0, str(Path(__file__).parent / "pod"))
import pod_manifest
from pod_manifest import Pod, Probe, Sidecar

PRODUCT = manifests.ROOT / "deploy/kubernetes/overlays/sidecar-pod"
PLAYED = manifests.ROOT / "tests/deploy/pod"
rendered = pytest.mark.skipif(bool(manifests.why_not_rendered()), reason=manifests.why_not_rendered())


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Everything in a manifest by its path. Elements of a list that have names go by them, as Kubernetes takes them."""
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = [(entry["name"] if isinstance(entry, dict) and "name" in entry else i, entry) for i, entry in enumerate(value)]
    else:
        return {path: value}
    found = {path + "/": type(value).__name__}
    for key, entry in entries:
        found |= leaves(entry, f"{path}/{key}")
    return found


def differences(first: Any, second: Any) -> dict[str, tuple[Any, Any]]:
    """Where two manifests differ, with what each has there; None: nothing."""
    one, other = leaves(first), leaves(second)
    return {path: (one.get(path), other.get(path)) for path in one.keys() | other.keys() if one.get(path) != other.get(path)}


def pod_of(folder: Path) -> dict[str, Any]:
    (document,) = manifests.objects(folder)
    return document


@rendered
def test_the_overlay_changes_the_network_and_the_images_and_nothing_else():
    assert differences(pod_of(PRODUCT), pod_of(PLAYED)) == {
        "/spec/hostNetwork": (None, True),
        "/spec/containers/trainer/image": ("trainer", "localhost/headwater-trainer:pod-test"),
        "/spec/containers/trainer/imagePullPolicy": ("IfNotPresent", "Never"),
        "/spec/initContainers/headwater/image": ("headwater:0.1.0-cpu", "localhost/headwater:pod-test"),
        "/spec/initContainers/headwater/imagePullPolicy": ("IfNotPresent", "Never"),
    }


@rendered
def test_podman_gets_the_sidecar_as_a_container_that_has_all_but_its_ports():
    document = pod_of(PLAYED)
    before = copy.deepcopy(document)
    taken = pod_manifest.for_podman(document)
    assert document == before
    (sidecar,) = document["spec"].pop("initContainers")
    assert sidecar.pop("restartPolicy") == "Always" and sidecar.pop("ports")
    document["spec"]["containers"].insert(0, sidecar)
    assert taken == document
    # Where the pod has a network of its own podman takes its ports.
    del before["spec"]["hostNetwork"]
    assert "ports" in pod_manifest.for_podman(before)["spec"]["containers"][0]


@rendered
def test_the_pod_is_read_as_it_is_written():
    document = pod_of(PLAYED)
    command = ("/usr/local/bin/headwaterctl", "--server=unix:/run/headwater/headwater.sock", "--connect_timeout=4s", "health")
    assert pod_manifest.read_pod(document) == Pod(
        name="trainer",
        sidecars=(
            Sidecar(
                "headwater",
                startup=Probe(command, period_s=2, timeout_s=5, failure_threshold=150),
                readiness=Probe(command, period_s=5, timeout_s=5, failure_threshold=1),
                liveness=Probe(command, period_s=10, timeout_s=10, failure_threshold=6),
            ),
        ),
        containers=("trainer",),
        grace_period_s=90,
    )
    assert pod_manifest.memory_volumes(document) == {"headwater-run": 16 << 20, "headwater-memory": 1 << 30}
    assert pod_manifest.volumes(document) == ["headwater-run", "headwater-memory", "headwater-state"]
