"""A temporary API server outage for the controller: its probe, its log and its recovery."""

from __future__ import annotations

import json
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.kube_jobs import JOBS, PODS, ControllerProcess
from tests.support.kube_objects import job_object
from tests.support.kube_server import KubeClient
from tests.support.local_nodes import wait_until
from tests.support.ports import free_port
from tests.support.severable_proxy import SeverableProxy

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PATIENCE_S = 240.0


def _create(kube: KubeClient, name: str) -> None:
    """Create a job whose pods stay pending, since their selector matches no node."""
    job = job_object(name)
    job["metadata"] = {"name": name, "namespace": "default"}
    job["spec"]["replicaSpecs"][0]["template"] = {
        "spec": {
            "nodeSelector": {"no": "such-node"},
            "containers": [{"name": "sleeper", "image": "none", "command": [sys.executable]}],
        }
    }
    kube.create(JOBS, job)


def _pods(kube: KubeClient, job: str) -> list[Any]:
    return kube.list(f"{PODS}?labelSelector=HPJob={job}")


def _is_well(health: str) -> Callable[[], bool]:
    def asked() -> bool:
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(health, timeout=10) as reply:
                return reply.status == 200
        except OSError:
            return False

    return asked


def test_controller_catches_up_after_an_api_outage(kube: KubeClient, tmp_path: Path) -> None:
    port = urllib.parse.urlsplit(kube.url).port
    assert port
    account = kube.as_service_account("tieredckpt-system", "hyperpod-controller")
    health = f"127.0.0.1:{free_port()}"
    with SeverableProxy(port).running() as line:
        config = account.kubeconfig(tmp_path / "kubeconfig", url=f"https://127.0.0.1:{line.port}")
        account.close()
        with ControllerProcess(tmp_path, config, f"--health={health}").running() as controller:
            wait_until(_is_well(f"http://{health}/healthz"), "the probe is answered", PATIENCE_S)
            for name in ("before", "going"):
                _create(kube, name)
            wait_until(lambda: len(_pods(kube, "before")) == len(_pods(kube, "going")) == 2, "pods", PATIENCE_S)

            line.cut()
            _create(kube, "meanwhile")
            kube.delete(f"{JOBS}/going")
            victim = _pods(kube, "before")[0]["metadata"]
            kube.delete(f"{PODS}/{victim['name']}", grace_s=0)
            assert line.refused.wait(PATIENCE_S), "the controller retries"
            assert controller.exit_status() is None, controller.log()
            assert len(_pods(kube, "before")) == 1

            line.reconnect()
            wait_until(lambda: len(_pods(kube, "meanwhile")) == 2, "pods of the new job", PATIENCE_S)
            wait_until(lambda: len(_pods(kube, "before")) == 2, "a replacement of the deleted pod", PATIENCE_S)
            wait_until(lambda: not _pods(kube, "going"), "the deleted job has no pods", PATIENCE_S)
            assert victim["uid"] not in {pod["metadata"]["uid"] for pod in _pods(kube, "before")}
            assert _is_well(f"http://{health}/healthz")()
            meta = kube.get(f"{JOBS}/before")["metadata"]
            assert not {"finalizers", "annotations"} & set(meta), "it can be deleted while no controller runs"
    for name in ("before", "meanwhile"):
        kube.delete(f"{JOBS}/{name}")
        wait_until(lambda name=name: not _pods(kube, name), "pods go with their job", PATIENCE_S)
    for row in controller.log().splitlines():
        assert {"message", "severity", "timestamp"} <= set(json.loads(row)), row
