"""The index of a collection: versions never go back, and no write is forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from integration.kubernetes.errors import ApiServerUnreachableError
from integration.kubernetes.informer import ObjectIndex
from tests.support.example_counts import examples


def pod(name: str, version: int, *, job: str = "llama", uid: str = "", **status: Any) -> dict[str, Any]:
    meta = {
        "name": name, "namespace": "default", "uid": uid or f"uid-{name}", "resourceVersion": str(version),
        "labels": {"HPJob": job}, "managedFields": ["much"],
    }  # fmt: skip
    return {"metadata": meta, "status": status}


def index(told: list[str] | None = None) -> ObjectIndex:
    heard = [] if told is None else told
    return ObjectIndex(lambda one: one["metadata"]["labels"]["HPJob"], lambda _, job: heard.append(job))


def names(found: ObjectIndex, job: str = "llama") -> list[str]:
    return [one["metadata"]["name"] for one in found.of_job("default", job)]


def test_only_new_versions_wake_their_job():
    told: list[str] = []
    found = index(told)
    found.replace_all([pod("a", 3), pod("b", 4, job="qwen")], "5")
    assert sorted(told) == ["llama", "qwen"]
    found.heard("MODIFIED", pod("a", 3))
    found.heard("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
    assert len(told) == 2
    found.heard("DELETED", pod("a", 10))
    assert told[2:] == ["llama"]
    assert names(found) == []


def test_written_pod_is_visible_at_once_and_its_event_is_ignored():
    told: list[str] = []
    found = index(told)
    found.replace_all([], "5")
    found.answered(pod("a", 7))
    assert names(found) == ["a"]
    found.heard("ADDED", pod("a", 7))
    assert told == []


def test_late_answer_does_not_restore_a_deleted_pod():
    found = index()
    found.replace_all([], "5")
    found.heard("ADDED", pod("a", 7))
    found.heard("DELETED", pod("a", 8))
    found.answered(pod("a", 7))
    assert names(found) == []


def test_deletion_of_an_older_pod_with_the_same_name_is_ignored():
    found = index()
    found.replace_all([pod("a", 3, uid="old")], "5")
    found.answered(pod("a", 9, uid="new"))
    found.heard("DELETED", pod("a", 8, uid="old"))
    assert names(found) == ["a"]


def test_full_list_drops_missing_pods_and_keeps_newer_ones():
    found = index()
    found.replace_all([pod("a", 3), pod("b", 4)], "5")
    found.answered(pod("c", 9))
    found.replace_all([pod("b", 4)], "8")
    assert names(found) == ["b", "c"]


def test_list_of_a_job_drops_its_missing_pods_for_good():
    """This holds even if the watch has yet to report their creation and deletion."""
    found = index()
    found.replace_all([pod("a", 3), pod("other", 4, job="qwen")], "5")
    found.replace_of_job("default", "llama", [pod("b", 7)], "9")
    assert names(found) == ["b"]
    assert names(found, "qwen") == ["other"]
    found.heard("MODIFIED", pod("a", 6))
    assert names(found) == ["b"]
    found.heard("DELETED", pod("a", 8))
    found.heard("ADDED", pod("b", 7))
    assert names(found) == ["b"]


def test_deleted_pod_is_terminating_before_the_watch_event():
    found = index()
    found.replace_all([pod("a", 3)], "5")
    found.leaves("default", "a", "another")
    assert "deletionTimestamp" not in found.of_job("default", "llama")[0]["metadata"]
    found.leaves("default", "a", "uid-a")
    assert found.of_job("default", "llama")[0]["metadata"]["deletionTimestamp"]


def test_missing_resource_kind_clears_the_index():
    told: list[str] = []
    found = index(told)
    found.replace_all([pod("a", 3)], "5")
    found.is_not_there()
    assert found.is_absent
    assert not found.is_listed
    assert told == ["llama", "llama"]


def test_nonnumeric_versions_are_refused():
    with pytest.raises(ApiServerUnreachableError, match="is not a number"):
        index().replace_all([], "x7")


class Watched(RuleBasedStateMachine):
    """A server, our writes and a late watch: reads return a current or recent state."""

    def __init__(self) -> None:
        super().__init__()
        self.index = index()
        self.version = 1
        self.born = 0
        self.there: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[str, dict[str, Any]]] = []
        """Events that the watch has yet to report."""
        self.answers: list[dict[str, Any]] = []
        """Answers that have not reached the writer yet."""
        self.best: dict[str, int] = {}
        """By uid, the newest version that was ever read."""
        self.ours: dict[str, str] = {}
        """Pods that we created and did not see deleted: name by uid."""
        self.index.replace_all([], "1")

    def _write(self, kind: str, one: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        one = {**one, "metadata": {**one["metadata"], "resourceVersion": str(self.version)}}
        name = one["metadata"]["name"]
        if kind == "DELETED":
            del self.there[name]
        else:
            self.there[name] = one
        self.events.append((kind, one))
        return one

    @rule(name=st.sampled_from("abc"), late=st.booleans())
    def we_create(self, name: str, late: bool) -> None:
        if name not in self.there:
            self.born += 1
            made = self._write("ADDED", pod(name, 0, uid=f"u{self.born}"))
            if late:
                self.answers.append(made)
            else:
                self.index.answered(made)
                self.ours[made["metadata"]["uid"]] = name

    @rule(name=st.sampled_from("abc"), kind=st.sampled_from(["ADDED", "MODIFIED", "DELETED"]))
    def somebody_writes(self, name: str, kind: str) -> None:
        if kind == "ADDED" and name not in self.there:
            self.born += 1
            self._write("ADDED", pod(name, 0, uid=f"u{self.born}"))
        elif kind != "ADDED" and name in self.there:
            self._write(kind, self.there[name])

    @precondition(lambda self: self.answers)
    @rule()
    def an_answer_arrives(self) -> None:
        self.index.answered(self.answers.pop(0))

    @precondition(lambda self: self.events)
    @rule(count=st.integers(1, 4))
    def the_watch_says(self, count: int) -> None:
        for _ in range(min(count, len(self.events))):
            self.index.heard(*self.events.pop(0))

    @rule()
    def it_is_listed_anew(self) -> None:
        """List again after a 410: events not yet delivered are never delivered."""
        self.events.clear()
        self.index.replace_all(list(self.there.values()), str(self.version))

    @rule()
    def the_job_is_listed(self) -> None:
        self.index.replace_of_job("default", "llama", list(self.there.values()), str(self.version))
        assert {one["metadata"]["uid"] for one in self.index.of_job("default", "llama")} == {
            one["metadata"]["uid"] for one in self.there.values()
        }, "nothing is as new as this"

    @invariant()
    def nothing_goes_back_and_nothing_of_ours_is_forgotten(self) -> None:
        found = {one["metadata"]["uid"]: one for one in self.index.of_job("default", "llama")}
        for uid, one in found.items():
            version = int(one["metadata"]["resourceVersion"])
            assert version >= self.best.get(uid, 0)
            self.best[uid] = version
        for uid, name in list(self.ours.items()):
            if self.there.get(name, {}).get("metadata", {}).get("uid") != uid:
                del self.ours[uid]
            else:
                assert uid in found, "it was made here and is there yet"

    def teardown(self) -> None:
        for one in self.answers:
            self.index.answered(one)
        for kind, one in self.events:
            self.index.heard(kind, one)
        found = {name: one["metadata"] for one in self.index.of_job("default", "llama") for name in [_name(one)]}
        assert {name: meta["resourceVersion"] for name, meta in found.items()} == {
            name: one["metadata"]["resourceVersion"] for name, one in self.there.items()
        }, "in the end it is what the server has"


def _name(one: Any) -> str:
    return str(one["metadata"]["name"])


def test_late_events_never_move_the_index_back():
    run_state_machine_as_test(Watched, settings=settings(max_examples=examples(300), deadline=None))


def test_outdated_list_of_a_job_is_ignored():
    found = index()
    found.replace_all([pod("a", 3)], "5")
    found.heard("ADDED", pod("b", 8))
    found.replace_of_job("default", "llama", [pod("a", 3), pod("c", 6)], "7")
    assert names(found) == ["a", "b"]
