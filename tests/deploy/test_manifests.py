"""The manifests: they render, Kubernetes takes them, they keep the rules, and their flags and probes work on a real server."""

import contextlib
import copy
import functools
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import manifests
import pytest
import yaml
from headwater.v1 import head_service_pb2, head_service_pb2_grpc, tensor_pb2
from servers import START_TIMEOUT_S, Server, eventually, program, running_server

import headwater

sys.path += [str(manifests.ROOT / folder) for folder in ("tests/e2e/python", "deploy/kubernetes")]

import size as sizing
from certificates import make_authority, make_signed

pytestmark = pytest.mark.skipif(bool(manifests.why_not_rendered()), reason=manifests.why_not_rendered())
VALIDATOR = "kubernetes-validate==1.37.0"
# Objects of custom resources, which have no schema in Kubernetes.
CUSTOM = {
    "cert-manager.io/v1/Certificate",
    "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet",
    "monitoring.coreos.com/v1/PrometheusRule",
    "monitoring.coreos.com/v1/ServiceMonitor",
}
ROW_FLAGS = ("max_in_flight_bytes", "max_upload_bytes", "max_held_bytes", "max_join_bytes")
# The defaults of size.py: keep, extra checkpoints, bytes a second, bytes in flight, held and joined.
RULES = (3, 6, 200e6, 4 << 30, 1 << 30, 1 << 30)


each_overlay = pytest.mark.parametrize("folder", manifests.OVERLAYS, ids=lambda folder: folder.name)


def memory(pod: manifests.Pod, kind: str = "limits") -> int:
    return manifests.quantity(pod.server["resources"][kind]["memory"])


def sized(plans: list[dict], engine: str = "cpu") -> dict:
    return sizing.size(plans, engine, *RULES)


@pytest.fixture(scope="session")
def validator():
    """The module kubernetes_validate; from PyPI into the build tree, unless it is there."""
    folder = manifests.ROOT / "build" / f"kubernetes-validate-{sys.version_info.major}.{sys.version_info.minor}"
    if not folder.exists():
        new = folder.with_name(f"{folder.name}.{os.getpid()}")
        pip = [sys.executable, *"-m pip install --quiet --no-input --no-compile --retries 1 --target".split(), str(new)]
        done = subprocess.run([*pip, VALIDATOR], capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(new, ignore_errors=True)
            pytest.skip(f"PyPI does not give {VALIDATOR}: {done.stderr.strip()[-300:]}")
        new.rename(folder)
    sys.path.append(str(folder))
    return importlib.import_module("kubernetes_validate")


def schema_errors(validator, version: str, document: dict) -> list[str]:
    """The object's errors by the strict API schemas of a version; none for a custom resource, which has no schema."""
    try:
        validator.validate(document, version, strict=True)
    except validator.ValidationError as error:
        return [f"{document['kind']}/{document['metadata']['name']}: Kubernetes {version}: {error.absolute_path}: {error.message}"]
    except validator.SchemaNotFoundError:
        assert f"{document['apiVersion']}/{document['kind']}" in CUSTOM
    return []


def test_every_overlay_is_valid_for_the_two_newest_versions_of_kubernetes(validator):
    documents = [document for folder in manifests.OVERLAYS for document in manifests.objects(folder)]
    assert len(documents) > len(manifests.OVERLAYS) >= 10
    # A wrong one, so that a check that finds nothing has looked.
    broken = copy.deepcopy(next(document for document in documents if document["kind"] == "StatefulSet"))
    broken["spec"]["template"]["spec"]["containers"][0]["readOnlyRoot"] = True
    known = {tuple(map(int, version.split(".")[:2])) for version in validator.utils.all_versions()}
    for major, minor in sorted(known)[-2:]:
        version = f"{major}.{minor}"
        assert len(schema_errors(validator, version, broken)) == 1
        # Most objects are in several overlays.
        for document in {json.dumps(document, sort_keys=True): document for document in documents}.values():
            assert schema_errors(validator, version, document) == []


@each_overlay
def test_every_pod_keeps_the_rules_and_all_objects_are_in_one_namespace(folder):
    documents = manifests.objects(folder)
    # An object that names none would be made in the namespace of the caller's context, away from those that refer to it.
    assert len({document["metadata"].get("namespace") for document in documents if document["kind"] != "Namespace"}) == 1
    pods = list(manifests.pods(documents))
    assert pods
    for pod in pods:
        assert manifests.violations(pod) == [], pod.name


@each_overlay
def test_flags_exist_and_their_bytes_fit_the_memory_limit(folder):
    table = subprocess.run([program("headwaterd"), "--print_flags_doc"], capture_output=True, text=True, check=True).stdout
    known = {line.split("`")[1].removeprefix("--") for line in table.splitlines() if line.startswith("| `--")}
    for pod in manifests.pods(manifests.objects(folder)):
        assert set(pod.flags) <= known, pod.name
        engine = "cpu" if "join" in pod.flags else pod.flags["engine"]
        on_host = [*ROW_FLAGS, "memory_budget_bytes"] if engine == "cpu" else ROW_FLAGS
        needed = sum(int(pod.flags.get(flag, 0)) for flag in on_host) + sizing.PROCESS_BYTES[engine]
        gpus = int(pod.flags.get("gpus", 1))
        if gpus > 1:
            needed += (gpus - 1) * sizing.FURTHER_GPU_BYTES + sizing.NCCL_BYTES
        assert needed <= memory(pod), pod.name


def test_as_many_gpus_are_asked_for_as_the_server_wants():
    several = 0
    for folder in manifests.OVERLAYS:
        for pod in manifests.pods(manifests.objects(folder)):
            gpus = pod.server["resources"]["limits"].get("nvidia.com/gpu")
            if "gpus" not in pod.flags:
                assert gpus in (None, "1"), pod.name
                continue
            several += 1
            assert pod.flags["engine"] == "cuda" and int(pod.flags["gpus"]) == int(gpus) > 1, pod.name
            # NCCL's ranks meet there, and what a container has otherwise is too small.
            (shared,) = (mount["name"] for mount in pod.server["volumeMounts"] if mount["mountPath"] == "/dev/shm")
            (volume,) = (volume["emptyDir"] for volume in pod.spec["volumes"] if volume["name"] == shared)
            assert volume["medium"] == "Memory" and manifests.quantity(volume["sizeLimit"]) >= sizing.NCCL_BYTES
    assert several


@pytest.mark.parametrize("name", [folder.name for folder in manifests.OVERLAYS if folder.name.startswith("service")])
def test_a_service_denies_by_default_and_selects_its_own_pods(name):
    documents = manifests.overlay_objects(name)
    stateful_set = manifests.only(documents, "StatefulSet")["spec"]
    labels = stateful_set["template"]["metadata"]["labels"].items()
    policies = {document["metadata"]["name"]: document["spec"] for document in documents if document["kind"] == "NetworkPolicy"}
    assert policies.pop("default-deny") == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    (allow,) = policies.values()
    for selector in (
        stateful_set["selector"]["matchLabels"],
        manifests.only(documents, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        manifests.only(documents, "Service")["spec"]["selector"],
        allow["podSelector"]["matchLabels"],
    ):
        assert selector and selector.items() <= labels
    assert all(rule["from"] and rule["ports"] for rule in allow["ingress"]) and "egress" not in allow
    assert stateful_set["template"]["spec"]["topologySpreadConstraints"]
    (pod,) = manifests.pods(documents)
    ports = {port["name"] for port in pod.server["ports"]}
    assert {port["port"] for rule in allow["ingress"] for port in rule["ports"]} == ports


def test_trainers_are_told_a_name_that_other_namespaces_know():
    # Pods in the server's own namespace may not call it.
    documents = manifests.overlay_objects("service-tls")
    stateful_set, service = (manifests.only(documents, kind) for kind in ("StatefulSet", "Service"))
    name = f"{stateful_set['metadata']['name']}-0.{service['metadata']['name']}.{service['metadata']['namespace']}"
    port = next(port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc")
    assert f"`{name}:{port}`" in (manifests.ROOT / "docs/deployment.md").read_text()
    certificates = [document["spec"].get("dnsNames", []) for document in documents if document["kind"] == "Certificate"]
    assert any(name in names for names in certificates)


@pytest.mark.parametrize("name", ["service-tls", "multi-node-tls"])
def test_certificates_are_signed_by_an_authority_of_the_cluster(name):
    authority = manifests.objects(manifests.ROOT / "deploy/kubernetes/authority")
    by_name = {f"{document['kind']}/{document['metadata']['name']}": document for document in authority}
    assert by_name.keys() == {"ClusterIssuer/headwater-root", "ClusterIssuer/headwater-ca", "Certificate/headwater-ca"}
    assert ["namespace" in document["metadata"] for document in authority].count(True) == 1
    root, issuer = (by_name[f"ClusterIssuer/{issuer}"]["spec"] for issuer in ("headwater-root", "headwater-ca"))
    own = by_name["Certificate/headwater-ca"]["spec"]
    # cert-manager looks for the secrets of a ClusterIssuer in its own namespace.
    assert by_name["Certificate/headwater-ca"]["metadata"]["namespace"] == "cert-manager"
    assert root == {"selfSigned": {}} and issuer == {"ca": {"secretName": own["secretName"]}}
    assert own["isCA"] and own["issuerRef"] == {"name": "headwater-root", "kind": "ClusterIssuer"}
    documents = manifests.overlay_objects(name)
    assert not [document for document in documents if document["kind"].endswith("Issuer")]
    certificates = {document["metadata"]["name"]: document for document in documents if document["kind"] == "Certificate"}
    assert {"headwater"} <= certificates.keys() <= {"headwater", "headwater-worker"}
    for certificate in certificates.values():
        assert certificate["metadata"]["namespace"] == "headwater"
        assert certificate["spec"]["issuerRef"] == {"name": "headwater-ca", "kind": "ClusterIssuer"}
    # A pod mounts secrets of its own namespace; each that it mounts for TLS is one that a Certificate there fills.
    volumes = (volume for pod in manifests.pods(documents) for volume in pod.spec["volumes"])
    mounted = {volume["secret"]["secretName"] for volume in volumes if volume["name"] == "tls"}
    assert mounted == {certificate["spec"]["secretName"] for certificate in certificates.values()}


def test_the_authority_goes_where_cert_manager_runs(tmp_path):
    patch = manifests.documented("deployment.md", "overlay of authority")
    documents = manifests.overlay(tmp_path / "authority", "authority", patch)
    namespaces = {document["kind"]: document["metadata"].get("namespace") for document in documents}
    assert namespaces == {"Certificate": "security", "ClusterIssuer": None}


def test_trainers_get_a_certificate_in_their_own_namespace_and_mount_it():
    certificate = yaml.safe_load(manifests.documented("deployment.md", "client certificate"))
    spec = yaml.safe_load(manifests.documented("deployment.md", "spec of the trainer's pod"))
    server = manifests.overlay_objects("service-tls")
    served = manifests.only(server, "Certificate")
    assert certificate["metadata"]["namespace"] != served["metadata"]["namespace"]
    assert certificate["spec"]["issuerRef"] == served["spec"]["issuerRef"]
    assert certificate["spec"]["usages"] == ["client auth"]
    secrets = {volume["name"]: volume["secret"] for volume in spec["volumes"]}
    assert certificate["spec"]["secretName"] == secrets["headwater-tls"]["secretName"]
    (container,) = spec["containers"]
    assert secrets.keys() == {mount["name"] for mount in container["volumeMounts"] if mount["readOnly"]}
    # A process that is not root reads it by its group.
    assert spec["securityContext"]["fsGroup"] and {secret["defaultMode"] for secret in secrets.values()} == {0o440}
    # The files that the page passes to the client are there: those that cert-manager makes, and the token.
    folders = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    passed = re.findall(r'"(/etc/headwater/[\w/]+)/([\w.]+)"', (manifests.ROOT / "docs/deployment.md").read_text())
    assert {file for folder, file in passed if folders[folder] == "headwater-tls"} == {"ca.crt", "tls.crt", "tls.key"}
    assert {file for folder, file in passed if folders[folder] == "headwater-token"} == {"token"}


def test_objects_get_the_label_that_a_helm_release_of_prometheus_selects(tmp_path):
    patch = manifests.documented("deployment.md", "overlay of service-monitored")
    documents = manifests.overlay(tmp_path / "monitored", "overlays/service-monitored", patch)
    labelled = {document["kind"] for document in documents if document["metadata"].get("labels", {}).get("release")}
    assert labelled == {"ServiceMonitor", "PrometheusRule"}
    plain = manifests.overlay_objects("service-monitored")
    assert not [document for document in plain if "release" in document["metadata"].get("labels", {})]


def test_prometheus_finds_the_service():
    documents = manifests.overlay_objects("service-monitored")
    monitor, service = (manifests.only(documents, kind) for kind in ("ServiceMonitor", "Service"))
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
    assert monitor["metadata"]["namespace"] == service["metadata"]["namespace"]
    # A user who may label a Service elsewhere must not get scraped, and alarm, in the servers' name.
    assert "namespaceSelector" not in monitor["spec"]
    assert {"PrometheusRule", "ConfigMap"} <= {document["kind"] for document in documents}


def test_the_sidecar_is_the_same_in_pods_and_jobs():
    folder = manifests.ROOT / "deploy/kubernetes/components/sidecar"
    pod, job = (yaml.safe_load((folder / f"{kind}.yaml").read_text()) for kind in ("pod", "job"))
    assert pod["spec"] == job["spec"]["template"]["spec"]


def test_the_sidecar_leaves_what_the_pod_had(tmp_path):
    trainer = yaml.safe_load((manifests.ROOT / "deploy/kubernetes/overlays/sidecar-job/trainer.yaml").read_text())
    spec = trainer["spec"]["template"]["spec"]
    spec["initContainers"] = [{"name": "data", "image": "data:1", "args": ["fetch"]}]
    spec["containers"][0]["env"] = [{"name": "MINE", "value": "1"}]
    (tmp_path / "trainer.yaml").write_text(yaml.safe_dump(trainer))
    place = os.path.relpath(manifests.ROOT / "deploy/kubernetes/components", tmp_path)
    components = [f"{place}/sidecar", f"{place}/sidecar-dra"]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": ["trainer.yaml"], "components": components}))
    ((_, spec, server, _),) = manifests.pods(manifests.objects(tmp_path))
    assert [container["name"] for container in spec["initContainers"]] == ["headwater", "data"]
    assert spec["initContainers"][1]["args"] == ["fetch"] and server["args"][-1] == "--memory_budget_bytes=0"
    assert [claim["name"] for claim in spec["resourceClaims"]] == ["gpu"]
    assert {entry["name"] for entry in spec["containers"][0]["env"]} == {"MINE", "HEADWATER_SERVER"}


class Place:
    """Where a server has the flags of a manifest's pod: its folders and ports are replaced by ones of the test's own."""

    def __init__(self, folder: Path, pod: manifests.Pod):
        self.folder, self.pod = folder, pod
        for name in ("run", "state", "tls", "tokens"):
            (folder / name).mkdir(mode=0o700)

    def replace(self, text: str) -> str:
        text = re.sub("/var/lib/headwater", f"{self.folder}/state", text)
        text = re.sub("/run/headwater", f"{self.folder}/run", text)
        text = re.sub("/etc/headwater/(tls|tokens)", rf"{self.folder}/\1", text)
        return re.sub(r"0\.0\.0\.0:(50051|9464)", "127.0.0.1:0", text)

    @contextlib.contextmanager
    def running(self) -> Iterator[Server]:
        """The server, which must end in an orderly way."""
        # The manifests for a GPU run here without; all of their other flags are as they are.
        arguments = [self.replace(argument) for argument in self.pod.server["args"]]
        with running_server(*arguments, "--engine=cpu", "--memory_budget_bytes=67108864") as self.server:
            yield self.server
        assert self.server.process.returncode == 0

    def tcp(self) -> str:
        lines = (self.server.directory / "ready").read_text().splitlines()
        return next(line for line in lines if line.startswith("127.0.0.1:"))

    def ask(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([program("headwaterctl"), *arguments], capture_output=True, text=True, env={}, timeout=60)

    def passes(self, kind: str) -> bool:
        """Whether the kubelet would take the probe for a success: of gRPC it speaks no TLS, of a command the status counts."""
        probe = self.pod.server[kind]
        if "grpc" in probe:
            return self.ask(f"--server={self.tcp()}", "--connect_timeout=10s", "health").returncode == 0
        command, *arguments = (self.replace(word) for word in probe["exec"]["command"])
        assert command == "/usr/local/bin/headwaterctl"
        return self.ask(*arguments).returncode == 0


# The files that cert-manager puts into a secret are ca.crt, tls.crt and tls.key.
@pytest.mark.parametrize("name", ["service", "service-tls", "sidecar-pod"])
def test_a_server_with_these_flags_answers_these_probes_and_drains(name, tmp_path_factory):
    # A socket's path is short.
    folder = tmp_path_factory.mktemp("hw")
    assert len(str(folder)) < 80
    (pod,) = manifests.pods(manifests.overlay_objects(name))
    place = Place(folder, pod)
    tls = name == "service-tls"
    if tls:
        make_authority(folder / "tls", "ca")
        make_signed(folder / "tls", "tls")
        (folder / "tokens/tokens.json").write_text(json.dumps({"tokens": [{"name": "a", "sha256": "ab" * 32, "compute": ["*"]}]}))
    with place.running():
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert ("exec" in pod.server[kind]) == (tls or name.startswith("sidecar"))
            eventually(functools.partial(place.passes, kind), f"the {kind} to pass")
        assert place.ask(f"--server=unix:{folder}/run/nobody", "--connect_timeout=100ms", "health").returncode != 0
        if tls:
            # Why the probes of base do not do: without TLS nothing is answered, and without a certificate neither.
            for certificate in ([], [f"--ca_certificate={folder}/tls/ca.crt"]):
                assert place.ask(f"--server={place.tcp()}", *certificate, "--connect_timeout=1s", "health").returncode != 0
            # A probe has no token, and gets no further without one.
            assert "UNAUTHENTICATED" in place.ask(f"--server=unix:{folder}/run/headwater.sock", "info").stderr
        assert (folder / "state/checkpoints").is_dir()


def test_a_leaderworkerset_has_the_pods_of_the_statefulsets():
    sets, group = (manifests.overlay_objects(name) for name in ("multi-node", "multi-node-lws"))
    stateful = {document["metadata"]["name"]: document["spec"] for document in sets if document["kind"] == "StatefulSet"}
    (spec,) = (document["spec"]["leaderWorkerTemplate"] for document in group if document["kind"] == "LeaderWorkerSet")
    (claim,) = (document["spec"] for document in group if document["kind"] == "PersistentVolumeClaim")
    assert not [document for document in group if document["kind"] == "StatefulSet"]
    assert claim == stateful["headwater"]["volumeClaimTemplates"][0]["spec"]
    workers = stateful["headwater-worker"]["replicas"]
    assert spec["size"] == 1 + workers
    assert f"--workers={workers}" in stateful["headwater"]["template"]["spec"]["containers"][0]["args"]
    # Except for the name of the volume's claim, and of the leader.
    state = spec["leaderTemplate"]["spec"]["volumes"].pop()
    assert state == {"name": "state", "persistentVolumeClaim": {"claimName": "headwater-state"}}
    assert spec["leaderTemplate"] == stateful["headwater"]["template"]
    join = spec["workerTemplate"]["spec"]["containers"][0]["args"]
    join[0] = join[0].replace("$(LWS_LEADER_ADDRESS)", "headwater-0.headwater")
    assert spec["workerTemplate"] == stateful["headwater-worker"]["template"]


@pytest.mark.parametrize("name", ["multi-node", "multi-node-tls"])
def test_a_group_with_these_flags_serves_when_it_is_whole(name, tmp_path_factory):
    pods = {pod.name: pod for pod in manifests.pods(manifests.overlay_objects(name))}
    leader, worker = pods["StatefulSet/headwater"], pods["StatefulSet/headwater-worker"]
    # With the group's readiness for its own a worker of an old version would never be replaced: the new leader refuses it.
    assert "readinessProbe" not in worker.server
    place = Place(tmp_path_factory.mktemp("hw"), leader)
    secrets = Place(tmp_path_factory.mktemp("hw"), worker)
    tls = name == "multi-node-tls"
    if tls:
        make_authority(place.folder / "tls", "ca")
        make_signed(place.folder / "tls", "tls")
        shutil.copy(place.folder / "tls/ca.crt", secrets.folder / "tls")
        make_signed(secrets.folder / "tls", "tls", place.folder / "tls/ca")
        token = "a worker's secret"
        (secrets.folder / "tokens/token").write_text(token + "\n")
        tokens = {"tokens": [{"name": "worker", "sha256": hashlib.sha256(token.encode()).hexdigest(), "admin": ["*"]}]}
        (place.folder / "tokens/tokens.json").write_text(json.dumps(tokens))
    with contextlib.ExitStack() as workers, place.running():
        assert not place.passes("readinessProbe")
        arguments = [
            secrets.replace(argument.replace("headwater-0.headwater:50051", place.tcp())) for argument in worker.server["args"]
        ]
        assert f"--join={place.tcp()}" in arguments
        assert any(argument.startswith("--join_ca=") for argument in arguments) == tls
        arguments += ["--memory_budget_bytes=67108864", "--log_level=warning"]
        for _ in range(2):
            process = workers.enter_context(subprocess.Popen([program("headwaterd"), *arguments], stderr=subprocess.DEVNULL))
            workers.callback(process.kill)
        eventually(lambda: place.passes("readinessProbe"), "the group to form")


def test_probes_tell_of_a_drain_and_of_a_process_that_stands_still(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hw")
    (pod,) = manifests.pods(manifests.overlay_objects("sidecar-pod"))
    place = Place(folder, pod)
    release = threading.Event()
    weight = bytes(4 * 8 * 4)

    def requests():
        header = head_service_pb2.UploadWeightsHeader(name=head.name, epoch=head.epoch, upload_id="u", total_bytes=len(weight))
        header.tensor, header.data_type = head_service_pb2.HEAD_TENSOR_WEIGHT, tensor_pb2.DATA_TYPE_FLOAT32
        yield head_service_pb2.UploadWeightsRequest(header=header)
        release.wait(START_TIMEOUT_S)
        yield head_service_pb2.UploadWeightsRequest(chunk=head_service_pb2.ByteChunk(data=weight))

    address = f"unix:{folder}/run/headwater.sock"
    with place.running() as server, headwater.connect(address) as client, grpc.insecure_channel(address) as channel:
        head = client.create_head("h", (8, 4), dtype="float32", trainable=False)
        with server.frozen():
            assert not place.passes("livenessProbe")
        eventually(lambda: place.passes("livenessProbe"), "it to go on")
        upload = head_service_pb2_grpc.HeadServiceStub(channel).UploadWeights(requests(), timeout=START_TIMEOUT_S)
        assert next(upload).WhichOneof("message") == "resume_offset_bytes"
        server.process.terminate()
        eventually(lambda: not place.passes("readinessProbe"), "it to be unready")
        assert server.process.poll() is None
        release.set()
        assert next(upload).head.state == head_service_pb2.HEAD_STATE_READY
        # A second SIGTERM would end it at once.
        server.process.wait(pod.spec["terminationGracePeriodSeconds"])
    assert (folder / "state/checkpoints/default/h/drain").is_dir()


def planned(address: str, *shape: str) -> dict:
    """The output of `headwaterctl --json plan`."""
    command = [program("headwaterctl"), f"--server={address}", "--connect_timeout=60s", "--json", "plan", *shape]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_server_sized_for_many_small_heads_takes_them_all():
    """On the CPU each head has a workspace of its own, which is most of a small one."""
    shape = ["--vocab_size=4096", "--hidden_size=128", "--data_type=float32", "--trainable", "--optimizer=adamw"]
    heads = 24
    with running_server(f"--memory_budget_bytes={1 << 40}") as server:
        plan = planned(server.address, *shape)
    purposes = sizing.purposes(plan)
    budget = sized([plan] * heads)["memory_budget_bytes"]
    needed = heads * sum(purposes.values())
    assert needed <= budget < needed + sizing.GIB
    # The heads of a GPU share the largest workspace.
    shared = needed - (heads - 1) * purposes["workspace"]
    assert shared <= sized([plan] * heads, "cuda")["memory_budget_bytes"] < shared + sizing.GIB
    with running_server(f"--memory_budget_bytes={budget}") as server, headwater.connect(server.address) as client:
        for index in range(heads):
            head = client.create_head(f"h{index}", (4096, 128), dtype="float32", optimizer=headwater.AdamW())
            assert head.info().memory_plan.total_bytes == sum(purposes.values())


def base_set() -> dict:
    return manifests.only(manifests.objects(manifests.ROOT / "deploy/kubernetes/base"), "StatefulSet")


def check_sizes(pod: manifests.Pod, sizes: dict) -> None:
    """The pod has these figures, except for its budget."""
    assert {flag: int(pod.flags[flag]) for flag in ROW_FLAGS} == {flag: sizes[flag] for flag in ROW_FLAGS}
    assert memory(pod) == memory(pod, "requests") == sizes["host_memory_bytes"]
    assert manifests.seconds(pod.flags["drain_timeout"]) == sizes["drain_timeout_s"]
    assert pod.spec["terminationGracePeriodSeconds"] == sizes["grace_s"]


def test_the_statefulset_has_the_figures_that_its_head_needs(tmp_path):
    """The documented head, planned by a real server."""
    shape = ["--vocab_size=128256", "--hidden_size=4096", "--data_type=bfloat16", "--trainable", "--optimizer=adamw"]
    with running_server("--memory_budget_bytes=40000000000") as server:
        plan, halves = planned(server.address, *shape), planned(server.address, *shape, "--ranks=2")
    sizes = sized([plan])
    # The tests without a server use this plan.
    assert sized([documented_plan()]) == sizes
    # Each of two ranks has half of the head, and a workspace of its own; what is saved is the same.
    of_two = sized([halves])
    assert sizes["memory_budget_bytes"] / 2 <= of_two["memory_budget_bytes"] < sizes["memory_budget_bytes"] / 2 + sizing.GIB
    assert (of_two["ranks"], of_two["volume_bytes"]) == (2, sizes["volume_bytes"])
    stateful_set = base_set()
    (pod,) = manifests.pods([stateful_set])
    check_sizes(pod, sizes)
    assert int(pod.flags["memory_budget_bytes"]) == sizes["memory_budget_bytes"]
    claims = stateful_set["spec"]["volumeClaimTemplates"]
    assert manifests.quantity(claims[0]["spec"]["resources"]["requests"]["storage"]) == sizes["volume_bytes"]
    # The patch that the script prints makes the same of it.
    patched = manifests.only(manifests.overlay(tmp_path / "sized", "base", sizing.patch(sizes, 3, "cpu")), "StatefulSet")
    assert next(manifests.pods([patched])).flags == pod.flags and patched["spec"]["volumeClaimTemplates"] == claims


def documented_plan() -> dict:
    """The output of `headwaterctl --json plan` for the head of docs/deployment.md, as far as sizes depend on it."""
    elements = 128256 * 4096
    # docs/operations.md, "Memory"; with one staging slot.
    taken = {"weight": 2, "grad_weight": 4, "master_weight": 4, "optimizer_state": 8, "staging": 4}
    items = [{"purpose": purpose, "bytes": size * elements} for purpose, size in taken.items()]
    return {"memory_plan": {"items": [*items, {"purpose": "workspace", "bytes": 50_000_000}]}}


def test_the_figures_of_the_page_are_those_of_the_rules_and_of_the_manifests():
    sizes = sized([documented_plan()])
    page = (manifests.ROOT / "docs/deployment.md").read_text()
    for row in ("volume_bytes", "host_memory_bytes"):
        assert f"**{sizes[row] // sizing.GIB} GiB**" in page
    keep = int(next(manifests.pods([base_set()])).flags["keep_checkpoints"])
    # The checkpoints that the page saves are a series each, which end with a number, and have room.
    names = re.findall(r"headwaterctl save HEAD ([\w.-]+)", page)
    assert len(names) == len({re.sub(r"\d+$", "", name) for name in names}) == sizing.FURTHER_SERIES
    assert all(name[-1].isdigit() for name in names)
    checkpoint = sum(sizing.purposes(documented_plan()).get(purpose, 0) for purpose in sizing.SAVED)
    assert sizes["volume_bytes"] >= (keep + keep * len(names) + len(["drain", "being written"])) * checkpoint * 1.1


def size_program(folder: Path, *options: str, plan: dict | None = None) -> subprocess.CompletedProcess:
    (folder / "head.json").write_text(json.dumps(plan or documented_plan()))
    command = [sys.executable, "-B", str(manifests.ROOT / "deploy/kubernetes/size.py"), *options, str(folder / "head.json")]
    return subprocess.run(command, capture_output=True, text=True)


def test_checkpoints_beside_the_trainings_have_room_on_the_volume(tmp_path):
    def gib(*options: str) -> int:
        return json.loads(size_program(tmp_path, "--engine=cpu", "--json", *options).stdout)["volume_bytes"] // sizing.GIB

    assert gib() == gib("--extra_checkpoints=6") == gib("--keep_checkpoints=3") == 83
    assert gib("--extra_checkpoints=0") == 38
    assert gib("--keep_checkpoints=1") == gib("--keep_checkpoints=1", "--extra_checkpoints=2") == 38
    refused = size_program(tmp_path, "--engine=cpu", "--extra_checkpoints=-1")
    assert refused.returncode == 1 and "--extra_checkpoints must be at least 0" in refused.stderr


# The room of components/sidecar for rows.
SIDECAR = ("--max_in_flight_bytes=1073741824", "--max_held_bytes=268435456", "--max_join_bytes=268435456")


def test_a_sidecar_on_a_gpu_takes_the_documented_head(tmp_path):
    sizes = json.loads(size_program(tmp_path, "--engine=cuda", "--json", *SIDECAR).stdout)
    assert " ".join(SIDECAR) in re.sub(r"\s*\\\n\s*", " ", (manifests.ROOT / "docs/deployment.md").read_text())
    sidecars = [folder for folder in manifests.OVERLAYS if folder.name.startswith("sidecar-")]
    pods = [pod for folder in sidecars for pod in manifests.pods(manifests.objects(folder)) if pod.flags["engine"] == "cuda"]
    assert len(pods) >= 5
    for pod in pods:
        check_sizes(pod, sizes)
        assert int(pod.flags["memory_budget_bytes"]) == 0 or int(pod.flags["memory_budget_bytes"]) >= sizes["memory_budget_bytes"]


@pytest.mark.parametrize("overlay", ["sidecar-pod", "sidecar-job", "sidecar-time-slicing"])
def test_a_sidecar_is_sized_by_a_patch_of_its_pod(overlay, tmp_path):
    printed = size_program(tmp_path, "--engine=cpu", "--sidecar", "--keep_checkpoints=2", *SIDECAR)
    assert printed.returncode == 0, printed.stderr
    (pod,) = manifests.pods(manifests.overlay(tmp_path / "sized", f"overlays/{overlay}", printed.stdout))
    assert (pod.flags["memory_budget_bytes"], pod.flags["max_upload_bytes"]) == ("11811160064", "2147483648")
    assert pod.flags["keep_checkpoints"] == "2"
    assert memory(pod) == memory(pod, "requests") == 16 * sizing.GIB
    assert (pod.flags["drain_timeout"], pod.spec["terminationGracePeriodSeconds"]) == ("120s", 150)
    assert manifests.violations(pod) == []
    several = size_program(tmp_path, "--engine=cuda", "--sidecar", plan=plan_of(2, 1 << 30, 1 << 20))
    assert several.returncode == 1 and "a sidecar is one process with one GPU at most" in several.stderr


def plan_of(ranks: int, weight: int, workspace: int) -> dict:
    """The output of `headwaterctl --json plan --ranks` for a head with so many bytes, as far as sizes depend on it."""

    def items(share: int) -> dict:
        return {"items": [{"purpose": "weight", "bytes": share}, {"purpose": "workspace", "bytes": workspace}]}

    return {"memory_plan": items(weight), "ranks": ranks, "rank_plan": items(weight // ranks)}


@pytest.mark.parametrize("engine, overlay", [("cuda", "service-gpus"), ("cpu", "multi-node")])
def test_plans_of_several_ranks_size_each_of_them(engine, overlay, tmp_path):
    gib = sizing.GIB
    plans = [plan_of(4, 40 * gib, gib), plan_of(4, 8 * gib, gib // 2)]
    sizes = sized(plans, engine)
    # The larger workspace once on a GPU, both on the CPU, in whole GiB.
    budget = (10 + 2 + {"cuda": 1, "cpu": 2}[engine]) * gib
    assert (sizes["ranks"], sizes["memory_budget_bytes"]) == (4, budget)
    assert sizes["volume_bytes"] >= 11 * 48 * gib  # the checkpoints are the leader's, whole
    rendered = manifests.overlay(tmp_path / "sized", f"overlays/{overlay}", sizing.patch(sizes, 3, engine))
    pods = {pod.name: pod for pod in manifests.pods(rendered)}
    leader = pods["StatefulSet/headwater"]
    assert (int(leader.flags["memory_budget_bytes"]), memory(leader)) == (budget, sizes["host_memory_bytes"])
    if engine == "cuda":
        assert leader.flags["gpus"] == leader.server["resources"]["limits"]["nvidia.com/gpu"] == "4"
        of_one = sized([{"memory_plan": plan["memory_plan"]} for plan in plans], engine)
        assert sizes["host_memory_bytes"] == of_one["host_memory_bytes"] + 4 * gib
    else:
        worker = pods["StatefulSet/headwater-worker"]
        assert leader.flags["workers"] == "3"
        assert (int(worker.flags["memory_budget_bytes"]), memory(worker)) == (budget, (14 + 4 + 1) * gib)
        assert worker.flags["drain_timeout"] == leader.flags["drain_timeout"]
        assert worker.spec["terminationGracePeriodSeconds"] == sizes["grace_s"]
    with pytest.raises(SystemExit, match="the same number of ranks"):
        sized([plan_of(4, gib, gib), plan_of(2, gib, gib)], engine)
