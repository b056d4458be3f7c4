"""A watch that is dropped, expired, refused or of a missing kind: each following request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from integration.kubernetes.errors import ApiServerRefusedError, ApiServerUnreachableError, ResourceNotFoundError
from integration.kubernetes.informer import Informer, ObjectIndex, ResourceCollection

PODS = ResourceCollection("/api/v1/pods")


def pod(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "default", "uid": name, "resourceVersion": str(version)}}


def event(kind: str, *what: Any) -> dict[str, Any]:
    return {"type": kind, "object": pod(*what)}


BOOKMARK = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "40"}}}
EXPIRED = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
BROKEN = {"type": "ERROR", "object": {"code": 500, "message": "etcd"}}


class Told:
    """A source that returns or raises one scripted result for each request."""

    def __init__(self, *does: Any) -> None:
        self.does = list(does)
        self.since: list[str] = []

    def _next(self) -> Any:
        now = self.does.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    def list_all(self, what: ResourceCollection) -> Any:
        self.since.append("list")
        return self._next()

    @contextlib.contextmanager
    def watch(self, what: ResourceCollection, since: str, timeout_s: int) -> Iterator[Any]:
        self.since.append(since)
        assert 240 <= timeout_s <= 360
        yield self._events(self._next())

    def _events(self, events: list[Any]) -> Iterator[Any]:
        for one in events:
            if isinstance(one, Exception):
                raise one
            yield one


class Story:
    def __init__(self, *does: Any) -> None:
        self.source = Told(*does)
        self.index = ObjectIndex(lambda _: "llama", lambda *_: None)
        self.pauses: list[float] = []
        self.informer = Informer(self.source, PODS, self.index, wait=self.pauses.append)
        while self.source.does:
            self.informer.step()

    @property
    def names(self) -> list[str]:
        return [str(one["metadata"]["name"]) for one in self.index.of_job("default", "llama")]


def test_informer_lists_once_and_watches_from_that_version():
    story = Story(([pod("a", 3)], "9"), [event("ADDED", "b", 12)], [event("DELETED", "a", 13)], [])
    assert story.source.since == ["list", "9", "12", "13"]
    assert story.names == ["b"]
    assert story.index.is_followed


def test_dropped_watch_resumes_at_its_version():
    dropped = [event("ADDED", "b", 12), BOOKMARK, ApiServerUnreachableError("reset by peer")]
    story = Story(([pod("a", 3)], "9"), dropped, [event("DELETED", "b", 41)])
    assert story.source.since == ["list", "9", "40"]
    assert story.names == ["a"]


def test_broken_watch_is_reported():
    story = Story(([pod("a", 3)], "9"), [ApiServerUnreachableError("reset by peer")])
    assert story.names == ["a"]
    assert not story.index.is_followed


@pytest.mark.parametrize("said", [EXPIRED], ids=["an event"])
def test_expired_watch_lists_again(said):
    story = Story(([pod("a", 3)], "9"), [said], ([pod("b", 20)], "22"), [])
    assert story.source.since == ["list", "9", "list", "22"]
    assert story.names == ["b"], "what went meanwhile has gone"


def test_other_server_errors_trigger_no_list():
    story = Story(([pod("a", 3)], "9"), [BROKEN], [event("ADDED", "b", 12)])
    assert story.source.since == ["list", "9", "9"]
    assert story.names == ["a", "b"]


def test_retry_pauses_grow_until_an_event_arrives():
    wrong = [ApiServerUnreachableError("500"), ApiServerRefusedError("403"), ApiServerUnreachableError("500")] * 4
    story = Story(*wrong, ([], "9"), [event("ADDED", "b", 12), ApiServerUnreachableError("500")])
    *longer, last = story.pauses
    assert len(longer) == 12
    assert all(0.0 < pause <= 30.0 for pause in longer)
    assert min(longer[-3:]) > 10 * longer[0]
    assert last < 1.0


def test_watch_closed_at_once_is_retried_with_pauses():
    story = Story(([], "9"), [], [], [])
    assert len(story.pauses) == 3
    assert story.index.is_followed, "nothing is missed by it"


def test_missing_collection_is_retried():
    story = Story(([pod("a", 3)], "9"), ResourceNotFoundError("no such kind"), ResourceNotFoundError("no such kind"))
    assert story.index.is_absent
    assert story.names == []
    story.source.does = [([pod("c", 30)], "31")]
    story.informer.step()
    assert story.names == ["c"]
    assert not story.index.is_absent


def test_malformed_event_triggers_a_new_list():
    story = Story(([pod("a", 3)], "9"), [{"type": "ADDED", "object": {}}], ([pod("b", 10)], "11"))
    assert story.source.since == ["list", "9", "list"]
    assert story.names == ["b"]
