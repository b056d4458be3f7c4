"""Jobs from creation to completion, pass by pass, with controllers killed at any write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from integration.hyperpod.operator import AgentState, JobPhase
from integration.kubernetes.errors import ApiServerUnreachableError, ResourceConflictError
from integration.kubernetes.reconciler import JobReconciler
from integration.kubernetes.resource_status import load_job_state
from tests.support.example_counts import examples
from tests.support.fake_cluster import ControllerKilled, FakeKubernetes
from tests.support.kube_objects import TEMPLATE, job_object

ELASTIC = {
    "replicaSpecs": [{"name": "workers", "replicas": 2, "maxReplicas": 3, "template": TEMPLATE}],
    # Longer than a story's controllers are down: after this time a job may start with fewer pods.
    "elasticPolicy": {"minReplicas": 1, "maxReplicas": 3, "scalingTimeoutInSeconds": 30},
}


class Story:
    """A cluster and a controller without memory: a new controller runs each pass."""

    def __init__(self, nodes: int = 4, **spec: Any) -> None:
        self.kube = FakeKubernetes(job_object(**spec), nodes=nodes)
        self.killed = 0

    def one_pass(self) -> None:
        passing = JobReconciler(self.kube, self.kube, health=self.kube.health, clock=lambda: self.kube.now_s)
        try:
            passing.reconcile("default", "llama")
        except ControllerKilled:
            self.killed += 1
            self.kube.cut_at = None
        except (ResourceConflictError, ApiServerUnreachableError):
            pass

    def until(self, holds: Callable[[], bool], *, passes: int = 400) -> None:
        for _ in range(passes):
            if holds():
                return
            self.one_pass()
            self.kube.tick()
        raise AssertionError(f"it did not happen: {self.kube.current_job().get('status')}")

    @property
    def phase(self) -> JobPhase | None:
        state = load_job_state(self.kube.current_job())
        return state.phase if state else None

    def until_running(self, nodes: int) -> None:
        self.until(lambda: self.phase is JobPhase.RUNNING and len(self.members) == nodes)

    @property
    def members(self) -> tuple[str, ...]:
        state = load_job_state(self.kube.current_job())
        assert state is not None
        return state.members

    def true_conditions(self) -> set[str]:
        found = self.kube.current_job().get("status", {}).get("conditions", [])
        return {one["type"] for one in found if one["status"] == "True"}


def test_job_runs_from_creation_to_completion():
    story = Story()
    story.until_running(2)
    bodies = [story.kube.starts[name] for name in story.members]
    assert [[body.rank for body in each] for each in bodies] == [[0], [1]]
    assert {each[0].nnodes for each in bodies} == {2}
    assert len({(each[0].master_addr, each[0].master_port, each[0].version) for each in bodies}) == 1
    story.kube.complete()
    story.until(lambda: story.phase is JobPhase.SUCCEEDED and not story.kube.pod_names(running=False))
    status = story.kube.current_job()["status"]
    assert status["completionTime"]
    assert status["restartCount"] == 0


@pytest.mark.parametrize(("policy", "left"), [("All", 0), ("OnlyComplete", 0), ("None", 2)])
def test_finished_job_keeps_pods_by_its_cleanup_policy(policy, left):
    story = Story(runPolicy={"cleanPodPolicy": policy})
    story.until_running(2)
    story.kube.complete()
    story.until(lambda: story.phase is JobPhase.SUCCEEDED and not story.kube.pod_names())
    for _ in range(5):
        story.one_pass()
        story.kube.tick()
    assert len(story.kube.pod_names(running=False)) == left


def test_finished_job_is_deleted_after_its_ttl():
    story = Story(runPolicy={"ttlSecondsAfterFinished": 100})
    story.until_running(2)
    story.kube.complete()
    story.until(lambda: story.phase is JobPhase.SUCCEEDED)
    before_s = story.kube.now_s
    story.until(lambda: story.kube.is_deleted)
    assert 90 <= story.kube.now_s - before_s <= 110


def test_worker_fault_restarts_all_ranks_in_the_same_pods():
    story = Story()
    story.until_running(2)
    pods = story.members
    story.kube.crash(pods[1])
    story.until(lambda: len(story.kube.starts[pods[0]]) == 2 and story.phase is JobPhase.RUNNING)
    assert story.members == pods
    assert story.kube.starts[pods[0]][-1].fault_count == 1
    assert story.kube.current_job()["status"]["restartCount"] == 1
    assert story.kube.current_job()["status"]["latestFaultyPodInstanceList"]["faultyPodList"] == [pods[1]]


def test_a_pod_that_has_failed_is_replaced_under_another_name():
    story = Story()
    story.until_running(2)
    before = story.members
    story.kube.fail_pod(before[1])
    story.until(lambda: before[1] not in story.members and len(story.members) == 2 and story.phase is JobPhase.RUNNING)
    assert before[0] in story.members


def test_pod_on_an_unhealthy_node_is_replaced():
    story = Story()
    story.until_running(2)
    bad = story.kube.node_of(story.members[0])
    story.kube.health[bad] = "UnschedulablePendingReplacement"
    story.until(
        lambda: story.phase is JobPhase.RUNNING and bad not in {story.kube.node_of(name) for name in story.members}
    )
    assert len(story.members) == 2


def test_scaled_by_hand_through_the_scale_subresource():
    story = Story(**ELASTIC)
    story.kube.change_spec(replicas=2)
    story.until_running(2)
    story.kube.change_spec(replicas=3)
    story.until_running(3)
    story.kube.change_spec(replicas=1)
    story.until_running(1)
    story.kube.complete()
    story.until(lambda: story.phase is JobPhase.SUCCEEDED)
    assert story.kube.current_job()["status"]["restartCount"] == 0, "a change of size is no fault"


def test_suspended_job_resumes():
    story = Story()
    story.until_running(2)
    story.kube.change_spec(runPolicy={"suspend": True})
    story.until(lambda: story.phase is JobPhase.SUSPENDED and not story.kube.pod_names())
    story.kube.change_spec(runPolicy={"suspend": False})
    story.until_running(2)


def test_an_impossible_change_disturbs_nothing():
    story = Story()
    story.until_running(2)
    good = story.kube.current_job()["spec"]["replicaSpecs"]
    story.kube.change_spec(replicaSpecs=[{**good[0], "maxReplicas": 1}])
    for _ in range(3):
        story.one_pass()
        story.kube.tick()
    assert "InvalidSpec" in story.true_conditions()
    assert story.kube.events.count("InvalidSpec") == 1
    assert {story.kube.state_of(name) for name in story.members} == {AgentState.RUNNING}
    story.kube.change_spec(replicaSpecs=good)
    story.kube.complete()
    story.until(lambda: story.phase is JobPhase.SUCCEEDED)
    assert "InvalidSpec" not in story.true_conditions()


def test_unreachable_agents_do_not_change_the_state():
    story = Story()
    story.until_running(2)
    story.kube.unreachable = True
    for _ in range(20):
        story.one_pass()
        story.kube.tick()
    assert {story.kube.state_of(name) for name in story.members} == {AgentState.RUNNING}
    story.kube.unreachable = False
    story.kube.complete()
    story.until(lambda: story.phase is JobPhase.SUCCEEDED)


def test_pass_during_a_change_is_requeued_sooner():
    story = Story()
    story.until_running(2)
    passing = JobReconciler(story.kube, story.kube, health={}, clock=lambda: story.kube.now_s)
    passing.reconcile("default", "llama")
    assert passing.reconcile("default", "llama").requeue_after_s == 1.0
    story.kube.crash(story.members[0])
    assert passing.reconcile("default", "llama").requeue_after_s == 0.2


def test_refused_pods_are_reported_once_and_retried():
    story = Story()
    story.kube.refusal = "exceeded quota"
    passing = JobReconciler(story.kube, story.kube, health={}, clock=lambda: story.kube.now_s)
    for _ in range(5):
        passing.reconcile("default", "llama")
        story.kube.tick()
    assert story.kube.events.count("PodRefused") == 1
    story.kube.refusal = ""
    story.until_running(2)


def test_refused_pods_are_retried_with_backoff():
    story = Story()
    story.kube.refusal = "exceeded quota"
    passing = JobReconciler(story.kube, story.kube, health={}, clock=lambda: story.kube.now_s)
    asked, create = [], story.kube.create_pod

    def counted(pod):
        asked.append(story.kube.now_s)
        create(pod)

    story.kube.create_pod = counted
    for _ in range(130):
        passing.reconcile("default", "llama")
        story.kube.tick()
    assert 5 <= len(asked) <= 9, asked
    assert asked[-1] - asked[-2] >= 30


def test_decision_on_a_stale_state_has_no_effect():
    """A controller that was delayed must not start agents according to its old decision."""
    story = Story()
    story.until(lambda: story.phase is JobPhase.STARTING)
    old = story.kube.get_job("default", "llama")
    story.until_running(2)
    pods = story.members
    story.kube.crash(pods[0])
    story.until(lambda: {story.kube.state_of(name) for name in pods} == {AgentState.READY})
    starts = {name: list(bodies) for name, bodies in story.kube.starts.items()}

    class Late:
        def __init__(self) -> None:
            self.jobs = [old]

        def __getattr__(self, name):
            return getattr(story.kube, name)

        def get_job(self, namespace, name):
            return self.jobs.pop() if self.jobs else story.kube.get_job(namespace, name)

    with pytest.raises(ResourceConflictError):
        JobReconciler(Late(), story.kube, health={}, clock=lambda: story.kube.now_s).reconcile("default", "llama")
    assert story.kube.starts == starts
    story.until_running(2)
    assert story.kube.current_job()["status"]["restartCount"] == 1


def _whole_story(cuts: list[tuple[int, bool]]) -> Story:
    """Run a fault, a growth and the end; kill the controller after each number of writes in ``cuts``."""
    story = Story(**ELASTIC)
    story.kube.change_spec(replicas=2)
    waiting = list(cuts)

    def arm() -> bool:
        if story.kube.cut_at is None and waiting:
            writes, story.kube.cut_after = waiting.pop(0)
            story.kube.cut_at = story.kube.writes + writes
        return False

    def until_running(nodes: int, restarts: int) -> None:
        story.until(
            lambda: (
                arm()
                or (
                    story.phase is JobPhase.RUNNING
                    and len(story.members) == nodes
                    and story.kube.current_job()["status"]["restartCount"] == restarts
                )
            )
        )

    until_running(2, 0)
    story.kube.crash(story.members[1])
    until_running(2, 1)
    story.kube.change_spec(replicas=3)
    until_running(3, 1)
    story.kube.complete()
    story.until(lambda: arm() or (story.phase is JobPhase.SUCCEEDED and not story.kube.pod_names(running=False)))
    return story


def test_decision_modules_import_neither_client_nor_torch():
    names = "reconciler", "pods", "resource_status", "api_client", "kueue_admission", "cached_client"
    imports = "; ".join(f"import integration.kubernetes.{name}" for name in names)
    found = "{name.partition('.')[0] for name in sys.modules} & {'kubernetes', 'torch'}"
    subprocess.run(
        [sys.executable, "-c", f"import sys; {imports}; assert not {found}, {found}"], check=True, timeout=120
    )


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=6))
@example([(0, True), (0, False), (0, False), (0, False), (1, False)])
def test_killed_at_any_write_the_job_does_not_notice(cuts):
    undisturbed, disturbed = _whole_story([]), _whole_story(cuts)
    ours, theirs = disturbed.kube, undisturbed.kube
    assert set(ours.starts) == set(theirs.starts), "the same pods, and none more"
    for name, bodies in theirs.starts.items():
        found = ours.starts[name]
        assert [body.fault_count for body in bodies] == list(dict.fromkeys(body.fault_count for body in found))
        for version in {body.version for body in found}:
            assert len({str(body) for body in found if body.version == version}) == 1, "told again, told the same"
    assert ours.current_job()["status"]["restartCount"] == theirs.current_job()["status"]["restartCount"] == 1
