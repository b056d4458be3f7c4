"""What the controller asks of the API server, over the client's plain calls: objects are what came as JSON."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

from integration.kubernetes.errors import AbsentError, ClusterError, ConflictError, RefusedError, UnreachableError
from integration.kubernetes.kueue import Kueue
from integration.kubernetes.names import GROUP, JOB_LABEL, KIND, KUEUE_GROUP, KUEUE_VERSIONS, PLURAL, VERSION

_TIMEOUT_S = 30.0
_REPORTER = "hyperpod-controller"
_MERGE = "application/merge-patch+json"


class Cluster:
    """One API server, as the account that the controller runs under. Any thread may call any method."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def job(self, namespace: str, name: str) -> dict[str, Any]:
        return self.ask("GET", _job(namespace, name))

    def write_status(self, job: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, Any]:
        """Replace what ``status`` names, if nobody has written since ``job`` was read: two controllers cannot both."""
        meta = job["metadata"]
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": dict(status)}
        return self.ask("PATCH", f"{_job(meta['namespace'], meta['name'])}/status", body)

    def delete_job(self, job: Mapping[str, Any]) -> None:
        meta = job["metadata"]
        self.ask("DELETE", _job(meta["namespace"], meta["name"]), _this(meta["uid"]))

    def pods(self, namespace: str, job: str) -> list[dict[str, Any]]:
        path = f"/api/v1/namespaces/{namespace}/pods"
        return self.ask("GET", path, query={"labelSelector": f"{JOB_LABEL}={job}"})["items"]

    def create_pod(self, pod: Mapping[str, Any]) -> None:
        """:class:`ConflictError` where one of that name is there."""
        self.ask("POST", f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods", dict(pod))

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
        return next((Kueue(self.ask, version) for version in KUEUE_VERSIONS if version in served), None)

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """One request; every answer but a good one is a :class:`ClusterError`."""
        import urllib3
        from kubernetes.client.exceptions import ApiException

        headers = {"Accept": "application/json", "Content-Type": _MERGE if method == "PATCH" else "application/json"}
        try:
            return self._client.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params=headers,
                body=body,
                response_types_map={200: "object", 201: "object", 202: "object"},
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _request_timeout=_TIMEOUT_S,
            )
        except ApiException as error:
            raise _meaning(error.status, f"{method} {path}: {error.status} {error.body or error.reason}") from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnreachableError(f"{method} {path}: {error}") from error


def connect() -> Cluster:
    """As the pod's service account, or as the kubeconfig says."""
    from kubernetes import client, config

    try:
        config.load_incluster_config()
    except config.ConfigException:
        config.load_kube_config()
    configuration = client.Configuration.get_default_copy()
    configuration.retries = False
    return Cluster(client.ApiClient(configuration))


def _job(namespace: str, name: str) -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/{name}"


def _this(uid: str) -> dict[str, Any]:
    return {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}


def _meaning(status: int | None, said: str) -> ClusterError:
    if status == 404:
        return AbsentError(said)
    if status == 409:
        return ConflictError(said)
    if status is None or status == 429 or status >= 500:
        return UnreachableError(said)
    return RefusedError(said)
