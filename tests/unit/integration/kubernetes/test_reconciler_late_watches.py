"""Controllers whose watches are late by any amount: without a failure no job restarts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from integration.hyperpod.operator import JobPhase
from integration.kubernetes.api_client import ApiServerClient
from integration.kubernetes.cached_client import CachedApiClient
from integration.kubernetes.errors import ApiServerError
from integration.kubernetes.reconciler import JobReconciler
from integration.kubernetes.resource_status import load_job_state
from tests.support.example_counts import examples
from tests.support.fake_cluster import FakeAgents
from tests.support.kube_api import FakeApiServer, FakeKubelets, official_client
from tests.support.kube_objects import job_object

pytest.importorskip("kubernetes.client")

_KINDS = ("hyperpodpytorchjobs", "pods")


class LateController:
    """A controller that receives changes only when the test delivers them."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._cluster = CachedApiClient(ApiServerClient(story.client), [""], lambda *_: None)
        self._indexes = dict(zip(_KINDS, (self._cluster._jobs[""], self._cluster._pods[""]), strict=True))
        self._heard = {}
        for kind, informer in zip(_KINDS, self._cluster.informers(), strict=True):
            index, informer._wait = self._indexes[kind], lambda _: None
            while not index.is_followed:  # a failed list is requested again
                informer.step()
            self._heard[kind] = story.api.version
        self._passing = JobReconciler(
            self._cluster, story.agents, health={}, clock=lambda: story.now_s, settings={"agent_timeout_s": 1e6}
        )

    def hear(self, kind: str, count: int) -> None:
        for version, word, one in self._story.api.changes(kind, self._heard[kind])[:count]:
            self._indexes[kind].heard(word, one)
            self._heard[kind] = version

    def once(self) -> None:
        with contextlib.suppress(ApiServerError):
            self._passing.reconcile("default", "llama")


class Story:
    def __init__(self, api: FakeApiServer, client: Any) -> None:
        self.api, self.client = api, client
        self.agents, self.kubelets = FakeAgents(), FakeKubelets(api)
        self.now_s = 1_000_000.0
        job = job_object("llama")
        job["metadata"] = {"name": "llama", "namespace": "default"}
        api.put("hyperpodpytorchjobs", job)
        self.controllers = [LateController(self), LateController(self)]

    def job(self) -> dict[str, Any]:
        return self.api.get("hyperpodpytorchjobs", "llama")

    def do(self, what: str, which: int, number: int) -> None:
        one = self.controllers[which]
        if what == "pass":
            one.once()
        elif what in _KINDS:
            one.hear(what, number)
        elif what == "new":
            self.controllers[which] = LateController(self)
        elif what == "kubelets":
            self.kubelets.sync_pods()
        elif what == "somebody":
            job = self.job()
            job["metadata"]["labels"] = {"number": str(self.api.version)}
            self.api.put("hyperpodpytorchjobs", job)
        else:
            method, path = (("POST", "/pods"), ("PATCH", "/status"), ("GET", "/pods"))[number % 3]
            self.api.fail(method, path, (500, 409)[number % 2], after=which == 1)
        self.now_s += 0.1

    def runs(self) -> bool:
        state = load_job_state(self.job())
        return state is not None and state.phase is JobPhase.RUNNING


@pytest.fixture(scope="module")
def client_and_api() -> Iterator[tuple[FakeApiServer, Any]]:
    with FakeApiServer().running() as api, official_client(api.url) as client:
        yield api, client


_HAPPENS = st.tuples(
    st.sampled_from(["pass", "pass", "pods", "hyperpodpytorchjobs", "kubelets", "new", "somebody", "fails"]),
    st.integers(0, 1),
    st.integers(1, 5),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(_HAPPENS, max_size=50))
@example(
    [("pass", 0, 1), ("kubelets", 0, 1), ("pods", 0, 5), *[("pass", 0, 1)] * 4, ("hyperpodpytorchjobs", 1, 5)]
    + [("pass", 1, 1)] * 3
)
@example([("fails", 0, 2), ("fails", 0, 5), ("new", 0, 1), ("new", 1, 1)])
def test_late_watches_lose_no_pod_make_none_twice_and_restart_nothing(client_and_api, happens):
    api, client = client_and_api
    api.clear()
    story = Story(api, client)
    for one in happens:
        story.do(*one)
        assert story.job().get("status", {}).get("restartCount", 0) == 0, "nothing has failed"
    api.clear_failures()
    for _ in range(60):
        for which in (0, 1):
            for kind in _KINDS:
                story.controllers[which].hear(kind, 1000)
            story.do("pass", which, 1)
        story.kubelets.sync_pods()
        if story.runs():
            break
    assert story.runs(), story.job().get("status")
    assert story.job()["status"]["restartCount"] == 0
    assert [pod["metadata"]["name"] for pod in api.list_all("pods")] == ["llama-workers-0", "llama-workers-1"]
