"""The manifests: they render, Kubernetes takes them, they keep the rules, and their flags and probes work on a real server."""

import copy
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import manifests
import pytest
import yaml
from headwater.v1 import head_service_pb2, head_service_pb2_grpc, tensor_pb2
from servers import START_TIMEOUT_S, program, running_server, start_server, wait_until

sys.path.append(str(Path(__file__).resolve().parents[1] / "e2e/python"))

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
CTL = "/usr/local/bin/headwaterctl"
# The defaults of size.py: keep, extra checkpoints, bytes a second, bytes in flight, held and joined.
RULES = (3, 6, 200e6, 4 << 30, 1 << 30, 1 << 30)


def name_of(path: Path) -> str:
    return path.name


def sizing():
    """The module deploy/kubernetes/size.py."""
    spec = importlib.util.spec_from_file_location("size", manifests.ROOT / "deploy/kubernetes/size.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        try:
            new.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(new)
            assert folder.exists()
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


@pytest.mark.parametrize("folder", manifests.OVERLAYS, ids=name_of)
def test_every_pod_keeps_the_rules_and_all_objects_are_in_one_namespace(folder):
    documents = manifests.objects(folder)
    # An object that names none would be made in the namespace of the caller's context, away from those that refer to it.
    assert len({document["metadata"].get("namespace") for document in documents if document["kind"] != "Namespace"}) == 1
    specs = list(manifests.pod_specs(documents))
    assert specs
    for name, spec in specs:
        assert manifests.violations(spec) == [], name


@pytest.mark.parametrize("folder", manifests.OVERLAYS, ids=name_of)
def test_flags_exist_and_their_bytes_fit_the_memory_limit(folder):
    table = subprocess.run([program("headwaterd"), "--print_flags_doc"], capture_output=True, text=True, check=True).stdout
    known = {line.split("`")[1].removeprefix("--") for line in table.splitlines() if line.startswith("| `--")}
    for name, spec in manifests.pod_specs(manifests.objects(folder)):
        container = manifests.server(spec)
        flags = manifests.flags(container)
        assert set(flags) <= known, name
        on_host = ["max_in_flight_bytes", "max_upload_bytes", "max_held_bytes", "max_join_bytes"]
        engine = "cpu" if "join" in flags else flags["engine"]
        if engine == "cpu":
            on_host.append("memory_budget_bytes")
        needed = sum(int(flags.get(flag, 0)) for flag in on_host) + sizing().PROCESS_BYTES[engine]
        gpus = int(flags.get("gpus", 1))
        if gpus > 1:
            needed += (gpus - 1) * sizing().FURTHER_GPU_BYTES + sizing().NCCL_BYTES
        assert needed <= manifests.quantity(container["resources"]["limits"]["memory"]), name


def test_as_many_gpus_are_asked_for_as_the_server_wants():
    several = 0
    for folder in manifests.OVERLAYS:
        for name, spec in manifests.pod_specs(manifests.objects(folder)):
            container = manifests.server(spec)
            flags = manifests.flags(container)
            gpus = container["resources"]["limits"].get("nvidia.com/gpu")
            if "gpus" not in flags:
                assert gpus in (None, "1"), name
                continue
            several += 1
            assert flags["engine"] == "cuda" and int(flags["gpus"]) == int(gpus) > 1, name
            # NCCL's ranks meet there, and what a container has otherwise is too small.
            (shared,) = (mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm")
            (volume,) = (volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == shared)
            assert volume["medium"] == "Memory" and manifests.quantity(volume["sizeLimit"]) >= sizing().NCCL_BYTES
    assert several


def service_overlays():
    return [folder for folder in manifests.OVERLAYS if folder.name.startswith("service")]


@pytest.mark.parametrize("folder", service_overlays(), ids=name_of)
def test_a_service_denies_by_default_and_selects_its_own_pods(folder):
    documents = manifests.objects(folder)
    by_kind = {}
    for document in documents:
        by_kind.setdefault(document["kind"], []).append(document)
    (stateful_set,) = by_kind["StatefulSet"]
    labels = stateful_set["spec"]["template"]["metadata"]["labels"].items()
    for selector in (
        stateful_set["spec"]["selector"]["matchLabels"],
        by_kind["PodDisruptionBudget"][0]["spec"]["selector"]["matchLabels"],
        by_kind["Service"][0]["spec"]["selector"],
    ):
        assert selector and selector.items() <= labels
    deny, allow = sorted(by_kind["NetworkPolicy"], key=lambda policy: policy["metadata"]["name"] != "default-deny")
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert allow["spec"]["podSelector"]["matchLabels"].items() <= labels
    assert all(rule["from"] and rule["ports"] for rule in allow["spec"]["ingress"]) and "egress" not in allow["spec"]
    assert stateful_set["spec"]["template"]["spec"]["topologySpreadConstraints"]
    ports = {port["name"] for port in manifests.server(stateful_set["spec"]["template"]["spec"])["ports"]}
    assert {port["port"] for rule in allow["spec"]["ingress"] for port in rule["ports"]} == ports


def test_trainers_are_told_a_name_that_other_namespaces_know():
    # Pods in the server's own namespace may not call it.
    documents = manifests.overlay_objects("service-tls")
    by_kind = {document["kind"]: document for document in documents}
    stateful_set, service = by_kind["StatefulSet"], by_kind["Service"]
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
    mounted = {
        volume["secret"]["secretName"]
        for _, spec in manifests.pod_specs(documents)
        for volume in spec["volumes"]
        if volume["name"] == "tls"
    }
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
    by_kind = {document["kind"]: document for document in documents}
    monitor, service = by_kind["ServiceMonitor"], by_kind["Service"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
    assert monitor["metadata"]["namespace"] == service["metadata"]["namespace"]
    # A user who may label a Service elsewhere must not get scraped, and alarm, in the servers' name.
    assert "namespaceSelector" not in monitor["spec"]
    assert {"PrometheusRule", "ConfigMap"} <= by_kind.keys()


def test_the_sidecar_is_the_same_in_pods_and_jobs():
    folder = manifests.ROOT / "deploy/kubernetes/components/sidecar"
    pod = yaml.safe_load((folder / "pod.yaml").read_text())
    job = yaml.safe_load((folder / "job.yaml").read_text())
    assert pod["spec"] == job["spec"]["template"]["spec"]


def test_the_sidecar_leaves_what_the_pod_had(tmp_path):
    trainer = yaml.safe_load((manifests.ROOT / "deploy/kubernetes/overlays/sidecar-job/trainer.yaml").read_text())
    spec = trainer["spec"]["template"]["spec"]
    spec["initContainers"] = [{"name": "data", "image": "data:1", "args": ["fetch"]}]
    spec["containers"][0]["env"] = [{"name": "MINE", "value": "1"}]
    (tmp_path / "trainer.yaml").write_text(yaml.safe_dump(trainer))
    components = [
        os.path.relpath(manifests.ROOT / "deploy/kubernetes/components" / name, tmp_path) for name in ("sidecar", "sidecar-dra")
    ]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": ["trainer.yaml"], "components": components}))
    _, spec = next(manifests.pod_specs(manifests.objects(tmp_path)))
    assert [container["name"] for container in spec["initContainers"]] == ["headwater", "data"]
    assert spec["initContainers"][1]["args"] == ["fetch"] and spec["initContainers"][0]["args"][-1] == "--memory_budget_bytes=0"
    assert [claim["name"] for claim in spec["resourceClaims"]] == ["gpu"]
    assert {entry["name"] for entry in spec["containers"][0]["env"]} == {"MINE", "HEADWATER_SERVER"}


class Place:
    """A server with a manifest's flags, its folders and ports replaced by ones of the test's own."""

    def __init__(self, folder: Path, spec: dict):
        self.folder, self.spec = folder, spec
        for name in ("run", "state", "tls", "tokens"):
            (folder / name).mkdir(mode=0o700)
        self.port_file = folder / "ports"
        self.terminated = False

    def replace(self, text: str) -> str:
        for inside, outside in (
            ("/var/lib/headwater", "state"),
            ("/run/headwater", "run"),
            ("/etc/headwater/tls", "tls"),
            ("/etc/headwater/tokens", "tokens"),
        ):
            text = text.replace(inside, str(self.folder / outside))
        return text.replace("0.0.0.0:50051", "127.0.0.1:0").replace("0.0.0.0:9464", "127.0.0.1:0")

    def start(self) -> None:
        arguments = [self.replace(argument) for argument in manifests.server(self.spec)["args"]]
        # The manifests for a GPU run here without; all of their other flags are as they are.
        arguments += ["--engine=cpu", f"--port_file={self.port_file}", "--memory_budget_bytes=67108864"]
        self.process = start_server(arguments, self.port_file, self.folder / "log")

    def tcp(self) -> str:
        return next(line for line in self.port_file.read_text().splitlines() if line.startswith("127.0.0.1:"))

    def ask(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([program("headwaterctl"), *arguments], capture_output=True, text=True, env={}, timeout=60)

    def probe(self, probe: dict) -> bool:
        """Whether the kubelet would take it for a success: a gRPC probe speaks no TLS, a command says it by its status."""
        if "grpc" in probe:
            return self.ask(f"--server={self.tcp()}", "--connect_timeout=10s", "health").returncode == 0
        command, *arguments = (self.replace(word) for word in probe["exec"]["command"])
        assert command == CTL
        return self.ask(*arguments).returncode == 0

    def terminate(self) -> None:
        """Once: a second SIGTERM would end it at once."""
        if not self.terminated:
            self.terminated = True
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        self.terminate()
        try:
            return self.process.wait(self.spec["terminationGracePeriodSeconds"])
        finally:
            self.process.kill()
            self.process.wait()


# The files that cert-manager puts into a secret are ca.crt, tls.crt and tls.key.
def make_certificates(folder: Path) -> None:
    make_authority(folder, "ca")
    make_signed(folder, "tls")


def make_client_certificate(authority: Path, folder: Path) -> None:
    """For a client of the server whose secret is in `authority`."""
    shutil.copy(authority / "ca.crt", folder)
    make_signed(folder, "tls", authority / "ca")


@pytest.mark.parametrize("name", ["service", "service-tls", "sidecar-pod"])
def test_a_server_with_these_flags_answers_these_probes_and_drains(name, tmp_path_factory):
    # A socket's path is short.
    folder = tmp_path_factory.mktemp("hw")
    assert len(str(folder)) < 80
    _, spec = next(manifests.pod_specs(manifests.overlay_objects(name)))
    place = Place(folder, spec)
    tls = name == "service-tls"
    if tls:
        make_certificates(folder / "tls")
        (folder / "tokens/tokens.json").write_text(json.dumps({"tokens": [{"name": "a", "sha256": "ab" * 32, "compute": ["*"]}]}))
    place.start()
    try:
        container = manifests.server(spec)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert ("exec" in container[kind]) == (tls or name.startswith("sidecar"))
            wait_until(functools.partial(place.probe, container[kind]), f"the {kind} to pass")
        assert not place.probe(
            {"exec": {"command": [CTL, f"--server=unix:{folder}/run/nobody", "--connect_timeout=100ms", "health"]}}
        )
        if tls:
            # Why the probes of base do not do: without TLS nothing is answered, and without a certificate neither.
            assert place.ask(f"--server={place.tcp()}", "--connect_timeout=1s", "health").returncode != 0
            certificate = f"--ca_certificate={folder}/tls/ca.crt"
            assert place.ask(f"--server={place.tcp()}", certificate, "--connect_timeout=1s", "health").returncode != 0
            # A probe has no token, and gets no further without one.
            assert "UNAUTHENTICATED" in place.ask(f"--server=unix:{folder}/run/headwater.sock", "info").stderr
        assert (folder / "state/checkpoints").is_dir()
    finally:
        status = place.stop()
    assert status == 0


def test_a_leaderworkerset_has_the_pods_of_the_statefulsets():
    sets, group = (manifests.overlay_objects(name) for name in ("multi-node", "multi-node-lws"))
    stateful = {document["metadata"]["name"]: document["spec"] for document in sets if document["kind"] == "StatefulSet"}
    (spec,) = (document["spec"]["leaderWorkerTemplate"] for document in group if document["kind"] == "LeaderWorkerSet")
    (claim,) = (document["spec"] for document in group if document["kind"] == "PersistentVolumeClaim")
    assert not [document for document in group if document["kind"] == "StatefulSet"]
    assert claim == stateful["headwater"]["volumeClaimTemplates"][0]["spec"]
    workers = stateful["headwater-worker"]["replicas"]
    assert spec["size"] == 1 + workers
    assert manifests.flags(manifests.server(stateful["headwater"]["template"]["spec"]))["workers"] == str(workers)
    # Except for the name of the volume's claim, and of the leader.
    state = spec["leaderTemplate"]["spec"]["volumes"].pop()
    assert state == {"name": "state", "persistentVolumeClaim": {"claimName": "headwater-state"}}
    assert spec["leaderTemplate"] == stateful["headwater"]["template"]
    join = spec["workerTemplate"]["spec"]["containers"][0]["args"]
    join[0] = join[0].replace("$(LWS_LEADER_ADDRESS)", "headwater-0.headwater")
    assert spec["workerTemplate"] == stateful["headwater-worker"]["template"]


@pytest.mark.parametrize("name", ["multi-node", "multi-node-tls"])
def test_a_group_with_these_flags_serves_when_it_is_whole(name, tmp_path_factory):
    documents = manifests.overlay_objects(name)
    specs = dict(manifests.pod_specs(documents))
    leader, worker = specs["StatefulSet/headwater"], manifests.server(specs["StatefulSet/headwater-worker"])
    # With the group's readiness for its own a worker of an old version would never be replaced: the new leader refuses it.
    assert "readinessProbe" not in worker
    place = Place(tmp_path_factory.mktemp("hw"), leader)
    secrets = Place(tmp_path_factory.mktemp("hw"), specs["StatefulSet/headwater-worker"])
    token = "a worker's secret"
    tls = name == "multi-node-tls"
    if tls:
        make_certificates(place.folder / "tls")
        make_client_certificate(place.folder / "tls", secrets.folder / "tls")
        digest = hashlib.sha256(token.encode()).hexdigest()
        tokens = {"tokens": [{"name": "worker", "sha256": digest, "admin": ["*"]}]}
        (place.folder / "tokens/tokens.json").write_text(json.dumps(tokens))
        (secrets.folder / "tokens/token").write_text(token + "\n")
    place.start()
    workers = []
    try:
        assert not place.probe(manifests.server(leader)["readinessProbe"])
        arguments = [secrets.replace(argument.replace("headwater-0.headwater:50051", place.tcp())) for argument in worker["args"]]
        assert f"--join={place.tcp()}" in arguments
        assert any(argument.startswith("--join_ca=") for argument in arguments) == tls
        arguments += ["--memory_budget_bytes=67108864", "--log_level=warning"]
        workers += [subprocess.Popen([program("headwaterd"), *arguments], stderr=subprocess.DEVNULL) for _ in range(2)]
        wait_until(lambda: place.probe(manifests.server(leader)["readinessProbe"]), "the group to form")
    finally:
        status = place.stop()
        for process in workers:
            process.kill()
            process.wait()
    assert status == 0


def test_probes_tell_of_a_drain_and_of_a_process_that_stands_still(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hw")
    _, spec = next(manifests.pod_specs(manifests.overlay_objects("sidecar-pod")))
    probes = manifests.server(spec)
    place = Place(folder, spec)
    place.start()
    release = threading.Event()
    weight = bytes(4 * 8 * 4)

    def requests(head):
        header = head_service_pb2.UploadWeightsHeader(name=head.name, epoch=head.epoch, upload_id="u", total_bytes=len(weight))
        header.tensor, header.data_type = head_service_pb2.HEAD_TENSOR_WEIGHT, tensor_pb2.DATA_TYPE_FLOAT32
        yield head_service_pb2.UploadWeightsRequest(header=header)
        release.wait(START_TIMEOUT_S)
        yield head_service_pb2.UploadWeightsRequest(chunk=head_service_pb2.ByteChunk(data=weight))

    try:
        place.process.send_signal(signal.SIGSTOP)
        assert not place.probe(probes["livenessProbe"])
        place.process.send_signal(signal.SIGCONT)
        wait_until(lambda: place.probe(probes["livenessProbe"]), "it to go on")
        with grpc.insecure_channel(f"unix:{folder}/run/headwater.sock") as channel:
            stub = head_service_pb2_grpc.HeadServiceStub(channel)
            spec_of_head = head_service_pb2.HeadSpec(vocab_size=8, hidden_size=4, data_type=tensor_pb2.DATA_TYPE_FLOAT32)
            request = head_service_pb2.CreateHeadRequest(name="tenants/default/heads/h", spec=spec_of_head)
            head = stub.CreateHead(request, timeout=START_TIMEOUT_S).head
            upload = stub.UploadWeights(requests(head), timeout=START_TIMEOUT_S)
            assert next(upload).WhichOneof("message") == "resume_offset_bytes"
            place.terminate()
            wait_until(lambda: not place.probe(probes["readinessProbe"]), "it to be unready")
            assert place.process.poll() is None
            release.set()
            assert next(upload).head.state == head_service_pb2.HEAD_STATE_READY
    finally:
        release.set()
        place.process.send_signal(signal.SIGCONT)
        status = place.stop()
    assert status == 0
    assert (folder / "state/checkpoints/default/h/drain").is_dir()


def planned(address: str, *shape: str) -> dict:
    """The output of `headwaterctl --json plan`."""
    command = [program("headwaterctl"), f"--server={address}", "--connect_timeout=60s", "--json", "plan", *shape]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_server_sized_for_many_small_heads_takes_them_all(tmp_path):
    """On the CPU each head has a workspace of its own, which is most of a small one."""
    shape = ["--vocab_size=4096", "--hidden_size=128", "--data_type=float32", "--trainable", "--optimizer=adamw"]
    size, heads = sizing(), 24
    with running_server(f"--memory_budget_bytes={1 << 40}") as address:
        plan = planned(address, *shape)
    budget = size.size([plan] * heads, "cpu", *RULES)["memory_budget_bytes"]
    needed = heads * sum(size.purposes(plan).values())
    assert needed <= budget < needed + size.GIB
    # The heads of a GPU share the largest workspace.
    shared = needed - (heads - 1) * size.purposes(plan)["workspace"]
    assert shared <= size.size([plan] * heads, "cuda", *RULES)["memory_budget_bytes"] < shared + size.GIB
    with running_server(f"--memory_budget_bytes={budget}") as address, grpc.insecure_channel(address) as channel:
        stub = head_service_pb2_grpc.HeadServiceStub(channel)
        spec = head_service_pb2.HeadSpec(
            vocab_size=4096,
            hidden_size=128,
            data_type=tensor_pb2.DATA_TYPE_FLOAT32,
            trainable=True,
            optimizer=head_service_pb2.OptimizerSpec(adamw=head_service_pb2.AdamW()),
        )
        grpc.channel_ready_future(channel).result(START_TIMEOUT_S)
        for index in range(heads):
            request = head_service_pb2.CreateHeadRequest(name=f"tenants/default/heads/h{index}", spec=spec)
            created = stub.CreateHead(request, timeout=START_TIMEOUT_S).head
            assert created.memory_plan.total_bytes == sum(size.purposes(plan).values())


def test_the_statefulset_has_the_figures_that_its_head_needs(tmp_path):
    """The documented head, planned by a real server."""
    shape = ["--vocab_size=128256", "--hidden_size=4096", "--data_type=bfloat16", "--trainable", "--optimizer=adamw"]
    with running_server("--memory_budget_bytes=40000000000") as address:
        plan, halves = planned(address, *shape), planned(address, *shape, "--ranks=2")
    size = sizing()
    sizes = size.size([plan], "cpu", *RULES)
    # The tests without a server use this plan.
    assert size.size([documented_plan()], "cpu", *RULES) == sizes
    # Each of two ranks has half of the head, and a workspace of its own; what is saved is the same.
    of_two = size.size([halves], "cpu", *RULES)
    assert sizes["memory_budget_bytes"] / 2 <= of_two["memory_budget_bytes"] < sizes["memory_budget_bytes"] / 2 + size.GIB
    assert (of_two["ranks"], of_two["volume_bytes"]) == (2, sizes["volume_bytes"])
    stateful_set = manifests.only(manifests.objects(manifests.ROOT / "deploy/kubernetes/base"), "StatefulSet")
    spec = stateful_set["spec"]["template"]["spec"]
    flags = manifests.flags(manifests.server(spec))
    for name in ("memory_budget_bytes", "max_in_flight_bytes", "max_upload_bytes", "max_held_bytes", "max_join_bytes"):
        assert int(flags[name]) == sizes[name], name
    assert manifests.seconds(flags["drain_timeout"]) == sizes["drain_timeout_s"]
    assert spec["terminationGracePeriodSeconds"] == sizes["grace_s"]
    assert manifests.quantity(manifests.server(spec)["resources"]["limits"]["memory"]) == sizes["host_memory_bytes"]
    claim = stateful_set["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]
    assert manifests.quantity(claim) == sizes["volume_bytes"]
    # The patch that the script prints makes the same of it.
    rendered = manifests.overlay(tmp_path / "sized", "base", size.patch(sizes, 3, "cpu"))
    sized = manifests.only(rendered, "StatefulSet")
    sized_flags = manifests.flags(manifests.server(sized["spec"]["template"]["spec"]))
    assert sized_flags == flags and sized["spec"]["volumeClaimTemplates"] == stateful_set["spec"]["volumeClaimTemplates"]


def documented_plan() -> dict:
    """The output of `headwaterctl --json plan` for the head of docs/deployment.md, as far as sizes depend on it."""
    elements = 128256 * 4096
    # docs/operations.md, "Memory"; with one staging slot.
    taken = {"weight": 2, "grad_weight": 4, "master_weight": 4, "optimizer_state": 8, "staging": 4}
    items = [{"purpose": purpose, "bytes": size * elements} for purpose, size in taken.items()]
    return {"memory_plan": {"items": [*items, {"purpose": "workspace", "bytes": 50_000_000}]}}


def test_the_figures_of_the_page_are_those_of_the_rules_and_of_the_manifests():
    size = sizing()
    sizes = size.size([documented_plan()], "cpu", *RULES)
    page = (manifests.ROOT / "docs/deployment.md").read_text()
    for row in ("volume_bytes", "host_memory_bytes"):
        assert f"**{sizes[row] // size.GIB} GiB**" in page
    stateful_set = manifests.only(manifests.objects(manifests.ROOT / "deploy/kubernetes/base"), "StatefulSet")
    keep = int(manifests.flags(manifests.server(stateful_set["spec"]["template"]["spec"]))["keep_checkpoints"])
    # The checkpoints that the page saves are a series each, which end with a number, and have room.
    names = re.findall(r"headwaterctl save HEAD ([\w.-]+)", page)
    assert len(names) == len({re.sub(r"\d+$", "", name) for name in names}) == size.FURTHER_SERIES
    assert all(name[-1].isdigit() for name in names)
    checkpoint = sum(size.purposes(documented_plan()).get(purpose, 0) for purpose in size.SAVED)
    assert sizes["volume_bytes"] >= (keep + keep * len(names) + len(["drain", "being written"])) * checkpoint * 1.1


def size_program(folder: Path, *options: str, plan: dict | None = None) -> subprocess.CompletedProcess:
    (folder / "head.json").write_text(json.dumps(plan or documented_plan()))
    command = [sys.executable, "-B", str(manifests.ROOT / "deploy/kubernetes/size.py"), *options, str(folder / "head.json")]
    return subprocess.run(command, capture_output=True, text=True)


def test_checkpoints_beside_the_trainings_have_room_on_the_volume(tmp_path):
    def gib(*options: str) -> int:
        return json.loads(size_program(tmp_path, "--engine=cpu", "--json", *options).stdout)["volume_bytes"] // sizing().GIB

    assert gib() == gib("--extra_checkpoints=6") == gib("--keep_checkpoints=3") == 83
    assert gib("--extra_checkpoints=0") == 38
    assert gib("--keep_checkpoints=1") == gib("--keep_checkpoints=1", "--extra_checkpoints=2") == 38
    refused = size_program(tmp_path, "--engine=cpu", "--extra_checkpoints=-1")
    assert refused.returncode == 1 and "--extra_checkpoints must be at least 0" in refused.stderr


# The room of components/sidecar for rows.
SIDECAR = ("--max_in_flight_bytes=1073741824", "--max_held_bytes=268435456", "--max_join_bytes=268435456")


def gpu_sidecars():
    """The overlays whose sidecar is on a GPU, with its pod."""
    for folder in manifests.OVERLAYS:
        if folder.name.startswith("sidecar-"):
            ((_, spec),) = manifests.pod_specs(manifests.objects(folder))
            if manifests.flags(manifests.server(spec))["engine"] == "cuda":
                yield folder, spec


def test_a_sidecar_on_a_gpu_takes_the_documented_head(tmp_path):
    sizes = json.loads(size_program(tmp_path, "--engine=cuda", "--json", *SIDECAR).stdout)
    assert " ".join(SIDECAR) in re.sub(r"\s*\\\n\s*", " ", (manifests.ROOT / "docs/deployment.md").read_text())
    found = list(gpu_sidecars())
    assert len(found) >= 5
    for folder, spec in found:
        container = manifests.server(spec)
        flags = manifests.flags(container)
        for flag in ("max_in_flight_bytes", "max_upload_bytes", "max_held_bytes", "max_join_bytes"):
            assert int(flags[flag]) == sizes[flag], (folder.name, flag)
        assert int(flags["memory_budget_bytes"]) == 0 or int(flags["memory_budget_bytes"]) >= sizes["memory_budget_bytes"]
        for kind in ("requests", "limits"):
            assert manifests.quantity(container["resources"][kind]["memory"]) == sizes["host_memory_bytes"], folder.name
        assert manifests.seconds(flags["drain_timeout"]) == sizes["drain_timeout_s"], folder.name
        assert spec["terminationGracePeriodSeconds"] == sizes["grace_s"], folder.name


@pytest.mark.parametrize("overlay", ["sidecar-pod", "sidecar-job", "sidecar-time-slicing"])
def test_a_sidecar_is_sized_by_a_patch_of_its_pod(overlay, tmp_path):
    printed = size_program(tmp_path, "--engine=cpu", "--sidecar", "--keep_checkpoints=2", *SIDECAR)
    assert printed.returncode == 0, printed.stderr
    ((_, spec),) = manifests.pod_specs(manifests.overlay(tmp_path / "sized", f"overlays/{overlay}", printed.stdout))
    container = manifests.server(spec)
    flags = manifests.flags(container)
    assert (flags["memory_budget_bytes"], flags["max_upload_bytes"]) == ("11811160064", "2147483648")
    assert flags["keep_checkpoints"] == "2"
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"] == "16Gi"
    assert (flags["drain_timeout"], spec["terminationGracePeriodSeconds"]) == ("120s", 150)
    assert manifests.violations(spec) == []
    several = size_program(tmp_path, "--engine=cuda", "--sidecar", plan=plan_of(2, 1 << 30, 1 << 20))
    assert several.returncode == 1 and "a sidecar is one process with one GPU at most" in several.stderr


def plan_of(ranks: int, weight: int, workspace: int) -> dict:
    """The output of `headwaterctl --json plan --ranks` for a head with so many bytes, as far as sizes depend on it."""

    def items(share: int) -> dict:
        return {"items": [{"purpose": "weight", "bytes": share}, {"purpose": "workspace", "bytes": workspace}]}

    return {"memory_plan": items(weight), "ranks": ranks, "rank_plan": items(weight // ranks)}


@pytest.mark.parametrize("engine, overlay", [("cuda", "service-gpus"), ("cpu", "multi-node")])
def test_plans_of_several_ranks_size_each_of_them(engine, overlay, tmp_path):
    size = sizing()
    gib = size.GIB
    plans = [plan_of(4, 40 * gib, gib), plan_of(4, 8 * gib, gib // 2)]
    sizes = size.size(plans, engine, *RULES)
    # The larger workspace once on a GPU, both on the CPU, in whole GiB.
    assert sizes["ranks"] == 4 and sizes["memory_budget_bytes"] == (10 + 2 + {"cuda": 1, "cpu": 2}[engine]) * gib
    assert sizes["volume_bytes"] >= 11 * 48 * gib  # the checkpoints are the leader's, whole
    specs = dict(manifests.pod_specs(manifests.overlay(tmp_path / "sized", f"overlays/{overlay}", size.patch(sizes, 3, engine))))
    leader = manifests.server(specs["StatefulSet/headwater"])
    limits = leader["resources"]["limits"]
    assert int(manifests.flags(leader)["memory_budget_bytes"]) == sizes["memory_budget_bytes"]
    assert manifests.quantity(limits["memory"]) == sizes["host_memory_bytes"]
    if engine == "cuda":
        assert manifests.flags(leader)["gpus"] == limits["nvidia.com/gpu"] == "4"
        assert (
            sizes["host_memory_bytes"]
            == size.size([{"memory_plan": plan["memory_plan"]} for plan in plans], engine, *RULES)["host_memory_bytes"] + 4 * gib
        )
    else:
        worker = manifests.server(specs["StatefulSet/headwater-worker"])
        assert manifests.flags(leader)["workers"] == "3"
        assert int(manifests.flags(worker)["memory_budget_bytes"]) == sizes["memory_budget_bytes"]
        assert manifests.flags(worker)["drain_timeout"] == manifests.flags(leader)["drain_timeout"]
        assert specs["StatefulSet/headwater-worker"]["terminationGracePeriodSeconds"] == sizes["grace_s"]
        assert manifests.quantity(worker["resources"]["limits"]["memory"]) == (14 + 4 + 1) * gib
    with pytest.raises(SystemExit, match="the same number of ranks"):
        size.size([plan_of(4, gib, gib), plan_of(2, gib, gib)], engine, *RULES)
