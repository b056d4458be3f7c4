"""The manifests: least privilege, only existing names, and shipped files equal generated ones."""

import argparse
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import integration.hyperpod
from integration.hyperpod.example_jobs import EXAMPLE_JOBS, example_text
from integration.hyperpod.job_manifest import ARENA_DIRECTORY, HTTP_PORT, MEMORY_LABEL, PEERS_PORT, job_manifest
from tieredckpt.agent.__main__ import add_agent_arguments

ROOT = Path(integration.hyperpod.__file__).parent / "manifests"
CUSTOMIZATIONS = sorted(path.parent for path in ROOT.rglob("kustomization.yaml"))
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def documents(path):
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def shipped():
    return [
        document
        for path in sorted(ROOT.rglob("*.yaml"))
        if path.name not in ("kustomization.yaml", "TieredStorageConfig.yaml")
        for document in documents(path)
    ]


def pod_of(document):
    """The pod a workload makes, with its labels."""
    spec = document["spec"]
    template = {
        "DaemonSet": lambda: spec["template"],
        "HyperPodPyTorchJob": lambda: spec["replicaSpecs"][0]["template"],
        "JobSet": lambda: spec["replicatedJobs"][0]["template"]["spec"]["template"],
        "PyTorchJob": lambda: spec["pytorchReplicaSpecs"]["Worker"]["template"],
    }[document["kind"]]()
    return template["metadata"]["labels"], template["spec"]


PODS = [(d["kind"], *pod_of(d)) for d in shipped() if d["kind"] not in ("Namespace", "ServiceAccount", "NetworkPolicy")
        and not d["kind"].startswith("ClusterRole")]  # fmt: skip
each_pod = pytest.mark.parametrize(("kind", "labels", "pod"), PODS, ids=[kind for kind, *_ in PODS])


def containers(pod):
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_every_workload_is_covered():
    assert sorted(kind for kind, *_ in PODS) == [
        "DaemonSet",
        "HyperPodPyTorchJob",
        "HyperPodPyTorchJob",
        "JobSet",
        "PyTorchJob",
    ]


@each_pod
def test_containers_may_do_as_little_as_works(kind, labels, pod):
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for container in containers(pod):
        may = {**pod.get("securityContext", {}), **container["securityContext"]}
        assert may["allowPrivilegeEscalation"] is False
        assert may["capabilities"]["drop"] == ["ALL"]
        assert may["seccompProfile"] == {"type": "RuntimeDefault"}
        if container["name"] == "own-directory":
            assert may["capabilities"]["add"] == ["CHOWN", "FOWNER"]
            assert container["command"][0] == "install"
        else:
            assert "add" not in may["capabilities"]
            assert may["runAsNonRoot"] is True
            assert may["runAsUser"] == 10001
        if container["name"] in ("agent", "own-directory"):
            assert may["readOnlyRootFilesystem"] is True


@each_pod
def test_mounts_exist_and_only_the_arena_is_a_host_path(kind, labels, pod):
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in containers(pod):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
    used = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
    assert used == volumes.keys()
    assert [v["hostPath"]["path"] for v in volumes.values() if "hostPath" in v] in ([], [ARENA_DIRECTORY])


@each_pod
def test_agents_accept_their_arguments_and_are_probed_where_they_serve(kind, labels, pod):
    for container in containers(pod):
        if container["name"] != "agent":
            continue
        assert container["command"] == ["tieredckpt", "agent"]
        known = {variable["name"] for variable in container["env"]}
        assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) <= known
        parser = argparse.ArgumentParser(exit_on_error=False)
        add_agent_arguments(parser)
        args, rest = parser.parse_known_args([arg.replace("$(POD_IP)", "10.0.0.1") for arg in container["args"]])
        assert [word for word in rest if not word.startswith("--cluster-config=hyperpod:")] == []
        assert str(args.dir) == ARENA_DIRECTORY
        assert (args.http, args.peers) == (f"10.0.0.1:{HTTP_PORT}", f"10.0.0.1:{PEERS_PORT}")
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"http": HTTP_PORT, "peers": PEERS_PORT}
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}


@each_pod
def test_pods_that_speak_to_agents_are_let_through(kind, labels, pod):
    (policy,) = (document for document in shipped() if document["kind"] == "NetworkPolicy")
    if kind == "DaemonSet":
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        ports = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
        assert set(ports) <= {port["name"] for port in pod["containers"][0]["ports"]}
    else:
        assert labels[MEMORY_LABEL] in ("node", "sidecar")
        selectors = [one["podSelector"] for one in policy["spec"]["ingress"][0]["from"]]
        assert {"matchExpressions": [{"key": MEMORY_LABEL, "operator": "Exists"}]} in selectors


def test_rights_in_the_cluster_are_those_of_labels():
    rules = [rule for document in shipped() if document["kind"] == "ClusterRole" for rule in document["rules"]]
    assert rules == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]}]


@pytest.mark.parametrize("name", EXAMPLE_JOBS)
def test_shipped_jobs_match_the_generated_ones(name):
    about, job = EXAMPLE_JOBS[name]
    assert (ROOT / "examples" / name).read_text(encoding="utf-8") == example_text(about, job_manifest(job))


def test_awss_models_take_the_shipped_jobs():
    aws = pytest.importorskip("sagemaker.hyperpod.training.config.hyperpod_pytorch_job_unified_config")
    jobs = [document for document in shipped() if document["kind"] == "HyperPodPyTorchJob"]
    assert len(jobs) == len(EXAMPLE_JOBS)
    for document in jobs:
        found = aws._HyperPodPytorchJob.model_validate(document["spec"], by_name=True, by_alias=False)
        assert found.model_dump(exclude_unset=True, by_alias=False) == document["spec"]


@pytest.mark.parametrize("folder", CUSTOMIZATIONS, ids=lambda path: path.name)
def test_kustomizations_name_existing_files(folder):
    (custom,) = documents(folder / "kustomization.yaml")
    for name in custom["resources"]:
        assert (folder / name).exists()
    for patch in custom.get("patches", []):
        assert "path" not in patch or (folder / patch["path"]).exists()
    for made in custom.get("configMapGenerator", []):
        for file in made.get("files", []):
            assert (folder / file.partition("=")[2]).exists()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", CUSTOMIZATIONS, ids=lambda path: path.name)
def test_kubectl_renders_kustomizations(folder):
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    made = [document for document in yaml.safe_load_all(done.stdout) if document]
    assert all(document["metadata"].get("namespace", "tieredckpt-agents") == "tieredckpt-agents" for document in made)
    configs = {document["metadata"]["name"] for document in made if document["kind"] == "ConfigMap"}
    for document in made:
        if document["kind"] == "DaemonSet":
            volumes = document["spec"]["template"]["spec"]["volumes"]
            assert {volume["configMap"]["name"] for volume in volumes if "configMap" in volume} == configs
            (agent,) = document["spec"]["template"]["spec"]["containers"]
            mounts = {mount["name"]: mount["mountPath"] for mount in agent["volumeMounts"]}
            assert mounts.keys() == {volume["name"] for volume in volumes}
            said = [arg.partition("=")[2] for arg in agent["args"] if arg.startswith("--tls=")]
            assert said == [path for name, path in mounts.items() if name == "tls"]


def test_dockerfile_copies_existing_files_and_sets_the_user():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    repository = ROOT.parents[2]
    if not (repository / "pyproject.toml").exists():
        pytest.skip("installed without its repository")
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in line.split():
            assert (repository / name).exists()
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["10001:10001"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the image has Python 3.11 with tomllib")
def test_image_has_all_dependencies_but_torch():
    repository = ROOT.parents[2]
    if not (repository / "pyproject.toml").exists():
        pytest.skip("installed without its repository")
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (program,) = re.findall(r'^RUN python -c "(.+?)" >', text, re.MULTILINE)
    listed = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, check=True)
    required = {re.match(r"[\w-]+", one)[0] for one in metadata.requires("tieredckpt") if "extra ==" not in one}
    assert {re.match(r"[\w-]+", one)[0] for one in listed.stdout.split()} == required - {"torch"}


@each_pod
def test_an_image_is_named_by_a_version(kind, labels, pod):
    """The image behind ``latest`` changes over time."""
    for container in containers(pod):
        tag = container["image"].rpartition("/")[2].partition(":")[2]
        assert tag not in ("", "latest")
