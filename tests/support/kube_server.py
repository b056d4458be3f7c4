"""A real Kubernetes control plane on loopback, for the tests of controller and manifests.

etcd, kube-apiserver, controller-manager (garbage collection, service accounts) and scheduler, as ``tests/system/
kubernetes/build.sh`` built them. There are no kubelets: nodes are objects, and :mod:`tests.support.process_kubelet`
runs the pods bound to them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import urllib3
import yaml

from tests.support.local_nodes import wait_until
from tests.support.ports import free_port
from tests.support.s3 import server_process

BUILD = Path(__file__).parents[1] / "system" / "kubernetes" / "build.sh"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_ADMIN = "the-administrator"
_START_S = 120.0
_CONTROLLERS = "garbagecollector,namespace,serviceaccount,serviceaccount-token,podgc"


def server_folder() -> Path:
    """Return the folder of the programs, whether built or not."""
    said = subprocess.run([BUILD, "--where"], capture_output=True, text=True, check=True, timeout=200)
    return Path(said.stdout.strip())


def missing_reason() -> str:
    """Return why no control plane can run here, or an empty string."""
    return (
        ""
        if (server_folder() / "complete").exists()
        else "no kube-apiserver: run tests/system/kubernetes/build.sh once"
    )


class ApiRefusedError(Exception):
    """Refusal of a request by the API server."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status = status


@dataclass
class KubeClient:
    """One user's client of a control plane."""

    url: str
    authority: Path
    token: str
    folder: Path
    _pool: urllib3.PoolManager = field(init=False)

    def __post_init__(self) -> None:
        self._pool = urllib3.PoolManager(ca_certs=str(self.authority), retries=False, maxsize=8)

    def close(self) -> None:
        self._pool.clear()

    def request(
        self, method: str, path: str, body: Any = None, *, kind: str = "application/json", timeout_s: float = 30.0
    ) -> Any:
        reply = self._pool.request(
            method,
            self.url + path,
            json=body,
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": kind, "Accept": "application/json"},
            timeout=timeout_s,
        )
        if reply.status >= 300:
            raise ApiRefusedError(reply.status, reply.data.decode(errors="replace")[:2000])
        return reply.json()

    def get(self, path: str) -> Any:
        return self.request("GET", path)

    def find(self, path: str) -> Any:
        """Return the object at ``path``, or ``None``."""
        try:
            return self.request("GET", path)
        except ApiRefusedError as refused:
            if refused.status == 404:
                return None
            raise

    def list(self, path: str) -> list[Any]:
        return self.request("GET", path)["items"]

    def create(self, path: str, body: Mapping[str, Any], *, dry_run: bool = False) -> Any:
        return self.request("POST", path + ("?dryRun=All" if dry_run else ""), dict(body))

    def patch(self, path: str, body: Any) -> Any:
        return self.request("PATCH", path, body, kind="application/merge-patch+json")

    def delete(self, path: str, *, grace_s: int | None = None) -> None:
        body: dict[str, Any] = {"propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        self.request("DELETE", path, body)

    def apply(self, document: Mapping[str, Any], *, dry_run: bool = False) -> Any:
        """Server-side apply, as ``kubectl apply --server-side`` does."""
        query = "?fieldManager=tests&force=true" + ("&dryRun=All" if dry_run else "")
        path = f"{collection(document)}/{document['metadata']['name']}{query}"
        return self.request("PATCH", path, dict(document), kind="application/apply-patch+yaml")

    def wait_served(self, path: str) -> None:
        """Wait until the server serves a kind, which takes a moment after its definition."""
        wait_until(lambda: self.find(path), f"{path} is served", _START_S)

    def as_service_account(self, namespace: str, name: str) -> KubeClient:
        """Return a client of the same cluster with the rights of that account."""
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        return KubeClient(self.url, self.authority, self.create(path, asked)["status"]["token"], self.folder)

    def kubeconfig(self, path: Path, *, url: str | None = None) -> Path:
        cluster = {"server": url or self.url, "certificate-authority": str(self.authority)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": self.token}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "current-context": "here",
        }
        path.write_text(yaml.safe_dump(document))
        return path


_PLURALS = {
    "NetworkPolicy": "networkpolicies",
    "HyperPodPyTorchJob": "hyperpodpytorchjobs",
    "JobSet": "jobsets",
    "PyTorchJob": "pytorchjobs",
}
_CLUSTER_WIDE = {"Namespace", "Node", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "PriorityClass"}


def collection(document: Mapping[str, Any]) -> str:
    """Return the path of all objects of a document's kind, in its namespace."""
    version, kind = document["apiVersion"], document["kind"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    plural = _PLURALS.get(kind, f"{kind.lower()}{'es' if kind.endswith('s') else 's'}")
    if kind in _CLUSTER_WIDE:
        return f"{root}/{plural}"
    return f"{root}/namespaces/{document['metadata'].get('namespace', 'default')}/{plural}"


@contextlib.contextmanager
def control_plane(folder: Path, *options: str) -> Iterator[KubeClient]:
    """Run a control plane, using about 400 MB of memory. ``options`` go to the API server."""
    programs = server_folder() / "bin"
    keys = folder / "pki"
    keys.mkdir(parents=True)
    key = keys / "sa.key"
    _run(["openssl", "genrsa", "-out", str(key), "2048"])
    _run(["openssl", "rsa", "-in", str(key), "-pubout", "-out", str(keys / "sa.pub")])
    (folder / "tokens.csv").write_text(f"{_ADMIN},admin,1,system:masters\n")
    store, peers, secure, manager, scheduler = (free_port() for _ in range(5))
    etcd = f"http://127.0.0.1:{store}"
    # Two processors suffice for a small cluster and leave the others to the ranks.
    env = {**os.environ, "GOMAXPROCS": "2"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            server_process(
                [
                    str(programs / "etcd"), f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync", "--log-level=error",
                    f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
                    f"--listen-peer-urls=http://127.0.0.1:{peers}",
                    f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}",
                    f"--initial-cluster=default=http://127.0.0.1:{peers}",
                ],
                folder / "etcd.log", store, env=env,
            )
        )  # fmt: skip
        stack.enter_context(
            server_process(
                [
                    str(programs / "kube-apiserver"), f"--etcd-servers={etcd}", "--bind-address=127.0.0.1",
                    "--advertise-address=127.0.0.1", f"--secure-port={secure}", "--insecure-port=0",
                    f"--cert-dir={keys}", f"--token-auth-file={folder / 'tokens.csv'}", "--authorization-mode=RBAC",
                    "--service-cluster-ip-range=10.96.0.0/16", f"--service-account-key-file={keys / 'sa.pub'}",
                    f"--service-account-signing-key-file={key}", "--endpoint-reconciler-type=none",
                    "--service-account-issuer=https://kubernetes.default.svc", *options,
                ],
                folder / "apiserver.log", None, env=env,
            )
        )  # fmt: skip
        kube = KubeClient(f"https://127.0.0.1:{secure}", keys / "apiserver.crt", _ADMIN, folder)
        stack.callback(kube.close)
        _until_ready(kube)
        wait_until(lambda: kube.find("/api/v1/namespaces/default"), "the default namespace is there", _START_S)
        config = f"--kubeconfig={kube.kubeconfig(folder / 'kubeconfig')}"
        quiet: Sequence[str] = ("--bind-address=127.0.0.1", "--port=0", "--leader-elect=false", config)
        stack.enter_context(
            server_process(
                [
                    str(programs / "kube-controller-manager"), *quiet, f"--secure-port={manager}",
                    f"--service-account-private-key-file={key}", f"--controllers={_CONTROLLERS}",
                    f"--cert-dir={keys / 'manager'}",
                ],
                folder / "manager.log", None, env=env,
            )
        )  # fmt: skip
        stack.enter_context(
            server_process(
                [
                    str(programs / "kube-scheduler"), *quiet, f"--secure-port={scheduler}",
                    f"--cert-dir={keys / 'scheduler'}",
                ],
                folder / "scheduler.log", None, env=env,
            )
        )  # fmt: skip
        yield kube


def add_node(kube: KubeClient, name: str, *, labels: Mapping[str, str] | None = None) -> None:
    """Create a ready node with room for pods."""
    labels = {"kubernetes.io/hostname": name, **(labels or {})}
    kube.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
    room = {"cpu": "16", "memory": "64Gi", "pods": "110"}
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    ready = {
        "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "",
        "lastHeartbeatTime": moment, "lastTransitionTime": moment,
    }  # fmt: skip
    status = {"capacity": room, "allocatable": room, "conditions": [ready]}
    kube.patch(f"/api/v1/nodes/{name}/status", {"status": status})
    kube.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})


def _until_ready(kube: KubeClient) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(urllib3.exceptions.HTTPError, OSError, ValueError):
            if kube.authority.exists() and _is_ready(kube):
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the API server is not ready after {_START_S:.0f} s, see {kube.folder}")
        time.sleep(0.1)


def _is_ready(kube: KubeClient) -> bool:
    reply = kube._pool.request(
        "GET", f"{kube.url}/readyz", headers={"Authorization": f"Bearer {kube.token}"}, timeout=5
    )
    return reply.status == 200 and reply.data == b"ok"


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=200)
