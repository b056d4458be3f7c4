"""Managed jobs: the owner names the shards to delete, and the store evicts none by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from peerstore.commit_protocol import CommitDecision
from peerstore.errors import ArenaBusyError, RequestError
from peerstore.settings import StoreSettings
from peerstore.shard_records import ResumePoint, ShardKey, ShardRecord, VersionId
from peerstore.store.arena import MemfdArena
from peerstore.store.node_store import NodeStore

PARTS = 1 << 20
"""More parts than any version has: no version becomes complete."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[NodeStore]:
    settings = StoreSettings(budget="1MiB", slots_per_part=2, burst_slots=1, job_ttl_s=10.0)
    with contextlib.closing(NodeStore(MemfdArena(), settings, clock=clock)) as made:
        yield made


def keep(store: NodeStore, job: str, version: int, size_bytes: int = 100) -> ShardKey:
    key = ShardKey(job, version, 1, "owner", 0, 0)
    store.seal(store.lease(key, size_bytes, PARTS).id, size_bytes)
    return key


def test_slots_are_bounded_by_the_budget_and_by_nothing_else(store: NodeStore) -> None:
    store.jobs.incarnations.manage("managed", 1, "owner")
    kept = [keep(store, "managed", version) for version in range(10)]
    assert [fact.key for fact in store.list_shards("managed")] == kept
    with pytest.raises(ArenaBusyError):
        keep(store, "managed", 10, (1 << 20) - 999)
    assert store.versions.delete("managed", [key.version_id for key in kept[:5]]) == 5
    keep(store, "managed", 10, (1 << 20) - 1999)
    assert {fact.key.version for fact in store.list_shards("managed")} == {5, 6, 7, 8, 9, 10}


def test_another_job_has_as_many_slots_as_its_writers_may_have(store: NodeStore) -> None:
    for version in range(3):
        keep(store, "other", version)
    with pytest.raises(ArenaBusyError):
        keep(store, "other", 3)


def test_managed_job_without_processes_does_not_expire(store: NodeStore, clock: Clock) -> None:
    store.jobs.incarnations.manage("managed", 1, "owner")
    keep(store, "managed", 1)
    keep(store, "other", 1)
    clock.now = 11.0
    store.sweep()
    assert [fact.key.job for fact in store.list_shards()] == ["managed"]


def test_managed_job_is_registered_before_any_write(store: NodeStore) -> None:
    store.jobs.incarnations.manage("managed", 1, "owner")
    assert store.epoch("managed") == 1
    store.jobs.incarnations.manage("managed", 1, "owner")
    assert store.epoch("managed") == 1


def test_managed_job_name_is_reserved(store: NodeStore) -> None:
    store.jobs.incarnations.manage("managed", 1, "owner")
    with pytest.raises(RequestError, match="belongs to this agent"):
        store.claim("managed", "trainer")
    with pytest.raises(RequestError, match="belongs to this agent"):
        store.lease(ShardKey("managed", 1, 2, "trainer", 0, 0), 100, 1)
    keep(store, "managed", 1)


STRANGER = VersionId(2, 5, 0, "stranger")


def offer(store: NodeStore) -> None:
    key = ShardKey("managed", 5, 2, "stranger", 0, 0)
    with contextlib.suppress(RequestError):
        store.replicas.begin_replica(ShardRecord(key, PARTS, 0, 1 << 20, b"", b"", 1), whole=True)


def resume(store: NodeStore) -> None:
    store.jobs.incarnations.learn_resume_point("managed", ResumePoint(2, "stranger", 0, STRANGER))


def fence(store: NodeStore) -> None:
    store.jobs.incarnations.fence("managed", 2, "stranger")


def decide(store: NodeStore) -> None:
    store.replicas.apply_decision("managed", CommitDecision(STRANGER, STRANGER, (VersionId(1, 1, 0, "owner"),)))


@pytest.mark.parametrize("message", [offer, resume, fence, decide])
def test_managed_job_ignores_other_incarnations(store: NodeStore, message: Callable[[NodeStore], None]) -> None:
    store.jobs.incarnations.manage("managed", 1, "owner")
    kept = [keep(store, "managed", 1)]
    message(store)
    kept.append(keep(store, "managed", 2))
    assert [fact.key for fact in store.list_shards("managed")] == kept
    received = ShardRecord(ShardKey("managed", 3, 1, "owner", 0, 0), PARTS, 0, 1 << 20, b"", b"", 1)
    assert store.replicas.begin_replica(received, whole=False) is not None


def test_managed_job_replaces_a_recorded_owner(store: NodeStore) -> None:
    store.jobs.incarnations.fence("managed", 2, "stranger")
    store.jobs.incarnations.manage("managed", 1, "owner")
    assert store.epoch("managed") == 1
    keep(store, "managed", 1)
