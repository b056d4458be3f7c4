"""Leader record in a ``coordination.k8s.io`` Lease: ``kubernetes://[NAMESPACE]/NAME``.

The spec contains the usual fields that ``kubectl get lease`` shows. Annotations contain the additional fields of a job.
"""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

import msgspec

from elastic.control.leader_election import LeaderRecord
from elastic.errors import ControlPlaneRefusedError, ControlPlaneUnavailableError, PolicyError
from integration.kubernetes.api_client import ApiServerClient, connect_api_server
from integration.kubernetes.errors import ApiServerError, ResourceConflictError, ResourceNotFoundError
from integration.kubernetes.errors import ApiServerRefusedError as NotAllowedError

LEASE_ANNOTATION_PREFIX = "elastic.tieredckpt/"
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_ANNOTATED_FIELDS = ("term", "address", "epoch", "incarnation_epoch", "duration_s", "over", "reason")
_CALLS = 5
"""Number of calls that fit into the time that a holder leads without renewal."""


class LeaderLease:
    """Leader record that changes only if it is unchanged since it was read, by its ``resourceVersion``."""

    def __init__(self, cluster: ApiServerClient, namespace: str, name: str, duration_s: float) -> None:
        self._cluster, self.duration_s = cluster, duration_s
        self._namespace, self._name = namespace, name
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    def read(self) -> LeaderRecord | None:
        try:
            return _record(self._cluster.request("GET", f"{self._path}/{self._name}"))
        except ResourceNotFoundError:
            return None
        except ApiServerError as error:
            raise self._control_plane_error(error) from error

    def write(self, record: LeaderRecord, over: LeaderRecord | None) -> LeaderRecord | None:
        lease = self._lease(record, over)
        try:
            if over is None:
                return _record(self._cluster.request("POST", self._path, lease))
            return _record(self._cluster.request("PATCH", f"{self._path}/{self._name}", lease))
        except (ResourceConflictError, ResourceNotFoundError):
            return None
        except ApiServerError as error:
            raise self._control_plane_error(error) from error

    def close(self) -> None:
        """Do nothing: the client owns the connections."""

    def _lease(self, record: LeaderRecord, over: LeaderRecord | None) -> dict[str, Any]:
        now = dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        annotated = {name: getattr(record, name) for name in _ANNOTATED_FIELDS}
        spec: dict[str, Any] = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": max(1, round(record.duration_s)),
            "renewTime": now,  # for users only: clocks of different machines are never compared
        }
        if over is None or (over.holder, over.term) != (record.holder, record.term):
            spec["acquireTime"] = now
        meta: dict[str, Any] = {
            "name": self._name,
            "namespace": self._namespace,
            "annotations": {
                LEASE_ANNOTATION_PREFIX + name.replace("_", "-"): str(value) for name, value in annotated.items()
            },
        }
        if over is not None:
            meta["resourceVersion"] = over.version
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}

    def _control_plane_error(self, error: ApiServerError) -> ControlPlaneUnavailableError:
        if isinstance(error, NotAllowedError):
            return ControlPlaneRefusedError(
                f"Lease {self._namespace}/{self._name}: {error}. The service account needs get, create and patch on "
                "leases: integration/kubernetes/manifests/training/leadership.yaml"
            )
        return ControlPlaneUnavailableError(f"Lease {self._namespace}/{self._name}: {error}")


def open_leader_lease(url: SplitResult, duration_s: float) -> LeaderLease:
    """Open ``kubernetes://NAMESPACE/NAME``, or ``kubernetes:///NAME`` in the namespace of this pod."""
    name = url.path.removeprefix("/")
    namespace = url.netloc or _own_namespace(url)
    for part in (namespace, name):
        if not _NAME.fullmatch(part):
            raise PolicyError(f"{url.geturl()}: write kubernetes://NAMESPACE/NAME, or kubernetes:///NAME in a pod")
    try:
        cluster = connect_api_server(max(0.5, duration_s / _CALLS))
    except Exception as error:
        if type(error).__name__ != "ConfigException":
            raise
        raise PolicyError(f"{url.geturl()}: this process is not in a pod and has no kubeconfig: {error}") from error
    return LeaderLease(cluster, namespace, name, duration_s)


def _own_namespace(url: SplitResult) -> str:
    try:
        return _NAMESPACE.read_text().strip()
    except FileNotFoundError:
        raise PolicyError(f"{url.geturl()}: this process is not in a pod: write kubernetes://NAMESPACE/NAME") from None
    except OSError as error:
        raise PolicyError(f"{url.geturl()}: cannot read this pod's namespace from {_NAMESPACE}: {error}") from error


def _record(lease: dict[str, Any]) -> LeaderRecord:
    """Return the leader record. A Lease of another program contains only holder and duration."""
    meta, spec = lease["metadata"], lease.get("spec") or {}
    annotations = {
        name.removeprefix(LEASE_ANNOTATION_PREFIX).replace("-", "_"): value
        for name, value in (meta.get("annotations") or {}).items()
        if name.startswith(LEASE_ANNOTATION_PREFIX)
    }
    fields: dict[str, Any] = {
        "duration_s": spec.get("leaseDurationSeconds") or 1,
        **annotations,
        "holder": spec.get("holderIdentity") or "",
        "version": meta["resourceVersion"],
    }
    try:
        return msgspec.convert(fields, LeaderRecord, strict=False)
    except msgspec.ValidationError as error:
        raise ControlPlaneUnavailableError(f"Lease {meta.get('name')} does not say who leads: {error}") from error
