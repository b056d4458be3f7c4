"""Node health: machine faults in an event log (pure), and the health labels in Kubernetes.

HyperPod reboots and replaces nodes by the label. No pods are scheduled on a node with one of the last three values.
"""

from __future__ import annotations

import contextlib
import enum
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from integration.hyperpod.job_resource import NODE_HEALTH_LABEL, NodeHealth
from peerstore.optional_packages import optional_imports
from tieredckpt.cli.exit_codes import CommandError, ExitCode
from tieredckpt.event_log.event_types import FaultEvent, LogEvent, ProcessEnded


class DeviceFaultKind(enum.Enum):
    LOST = "lost"
    """The driver no longer finds the device."""
    MEMORY = "memory"
    """The device's memory has uncorrectable errors."""
    STUCK = "stuck"
    """The device does not execute its work."""
    LINK = "link"
    """The fast connection between devices or machines fails."""


_SIGNS = (
    (DeviceFaultKind.LOST, r"fallen off the bus|GPU is lost|no CUDA-capable device|\bXid\b.{0,80}?\b79\b"),
    (DeviceFaultKind.MEMORY, r"uncorrectable ECC|row[- ]remap|\bXid\b.{0,80}?\b(48|63|64|94|95)\b"),
    (DeviceFaultKind.LINK, r"NVLink.{0,40}(error|fail)|\bXid\b.{0,80}?\b74\b|NET/OFI.{0,80}(error|fail)"),
    (DeviceFaultKind.STUCK, r"the device (has not answered|is broken)|launch timed out|\bXid\b.{0,80}?\b(119|120)\b"),
)
"""Messages of CUDA, NVIDIA's driver, NCCL and this project's health check, the most specific first.

Errors of the program itself (an illegal access, an assertion, out of memory) do not count as faults of its machine.
"""

_DEDUPLICATION_S = 120.0


@dataclass(frozen=True)
class DeviceFault:
    at: float
    """Seconds since 1970."""
    node: str
    kind: DeviceFaultKind
    words: str = ""


@dataclass(frozen=True)
class NodeHealthRule:
    """Numbers of faults of a kind within the window that require a reboot or a replacement of the node."""

    window_s: float = 86400.0
    reboot: Mapping[DeviceFaultKind, int] = field(
        default_factory=lambda: {
            DeviceFaultKind.LOST: 1,
            DeviceFaultKind.MEMORY: 1,
            DeviceFaultKind.STUCK: 2,
            DeviceFaultKind.LINK: 2,
        }
    )
    replace: Mapping[DeviceFaultKind, int] = field(
        default_factory=lambda: {
            DeviceFaultKind.LOST: 2,
            DeviceFaultKind.MEMORY: 2,
            DeviceFaultKind.STUCK: 4,
            DeviceFaultKind.LINK: 4,
        }
    )


def classify_device_fault(words: str) -> DeviceFaultKind | None:
    """Return the kind of device fault that the words describe, or None."""
    return next((kind for kind, signs in _SIGNS if re.search(signs, words, re.IGNORECASE | re.DOTALL)), None)


def device_faults(events: Iterable[LogEvent]) -> list[DeviceFault]:
    """Return the device faults of a job's log, by time.

    Several ranks report one fault of their machine, and later processes may meet it again. Faults of one node and kind
    within two minutes of the last counted one are therefore ignored.
    """
    found: list[DeviceFault] = []
    counted: dict[tuple[str, DeviceFaultKind], float] = {}
    for event in sorted(filter(None, map(_fault_in, events)), key=lambda fault: fault.at):
        if event.at - counted.get((event.node, event.kind), -math.inf) > _DEDUPLICATION_S:
            counted[event.node, event.kind] = event.at
            found.append(event)
    return found


def _fault_in(event: LogEvent) -> DeviceFault | None:
    """Return the device fault of an event, or None.

    It uses the reasons reported to the coordinator and a rank's last words, which its supervisor may not know.
    """
    if isinstance(event, FaultEvent):
        words = event.reason
    elif isinstance(event, ProcessEnded) and event.who == "rank":
        words = event.words
    else:
        return None
    kind = classify_device_fault(words)
    return DeviceFault(event.at, event.node, kind, words) if kind is not None and event.node else None


def health_after_faults(faults: Iterable[DeviceFault], now: float, rule: NodeHealthRule | None = None) -> NodeHealth:
    """Return the health that the faults of one node require."""
    rule = rule or NodeHealthRule()
    counted = Counter(fault.kind for fault in faults if now - rule.window_s <= fault.at <= now)
    for limits, health in ((rule.replace, NodeHealth.PENDING_REPLACEMENT), (rule.reboot, NodeHealth.PENDING_REBOOT)):
        if any(number >= limits[kind] for kind, number in counted.items() if kind in limits):
            return health
    return NodeHealth.SCHEDULABLE


def is_worse_health(known: str | None, wanted: NodeHealth) -> bool:
    """Return whether to set the label: only to a worse value. Unknown values of others remain."""
    if known is None:
        return wanted is not NodeHealth.SCHEDULABLE
    try:
        return wanted.severity > NodeHealth(known).severity
    except ValueError:
        return False


_MAX_ATTEMPTS = 5
KUBERNETES_EXTRA = ("a connection to Kubernetes", "'tieredckpt[kubernetes]'")
"""Arguments of :func:`~peerstore.optional_packages.optional_imports` for Kubernetes' client."""


@dataclass(frozen=True)
class NodeHealthLabels:
    """Health labels of nodes. Needs ``get`` and ``patch`` of ``nodes``."""

    api: Any
    """Kubernetes' ``CoreV1Api``."""

    def get(self, node: str) -> str | None:
        """Return the label's value, or None without a label."""
        with _translated_errors(node):
            return _label(self.api.read_node(node))

    def set_if(self, node: str, value: NodeHealth, *, when: Callable[[str | None], bool]) -> str | None:
        """Set the label if ``when(current)`` is true, and return the previous value.

        After a concurrent change, check again.
        """
        with _translated_errors(node):
            for _ in range(_MAX_ATTEMPTS):
                found = self.api.read_node(node)
                was = _label(found)
                if not when(was):
                    return was
                if self._patched(node, value, found.metadata.resource_version):
                    return was
        raise CommandError(
            f"cannot set the health label of node {node}: other clients change the node all the time",
            code=ExitCode.UNAVAILABLE,
        )

    def _patched(self, node: str, value: NodeHealth, version: str) -> bool:
        from kubernetes.client.exceptions import ApiException

        body = {"metadata": {"labels": {NODE_HEALTH_LABEL: value.value}, "resourceVersion": version}}
        try:
            self.api.patch_node(node, body)
        except ApiException as error:
            if error.status == 409:
                return False
            raise
        return True


def connect_node_labels(context: str | None = None, kubeconfig: str | None = None) -> NodeHealthLabels:
    """Connect with the pod's service account, or with the configuration of ``kubectl``."""
    with optional_imports(*KUBERNETES_EXTRA):
        from kubernetes import client, config

    try:
        if context is None and kubeconfig is None:
            with contextlib.suppress(config.ConfigException):
                mine = client.Configuration()
                config.load_incluster_config(client_configuration=mine)
                return NodeHealthLabels(client.CoreV1Api(client.ApiClient(mine)))
        return NodeHealthLabels(client.CoreV1Api(config.new_client_from_config(kubeconfig, context=context)))
    except (config.ConfigException, OSError) as error:
        advice = "run it in a pod with an account, or give --kubeconfig and --context as to kubectl"
        raise CommandError(
            f"no way to Kubernetes is configured: {error}", code=ExitCode.USAGE, advice=advice
        ) from error


def _label(node: Any) -> str | None:
    found: str | None = (node.metadata.labels or {}).get(NODE_HEALTH_LABEL)
    return found


@contextlib.contextmanager
def _translated_errors(node: str) -> Iterator[None]:
    """Convert Kubernetes errors into :class:`CommandError`."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        if error.status == 404:
            raise CommandError(
                f"there is no node {node}", code=ExitCode.NOT_FOUND, advice="`kubectl get nodes`"
            ) from error
        if error.status in (401, 403):
            advice = "it needs get and patch of nodes: kubectl apply -k integration/hyperpod/manifests/node-health"
            text = f"node {node}: Kubernetes refuses ({error.reason})"
            raise CommandError(text, code=ExitCode.REFUSED, advice=advice) from error
        code = ExitCode.UNAVAILABLE if error.status is None or error.status >= 429 else ExitCode.FAILED
        raise CommandError(f"node {node}: {error.status} {error.reason}", code=code) from error
    except HTTPError as error:
        raise CommandError(f"Kubernetes cannot be reached: {error}", code=ExitCode.UNAVAILABLE) from error
