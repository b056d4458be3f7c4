"""Queued jobs, pass by pass: admission, preemption and release, with killed controllers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from integration.hyperpod.operator import AgentState, JobPhase
from integration.kubernetes.errors import ApiServerUnreachableError, ResourceConflictError, ResourceNotFoundError
from integration.kubernetes.reconciler import JobReconciler
from integration.kubernetes.resource_status import load_job_state
from tests.support.fake_cluster import ControllerKilled, FakeKubernetes
from tests.support.fake_kueue import FakeKueue
from tests.support.kube_objects import TEMPLATE, job_object

POLICY = {
    "minReplicas": 1, "maxReplicas": 3, "scalingTimeoutInSeconds": 5, "gracefulShutdownTimeoutInSeconds": 20,
}  # fmt: skip
WORKERS = {"name": "workers", "replicas": 1, "maxReplicas": 3, "template": TEMPLATE}
QUEUE = {"kueue.x-k8s.io/queue-name": "team-a"}


class Waiting:
    """A job in a queue. A new controller runs each pass."""

    def __init__(self, *, quota: int = 0, labels: dict[str, str] | None = None, nodes: int = 5, **spec: Any) -> None:
        job = job_object(**{"replicaSpecs": [WORKERS], "elasticPolicy": POLICY, **spec})
        job["metadata"]["labels"] = QUEUE if labels is None else labels
        self.kube = FakeKubernetes(job, nodes=nodes)
        self.kueue = FakeKueue(self.kube, quota=quota)
        self.schedules = True

    def one_pass(self) -> None:
        passing = JobReconciler(self.kube, self.kube, health=self.kube.health, clock=lambda: self.kube.now_s)
        try:
            passing.reconcile("default", "llama")
        except ControllerKilled:
            self.kube.cut_at = None
        except (ResourceConflictError, ApiServerUnreachableError, ResourceNotFoundError):
            pass
        self.nothing_is_used_that_is_not_given()

    def turn(self) -> None:
        self.one_pass()
        if self.schedules:
            self.kueue.admit_all_that_fit()
        self.kube.tick()

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def until(self, holds: Callable[[], Any]) -> None:
        for _ in range(400):
            if holds():
                return
            self.turn()
        raise AssertionError(f"it did not happen: {self.kube.current_job().get('status')}")

    def nothing_is_used_that_is_not_given(self) -> None:
        """Check that no job uses more than its quota, as Kueue promises all other jobs."""
        used: dict[str, int] = {}
        for pod in self.kube.current_pods():
            if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                name = pod["metadata"]["labels"]["HPWorkload"]
                used[name] = used.get(name, 0) + (not pod["metadata"].get("deletionTimestamp"))
        for name, count in used.items():
            assert name in self.kueue.workload_names(), "its pods are there yet"
            assert self.kueue.has_condition(name, "QuotaReserved"), "given back while it has pods"
            assert not self.kueue.has_condition(name, "Finished"), "given up while it has pods"
            assert count <= self.kueue.pod_count(name)

    @property
    def state(self) -> Any:
        return load_job_state(self.kube.current_job())

    def runs(self, nodes: int) -> bool:
        return bool(self.state) and self.state.phase is JobPhase.RUNNING and len(self.state.members) == nodes

    def condition(self) -> dict[str, Any]:
        found = self.kube.current_job()["status"]["conditions"]
        return next(one for one in found if one["type"] == "Admitted")


def test_job_waits_until_its_minimum_is_admitted():
    story = Waiting(quota=0)
    story.turns(5)
    (first,) = story.kueue.workload_names()
    assert not story.kube.pod_names(running=False), "no pods before"
    story.kueue.set_conditions(first, "Pending", "insufficient quota for nvidia.com/gpu", QuotaReserved=False)
    story.turns(2)
    assert story.condition()["status"] == "False"
    assert "queue team-a" in story.condition()["message"]
    assert "insufficient quota" in story.condition()["message"]
    story.kueue.quota = 1
    story.until(lambda: story.runs(1))
    assert story.condition()["status"] == "True"
    assert story.kube.current_job()["status"]["restartCount"] == 0


def test_each_admitted_step_grows_the_job():
    story = Waiting(quota=1)
    story.until(lambda: story.runs(1))
    assert len(story.kueue.workload_names()) == 2, "the next step waits, and no other"
    for nodes in (2, 3):
        story.kueue.quota = nodes
        story.until(lambda nodes=nodes: story.runs(nodes))
    story.turns(3)
    assert [story.kueue.pod_count(name) for name in story.kueue.workload_names()] == [1, 1, 1]
    assert all(story.kueue.has_condition(name, "PodsReady") for name in story.kueue.workload_names())
    assert story.kube.current_job()["status"]["restartCount"] == 0


def test_evicted_step_releases_its_pods_gracefully_and_then_its_quota():
    story = Waiting(quota=3)
    story.until(lambda: story.runs(3))
    last = story.kueue.workload_names()[-1]
    story.kueue.quota = 2
    story.kueue.evict(last)
    (theirs,) = [pod for pod in story.kube.current_pods() if pod["metadata"]["labels"]["HPWorkload"] == last]
    others = set(story.kube.pod_names()) - {theirs["metadata"]["name"]}
    story.until(lambda: story.runs(2))
    assert set(story.state.members) == others, "who is not preempted stays"
    story.until(lambda: not story.kueue.has_condition(last, "QuotaReserved"))
    assert story.kueue.workload(last)["status"].get("admission") is None
    assert story.kueue.has_condition(last, "Requeued"), "it may be admitted again"
    assert story.kube.current_job()["status"]["restartCount"] == 0, "no fault"
    story.kueue.quota = 3
    story.until(lambda: story.runs(3))


def test_job_without_its_minimum_releases_everything_and_waits():
    story = Waiting(quota=3)
    story.until(lambda: story.runs(3))
    first = story.kueue.workload_names()[0]
    story.schedules = False
    story.kueue.evict(first)
    story.until(lambda: not story.kube.pod_names(running=False) and story.kueue.used_quota() == 0)
    assert story.kueue.workload_names() == [first], "further steps are of no use without it"
    assert story.condition()["status"] == "False"
    assert story.state.phase is JobPhase.FORMING
    story.schedules = True
    story.until(lambda: story.runs(3))


def test_evicted_middle_step_keeps_the_later_one():
    story = Waiting(quota=3)
    story.until(lambda: story.runs(3))
    _, middle, last = story.kueue.workload_names()
    story.schedules = False
    story.kueue.evict(middle)
    story.until(lambda: story.runs(2) and not story.kueue.has_condition(middle, "QuotaReserved"))
    assert story.kueue.has_condition(last, "Admitted")


def test_deactivated_by_a_person():
    story = Waiting(quota=2)
    story.until(lambda: story.runs(2))
    second = story.kueue.workload_names()[1]
    story.kueue.workload(second)["spec"]["active"] = False
    story.kueue.evict(second, "Deactivated")
    story.until(lambda: story.runs(1) and not story.kueue.has_condition(second, "QuotaReserved"))
    assert not story.kueue.has_condition(second, "Requeued"), "Kueue says when it may be considered again"


def test_spares_are_admitted_with_the_least_size():
    story = Waiting(quota=2, replicaSpecs=[{**WORKERS, "spares": 1}])
    story.until(lambda: story.runs(1))
    assert story.kueue.pod_count(story.kueue.workload_names()[0]) == 2
    assert len(story.kube.pod_names()) == 2


def test_non_elastic_job_is_a_single_workload():
    story = Waiting(quota=1, replicaSpecs=[{**WORKERS, "replicas": 2, "maxReplicas": 2}], elasticPolicy=None)
    story.turns(5)
    assert not story.kube.pod_names(running=False), "half of it is of no use"
    story.kueue.quota = 2
    story.until(lambda: story.runs(2))
    (only,) = story.kueue.workload_names()
    story.schedules = False
    story.kueue.evict(only)
    story.until(lambda: not story.kueue.has_condition(only, "QuotaReserved"))
    assert not story.kube.pod_names(running=False)
    story.schedules = True
    story.until(lambda: story.runs(2))


def test_a_fault_fills_the_same_place_again():
    story = Waiting(quota=2)
    story.until(lambda: story.runs(2))
    gone = story.state.members[1]
    story.kube.fail_pod(gone)
    story.until(lambda: story.runs(2) and gone not in story.state.members)
    assert story.kube.current_job()["status"]["restartCount"] == 1
    assert story.kueue.used_quota() == 2


@pytest.mark.parametrize(("ends", "reason"), [("complete", "Succeeded"), ("fail", "Failed")])
def test_ended_job_releases_its_workloads(ends, reason):
    story = Waiting(quota=2, runPolicy={"jobMaxRetryCount": 0})
    story.until(lambda: story.runs(2))
    story.kueue.quota = 9
    story.schedules = False
    if ends == "complete":
        story.kube.complete()
    else:
        story.kube.crash(story.state.members[0])
    story.until(lambda: story.kueue.used_quota() == 0)
    assert story.state.phase.value == reason
    for name in story.kueue.workload_names():
        found = [one for one in story.kueue.workload(name)["status"]["conditions"] if one["type"] == "Finished"]
        assert (found[0]["status"], found[0]["reason"]) == ("True", reason)
    story.turns(3)
    assert story.condition()["status"] == "True", "what was, not what would be"


@pytest.mark.parametrize("policy", ["None", "OnlyComplete", "All"])
@pytest.mark.parametrize("ends", ["complete", "crash"])
def test_a_pod_that_never_began_holds_no_quota_for_good(policy, ends):
    """The pod waits for a machine when the job ends, so no agent can receive a stop."""
    run = {"cleanPodPolicy": policy, "jobMaxRetryCount": 0}
    story = Waiting(quota=3, nodes=2, runPolicy=run)
    story.until(lambda: story.runs(2) and len(story.kube.pod_names(running=False)) == 3)
    story.kube.nodes.clear()
    if ends == "complete":
        story.kube.complete()
    else:
        story.kube.crash(story.state.members[0])
    story.until(lambda: story.state.phase.is_final and story.kueue.used_quota() == 0)
    kept = {pod["metadata"]["name"] for pod in story.kube.current_pods()}
    assert kept <= set(story.state.members), "what has run is kept, if it is to be"


def test_scaled_down_job_releases_the_rest():
    story = Waiting(quota=9)
    story.until(lambda: story.runs(3))
    story.kube.change_spec(replicas=1)
    story.until(lambda: story.runs(1) and story.kueue.used_quota() == 1)
    assert len(story.kueue.workload_names()) == 1
    story.kube.change_spec(replicas=2)
    story.until(lambda: story.runs(2))
    assert story.kueue.used_quota() == 2


def test_suspended_job_holds_no_quota():
    story = Waiting(quota=2)
    story.until(lambda: story.runs(2))
    story.kube.change_spec(runPolicy={"suspend": True})
    story.until(lambda: story.state.phase is JobPhase.SUSPENDED and not story.kueue.workload_names())
    assert not story.kube.pod_names(running=False)
    story.kube.change_spec(runPolicy={"suspend": False})
    story.until(lambda: story.runs(2))


def test_deleted_workload_is_requested_again():
    story = Waiting(quota=2)
    story.until(lambda: story.runs(2))
    second = story.kueue.workload_names()[1]
    story.kueue.workload(second)["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    story.until(lambda: story.runs(1) and len(story.kube.pod_names(running=False)) == 1)
    story.kueue.delete_workload(story.kueue.workload(second))
    story.until(lambda: story.runs(2))


def test_queue_change_updates_a_waiting_workload():
    story = Waiting(quota=0)
    story.turns(3)
    story.kube.current_job()["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-b"}
    story.turns(3)
    (only,) = story.kueue.workload_names()
    assert story.kueue.workload(only)["spec"]["queueName"] == "team-b"


def test_missing_priority_class_is_reported_once():
    story = Waiting(quota=1, labels={**QUEUE, "kueue.x-k8s.io/priority-class": "urgent"})
    passing = JobReconciler(story.kube, story.kube, health={}, clock=lambda: story.kube.now_s)
    for _ in range(4):
        passing.reconcile("default", "llama")
        story.kube.tick()
    assert story.kube.events.count("WorkloadRefused") == 1
    story.kueue.classes["urgent"] = 7
    story.until(lambda: story.runs(1))
    assert story.kueue.workload(story.kueue.workload_names()[0])["spec"]["priority"] == 7


def test_refused_workload_is_retried_with_backoff():
    story = Waiting(quota=1, labels={**QUEUE, "kueue.x-k8s.io/priority-class": "urgent"})
    asked: list[float] = []
    priority = story.kueue.priority_value

    def counted(named: Any) -> int:
        asked.append(story.kube.now_s)
        return priority(named)

    story.kueue.priority_value = counted
    passing = JobReconciler(story.kube, story.kube, health={}, clock=lambda: story.kube.now_s)
    for _ in range(130):
        passing.reconcile("default", "llama")
        story.kube.tick()
    assert 5 <= len(asked) <= 9, asked
    assert asked[-1] - asked[-2] >= 30
    before = len(asked)
    story.kube.current_job()["metadata"]["labels"] = {**QUEUE, "kueue.x-k8s.io/priority-class": "high"}
    story.kube.change_spec()
    passing.reconcile("default", "llama")
    assert len(asked) == before + 1, "another class is asked for at once"
    assert len(story.kueue.workload_names()) == 1


def test_pods_go_where_their_quota_is():
    story = Waiting(quota=1)
    taint = {"key": "spot", "operator": "Exists", "effect": "NoSchedule"}
    story.kueue.flavors["spot"] = {"spec": {"nodeLabels": {"price": "spot"}, "tolerations": [taint]}}
    story.until(lambda: story.runs(1))
    (pod,) = story.kube.current_pods()
    assert pod["spec"]["nodeSelector"] == {"price": "spot"}
    assert taint in pod["spec"]["tolerations"]
    assert not [label for label in pod["metadata"]["labels"] if label.startswith("kueue.x-k8s.io/")]


def test_missing_flavor_is_reported():
    story = Waiting(quota=1)
    story.kueue.flavors["other"] = {}
    story.turns(5)
    assert "PodRefused" in story.kube.events
    story.kueue.flavors["spot"] = {}
    story.until(lambda: story.runs(1))


def test_job_without_a_queue_does_not_use_kueue():
    story = Waiting(labels={}, replicaSpecs=[{**WORKERS, "replicas": 2}])
    story.kueue.is_installed = False
    _until_it_runs_anyhow(story)
    assert not story.kueue.workload_names()


def test_pods_carry_the_queue_label_without_kueue():
    """A job started without Kueue continues without it after Kueue is installed."""
    story = Waiting()
    story.kueue.is_installed = False
    _until_it_runs_anyhow(story)
    assert {pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] for pod in story.kube.current_pods()} == {"team-a"}
    story.kueue.is_installed = True
    for _ in range(5):
        _pass(story)
    assert not story.kueue.workload_names()
    assert {story.kube.state_of(name) for name in story.state.members} == {AgentState.RUNNING}


def test_removal_of_kueue_stops_no_job():
    story = Waiting(quota=2)
    story.until(lambda: story.runs(2))
    story.kueue.is_installed = False
    members = story.state.members
    for _ in range(3):
        _pass(story)
    assert {story.kube.state_of(name) for name in members} == {AgentState.RUNNING}


def _pass(story: Waiting) -> None:
    JobReconciler(story.kube, story.kube, health={}, clock=lambda: story.kube.now_s).reconcile("default", "llama")
    story.kube.tick()


def _until_it_runs_anyhow(story: Waiting) -> None:
    for _ in range(40):
        _pass(story)
    assert story.state.phase is JobPhase.RUNNING


class _Killed(Waiting):
    """The controller is killed at each of ``cuts``, in writes since the last one."""

    def __init__(self, cuts: list[tuple[int, bool]], **how: Any) -> None:
        super().__init__(**how)
        self._cuts = list(cuts)

    def turn(self) -> None:
        if self.kube.cut_at is None and self._cuts:
            writes, self.kube.cut_after = self._cuts.pop(0)
            self.kube.cut_at = self.kube.writes + writes
        super().turn()


def _whole_story(cuts: list[tuple[int, bool]]) -> _Killed:
    story = _Killed(cuts, quota=0)
    story.turns(3)
    story.kueue.quota = 3
    story.until(lambda: story.runs(3))
    story.kueue.quota = 2
    story.kueue.evict(story.kueue.workload_names()[-1])
    story.until(lambda: story.runs(2) and story.kueue.used_quota() == 2)
    story.kube.complete()
    story.until(lambda: story.state.phase is JobPhase.SUCCEEDED and story.kueue.used_quota() == 0)
    return story


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 14), st.booleans()), max_size=6))
def test_killed_at_any_write_the_job_does_not_notice(cuts):
    story = _whole_story(cuts)
    assert story.kube.current_job()["status"]["restartCount"] == 0
    assert all(story.kueue.has_condition(name, "Finished") for name in story.kueue.workload_names())
    assert len(story.kube.starts) == 3, "three pods in all, and each of them once"


@settings(max_examples=30)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("quota"), st.integers(0, 4)),
            st.tuples(st.just("evict"), st.integers(0, 2)),
            st.tuples(st.just("crash"), st.integers(0, 2)),
            st.tuples(st.just("cut"), st.integers(0, 9)),
            st.tuples(st.just("wait"), st.integers(1, 12)),
            st.tuples(st.just("by hand"), st.integers(1, 3)),
        ),
        max_size=12,
    )
)
def test_random_changes_never_exceed_the_quota_and_end_running(happens):
    """:meth:`Waiting.nothing_is_used_that_is_not_given` holds after every pass."""
    story = Waiting(quota=2)
    for what, number in happens:
        if what == "quota":
            story.kueue.quota = number
            while story.kueue.used_quota() > number:
                held = [
                    name for name in story.kueue.workload_names() if story.kueue.has_condition(name, "QuotaReserved")
                ]
                asked = [name for name in held if not story.kueue.has_condition(name, "Evicted")]
                if not asked:
                    break
                story.kueue.evict(asked[-1])
        elif what == "evict":
            for name in story.kueue.workload_names()[number : number + 1]:
                if story.kueue.has_condition(name, "QuotaReserved"):
                    story.kueue.evict(name)
        elif what == "crash":
            for name in story.kube.pod_names()[number : number + 1]:
                if story.kube.state_of(name) is AgentState.RUNNING:
                    story.kube.crash(name)
        elif what == "cut":
            story.kube.cut_at, story.kube.cut_after = story.kube.writes + number, bool(number % 2)
        elif what == "by hand":
            story.kube.change_spec(replicas=number)
        story.turns(number if what == "wait" else 1)
    story.kueue.quota = 3
    story.kube.change_spec(replicas=3)
    story.until(lambda: story.runs(3) and story.kueue.used_quota() == 3)
