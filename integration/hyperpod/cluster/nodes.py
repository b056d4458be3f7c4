"""The health labels of Kubernetes' nodes: read, and set only where nobody else has set them meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from integration.hyperpod.cluster.health import LABEL, NodeHealth
from tieredckpt.cli.exits import CommandError, Exit

_TRIES = 5


@dataclass(frozen=True)
class NodeLabels:
    """Needs ``get`` and ``patch`` of ``nodes``."""

    api: Any
    """Kubernetes' ``CoreV1Api``."""

    def health(self, node: str) -> str | None:
        """The label, whatever it says; None: there is none."""
        with _told(node):
            return _label(self.api.read_node(node))

    def change(self, node: str, value: NodeHealth, *, when: Callable[[str | None], bool]) -> str | None:
        """Set it if ``when`` says so of what it is; what it was. What changes in between is looked at again."""
        with _told(node):
            for _ in range(_TRIES):
                found = self.api.read_node(node)
                was = _label(found)
                if not when(was):
                    return was
                if self._patched(node, value, found.metadata.resource_version):
                    return was
        raise CommandError(f"node {node} is changed by somebody else all the time", code=Exit.UNAVAILABLE)

    def _patched(self, node: str, value: NodeHealth, version: str) -> bool:
        from kubernetes.client.exceptions import ApiException

        body = {"metadata": {"labels": {LABEL: value.value}, "resourceVersion": version}}
        try:
            self.api.patch_node(node, body)
        except ApiException as error:
            if error.status == 409:
                return False
            raise
        return True


def connected(context: str | None = None, kubeconfig: str | None = None) -> NodeLabels:
    """With a pod's own account, or what ``kubectl`` would use."""
    try:
        from kubernetes import client, config
    except ModuleNotFoundError as error:
        advice = "pip install 'tieredckpt[kubernetes]'"
        raise CommandError("there is no Kubernetes client", code=Exit.USAGE, advice=advice) from error
    try:
        if context is None and kubeconfig is None:
            with contextlib.suppress(config.ConfigException):
                mine = client.Configuration()
                config.load_incluster_config(client_configuration=mine)
                return NodeLabels(client.CoreV1Api(client.ApiClient(mine)))
        return NodeLabels(client.CoreV1Api(config.new_client_from_config(kubeconfig, context=context)))
    except (config.ConfigException, OSError) as error:
        advice = "run it in a pod with an account, or give --kubeconfig and --context as to kubectl"
        raise CommandError(f"no way to Kubernetes is configured: {error}", code=Exit.USAGE, advice=advice) from error


def _label(node: Any) -> str | None:
    found: str | None = (node.metadata.labels or {}).get(LABEL)
    return found


@contextlib.contextmanager
def _told(node: str) -> Iterator[None]:
    """What refusals mean."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        if error.status == 404:
            raise CommandError(f"there is no node {node}", code=Exit.NOT_FOUND, advice="`kubectl get nodes`") from error
        if error.status in (401, 403):
            advice = "it needs get and patch of nodes: kubectl apply -k integration/hyperpod/manifests/node-health"
            text = f"node {node}: Kubernetes refuses ({error.reason})"
            raise CommandError(text, code=Exit.REFUSED, advice=advice) from error
        code = Exit.UNAVAILABLE if error.status is None or error.status >= 429 else Exit.FAILED
        raise CommandError(f"node {node}: {error.status} {error.reason}", code=code) from error
    except HTTPError as error:
        raise CommandError(f"Kubernetes cannot be reached: {error}", code=Exit.UNAVAILABLE) from error
