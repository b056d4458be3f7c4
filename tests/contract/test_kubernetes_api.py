"""Contract of the API server that the controller needs: the fake one and, if built, a real one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.kubernetes.api_client import ApiServerClient, connected, jobs_in, pods_in, pods_of
from integration.kubernetes.errors import ResourceConflictError, ResourceNotFoundError
from integration.kubernetes.informer import Informer
from integration.kubernetes.pods import ReplicaSlot, build_pod
from tests.support.kube_api import FakeApiServer, official_client
from tests.support.kube_jobs import JOBS, ROOT
from tests.support.kube_objects import job_object
from tests.support.kube_server import control_plane, missing_reason
from tests.support.local_nodes import wait_until

pytest.importorskip("kubernetes.client")


@pytest.fixture(scope="module", params=["imagined", pytest.param("real", marks=pytest.mark.system)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServerClient]:
    with contextlib.ExitStack() as stack:
        if request.param == "imagined":
            api = stack.enter_context(FakeApiServer().running())
            api.compact()
            yield ApiServerClient(stack.enter_context(official_client(api.url)))
            return
        if reason := missing_reason():
            pytest.skip(reason)
        folder = tmp_path_factory.mktemp("kube")
        kube = stack.enter_context(control_plane(folder))
        definition = Path(ROOT, "integration/kubernetes/manifests/crd.yaml").read_text()
        for document in yaml.safe_load_all(definition):
            kube.apply(document)
        kube.wait_served(JOBS)
        wait_until(lambda: kube.find("/api/v1/namespaces/default/serviceaccounts/default"))  # pods require it
        yield connected(kube.kubeconfig(folder / "admin"))


@pytest.fixture
def job(server: ApiServerClient, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    name = f"j{abs(hash(request.node.name)) % 10**8}"
    wanted = job_object(name)
    wanted["metadata"] = {"name": name, "namespace": "default"}
    made = server.request("POST", JOBS, wanted)
    yield made
    with contextlib.suppress(ResourceNotFoundError):
        server.delete_job(made)


class CountingFollower:
    """A follower that counts."""

    is_followed = False
    lists = 0

    def replace_all(self, items: Any, revision: str) -> None:
        self.lists += 1

    def heard(self, kind: str, one: Any) -> None: ...

    def is_not_there(self) -> None: ...


def build_test_pod(job: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return build_pod(job, ReplicaSlot("workers", index), nodes=2)


def names_of(items: list[dict[str, Any]]) -> list[str]:
    return [one["metadata"]["name"] for one in items]


def wait_events(
    server: ApiServerClient, what: Any, since: str, count: int, kinds: Sequence[str] = ("ADDED", "DELETED")
) -> list[tuple[str, str]]:
    """The first ``count`` of these kinds: a scheduler writes to pods, too."""
    found: list[tuple[str, str]] = []
    with server.watch(what, since, 30) as events:
        for event in events:
            assert event["type"] != "ERROR", event
            if event["type"] in kinds:
                found.append((event["type"], event["object"]["metadata"]["name"]))
            if len(found) == count:
                break
    return found


def test_a_status_is_written_once(server: ApiServerClient, job: dict[str, Any]) -> None:
    written = server.update_status(job, {"restartCount": 1})
    assert int(written["metadata"]["resourceVersion"]) > int(job["metadata"]["resourceVersion"])
    assert written["status"]["restartCount"] == 1
    with pytest.raises(ResourceConflictError):
        server.update_status(job, {"restartCount": 2})
    with pytest.raises(ResourceConflictError):
        server.confirm(job)
    server.confirm(written)


def test_pod_is_created_once_and_deleted_by_uid(server: ApiServerClient, job: dict[str, Any]) -> None:
    made = server.create_pod(build_test_pod(job))
    assert made["metadata"]["uid"]
    with pytest.raises(ResourceConflictError):
        server.create_pod(build_test_pod(job))
    server.delete_pod({"metadata": {**made["metadata"], "uid": "another"}})
    assert names_of(server.list_pods("default", job["metadata"]["name"])) == names_of([made])
    server.delete_pod(made, grace_s=0)
    assert server.list_pods("default", job["metadata"]["name"]) == []
    server.delete_pod(made)


def test_watch_continues_after_a_list(server: ApiServerClient, job: dict[str, Any]) -> None:
    before, revision = server.list_all(pods_in("default"))
    made = server.create_pod(build_test_pod(job))
    second = server.create_pod(build_test_pod(job, 1))
    server.delete_pod(made, grace_s=0)
    first, other = names_of([made, second])
    what = pods_of("default", job["metadata"]["name"])
    assert wait_events(server, what, revision, 3) == [("ADDED", first), ("ADDED", other), ("DELETED", first)]
    after, later = server.list_all(what)
    assert names_of(after) == [other]
    assert int(later) > int(revision) >= max([0, *(int(one["metadata"]["resourceVersion"]) for one in before)])


def test_deleted_pod_has_a_newer_version(server: ApiServerClient, job: dict[str, Any]) -> None:
    made = server.create_pod(build_test_pod(job))
    server.delete_pod(made, grace_s=0)
    with server.watch(pods_in(""), made["metadata"]["resourceVersion"], 30) as events:
        gone = next(one for one in events if one["type"] == "DELETED")
    assert gone["object"]["metadata"]["uid"] == made["metadata"]["uid"]
    assert int(gone["object"]["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])


def test_watch_reports_job_changes(server: ApiServerClient, job: dict[str, Any]) -> None:
    server.update_status(job, {"restartCount": 1})
    found = wait_events(server, jobs_in(""), job["metadata"]["resourceVersion"], 1, ["MODIFIED"])
    assert found == [("MODIFIED", job["metadata"]["name"])]


def test_watch_from_an_expired_version_lists_again(server: ApiServerClient, request: pytest.FixtureRequest) -> None:
    if "imagined" not in request.node.name:
        pytest.skip("a real server forgets after minutes, and many changes")
    heard = CountingFollower()
    informer = Informer(server, pods_in(""), heard, wait=lambda _: None)
    informer.step()
    informer._since = "1"
    informer.step()
    informer.step()
    assert heard.lists == 2, "all is listed again"


def test_missing_job_is_not_found(server: ApiServerClient) -> None:
    with pytest.raises(ResourceNotFoundError):
        server.get_job("default", "no-such-job")
