"""A hundred jobs under one controller, on a real API server that logs every request."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.kubernetes.api_client import connected
from tests.support.kube_jobs import JOBS, PODS, ROOT, ControllerProcess
from tests.support.kube_objects import job_object
from tests.support.kube_server import KubeClient, add_node, control_plane, missing_reason
from tests.support.many_agents import ManyAgents

pytestmark = [pytest.mark.system, pytest.mark.nightly, pytest.mark.timeout(1800)]

COUNT = 100
_PATIENCE_S = 600.0
_REST_S = 60.0
_ACCOUNT = "system:serviceaccount:tieredckpt-system:hyperpod-controller"
_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": [_ACCOUNT]}],
}


class Requests:
    """The controller's requests in the API server's audit log."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> list[tuple[str, str, str]]:
        """Return verb, resource and time of each request; a watch counts when it begins."""
        found = []
        for line in self._path.read_text().splitlines():
            one = json.loads(line)
            began = one["verb"] != "watch" or one["stage"] == "ResponseStarted"
            if began and (one["stage"] == "ResponseComplete" or one["verb"] == "watch"):
                about = one.get("objectRef") or {}
                resource = "/".join(filter(None, (about.get("resource", ""), about.get("subresource", ""))))
                found.append((one["verb"], resource, one["requestReceivedTimestamp"]))
        return found


@pytest.fixture
def audited(tmp_path: Path) -> Iterator[tuple[KubeClient, Requests]]:
    if reason := missing_reason():
        pytest.skip(reason)
    policy, log = tmp_path / "policy.yaml", tmp_path / "audit.log"
    policy.write_text(yaml.safe_dump(_POLICY))
    options = (f"--audit-policy-file={policy}", f"--audit-log-path={log}", "--audit-log-mode=blocking")
    with control_plane(tmp_path / "kube", *options) as kube:
        manifests = ROOT / "integration" / "kubernetes" / "manifests"
        for name in ("namespace.yaml", "crd.yaml", "rbac.yaml"):
            for document in yaml.safe_load_all((manifests / name).read_text()):
                if document["kind"] == "ServiceAccount":
                    document["metadata"]["namespace"] = "tieredckpt-system"
                kube.apply(document)
        kube.wait_served(JOBS)
        kube.wait_served("/api/v1/namespaces/default/serviceaccounts/default")
        yield kube, Requests(log)


def test_hundred_jobs_send_few_requests_at_rest_and_after_pod_losses(
    audited: tuple[KubeClient, Requests], tmp_path: Path
) -> None:
    kube, requests = audited
    for number in range(10):
        add_node(kube, f"node-{number}")
    account = kube.as_service_account("tieredckpt-system", "hyperpod-controller")
    config = account.kubeconfig(tmp_path / "controller")
    account.close()
    admin = connected(kube.kubeconfig(tmp_path / "admin"))
    controller = ControllerProcess(tmp_path, config, "--every=1", "--silent=600")
    with ManyAgents(admin).running() as agents, controller.running():
        names = [f"job-{number}" for number in range(COUNT)]
        for name in names:
            kube.create(JOBS, _resource(name, agents.port))

        def run(restarts: int) -> Callable[[], bool]:
            def holds() -> bool:
                assert controller.exit_status() is None, controller.log()[-4000:]
                assert agents.failure is None, agents.failure
                status = {one["metadata"]["name"]: one.get("status") or {} for one in kube.list(JOBS)}
                return sum(_runs(status[name], restarts) for name in names) == COUNT

            return holds

        begun_s = _until(run(0))
        began, cpu_s, calls = len(requests.all()), _cpu_s(controller), agents.calls
        time.sleep(_REST_S)  # measure an idle period
        resting = requests.all()[began:]
        cores = (_cpu_s(controller) - cpu_s) / _REST_S
        calls = agents.calls - calls
        began, cpu_s = len(requests.all()), _cpu_s(controller)
        lost_at = time.time()
        for name in names:
            kube.patch(f"{PODS}/{name}-workers-0/status", {"status": {"phase": "Failed"}})
        again_s = _until(run(1))
        asked = Counter(f"{verb} {resource}" for verb, resource, _ in requests.all()[began:])
        took = sorted(_seconds(_running(one)["lastTransitionTime"]) - lost_at for one in kube.list(JOBS))
        figures = {
            "jobs": COUNT,
            "begun_s": round(begun_s, 1),
            "at_rest": {"requests": resting, "cores": round(cores, 3), "calls_to_agents": calls, "seconds": _REST_S},
            "rss_mib": _rss_mib(controller),
            "all_lost_a_pod": {
                "again_s": round(again_s, 1),
                "p50_s": round(took[COUNT // 2], 1),
                "requests": asked,
                "per_job": round(sum(asked.values()) / COUNT, 2),
                "cpu_s": round(_cpu_s(controller) - cpu_s, 2),
            },
            "load": os.getloadavg(),
        }
        print(json.dumps(figures, indent=1))
        assert not [one for one in resting if one[0] != "watch"], "an idle controller sends only watches"
        assert len(resting) <= 3 * 2, "watches are renewed a few times an hour"
        assert sum(asked.values()) <= 20 * COUNT
        for name in names:
            kube.delete(f"{JOBS}/{name}")


def _resource(name: str, port: int) -> dict[str, Any]:
    job = job_object(name)
    job["metadata"] = {"name": name, "namespace": "default"}
    container = {"name": "pytorch", "image": "none", "command": ["hyperpodrun", f"--server-port={port}", "train.py"]}
    job["spec"]["replicaSpecs"][0]["template"] = {"spec": {"containers": [container]}}
    return job


def _running(job: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in job["status"]["conditions"] if one["type"] == "Running")


def _runs(status: dict[str, Any], restarts: int) -> bool:
    found = [one for one in status.get("conditions", ()) if one["type"] == "Running"]
    return bool(found) and found[0]["status"] == "True" and status.get("restartCount", 0) == restarts


def _until(holds: Callable[[], bool]) -> float:
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() - began_s < _PATIENCE_S, "they do not all run"
        time.sleep(0.5)
    return time.monotonic() - began_s


def _seconds(moment: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def _stat(controller: ControllerProcess, name: str) -> str:
    assert controller._process is not None
    return Path(f"/proc/{controller._process.pid}/{name}").read_text()


def _cpu_s(controller: ControllerProcess) -> float:
    fields = _stat(controller, "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mib(controller: ControllerProcess) -> int:
    row = next(row for row in _stat(controller, "status").splitlines() if row.startswith("VmRSS"))
    return int(row.split()[1]) >> 10
