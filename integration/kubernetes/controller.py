"""The controller process: watches, a work queue with one task per job, the command line.

Watches update the caches of jobs, pods, Workloads and nodes. A change wakes the job that it concerns. Each job has its
own thread, and a limit for the calls to its agents, so no job waits for another one. Without finalizers, a job can be
deleted while no controller runs. Its agents continue without a controller.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from http import HTTPStatus
from typing import Any

import click

from integration.hyperpod.operator.elastic_agent_client import ElasticAgentClient
from integration.kubernetes.api_client import connect_api_server
from integration.kubernetes.cached_client import CachedApiClient, NodeHealthCache
from integration.kubernetes.errors import ApiServerError, ResourceConflictError
from integration.kubernetes.reconciler import JobReconciler
from peerstore.daemon_process import handle_signals
from peerstore.network_addresses import split_address
from tieredckpt.cli.command_output import CommandOutput
from tieredckpt.cli.run_program import run_program
from tieredckpt.http_server import HttpReply, HttpServer, resource_server

log = logging.getLogger(__name__)
_Key = tuple[str, str]
_SHUTDOWN_TIMEOUT_S = 5.0
"""Seconds that running reconciles may take to finish during shutdown."""


class JobController:
    """Work queue with one thread per job, which reconciles it."""

    def __init__(self, *, retry_s: float) -> None:
        self._reconciler: JobReconciler | None = None
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._jobs: dict[_Key, _Job] = {}
        self._closed = False

    def begin(self, reconciler: JobReconciler) -> None:
        """Set the reconciler. Call it before the watches start."""
        self._reconciler = reconciler

    def enqueue(self, namespace: str, name: str) -> None:
        """Schedule a reconcile of the job."""
        key = (namespace, name)
        with self._lock:
            job = self._jobs.get(key)
            if job is None and not self._closed:
                job = self._jobs[key] = _Job(threading.Thread(target=self._run_job, args=(key,), daemon=True))
                job.thread.name = f"job {namespace}/{name}"
                job.thread.start()
            if job is not None:
                job.wake.set()

    def enqueue_all(self) -> None:
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.wake.set()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            jobs = list(self._jobs.values())
        for job in jobs:
            job.wake.set()
        deadline_s = time.monotonic() + _SHUTDOWN_TIMEOUT_S
        for job in jobs:
            job.thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run_job(self, key: _Key) -> None:
        job = self._jobs[key]
        while not self._closed:
            job.wake.clear()
            again_in_s = self._reconcile(key)
            if again_in_s is None:
                with self._lock:  # enqueue() has set ``wake`` by now, or starts another thread later
                    if not job.wake.is_set():
                        del self._jobs[key]
                        return
            job.wake.wait(again_in_s)

    def _reconcile(self, key: _Key) -> float | None:
        assert self._reconciler is not None  # noqa: S101 - set by begin()
        try:
            return self._reconciler.reconcile(*key).requeue_after_s
        except ResourceConflictError:
            return 0.1  # another client wrote: the next reconcile reads it
        except ApiServerError as error:
            log.warning("job %s/%s: %s", *key, error)
        except Exception:  # top of a job's thread: the other jobs continue, this one is retried
            log.exception("job %s/%s: this pass has failed", *key)
        return self._retry_s


class _Job:
    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.wake = threading.Event()


def health_server(address: str, is_well: Callable[[], bool]) -> HttpServer:
    """Return a server of ``GET /healthz``: status 200 while ``is_well`` returns True, otherwise 503."""

    def answer() -> HttpReply:
        return HttpReply(b"ok\n") if is_well() else HttpReply(b"not well\n", status=HTTPStatus.SERVICE_UNAVAILABLE)

    return resource_server("controller", split_address(address), {"/healthz": answer})


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        timestamp = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {"message": record.getMessage(), "severity": record.levelname.lower(), "timestamp": timestamp}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _log_to_stderr(log_format: str, *, verbose: bool) -> None:
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_JsonLines() if log_format == "json" else plain)
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)
    for name in ("urllib3", "kubernetes", "asyncio"):
        logging.getLogger(name).setLevel(logging.ERROR)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--namespace", "-n", "namespaces", multiple=True, help="Jobs of this namespace; can be given again.")
@click.option("--all-namespaces", "-A", is_flag=True, help="Jobs of every namespace.")
@click.option("--every", "every_s", type=click.FloatRange(min=0.05), default=1.0, show_default=True, metavar="SECONDS",
              help="Seconds between status requests to agents.")  # fmt: skip
@click.option("--health", metavar="HOST:PORT", help="Answer GET /healthz here, for the pod's probes.")
@click.option("--silent", "silent_s", type=click.FloatRange(min=1), metavar="SECONDS",
              help="Seconds without an answer after which an agent's node counts as lost.")  # fmt: skip
@click.option("--master-ports", metavar="FIRST-LAST", help="Ports for the ranks' rendezvous.")
@click.option("--log-format", type=click.Choice(["json", "plain"]), default="json", show_default=True)
@click.option("--verbose", "-v", is_flag=True)
def controller_command(
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
    _log_to_stderr(log_format, verbose=verbose)
    settings = _settings(silent_s, master_ports)
    try:
        plain = connect_api_server()
    except Exception as error:
        if type(error).__name__ != "ConfigException":  # its package is imported on demand
            raise
        text = f"no Kubernetes cluster is configured ({error}): run it in a pod, or set $KUBECONFIG"
        raise click.ClickException(text) from error
    stop = threading.Event()
    undo = handle_signals({signal.SIGINT: stop.set, signal.SIGTERM: stop.set})
    controller = JobController(retry_s=max(every_s, 1.0))
    nodes = NodeHealthCache(controller.enqueue_all)
    cluster = CachedApiClient(plain, namespaces or [""], controller.enqueue)
    try:
        with ElasticAgentClient() as agents, contextlib.ExitStack() as stack:
            controller.begin(
                JobReconciler(cluster, agents, health=nodes.said, clock=time.time, every_s=every_s, settings=settings)
            )
            stack.callback(controller.close)
            node_informer = nodes.informer(plain).start()
            stack.callback(node_informer.close)
            cluster.start()
            stack.callback(cluster.close)
            if health:
                served = health_server(health, lambda: cluster.is_alive and node_informer.is_alive)
                stack.enter_context(served.running())
            stop.wait()
    finally:
        undo()


def _settings(silent_s: float | None, master_ports: str | None) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if silent_s is not None:
        settings["agent_timeout_s"] = silent_s
    if master_ports:
        first, dash, last = master_ports.partition("-")
        if not (dash and first.isdigit() and last.isdigit() and 0 < int(first) <= int(last) < 65536):
            raise click.BadParameter(f"{master_ports!r}: FIRST-LAST was expected", param_hint="--master-ports")
        settings["master_port"], settings["master_ports"] = int(first), int(last) - int(first) + 1
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the controller and return its exit code."""
    return run_program(controller_command, CommandOutput("hyperpod-controller"), argv)


if __name__ == "__main__":
    sys.exit(main())
