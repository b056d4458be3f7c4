"""API server client for jobs, pods, events and Kueue's objects, and its errors."""

from __future__ import annotations

import contextlib
import datetime as dt
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

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
from integration.kubernetes.labels import (
    JOB_API_GROUP,
    JOB_API_VERSION,
    JOB_LABEL,
    JOB_PLURAL,
    JOB_RESOURCE_KIND,
    KUEUE_GROUP,
    KUEUE_VERSIONS,
    KubeObject,
)
from peerstore.message_codec import from_json

_TIMEOUT_S = 30.0
_PAGE = 500
_CONNECTIONS = 64
"""That are kept open; more are made where more are needed at a time."""
_EVENT_SOURCE = "hyperpod-controller"
_JSON = "application/json"
_MERGE = "application/merge-patch+json"


class ApiServerClient:
    """One API server, as the account that the controller runs under. Any thread may call any method."""

    def __init__(self, client: Any, timeout_s: float = _TIMEOUT_S) -> None:
        self._client, self._timeout_s = client, timeout_s

    def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        return self.request("GET", _job(namespace, name))

    def confirm(self, job: Mapping[str, Any]) -> None:
        """:class:`ResourceConflictError` where somebody has written since ``job`` was read."""
        meta = job["metadata"]
        if self.get_job(meta["namespace"], meta["name"])["metadata"] != meta:
            raise ResourceConflictError(f"job {meta['name']} has changed since it was read")

    def update_status(self, job: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, Any]:
        """Replace what ``status`` names, if nobody has written since ``job`` was read: two controllers cannot both."""
        meta = job["metadata"]
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": dict(status)}
        return self.request("PATCH", f"{_job(meta['namespace'], meta['name'])}/status", body)

    def delete_job(self, job: Mapping[str, Any]) -> None:
        meta = job["metadata"]
        self.request("DELETE", _job(meta["namespace"], meta["name"]), _this(meta["uid"]))

    def list_pods(self, namespace: str, job: str) -> list[dict[str, Any]]:
        found, _ = self.list_all(pods_of(namespace, job))
        return found

    def create_pod(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """As it is now; :class:`ResourceConflictError` where one of that name is there."""
        return self.request("POST", f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods", dict(pod))

    def delete_pod(self, pod: Mapping[str, Any], *, grace_s: int | None = None) -> None:
        """This very pod. One that is gone already is as it should be, and so is another of its name."""
        meta = pod["metadata"]
        body: dict[str, Any] = _this(meta["uid"])
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            self.request("DELETE", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", body)
        except (ResourceNotFoundError, ResourceConflictError):
            return

    def post_event(self, job: Mapping[str, Any], reason: str, message: str, *, warning: bool = False) -> None:
        """An event about the job, for those who look."""
        meta = job["metadata"]
        moment = dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = {name: meta[name] for name in ("name", "namespace", "uid", "resourceVersion")}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{meta['name']}-", "namespace": meta["namespace"]},
            "involvedObject": {"apiVersion": f"{JOB_API_GROUP}/{JOB_API_VERSION}", "kind": JOB_RESOURCE_KIND, **about},
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message[:1000],
            "source": {"component": _EVENT_SOURCE},
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }
        self.request("POST", f"/api/v1/namespaces/{meta['namespace']}/events", event)

    def kueue_client(self) -> KueueClient | None:
        """Its objects, where it is installed in a version that is known here."""
        try:
            group = self.request("GET", f"/apis/{KUEUE_GROUP}")
        except ResourceNotFoundError:
            return None
        served = {one["version"] for one in group.get("versions") or ()}
        return next(
            (KueueClient(self.request, self.list_all, version) for version in KUEUE_VERSIONS if version in served), None
        )

    def list_all(self, what: ResourceCollection) -> tuple[list[dict[str, Any]], str]:
        """As it is now, not as some cache has it, page by page; and the revision of the list."""
        query = _query(what, limit=str(_PAGE))
        found: list[dict[str, Any]] = []
        while True:
            page = self.request("GET", what.path, query=query, accept=_accepted(what, "PartialObjectMetadataList"))
            found += page["items"]
            meta = page["metadata"]
            if not meta.get("continue"):
                return found, meta["resourceVersion"]
            query["continue"] = meta["continue"]

    @contextlib.contextmanager
    def watch(self, what: ResourceCollection, since: str, timeout_s: int) -> Iterator[Iterator[dict[str, Any]]]:
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
            raise ApiServerUnreachableError(f"watch {what.path}: {nonsense}") from None
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
        """One request; every answer but a good one is a :class:`ApiServerError`."""
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
                response_types_map={200: "object", 201: "object", 202: "object"},
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                **how,
            )
        except ApiException as error:
            raise _error_for_status(
                error.status, f"{method} {path}: {error.status} {error.body or error.reason}"
            ) from None


def connect_api_server(timeout_s: float = _TIMEOUT_S) -> ApiServerClient:
    """As the pod's service account, or as the kubeconfig says."""
    from kubernetes import config

    try:
        config.load_incluster_config()
    except config.ConfigException:
        config.load_kube_config()
    return _connected(timeout_s)


def connected(kubeconfig: Path) -> ApiServerClient:
    """As this kubeconfig says."""
    from kubernetes import config

    config.load_kube_config(str(kubeconfig))
    return _connected(_TIMEOUT_S)


def _connected(timeout_s: float) -> ApiServerClient:
    from kubernetes import client

    configuration = client.Configuration.get_default_copy()
    configuration.retries = False
    configuration.connection_pool_maxsize = _CONNECTIONS
    configuration.socket_options = _keeping_alive()
    return ApiServerClient(client.ApiClient(configuration), timeout_s)


def jobs_in(namespace: str) -> ResourceCollection:
    """Of one namespace; of all with ""."""
    return ResourceCollection(f"/apis/{JOB_API_GROUP}/{JOB_API_VERSION}{_within(namespace)}/{JOB_PLURAL}")


def pods_in(namespace: str) -> ResourceCollection:
    """Those of jobs, whichever."""
    return ResourceCollection(f"/api/v1{_within(namespace)}/pods", selector=JOB_LABEL)


def pods_of(namespace: str, job: str) -> ResourceCollection:
    return ResourceCollection(f"/api/v1{_within(namespace)}/pods", selector=f"{JOB_LABEL}={job}")


NODES = ResourceCollection("/api/v1/nodes", only_metadata=True)


def _within(namespace: str) -> str:
    return f"/namespaces/{namespace}" if namespace else ""


def _query(what: ResourceCollection, **more: str) -> dict[str, str]:
    return {**({"labelSelector": what.selector} if what.selector else {}), **more}


def _accepted(what: ResourceCollection, kind: str) -> str:
    return f"{_JSON};as={kind};g=meta.k8s.io;v=v1,{_JSON}" if what.only_metadata else _JSON


def _keeping_alive() -> list[tuple[int, int, int]]:
    """A server that is gone without a word is missed within half a minute, although a watch may be quiet for longer."""
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


def _job(namespace: str, name: str) -> str:
    return f"/apis/{JOB_API_GROUP}/{JOB_API_VERSION}/namespaces/{namespace}/{JOB_PLURAL}/{name}"


def _this(uid: str) -> dict[str, Any]:
    return {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}


def _error_for_status(status: int | None, said: str) -> ApiServerError:
    if status == 404:
        return ResourceNotFoundError(said)
    if status == 409:
        return ResourceConflictError(said)
    if status == 410:
        return ExpiredError(said)
    if status is None or status == 429 or status >= 500:
        return ApiServerUnreachableError(said)
    return ApiServerRefusedError(said)


class KueueClient:
    """Workloads of one cluster: ``ask`` and ``list_all`` are
    :class:`integration.kubernetes.api_client.ApiServerClient`'s.
    """

    def __init__(
        self,
        ask: Callable[..., dict[str, Any]],
        list_all: Callable[[ResourceCollection], tuple[list[dict[str, Any]], str]],
        version: str,
    ) -> None:
        self._ask, self._list = ask, list_all
        self.version = version

    def list_workloads(self, namespace: str, job: str) -> list[dict[str, Any]]:
        """:class:`ResourceNotFoundError` where Kueue is no longer there."""
        found, _ = self._list(self.workloads_of(namespace, job))
        return found

    def workloads_in(self, namespace: str) -> ResourceCollection:
        """Those of jobs, whichever; of all namespaces with ""."""
        return ResourceCollection(self._all(namespace), selector=JOB_LABEL)

    def workloads_of(self, namespace: str, job: str) -> ResourceCollection:
        return ResourceCollection(self._all(namespace), selector=f"{JOB_LABEL}={job}")

    def create_workload(self, workload: KubeObject) -> dict[str, Any]:
        """As it is now; :class:`ResourceConflictError` where one of that name is there."""
        return self._ask("POST", self._all(workload["metadata"]["namespace"]), dict(workload))

    def delete_workload(self, workload: KubeObject) -> None:
        """This very one, as it was read: one that has been admitted since is not deleted. It may be gone already."""
        meta = workload["metadata"]
        body = {
            "preconditions": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]},
            "propagationPolicy": "Background",
        }
        try:
            self._ask("DELETE", self._one(workload), body)
        except (ResourceNotFoundError, ResourceConflictError):
            return

    def update_workload_status(self, workload: KubeObject, status: KubeObject) -> dict[str, Any]:
        """If nobody has written since it was read: conditions are a list, and Kueue writes there, too."""
        body = {"metadata": {"resourceVersion": workload["metadata"]["resourceVersion"]}, "status": dict(status)}
        return self._ask("PATCH", f"{self._one(workload)}/status", body)

    def priority_value(self, named: PriorityClass) -> int:
        """How much a class is worth; :class:`ApiServerRefusedError` where there is none of that name."""
        root = f"/apis/{KUEUE_GROUP}/{self.version}" if named.is_kueue_class else "/apis/scheduling.k8s.io/v1"
        path = f"{root}/{'workloadpriorityclasses' if named.is_kueue_class else 'priorityclasses'}/{named.name}"
        try:
            return int(self._ask("GET", path)["value"])
        except ResourceNotFoundError:
            raise ApiServerRefusedError(f"there is no {named.kind} {named.name}") from None

    def get_flavor(self, name: str) -> dict[str, Any]:
        """A ResourceFlavor: what its nodes are labelled with, and which of their taints are to be tolerated."""
        return self._ask("GET", f"/apis/{KUEUE_GROUP}/{self.version}/resourceflavors/{name}")

    def _all(self, namespace: str) -> str:
        within = f"/namespaces/{namespace}" if namespace else ""
        return f"/apis/{KUEUE_GROUP}/{self.version}{within}/workloads"

    def _one(self, workload: KubeObject) -> str:
        return f"{self._all(workload['metadata']['namespace'])}/{workload['metadata']['name']}"
