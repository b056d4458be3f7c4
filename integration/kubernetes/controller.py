"""``python -m integration.kubernetes.controller``: the controller of ``HyperPodPyTorchJob`` on a plain cluster.

kopf watches, reconnects and answers probes; what it hears only wakes the job it is about. All that is known of a job
is read again in every pass, so a lost message costs a second and nothing else. No finalizers and no annotations: a
job can be deleted, and its agents go on, while no controller runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
import kopf

from integration.hyperpod.operator.client import AgentClient
from integration.kubernetes.cluster import connect
from integration.kubernetes.errors import ClusterError, ConflictError
from integration.kubernetes.names import GROUP, HEALTH_LABEL, JOB_LABEL, PLURAL, VERSION
from integration.kubernetes.passing import Passing
from integration.kubernetes.seeing import health_of

_log = logging.getLogger(__name__)
_Key = tuple[str, str]
_PASSES = 64
"""At a time. One waits for its job's agents, so a few jobs with silent ones must not be all that is looked at."""


class Controller:
    """One task per job, which makes passes over it."""

    def __init__(self, passing: Passing, *, retry_s: float) -> None:
        self._passing = passing
        self._retry_s = retry_s
        self._wakes: dict[_Key, asyncio.Event] = {}
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(_PASSES, thread_name_prefix="pass")

    def heard_of(self, namespace: str, name: str) -> None:
        """A job, or something about it: it has a pass soon."""
        key = (namespace, name)
        self._wakes.setdefault(key, asyncio.Event()).set()
        task = self._tasks.get(key)
        if task is None or task.done():
            self._tasks[key] = asyncio.create_task(self._care(key), name=f"job {namespace}/{name}")

    def wake_all(self) -> None:
        for namespace, name in list(self._tasks):
            self.heard_of(namespace, name)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._threads.shutdown(wait=False)

    async def _care(self, key: _Key) -> None:
        wake = self._wakes[key]
        while True:
            wake.clear()
            again_in_s = await self._pass(key)
            if again_in_s is None and not wake.is_set():
                self._tasks.pop(key, None)
                self._wakes.pop(key, None)
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(wake.wait(), again_in_s)

    async def _pass(self, key: _Key) -> float | None:
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(self._threads, self._passing.once, *key)
        except ConflictError:
            return 0.1  # somebody has written: the next pass reads it
        except ClusterError as error:
            _log.warning("job %s/%s: %s", *key, error)
            return self._retry_s
        except Exception:  # noqa: BLE001 - the top of a job's task: the others go on, and this one is tried again
            _log.exception("job %s/%s: this pass has failed", *key)
            return self._retry_s
        return outcome.again_in_s


def registry_for(controller: Controller, health: dict[str, str]) -> kopf.OperatorRegistry:
    """What is watched. ``health`` is kept as the nodes' labels say."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry, retries=3)
    def login(**known: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_via_client(**known)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job(namespace: str | None, name: str, **_: Any) -> None:
        controller.heard_of(namespace or "default", name)

    @kopf.on.event("v1", "pods", labels={JOB_LABEL: kopf.PRESENT}, registry=registry)
    async def pod(namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
        controller.heard_of(namespace or "default", labels[JOB_LABEL])

    @kopf.on.event("v1", "nodes", registry=registry)
    async def node(type: str | None, name: str, body: kopf.Body, **_: Any) -> None:  # noqa: A002 - kopf's name
        said = "" if type == "DELETED" else health_of(body)
        if health.get(name, "") != said:
            _log.info("node %s: %s is %s", name, HEALTH_LABEL, said or "not there any more")
            health[name] = said
            controller.wake_all()

    @kopf.on.cleanup(registry=registry)
    async def leave(**_: Any) -> None:
        await controller.close()

    @kopf.on.startup(registry=registry)
    async def settle(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False  # our own events are about jobs only
        settings.watching.server_timeout = 300
        settings.watching.client_timeout = 330
        settings.networking.request_timeout = 30

    return registry


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--namespace", "-n", "namespaces", multiple=True, help="Jobs of this namespace; can be given again.")
@click.option("--all-namespaces", "-A", is_flag=True, help="Jobs of every namespace.")
@click.option("--every", "every_s", type=click.FloatRange(min=0.05), default=1.0, show_default=True, metavar="SECONDS",
              help="How often agents are asked how they are.")  # fmt: skip
@click.option("--health", metavar="HOST:PORT", help="Answer GET /healthz here, for the pod's probes.")
@click.option("--silent", "silent_s", type=click.FloatRange(min=1), metavar="SECONDS",
              help="How long an agent may be silent before its node counts as lost.")  # fmt: skip
@click.option("--master-ports", metavar="FIRST-LAST", help="Where ranks meet.")
@click.option("--log-format", type=click.Choice(["json", "plain"]), default="json", show_default=True)
@click.option("--verbose", "-v", is_flag=True)
def main(
    namespaces: tuple[str, ...],
    *,
    all_namespaces: bool,
    every_s: float,
    health: str | None,
    silent_s: float | None,
    master_ports: str | None,
    log_format: str,
    verbose: bool,
) -> None:
    """Run HyperPodPyTorchJobs on any Kubernetes cluster.

    Needs the resource's definition and the rights of integration/kubernetes/manifests. Everything known of a job is in
    its status: the controller can be stopped, killed and started at any time.
    """
    if bool(namespaces) == all_namespaces:
        raise click.UsageError("either --namespace or --all-namespaces")
    formats = {"json": kopf.LogFormat.JSON, "plain": kopf.LogFormat.FULL}
    kopf.configure(verbose=verbose, log_format=formats[log_format])
    for chatty in ("urllib3", "aiohttp.access", "kubernetes"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    labels: dict[str, str] = {}
    settings = _settings(silent_s, master_ports)
    with AgentClient() as agents:
        passing = Passing(connect(), agents, health=labels, clock=time.time, every_s=every_s, settings=settings)
        kopf.run(
            registry=registry_for(Controller(passing, retry_s=max(every_s, 1.0)), labels),
            standalone=True,
            clusterwide=all_namespaces,
            namespaces=namespaces,
            liveness_endpoint=f"http://{health}/healthz" if health else None,
        )


def _settings(silent_s: float | None, master_ports: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if silent_s is not None:
        found["silent_s"] = silent_s
    if master_ports:
        first, dash, last = master_ports.partition("-")
        if not (dash and first.isdigit() and last.isdigit() and 0 < int(first) <= int(last) < 65536):
            raise click.BadParameter(f"{master_ports!r}: FIRST-LAST was expected", param_hint="--master-ports")
        found["master_port"], found["master_ports"] = int(first), int(last) - int(first) + 1
    return found


if __name__ == "__main__":
    main()
