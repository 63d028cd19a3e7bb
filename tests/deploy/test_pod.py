"""The pod of tests/deploy/pod: its manifest is the product's, and the stand-in for the kubelet leads it as a kubelet would.

No container runs here, and no time passes. The acts of each container are written down with their times, and the event loop's clock
jumps to the next one. tests/deploy/pod/run plays the real pod.
"""

import asyncio
import copy
import dataclasses
import selectors
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import manifests
import pytest

sys.path.insert(0, str(Path(__file__).parent / "pod"))
import pod_life
import pod_manifest
from pod_manifest import Pod, Probe, Sidecar

PRODUCT = manifests.ROOT / "deploy/kubernetes/overlays/sidecar-pod"
PLAYED = manifests.ROOT / "tests/deploy/pod"
rendered = pytest.mark.skipif(bool(manifests.why_not_rendered()), reason=manifests.why_not_rendered())
FOREVER_S = 1e9
# No story takes longer, in the loop's own time: a longer one never ends.
STORY_S = 1e4


# ---- the manifest ---------------------------------------------------------------------------------------------------------


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


def smallest() -> dict[str, Any]:
    """A pod that is played, with one of everything that can be wrong."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p"},
        "spec": {
            "automountServiceAccountToken": False,
            "restartPolicy": "Never",
            "securityContext": {"runAsUser": 7, "runAsGroup": 8, "fsGroup": 8, "runAsNonRoot": True},
            "initContainers": [{"name": "s", "restartPolicy": "Always", "startupProbe": {"exec": {"command": ["ask"]}}}],
            "containers": [{"name": "c", "image": "i", "securityContext": {}}],
            "volumes": [{"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": "4Ki"}}, {"name": "w", "emptyDir": {}}],
        },
    }


def test_what_a_manifest_does_not_say_is_as_in_kubernetes():
    pod = pod_manifest.read_pod(smallest())
    assert pod == Pod("p", (Sidecar("s", startup=Probe(("ask",), 0, 10, 1, 1, 3)),), ("c",), 30)
    assert pod_manifest.memory_volumes(smallest()) == {"v": 4096}


ABSENT = object()


@pytest.mark.parametrize(
    "path, value, why",
    [
        ("kind", "Job", "only a v1 Pod"),
        ("spec.shareProcessNamespace", True, "the pod has shareProcessNamespace"),
        ("spec.automountServiceAccountToken", ABSENT, "automountServiceAccountToken: false"),
        ("spec.restartPolicy", ABSENT, "restartPolicy is Always: only Never"),
        ("spec.restartPolicy", "OnFailure", "restartPolicy is OnFailure: only Never"),
        ("spec.containers", [], "no containers"),
        ("spec.securityContext.supplementalGroups", [1], "the pod's securityContext has supplementalGroups"),
        ("spec.securityContext.runAsUser", ABSENT, "no runAsUser other than 0"),
        ("spec.securityContext.runAsUser", 0, "no runAsUser other than 0"),
        ("spec.securityContext.fsGroup", 9, "fsGroup is 9, its runAsGroup 8"),
        ("spec.securityContext.seccompProfile", {"type": "Unconfined"}, "seccompProfile is Unconfined"),
        ("spec.initContainers.0.restartPolicy", ABSENT, "init container s has no restartPolicy: Always: only native sidecars"),
        ("spec.initContainers.0.lifecycle", {"preStop": {}}, "sidecar s has lifecycle"),
        ("spec.initContainers.0.startupProbe", {"grpc": {"port": 1}}, "the startupProbe of container s has grpc"),
        ("spec.initContainers.0.livenessProbe", {"httpGet": {"port": 1}}, "the livenessProbe of container s has httpGet"),
        ("spec.initContainers.0.readinessProbe", {"periodSeconds": 1}, "the readinessProbe of container s has no exec"),
        ("spec.containers.0.livenessProbe", {"exec": {"command": ["ask"]}}, "container c has livenessProbe"),
        ("spec.containers.0.restartPolicy", "Always", "container c has restartPolicy"),
        ("spec.containers.0.securityContext.privileged", True, "the securityContext of container c has privileged"),
        ("spec.containers.0.env", [{"name": "e", "valueFrom": {}}], "the variable e of container c has valueFrom"),
        ("spec.containers.0.volumeMounts", [{"name": "v", "subPath": "a"}], "the mount v of container c has subPath"),
        ("spec.containers.0.resources", {"claims": []}, "resources of container c has claims"),
        ("spec.containers.0.resources", {"limits": {"nvidia.com/gpu": 1}}, "resources.limits of container c has nvidia.com/gpu"),
        ("spec.volumes.0.hostPath", {"path": "/"}, "volume v has hostPath"),
        ("spec.volumes.0.emptyDir.sizeLimit", ABSENT, "volume v is in memory and its sizeLimit is None"),
        ("spec.volumes.0.emptyDir.sizeLimit", "1.5Gi", "volume v is in memory and its sizeLimit is 1.5Gi"),
        ("spec.volumes.1.emptyDir.sizeLimit", "1Gi", "the emptyDir of volume w has sizeLimit"),
    ],
)
def test_what_would_not_be_played_as_in_kubernetes_is_refused(path, value, why):
    document = smallest()
    *way, last = path.split(".")
    place = document
    for key in way:
        place = place[int(key) if key.isdigit() else key]
    if value is ABSENT:
        del place[last]
    else:
        place[last] = value
    with pytest.raises(pod_manifest.RefusedError) as raised:
        pod_manifest.read_pod(document)
    assert why in str(raised.value)


# ---- its life -------------------------------------------------------------------------------------------------------------


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is that of the next thing that happens. Fails if nothing ever would."""

    def __init__(self) -> None:
        self.now_s = 0.0
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout=None):
                assert timeout is not None, "nothing will ever happen"
                loop.now_s += max(timeout, 0)
                return super().select(0)

        super().__init__(Selector())

    def time(self) -> float:
        return self.now_s


@dataclasses.dataclass
class Run:
    """The acts of a container in one run; seconds since its start."""

    ends_s: float = FOREVER_S
    status: int = 0
    healthy: Callable[[float], bool] = lambda _: True
    answers_after_s: float = 0.0  # so long a probe takes
    obeys_after_s: float = 0.0  # so long it lives after SIGTERM


class Stage:
    """A pod_life.Runtime whose containers follow a script, with the events and acts and their times."""

    def __init__(self, **runs: list[Run]):
        self._runs = {name: list(each) for name, each in runs.items()}
        self._now: dict[str, tuple[Run, float, asyncio.Future[int]]] = {}
        self.told: list[tuple[float, str, str]] = []
        self.over_s: float | None = None

    @staticmethod
    def time() -> float:
        return asyncio.get_running_loop().time()

    def _after(self, delay_s: float, name: str, status: int) -> None:
        """The container ends then, unless it has ended before."""
        ended = self._now[name][2]
        asyncio.get_running_loop().call_later(delay_s, lambda: ended.done() or ended.set_result(status))

    async def start(self, name):
        assert name not in self._now or self._now[name][2].done(), f"{name} runs"
        run = self._runs[name].pop(0)
        self._now[name] = (run, self.time(), asyncio.get_running_loop().create_future())
        self._after(run.ends_s, name, run.status)

    async def wait(self, name):
        return await asyncio.shield(self._now[name][2])

    async def execute(self, name, command):
        run, began, ended = self._now[name]
        assert command == ("ask", name)
        await asyncio.sleep(run.answers_after_s)
        healthy = not ended.done() and run.healthy(self.time() - began)
        return (0, "yes") if healthy else (1, "no")

    async def signal(self, name, signal):
        run = self._now[name][0]
        self.told.append((self.time(), name, signal))
        self._after(run.obeys_after_s if signal == "TERM" else 0, name, 0 if signal == "TERM" else 137)

    def record(self, event, container="", probe="", **details):
        if event == "ending":
            container = "pod"
        elif event == "ended":
            self.over_s = self.time()
        words = {
            "container_started": "started",
            "container_ended": f"ended {details.get('status')}",
            "restarting": f"waits {details.get('wait_s')}",
            "probe_passed": f"{probe} passed",
            "probe_failed": f"{probe} failed",
            "ending": "ends",
        }
        if event in words:
            self.told.append((self.time(), container, words[event]))


def live(pod: Pod, stage: Stage, *, delete_s: float | None = None) -> bool:
    """Leads the pod through its life: whether it has succeeded."""

    async def lead() -> bool:
        life = pod_life.PodLife(pod, stage, stage.record)
        if delete_s is not None:
            asyncio.get_running_loop().call_later(delete_s, life.delete)
        async with asyncio.timeout(STORY_S):
            return await life.run()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(lead())


def ask(name: str, **options: Any) -> Probe:
    return Probe(("ask", name), **options)


def test_sidecars_start_in_order_and_the_containers_after_them_and_all_end_the_other_way_round():
    sidecars = (Sidecar("a", startup=ask("a", period_s=2)), Sidecar("b"), Sidecar("c", startup=ask("c", initial_delay_s=1)))
    stage = Stage(
        a=[Run(healthy=lambda s: s >= 3, obeys_after_s=5)],
        b=[Run(obeys_after_s=6)],
        c=[Run(obeys_after_s=7)],
        x=[Run(ends_s=100)],
        y=[Run(ends_s=50)],
    )
    assert live(Pod("p", sidecars, ("x", "y"), 30), stage)
    assert stage.told == [
        (0, "a", "started"),
        (4, "a", "startup passed"),  # asked at 0, 2 and 4
        (4, "b", "started"),
        (4, "c", "started"),
        (5, "c", "startup passed"),
        (5, "x", "started"),
        (5, "y", "started"),
        (55, "y", "ended 0"),
        (105, "x", "ended 0"),
        (105, "pod", "ends"),
        (105, "c", "TERM"),
        (112, "c", "ended 0"),
        (112, "b", "TERM"),
        (118, "b", "ended 0"),
        (118, "a", "TERM"),
        (123, "a", "ended 0"),
    ]


def test_the_grace_period_is_one_for_all_and_leaves_each_two_seconds():
    stage = Stage(a=[Run(obeys_after_s=FOREVER_S)], b=[Run(obeys_after_s=1.75)], c=[Run(obeys_after_s=19.5)], x=[Run(ends_s=1)])
    assert live(Pod("p", (Sidecar("a"), Sidecar("b"), Sidecar("c")), ("x",), 20), stage)
    assert [told for told in stage.told if told[0] >= 20] == [
        (20.5, "c", "ended 0"),
        (20.5, "b", "TERM"),
        (22.25, "b", "ended 0"),
        (22.25, "a", "TERM"),
        (24.25, "a", "KILL"),
        (24.25, "a", "ended 137"),
    ]
    stage = Stage(a=[Run(obeys_after_s=20.001)], x=[Run(ends_s=1)])
    assert live(Pod("p", (Sidecar("a"),), ("x",), 20), stage)
    assert stage.told[-2:] == [(21, "a", "KILL"), (21, "a", "ended 137")]


def test_a_startup_probe_has_as_many_tries_as_it_says_and_its_container_begins_again_after_them():
    pod = Pod("p", (Sidecar("a", startup=ask("a", period_s=2, failure_threshold=3)),), ("x",), 30)
    stage = Stage(a=[Run(healthy=lambda s: s >= 4.001, obeys_after_s=7), Run(healthy=lambda s: s >= 4)], x=[Run(ends_s=1)])
    assert live(pod, stage)
    assert stage.told[:8] == [
        (0, "a", "started"),
        (4, "a", "startup failed"),
        (4, "a", "TERM"),
        (11, "a", "ended 0"),
        (11, "a", "waits 0.0"),
        (11, "a", "started"),
        (15, "a", "startup passed"),
        (15, "x", "started"),
    ]


def test_a_container_that_hears_no_sigterm_is_killed_before_it_begins_again():
    pod = Pod("p", (Sidecar("a", liveness=ask("a", period_s=10, failure_threshold=2)),), ("x",), 30)
    stage = Stage(a=[Run(healthy=lambda s: s < 20, obeys_after_s=FOREVER_S), Run()], x=[Run(ends_s=100)])
    assert live(pod, stage)
    assert [told for told in stage.told if told[1] == "a"] == [
        (0, "a", "started"),
        (0, "a", "liveness passed"),
        (30, "a", "liveness failed"),  # asked at 20 and 30
        (30, "a", "TERM"),
        (60, "a", "KILL"),
        (60, "a", "ended 137"),
        (60, "a", "waits 0.0"),
        (60, "a", "started"),
        (60, "a", "liveness passed"),
        (100, "a", "TERM"),
        (100, "a", "ended 0"),
    ]


def test_an_answer_that_comes_too_late_is_none():
    pod = Pod("p", (Sidecar("a", startup=ask("a", period_s=2, timeout_s=3, failure_threshold=2)),), ("x",), 30)
    stage = Stage(a=[Run(answers_after_s=3.001), Run(answers_after_s=2.999)], x=[Run(ends_s=1)])
    assert live(pod, stage)
    # Two tries of 3 s, one after the other, since they take longer than the period.
    assert [told for told in stage.told if told[1] == "a"][1] == (6, "a", "startup failed")
    assert (8.999, "a", "startup passed") in stage.told


def test_a_success_may_have_to_come_more_than_once():
    pod = Pod("p", (Sidecar("a", readiness=ask("a", period_s=5, success_threshold=3, failure_threshold=1)),), ("x",), 30)
    stage = Stage(a=[Run(healthy=lambda s: s < 20)], x=[Run(ends_s=21)])
    assert live(pod, stage)
    # Not being ready changes nothing else.
    assert [told for told in stage.told if "readiness" in told[2]] == [(10, "a", "readiness passed"), (20, "a", "readiness failed")]
    assert (21, "x", "ended 0") in stage.told


def test_failures_that_are_not_in_a_row_do_not_count():
    pod = Pod("p", (Sidecar("a", liveness=ask("a", period_s=10, failure_threshold=2)),), ("x",), 30)
    stage = Stage(a=[Run(healthy=lambda s: s not in (10, 30, 50))], x=[Run(ends_s=100)])
    assert live(pod, stage)
    assert [told for told in stage.told if told[1] == "a"][2:] == [(100, "a", "TERM"), (100, "a", "ended 0")]


def test_a_sidecar_that_ends_is_started_again_ever_later():
    lives = [Run(ends_s=1, status=3) for _ in range(7)]
    stage = Stage(a=[*lives, Run(ends_s=601, status=3), Run()], x=[Run(ends_s=3000)])
    assert live(Pod("p", (Sidecar("a"),), ("x",), 30), stage)
    waits = [float(told[2].removeprefix("waits ")) for told in stage.told if "waits" in told[2]]
    # Having lived for ten minutes counts as being well again.
    assert waits == [0, 10, 20, 40, 80, 160, 300, 0]
    starts = [told[0] for told in stage.told if told[1:] == ("a", "started")]
    assert starts == [0, 1, 12, 33, 74, 155, 316, 617, 1218]


def test_a_backoff_ends_after_more_than_ten_minutes_of_life():
    backoff = pod_life.Backoff()
    assert [backoff.after(1), backoff.after(600), backoff.after(600.001), backoff.after(1)] == [0, 10, 0, 10]


@pytest.mark.parametrize("status, sidecar_status, succeeds", [(0, 5, True), (5, 0, False)])
def test_what_becomes_of_the_pod_is_what_becomes_of_its_containers(status, sidecar_status, succeeds):
    stage = Stage(a=[Run(ends_s=5, status=sidecar_status), Run()], x=[Run(ends_s=10, status=status)], y=[Run(ends_s=20)])
    assert live(Pod("p", (Sidecar("a"),), ("x", "y"), 30), stage) is succeeds


def test_a_pod_that_ends_while_its_sidecar_waits_to_begin_again_does_not_wait_for_it():
    stage = Stage(a=[Run(ends_s=1), Run(ends_s=1)], x=[Run(ends_s=5)])
    assert live(Pod("p", (Sidecar("a"),), ("x",), 30), stage)
    assert stage.told[-3:] == [(2, "a", "waits 10.0"), (5, "x", "ended 0"), (5, "pod", "ends")]
    assert stage.over_s == 5


def test_a_pod_that_is_deleted_ends_its_containers_before_its_sidecars_in_one_grace_period():
    stage = Stage(a=[Run(obeys_after_s=FOREVER_S)], x=[Run(obeys_after_s=9)], y=[Run(obeys_after_s=4, status=0)])
    assert live(Pod("p", (Sidecar("a"),), ("x", "y"), 20), stage, delete_s=100)
    assert [told for told in stage.told if told[0] >= 100] == [
        (100, "pod", "ends"),
        (100, "x", "TERM"),
        (100, "y", "TERM"),
        (104, "y", "ended 0"),
        (109, "x", "ended 0"),
        (109, "a", "TERM"),
        (120, "a", "KILL"),
        (120, "a", "ended 137"),
    ]


def test_a_pod_that_is_deleted_while_its_sidecar_is_stopped_ends_its_containers_at_once():
    pod = Pod("p", (Sidecar("a", liveness=ask("a", period_s=10, failure_threshold=1)),), ("x",), 30)
    stage = Stage(a=[Run(healthy=lambda s: s < 20, obeys_after_s=FOREVER_S)], x=[Run(obeys_after_s=1)])
    assert live(pod, stage, delete_s=25)
    assert [told for told in stage.told if told[0] >= 20] == [
        (20, "a", "liveness failed"),
        (20, "a", "TERM"),
        (25, "pod", "ends"),
        (25, "x", "TERM"),
        (26, "x", "ended 0"),
        (50, "a", "KILL"),
        (50, "a", "ended 137"),
    ]


@pytest.mark.parametrize("delete_s", [10, 11, 20, 21])
def test_a_pod_that_is_deleted_at_the_moment_of_a_probe_ends_all_the_same(delete_s):
    probe = ask("a", period_s=10, timeout_s=5)
    stage = Stage(a=[Run(answers_after_s=1)], x=[Run()])
    assert live(Pod("p", (Sidecar("a", readiness=probe, liveness=probe),), ("x",), 30), stage, delete_s=delete_s)
    assert stage.told[-1] == (delete_s, "a", "ended 0")


def test_a_pod_that_is_deleted_before_its_sidecar_has_started_does_not_begin():
    pod = Pod("p", (Sidecar("a", startup=ask("a", failure_threshold=100)), Sidecar("b")), ("x",), 30)
    stage = Stage(a=[Run(healthy=lambda s: s >= 500)], b=[], x=[])
    assert not live(pod, stage, delete_s=15)
    assert stage.told == [(0, "a", "started"), (15, "pod", "ends"), (15, "a", "TERM"), (15, "a", "ended 0")]


def test_a_runtime_that_fails_ends_the_story():
    class Broken(Stage):
        async def start(self, name):
            if name == "x":
                raise OSError("there is no such image")
            await super().start(name)

    with pytest.raises(ExceptionGroup) as raised:
        live(Pod("p", (Sidecar("a"),), ("x",), 30), Broken(a=[Run()]))
    assert [str(error) for error in raised.value.exceptions] == ["there is no such image"]
