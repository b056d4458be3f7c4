"""API server client for jobs, pods, events and Kueue's objects, and its errors."""

from __future__ import annotations

import contextlib
import datetime as dt
import inspect
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from integration.hyperpod.cluster.node_health import KUBERNETES_EXTRA
from integration.hyperpod.job_resource import JOB_API_VERSION, JOB_KIND, JOB_PLURAL, KUEUE_GROUP
from integration.kubernetes.errors import (
    ApiServerError,
    ApiServerRefusedError,
    ApiServerUnreachableError,
    ExpiredError,
    ResourceConflictError,
    ResourceNotFoundError,
)
from integration.kubernetes.informer import ResourceCollection
from integration.kubernetes.kueue_admission import PriorityClass
from integration.kubernetes.labels import JOB_LABEL, KUEUE_VERSIONS, KubeObject
from peerstore.message_codec import from_json
from peerstore.optional_packages import optional_imports

_TIMEOUT_S = 30.0
_PAGE = 500
_CONNECTIONS = 64
"""Connections in the pool. More are opened if more calls run at the same time."""
_EVENT_SOURCE = "hyperpod-controller"
_JSON = "application/json"
_MERGE = "application/merge-patch+json"


class ApiServerClient:
    """Client of one API server with the controller's account. Any thread may call any method."""

    def __init__(self, client: Any, timeout_s: float = _TIMEOUT_S) -> None:
        self._client, self._timeout_s = client, timeout_s

    def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        return self.request("GET", _job(namespace, name))

    def confirm(self, job: Mapping[str, Any]) -> None:
        """Raise :class:`ResourceConflictError` if the job was written since ``job`` was read."""
        meta = job["metadata"]
        if self.get_job(meta["namespace"], meta["name"])["metadata"] != meta:
            raise ResourceConflictError(f"job {meta['name']} has changed since it was read")

    def update_status(self, job: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the fields in ``status`` if the job is unchanged since ``job`` was read.

        Of two controllers that read the same version, only one succeeds.
        """
        meta = job["metadata"]
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": dict(status)}
        return self.request("PATCH", f"{_job(meta['namespace'], meta['name'])}/status", body)

    def delete_job(self, job: Mapping[str, Any]) -> None:
        meta = job["metadata"]
        self.request("DELETE", _job(meta["namespace"], meta["name"]), _precondition(meta["uid"]))

    def list_pods(self, namespace: str, job: str) -> list[dict[str, Any]]:
        pods, _ = self.list_all(pods_of(namespace, job))
        return pods

    def create_pod(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """Create the pod and return it.

        Raise :class:`ResourceConflictError` if the name is in use.
        """
        return self.request("POST", f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods", dict(pod))

    def delete_pod(self, pod: Mapping[str, Any], *, grace_s: int | None = None) -> None:
        """Delete this pod, identified by its uid.

        Succeed if it no longer exists, even if another pod has its name.
        """
        meta = pod["metadata"]
        body: dict[str, Any] = _precondition(meta["uid"])
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            self.request("DELETE", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", body)
        except (ResourceNotFoundError, ResourceConflictError):
            return

    def post_event(self, job: Mapping[str, Any], reason: str, message: str, *, warning: bool = False) -> None:
        """Post an event about the job."""
        meta = job["metadata"]
        now = dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        reference = {name: meta[name] for name in ("name", "namespace", "uid", "resourceVersion")}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{meta['name']}-", "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": JOB_API_VERSION,
                "kind": JOB_KIND,
                **reference,
            },
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message[:1000],
            "source": {"component": _EVENT_SOURCE},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self.request("POST", f"/api/v1/namespaces/{meta['namespace']}/events", event)

    def kueue_client(self) -> KueueClient | None:
        """Return a client of Kueue, or None if no supported version is installed."""
        try:
            group = self.request("GET", f"/apis/{KUEUE_GROUP}")
        except ResourceNotFoundError:
            return None
        served = {entry["version"] for entry in group.get("versions") or ()}
        return next(
            (KueueClient(self.request, self.list_all, version) for version in KUEUE_VERSIONS if version in served), None
        )

    def list_all(self, what: ResourceCollection) -> tuple[list[dict[str, Any]], str]:
        """Return all objects and the revision of the list.

        The list is read from the server, page by page, never from a cache.
        """
        query = _query(what, limit=str(_PAGE))
        items: list[dict[str, Any]] = []
        while True:
            page = self.request("GET", what.path, query=query, accept=_accept_header(what, "PartialObjectMetadataList"))
            items += page["items"]
            meta = page["metadata"]
            if not meta.get("continue"):
                return items, meta["resourceVersion"]
            query["continue"] = meta["continue"]

    @contextlib.contextmanager
    def watch(self, what: ResourceCollection, since: str, timeout_s: int) -> Iterator[Iterator[dict[str, Any]]]:
        """Yield the events after revision ``since``, for ``timeout_s`` seconds.

        Raise :class:`ExpiredError` if the server no longer has that revision.
        """
        import urllib3

        query = _query(what, watch="true", allowWatchBookmarks="true", resourceVersion=since)
        query["timeoutSeconds"] = str(timeout_s)
        accept = _accept_header(what, "PartialObjectMetadata")
        limits = (self._timeout_s, timeout_s + self._timeout_s)
        try:
            reply = self._call(
                "GET", what.path, query, accept, body=None, _request_timeout=limits, _preload_content=False
            )
            try:
                yield (from_json(line, dict[str, Any]) for line in reply if line.strip())
            finally:
                reply.close()
        except msgspec.DecodeError as error:
            raise ApiServerUnreachableError(f"watch {what.path}: {error}") from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiServerUnreachableError(f"watch {what.path}: {error}") from error

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        accept: str = _JSON,
    ) -> dict[str, Any]:
        """Send one request. Raise :class:`ApiServerError` unless it succeeds."""
        import urllib3

        try:
            return self._call(method, path, query or {}, accept, body=body, _request_timeout=self._timeout_s)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiServerUnreachableError(f"{method} {path}: {error}") from error

    def _call(self, method: str, path: str, query: Mapping[str, str], accept: str, **how: Any) -> Any:
        from kubernetes.client.exceptions import ApiException

        try:
            return self._client.call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params={"Accept": accept, "Content-Type": _MERGE if method == "PATCH" else _JSON},
                **_response_type(self._client),
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                **how,
            )
        except ApiException as error:
            raise _error_for_status(
                error.status, f"{method} {path}: {error.status} {error.body or error.reason}"
            ) from None


def _response_type(client: Any) -> dict[str, Any]:
    """Return the argument for plain objects, which has another name since version 36 of the client."""
    if "response_types_map" in inspect.signature(client.call_api).parameters:
        return {"response_types_map": {200: "object", 201: "object", 202: "object"}}
    return {"response_type": "object"}


def connect_api_server(timeout_s: float = _TIMEOUT_S) -> ApiServerClient:
    """Connect with the pod's service account, or with the default kubeconfig."""
    with optional_imports(*KUBERNETES_EXTRA):
        from kubernetes import config

    try:
        config.load_incluster_config()
    except config.ConfigException:
        config.load_kube_config()
    return _connected(timeout_s)


def connected(kubeconfig: Path) -> ApiServerClient:
    """Connect with this kubeconfig."""
    with optional_imports(*KUBERNETES_EXTRA):
        from kubernetes import config

    config.load_kube_config(str(kubeconfig))
    return _connected(_TIMEOUT_S)


def _connected(timeout_s: float) -> ApiServerClient:
    from kubernetes import client

    configuration = client.Configuration.get_default_copy()
    configuration.retries = False
    configuration.connection_pool_maxsize = _CONNECTIONS
    configuration.socket_options = _keepalive_options()
    return ApiServerClient(client.ApiClient(configuration), timeout_s)


def jobs_in(namespace: str) -> ResourceCollection:
    """Return the collection of the jobs in one namespace, or in all for ""."""
    return ResourceCollection(f"/apis/{JOB_API_VERSION}{_namespace_path(namespace)}/{JOB_PLURAL}")


def pods_in(namespace: str) -> ResourceCollection:
    """Return the collection of the pods of all jobs in a namespace, or in all for ""."""
    return ResourceCollection(f"/api/v1{_namespace_path(namespace)}/pods", selector=JOB_LABEL)


def pods_of(namespace: str, job: str) -> ResourceCollection:
    return ResourceCollection(f"/api/v1{_namespace_path(namespace)}/pods", selector=f"{JOB_LABEL}={job}")


NODES = ResourceCollection("/api/v1/nodes", only_metadata=True)


def _namespace_path(namespace: str) -> str:
    return f"/namespaces/{namespace}" if namespace else ""


def _query(what: ResourceCollection, **parameters: str) -> dict[str, str]:
    return {**({"labelSelector": what.selector} if what.selector else {}), **parameters}


def _accept_header(what: ResourceCollection, kind: str) -> str:
    return f"{_JSON};as={kind};g=meta.k8s.io;v=v1,{_JSON}" if what.only_metadata else _JSON


def _keepalive_options() -> list[tuple[int, int, int]]:
    """Return socket options that detect a dead server within half a minute.

    A watch may be silent for longer, so a read timeout cannot detect it.
    """
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


def _job(namespace: str, name: str) -> str:
    return f"/apis/{JOB_API_VERSION}/namespaces/{namespace}/{JOB_PLURAL}/{name}"


def _precondition(uid: str) -> dict[str, Any]:
    return {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}


def _error_for_status(status: int | None, message: str) -> ApiServerError:
    if status == 404:
        return ResourceNotFoundError(message)
    if status == 409:
        return ResourceConflictError(message)
    if status == 410:
        return ExpiredError(message)
    if status is None or status == 429 or status >= 500:
        return ApiServerUnreachableError(message)
    return ApiServerRefusedError(message)


class KueueClient:
    """Workloads of one cluster.

    ``ask`` and ``list_all`` are the methods ``request`` and ``list_all`` of
    :class:`integration.kubernetes.api_client.ApiServerClient`.
    """

    def __init__(
        self,
        ask: Callable[..., dict[str, Any]],
        list_all: Callable[[ResourceCollection], tuple[list[dict[str, Any]], str]],
        version: str,
    ) -> None:
        self._request, self._list = ask, list_all
        self.version = version

    def list_workloads(self, namespace: str, job: str) -> list[dict[str, Any]]:
        """Return the job's Workloads. Raise :class:`ResourceNotFoundError` if Kueue was removed."""
        workloads, _ = self._list(self.workloads_of(namespace, job))
        return workloads

    def workloads_in(self, namespace: str) -> ResourceCollection:
        """Return the collection of the Workloads of all jobs in a namespace, or in all for ""."""
        return ResourceCollection(self._workloads_path(namespace), selector=JOB_LABEL)

    def workloads_of(self, namespace: str, job: str) -> ResourceCollection:
        return ResourceCollection(self._workloads_path(namespace), selector=f"{JOB_LABEL}={job}")

    def create_workload(self, workload: KubeObject) -> dict[str, Any]:
        """Create the Workload and return it.

        Raise :class:`ResourceConflictError` if the name is in use.
        """
        return self._request("POST", self._workloads_path(workload["metadata"]["namespace"]), dict(workload))

    def delete_workload(self, workload: KubeObject) -> None:
        """Delete the Workload if it is unchanged since it was read.

        A Workload admitted meanwhile remains. Succeed if it no longer exists.
        """
        meta = workload["metadata"]
        body = {
            "preconditions": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]},
            "propagationPolicy": "Background",
        }
        try:
            self._request("DELETE", self._workload_path(workload), body)
        except (ResourceNotFoundError, ResourceConflictError):
            return

    def update_workload_status(self, workload: KubeObject, status: KubeObject) -> dict[str, Any]:
        """Update the status if the Workload is unchanged since it was read.

        A merge patch replaces the list of conditions, which Kueue writes, too.
        """
        body = {"metadata": {"resourceVersion": workload["metadata"]["resourceVersion"]}, "status": dict(status)}
        return self._request("PATCH", f"{self._workload_path(workload)}/status", body)

    def priority_value(self, named: PriorityClass) -> int:
        """Return the value of a priority class.

        Raise :class:`ApiServerRefusedError` if it does not exist.
        """
        root = f"/apis/{KUEUE_GROUP}/{self.version}" if named.is_kueue_class else "/apis/scheduling.k8s.io/v1"
        path = f"{root}/{'workloadpriorityclasses' if named.is_kueue_class else 'priorityclasses'}/{named.name}"
        try:
            return int(self._request("GET", path)["value"])
        except ResourceNotFoundError:
            raise ApiServerRefusedError(f"there is no {named.kind} {named.name}") from None

    def get_flavor(self, name: str) -> dict[str, Any]:
        """Return a ResourceFlavor: its node labels, taints and tolerations."""
        return self._request("GET", f"/apis/{KUEUE_GROUP}/{self.version}/resourceflavors/{name}")

    def _workloads_path(self, namespace: str) -> str:
        scope = f"/namespaces/{namespace}" if namespace else ""
        return f"/apis/{KUEUE_GROUP}/{self.version}{scope}/workloads"

    def _workload_path(self, workload: KubeObject) -> str:
        return f"{self._workloads_path(workload['metadata']['namespace'])}/{workload['metadata']['name']}"
