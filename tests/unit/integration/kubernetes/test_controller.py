"""Many jobs in one controller over an in-memory API server: no needless request, no lost event."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from integration.hyperpod.job_resource import NODE_HEALTH_LABEL
from integration.hyperpod.operator import JobPhase
from integration.hyperpod.operator.elastic_agent_client import AgentReply
from integration.kubernetes.api_client import ApiServerClient
from integration.kubernetes.cached_client import CachedApiClient, NodeHealthCache
from integration.kubernetes.controller import JobController, health_server
from integration.kubernetes.errors import ResourceConflictError
from integration.kubernetes.pods import ReplicaSlot, build_pod
from integration.kubernetes.reconciler import JobReconciler
from integration.kubernetes.resource_status import load_job_state
from tests.support.fake_cluster import FakeAgents
from tests.support.kube_api import FakeApiServer, FakeKubelets, official_client
from tests.support.kube_objects import job_object
from tests.support.local_nodes import wait_until

pytest.importorskip("kubernetes.client")

_PATIENCE_S = 60.0


class Running:
    """A controller, its watches, and fake agents that follow its commands."""

    def __init__(self, api: FakeApiServer, cluster: ApiServerClient, *, every_s: float = 0.02) -> None:
        self.api = api
        self.agents = FakeAgents()
        self.kubelets = FakeKubelets(api)
        self.controller = JobController(retry_s=0.05)
        self.nodes = NodeHealthCache(self.controller.enqueue_all)
        self.cluster = CachedApiClient(cluster, [""], self.controller.enqueue)
        self.passes = 0
        passing = JobReconciler(
            self.cluster, self.agents, health=self.nodes.said, clock=time.time, every_s=every_s,
            settings={"agent_timeout_s": 3600.0},
        )  # fmt: skip
        once = passing.reconcile

        def counted(namespace: str, name: str) -> Any:
            self.passes += 1
            return once(namespace, name)

        passing.reconcile = counted  # type: ignore[method-assign]
        self.controller.begin(passing)
        self._watched = self.nodes.informer(cluster)

    @contextlib.contextmanager
    def started(self) -> Iterator[Running]:
        self._watched.start()
        self.cluster.start()
        try:
            yield self
        finally:
            self._watched.close()
            self.cluster.close()
            self.controller.close()
            self.api.cut_watches()

    def create(self, name: str, *, labels: Mapping[str, str] | None = None, **spec: Any) -> None:
        job = job_object(name, **spec)
        job["metadata"] = {"name": name, "namespace": "default", "labels": dict(labels or {})}
        self.api.put("hyperpodpytorchjobs", job)

    def job(self, name: str) -> dict[str, Any]:
        return self.api.get("hyperpodpytorchjobs", name)

    def state(self, name: str) -> Any:
        return load_job_state(self.job(name))

    def runs(self, name: str, restarts: int = 0) -> bool:
        state = self.state(name)
        return state is not None and state.phase is JobPhase.RUNNING and state.restarts == restarts

    def until(self, holds: Callable[[], Any], what: str) -> None:
        def there() -> Any:
            self.kubelets.sync_pods()
            return holds()

        wait_until(there, what, _PATIENCE_S)

    def more_passes(self, count: int) -> None:
        after = self.passes + count
        self.until(lambda: self.passes >= after, f"{count} passes")

    def pods(self, job: str) -> list[str]:
        found = (one["metadata"] for one in self.api.list_all("pods") if one["metadata"]["labels"]["HPJob"] == job)
        return sorted(meta["name"] for meta in found)


@pytest.fixture
def api() -> Iterator[FakeApiServer]:
    with FakeApiServer().running() as api:
        yield api


@pytest.fixture
def running(api: FakeApiServer) -> Iterator[Running]:
    with official_client(api.url) as client, Running(api, ApiServerClient(client)).started() as running:
        yield running


def test_idle_controller_sends_no_requests(running: Running) -> None:
    jobs = [f"j{number}" for number in range(5)]
    for name in jobs:
        running.create(name)
    running.until(lambda: all(running.runs(name) for name in jobs), "all run")
    running.more_passes(20)
    before = list(running.api.asked)
    running.more_passes(100)
    assert running.api.asked == before


def test_lost_pod_is_replaced(running: Running) -> None:
    running.create("llama")
    running.until(lambda: running.runs("llama"), "it runs")
    lost = running.state("llama").members[0]
    running.api.remove("pods", lost)
    running.until(lambda: running.runs("llama", restarts=1), "it runs again")
    assert lost not in running.state("llama").members
    assert len(running.pods("llama")) == 2


@pytest.mark.parametrize("what", ["cut", "expired", "refused"])
def test_a_watch_that_ends_is_made_up_for(running: Running, what: str) -> None:
    running.create("llama")
    running.until(lambda: running.runs("llama"), "it runs")
    running.api.hold_watches()
    lost = running.state("llama").members[0]
    running.api.remove("pods", lost)
    if what == "expired":
        running.api.compact()
    else:
        if what == "refused":
            for _ in range(3):
                running.api.fail("GET", "/pods", 500)
        running.api.cut_watches()
    running.api.hold_watches(hold=False)
    running.until(lambda: running.runs("llama", restarts=1), "it runs again")
    running.create("qwen")
    running.until(lambda: running.runs("qwen"), "and others are heard of")


def test_broken_watch_falls_back_to_few_lists(running: Running) -> None:
    running.create("llama")
    running.until(lambda: running.runs("llama"), "it runs")
    for _ in range(1000):
        running.api.fail("GET", "/api/v1/pods", 500)  # of the watch over all namespaces
    running.api.cut_watches()
    lost = running.state("llama").members[0]
    running.api.remove("pods", lost)
    running.until(lambda: running.runs("llama", restarts=1), "it is heard of all the same")
    running.more_passes(20)
    running.api.asked.clear()
    running.more_passes(100)
    listed = [path for method, path in running.api.asked if method == "GET" and path.endswith("/default/pods")]
    assert len(listed) <= 10
    running.api.clear_failures()


def test_pods_missing_in_the_watch_are_not_created_again(running: Running) -> None:
    running.create("other")
    running.until(lambda: running.runs("other"), "it runs")
    running.api.hold_watches("pods")
    running.api.asked.clear()
    running.create("llama")
    running.until(lambda: len(running.pods("llama")) == 2, "its pods are there")
    running.more_passes(50)
    asked = [path for method, path in running.api.asked if method == "POST" and path.endswith("/pods")]
    assert len(asked) == 2
    assert running.pods("llama") == ["llama-workers-0", "llama-workers-1"]
    running.api.hold_watches(hold=False)
    running.until(lambda: running.runs("llama"), "it runs")
    assert running.state("llama").restarts == 0


@pytest.mark.parametrize("code", [500, 409, 503])
@pytest.mark.parametrize("after", [True, False], ids=["done and not said", "not done"])
def test_writes_that_fail_are_made_up_for(running: Running, code: int, after: bool) -> None:
    for method, path in (("POST", "/pods"), ("PATCH", "/status"), ("PATCH", "/status"), ("POST", "/pods")):
        running.api.fail(method, path, code, after=after)
    running.create("llama")
    running.until(lambda: running.runs("llama"), "it runs")
    assert running.pods("llama") == ["llama-workers-0", "llama-workers-1"]
    assert running.state("llama").restarts == 0


def test_newer_job_status_is_used_only_with_its_pods(api: FakeApiServer) -> None:
    """Another controller assigned a rank to a pod that this controller's watch has not reported."""
    job = job_object("llama")
    job["metadata"] = {"name": "llama", "namespace": "default"}
    first = api.put("hyperpodpytorchjobs", job)
    with official_client(api.url) as client:
        cluster = CachedApiClient(ApiServerClient(client), [""], lambda *_: None)
        jobs, pods = cluster.informers()
        jobs.step()
        pods.step()
        for index in (cluster._jobs[""], cluster._pods[""]):
            index.is_followed = True
        api.asked.clear()
        assert cluster.list_pods("default", "llama") == []
        assert api.asked == [], "listed after the job: nothing can be missing"

        written = cluster.update_status(first, {"restartCount": 1})
        assert cluster.list_pods("default", "llama") == []
        assert [method for method, _ in api.asked] == ["PATCH"], "what was written here is known to fit"

        api.put("pods", build_pod(first, ReplicaSlot("workers", 0), nodes=2))
        api.put("hyperpodpytorchjobs", {**written, "status": {"restartCount": 2}})
        (foreign,) = api.list_all("hyperpodpytorchjobs")
        cluster._jobs[""].heard("MODIFIED", foreign)
        for _ in range(3):
            assert [pod["metadata"]["name"] for pod in cluster.list_pods("default", "llama")] == ["llama-workers-0"]
        assert [method for method, _ in api.asked] == ["PATCH", "GET"], "asked for once"


def test_stale_status_update_rereads_first(api: FakeApiServer) -> None:
    job = job_object("llama")
    job["metadata"] = {"name": "llama", "namespace": "default"}
    first = api.put("hyperpodpytorchjobs", job)
    with official_client(api.url) as client:
        cluster = CachedApiClient(ApiServerClient(client), [""], lambda *_: None)
        for informer in cluster.informers():
            informer.step()
        cluster._jobs[""].is_followed = True
        api.put("hyperpodpytorchjobs", {**first, "status": {"restartCount": 2}})
        stale = cluster.get_job("default", "llama")
        with pytest.raises(ResourceConflictError):
            cluster.confirm(stale)
        with pytest.raises(ResourceConflictError):
            cluster.update_status(stale, {"restartCount": 1})
        assert cluster.get_job("default", "llama")["status"] == {"restartCount": 2}, "without a word of the watch"


def test_queued_job_follows_watched_admission_and_eviction(running: Running) -> None:
    running.api.groups["kueue.x-k8s.io"] = ["v1beta2"]
    running.create("llama", labels={"kueue.x-k8s.io/queue-name": "team-a"})
    running.until(lambda: running.api.list_all("workloads"), "it asks for room")
    assert running.pods("llama") == []
    running.more_passes(20)
    before = list(running.api.asked)
    running.more_passes(20)
    assert running.api.asked == before, "what it waits for is watched, too"

    (workload,) = running.api.list_all("workloads")
    pod_sets = [{"name": one["name"], "count": one["count"]} for one in workload["spec"]["podSets"]]
    workload["status"] = {"admission": {"clusterQueue": "all", "podSetAssignments": pod_sets}}
    running.api.put("workloads", said(workload, QuotaReserved=True, Admitted=True))
    running.until(lambda: running.runs("llama"), "it runs")
    running.until(lambda: holds(running, "PodsReady"), "Kueue hears of it")
    running.more_passes(20)
    before = list(running.api.asked)
    running.more_passes(20)
    assert running.api.asked == before

    (workload,) = running.api.list_all("workloads")
    running.api.put("workloads", said(workload, Evicted=True))
    running.until(lambda: not holds(running, "QuotaReserved"), "it gives back what it had")
    assert running.pods("llama") == []
    assert running.state("llama").restarts == 0


def said(workload: dict[str, Any], **conditions: bool) -> dict[str, Any]:
    kept = [one for one in workload["status"].get("conditions", ()) if one["type"] not in conditions]
    new = [
        {"type": kind, "status": str(value), "reason": "Test", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for kind, value in conditions.items()
    ]
    workload["status"]["conditions"] = [*kept, *new]
    return workload


def holds(running: Running, kind: str) -> bool:
    (workload,) = running.api.list_all("workloads")
    return any(one["type"] == kind and one["status"] == "True" for one in workload["status"]["conditions"])


def test_unhealthy_node_is_left(running: Running) -> None:
    running.create("llama")
    running.until(lambda: running.runs("llama"), "it runs")
    bad = running.api.get("pods", running.state("llama").members[0])
    node = {"metadata": {"name": bad["spec"]["nodeName"], "labels": {NODE_HEALTH_LABEL: "Unschedulable"}}}
    running.api.put("nodes", node)
    running.until(lambda: running.runs("llama", restarts=1), "it runs elsewhere")
    assert running.state("llama").last_fault.reason == "NodeFault"


@pytest.mark.parametrize("jobs", [20, pytest.param(99, marks=pytest.mark.nightly)])
def test_silent_agents_of_one_job_delay_no_other_job(api: FakeApiServer, jobs: int) -> None:
    """One job's agents do not answer until all other jobs have lost a pod and run again."""
    with official_client(api.url) as client:
        story = Running(api, ApiServerClient(client), every_s=0.5)
        answer = threading.Event()
        ask = story.agents.poll_all

        def asked(addresses: Mapping[str, str]) -> Mapping[str, AgentReply]:
            if any(name.startswith("silent-") for name in addresses):
                silent.set()
                answer.wait(_PATIENCE_S)
            return ask(addresses)

        silent = threading.Event()
        story.agents.poll_all = asked  # type: ignore[method-assign]
        with story.started():
            try:
                story.create("silent")
                story.until(silent.is_set, "it is asked, and waits")
                others = [f"j{number}" for number in range(jobs)]
                for name in others:
                    story.create(name)
                story.until(lambda: all(story.runs(name) for name in others), f"{jobs} run")
                for name in others:
                    api.remove("pods", story.state(name).members[0])
                story.until(lambda: all(story.runs(name, restarts=1) for name in others), f"{jobs} run again")
                assert story.state("silent") is None or story.state("silent").phase is JobPhase.FORMING
            finally:
                answer.set()
            story.until(lambda: story.runs("silent"), "and the other one, too")


def test_health_is_503_when_a_watch_has_ended():
    is_well = True
    with health_server("127.0.0.1:0", lambda: is_well).running() as address:

        def status_of(path):
            connection = http.client.HTTPConnection(address, timeout=_PATIENCE_S)
            with contextlib.closing(connection):
                connection.request("GET", path)
                return connection.getresponse().status

        assert status_of("/healthz") == 200
        is_well = False
        assert status_of("/healthz") == 503
        assert status_of("/status") == 404
