"""What the controller asks of the API server, over the client's plain calls: objects are what came as JSON."""

from __future__ import annotations

import contextlib
import datetime as dt
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from integration.kubernetes.errors import (
    AbsentError,
    ClusterError,
    ConflictError,
    ExpiredError,
    RefusedError,
    UnreachableError,
)
from integration.kubernetes.informer import Collection
from integration.kubernetes.kueue import Kueue
from integration.kubernetes.names import GROUP, JOB_LABEL, KIND, KUEUE_GROUP, KUEUE_VERSIONS, PLURAL, VERSION
from peerstore.decode import from_json

_TIMEOUT_S = 30.0
_PAGE = 500
_CONNECTIONS = 64
"""That are kept open; more are made where more are needed at a time."""
_REPORTER = "hyperpod-controller"
_JSON = "application/json"
_MERGE = "application/merge-patch+json"


class Cluster:
    """One API server, as the account that the controller runs under. Any thread may call any method."""

    def __init__(self, client: Any, timeout_s: float = _TIMEOUT_S) -> None:
        self._client, self._timeout_s = client, timeout_s

    def job(self, namespace: str, name: str) -> dict[str, Any]:
        return self.ask("GET", _job(namespace, name))

    def confirm(self, job: Mapping[str, Any]) -> None:
        """:class:`ConflictError` where somebody has written since ``job`` was read."""
        meta = job["metadata"]
        if self.job(meta["namespace"], meta["name"])["metadata"] != meta:
            raise ConflictError(f"job {meta['name']} has changed since it was read")

    def write_status(self, job: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, Any]:
        """Replace what ``status`` names, if nobody has written since ``job`` was read: two controllers cannot both."""
        meta = job["metadata"]
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": dict(status)}
        return self.ask("PATCH", f"{_job(meta['namespace'], meta['name'])}/status", body)

    def delete_job(self, job: Mapping[str, Any]) -> None:
        meta = job["metadata"]
        self.ask("DELETE", _job(meta["namespace"], meta["name"]), _this(meta["uid"]))

    def pods(self, namespace: str, job: str) -> list[dict[str, Any]]:
        found, _ = self.list_all(pods_of(namespace, job))
        return found

    def create_pod(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """As it is now; :class:`ConflictError` where one of that name is there."""
        return self.ask("POST", f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods", dict(pod))

    def delete_pod(self, pod: Mapping[str, Any], *, grace_s: int | None = None) -> None:
        """This very pod. One that is gone already is as it should be, and so is another of its name."""
        meta = pod["metadata"]
        body: dict[str, Any] = _this(meta["uid"])
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            self.ask("DELETE", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", body)
        except (AbsentError, ConflictError):
            return

    def say(self, job: Mapping[str, Any], reason: str, message: str, *, warning: bool = False) -> None:
        """An event about the job, for those who look."""
        meta = job["metadata"]
        moment = dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = {name: meta[name] for name in ("name", "namespace", "uid", "resourceVersion")}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{meta['name']}-", "namespace": meta["namespace"]},
            "involvedObject": {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, **about},
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message[:1000],
            "source": {"component": _REPORTER},
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }
        self.ask("POST", f"/api/v1/namespaces/{meta['namespace']}/events", event)

    def kueue(self) -> Kueue | None:
        """Its objects, where it is installed in a version that is known here."""
        try:
            group = self.ask("GET", f"/apis/{KUEUE_GROUP}")
        except AbsentError:
            return None
        served = {one["version"] for one in group.get("versions") or ()}
        return next((Kueue(self.ask, self.list_all, version) for version in KUEUE_VERSIONS if version in served), None)

    def list_all(self, what: Collection) -> tuple[list[dict[str, Any]], str]:
        """As it is now, not as some cache has it, page by page; and the revision of the list."""
        query = _query(what, limit=str(_PAGE))
        found: list[dict[str, Any]] = []
        while True:
            page = self.ask("GET", what.path, query=query, accept=_accepted(what, "PartialObjectMetadataList"))
            found += page["items"]
            meta = page["metadata"]
            if not meta.get("continue"):
                return found, meta["resourceVersion"]
            query["continue"] = meta["continue"]

    @contextlib.contextmanager
    def watch(self, what: Collection, since: str, timeout_s: int) -> Iterator[Iterator[dict[str, Any]]]:
        """What has changed after revision ``since``, for so long; :class:`ExpiredError` where that is too long ago."""
        import urllib3

        query = _query(what, watch="true", allowWatchBookmarks="true", resourceVersion=since)
        query["timeoutSeconds"] = str(timeout_s)
        accept = _accepted(what, "PartialObjectMetadata")
        limits = (self._timeout_s, timeout_s + self._timeout_s)
        try:
            reply = self._call(
                "GET", what.path, query, accept, body=None, _request_timeout=limits, _preload_content=False
            )
            try:
                yield (from_json(line, dict[str, Any]) for line in reply if line.strip())
            finally:
                reply.close()
        except msgspec.DecodeError as nonsense:
            raise UnreachableError(f"watch {what.path}: {nonsense}") from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnreachableError(f"watch {what.path}: {error}") from error

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        accept: str = _JSON,
    ) -> dict[str, Any]:
        """One request; every answer but a good one is a :class:`ClusterError`."""
        import urllib3

        try:
            return self._call(method, path, query or {}, accept, body=body, _request_timeout=self._timeout_s)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnreachableError(f"{method} {path}: {error}") from error

    def _call(self, method: str, path: str, query: Mapping[str, str], accept: str, **how: Any) -> Any:
        from kubernetes.client.exceptions import ApiException

        try:
            return self._client.call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params={"Accept": accept, "Content-Type": _MERGE if method == "PATCH" else _JSON},
                response_types_map={200: "object", 201: "object", 202: "object"},
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                **how,
            )
        except ApiException as error:
            raise _meaning(error.status, f"{method} {path}: {error.status} {error.body or error.reason}") from None


def connect(timeout_s: float = _TIMEOUT_S) -> Cluster:
    """As the pod's service account, or as the kubeconfig says."""
    from kubernetes import config

    try:
        config.load_incluster_config()
    except config.ConfigException:
        config.load_kube_config()
    return _connected(timeout_s)


def connected(kubeconfig: Path) -> Cluster:
    """As this kubeconfig says."""
    from kubernetes import config

    config.load_kube_config(str(kubeconfig))
    return _connected(_TIMEOUT_S)


def _connected(timeout_s: float) -> Cluster:
    from kubernetes import client

    configuration = client.Configuration.get_default_copy()
    configuration.retries = False
    configuration.connection_pool_maxsize = _CONNECTIONS
    configuration.socket_options = _keeping_alive()
    return Cluster(client.ApiClient(configuration), timeout_s)


def jobs_in(namespace: str) -> Collection:
    """Of one namespace; of all with ""."""
    return Collection(f"/apis/{GROUP}/{VERSION}{_within(namespace)}/{PLURAL}")


def pods_in(namespace: str) -> Collection:
    """Those of jobs, whichever."""
    return Collection(f"/api/v1{_within(namespace)}/pods", selector=JOB_LABEL)


def pods_of(namespace: str, job: str) -> Collection:
    return Collection(f"/api/v1{_within(namespace)}/pods", selector=f"{JOB_LABEL}={job}")


NODES = Collection("/api/v1/nodes", only_metadata=True)


def _within(namespace: str) -> str:
    return f"/namespaces/{namespace}" if namespace else ""


def _query(what: Collection, **more: str) -> dict[str, str]:
    return {**({"labelSelector": what.selector} if what.selector else {}), **more}


def _accepted(what: Collection, kind: str) -> str:
    return f"{_JSON};as={kind};g=meta.k8s.io;v=v1,{_JSON}" if what.only_metadata else _JSON


def _keeping_alive() -> list[tuple[int, int, int]]:
    """A server that is gone without a word is missed within half a minute, although a watch may be quiet for longer."""
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


def _job(namespace: str, name: str) -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/{name}"


def _this(uid: str) -> dict[str, Any]:
    return {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}


def _meaning(status: int | None, said: str) -> ClusterError:
    if status == 404:
        return AbsentError(said)
    if status == 409:
        return ConflictError(said)
    if status == 410:
        return ExpiredError(said)
    if status is None or status == 429 or status >= 500:
        return UnreachableError(said)
    return RefusedError(said)
