import pytest

from peerstore.commit_protocol import CommitDecision
from peerstore.errors import ArenaBusyError, FencedError, NoQuorumError
from peerstore.shard_records import CHUNK_BYTES, ResumePoint, ShardKey, ShardRecord
from peerstore.testing import memory_store
from tests.support.chunk_sums import chunk_checksums

DATA = memoryview(bytes(100))


def record(version, epoch=1, incarnation="a", part=0, parts=2):
    key = ShardKey("job", version, epoch, incarnation, 0, part)
    return ShardRecord(key, parts, len(DATA), CHUNK_BYTES, chunk_checksums(DATA), b"", 0)


def test_complete_version_of_a_past_incarnation_gets_its_copies():
    with memory_store() as store:
        store.claim("job", "b", at_least=1)
        lease = store.replicas.begin_replica(record(3), whole=True)
        store.replicas.seal_replica(lease.id, record(3), ("n1", "n2"))
        assert [fact.key for fact in store.list_shards("job")] == [record(3).key]


def test_unfinished_version_of_a_past_incarnation_gets_no_replica():
    with memory_store() as store:
        store.claim("job", "b", at_least=1)
        with pytest.raises(FencedError, match="not complete"):
            store.replicas.begin_replica(record(3), whole=False)


def seal_own(store, version, epoch=1, incarnation="a", part=0):
    key = ShardKey("job", version, epoch, incarnation, 0, part)
    lease = store.lease(key, len(DATA), 2)
    return store.seal(lease.id, len(DATA))


def take_in(store, wanted, holders=("n1", "n2")):
    lease = store.replicas.begin_replica(wanted, whole=True)
    store.replicas.seal_replica(lease.id, wanted, holders)


def test_damaged_part_of_the_replicated_version_gets_its_slot_back():
    """All slots of the part hold versions that must stay while the replicated one is damaged."""
    with memory_store() as store:
        store.jobs.incarnations.set_replication_guard("job", guarded=True)
        records = [seal_own(store, version) for version in (0, 1, 2)]
        store.replicas.apply_decision("job", CommitDecision(replicated=records[1].key.version_id))
        store.report_damage(records[1].key, "a flipped bit")
        seal_own(store, 3)  # takes the freed slot
        with pytest.raises(ArenaBusyError):
            seal_own(store, 4)
        take_in(store, records[1])
        assert {fact.key.version for fact in store.list_shards("job")} == {1, 2, 3}
        store.replicas.apply_decision("job", CommitDecision(replicated=records[2].key.version_id))
        seal_own(store, 4)


def test_repaired_shard_is_not_damaged():
    with memory_store() as store:
        store.jobs.incarnations.set_replication_guard("job", guarded=True)
        records = [seal_own(store, version) for version in (0, 1, 2)]
        store.replicas.apply_decision("job", CommitDecision(replicated=records[2].key.version_id))
        store.report_damage(records[2].key, "a flipped bit")
        take_in(store, records[2])
        seal_own(store, 3)
        seal_own(store, 4)


def test_versions_after_the_resume_point_do_not_block_new_ones():
    """They were complete once and are no longer, so no node will ever replicate them."""
    with memory_store() as store:
        store.jobs.incarnations.set_replication_guard("job", guarded=True)
        records = [seal_own(store, version) for version in (0, 1, 2)]
        for one in records:
            store.versions.mark_committed("job", one.key.version_id)
        store.replicas.apply_decision("job", CommitDecision(replicated=records[0].key.version_id))
        store.jobs.incarnations.resume_from("job", records[0].key.version_id)
        seal_own(store, 1, epoch=2, incarnation="b")
        seal_own(store, 2, epoch=2, incarnation="b")
        assert records[0].key in {fact.key for fact in store.list_shards("job")}


def test_versions_between_replicated_and_resume_point_are_not_kept():
    with memory_store() as store:
        store.jobs.incarnations.set_replication_guard("job", guarded=True)
        records = [seal_own(store, version) for version in (0, 1, 2)]
        for one in records:
            store.versions.mark_committed("job", one.key.version_id)
        store.replicas.apply_decision("job", CommitDecision(replicated=records[0].key.version_id))
        store.jobs.incarnations.resume_from("job", records[2].key.version_id)
        seal_own(store, 3, epoch=2, incarnation="b")
        assert {fact.key.version for fact in store.list_shards("job")} == {0, 2, 3}


def test_stale_decision_does_not_evict_the_resume_point():
    with memory_store() as store:
        store.jobs.incarnations.set_replication_guard("job", guarded=True)
        records = [seal_own(store, version) for version in (0, 1)]
        store.replicas.apply_decision("job", CommitDecision(replicated=records[1].key.version_id))
        store.jobs.incarnations.resume_from("job", records[0].key.version_id)
        seal_own(store, 1, epoch=2, incarnation="b")
        store.replicas.apply_decision(
            "job", CommitDecision(replicated=records[1].key.version_id)
        )  # by a ping from a node that was away
        assert store.jobs.versions("job").replicated == records[0].key.version_id
        assert store.jobs.versions("job").resume_point == ResumePoint(2, "b", 0, records[0].key.version_id)


def test_node_without_processes_keeps_the_resume_point():
    with memory_store() as store:
        store.jobs.incarnations.set_replication_guard("job", guarded=True)
        take_in(store, record(3))
        take_in(store, record(4))
        store.jobs.incarnations.learn_resume_point("job", ResumePoint(2, "b", 0, record(3).key.version_id))
        for version in (4, 5):
            take_in(store, record(version, epoch=2, incarnation="b"))
        assert record(3).key in {fact.key for fact in store.list_shards("job")}
        with pytest.raises(FencedError, match="does not need"):
            store.replicas.begin_replica(record(4), whole=True)
        with pytest.raises(ArenaBusyError):
            store.replicas.begin_replica(record(6, epoch=2, incarnation="b"), whole=False)


def test_latest_resume_point_wins():
    with memory_store() as store:
        store.jobs.incarnations.set_replication_guard("job", guarded=True)
        store.claim("job", "a")
        versions = [record(version).key.version_id for version in range(4)]
        store.jobs.incarnations.resume_from("job", versions[3])
        again = ResumePoint(1, "a", 1, versions[3])
        store.jobs.incarnations.resume_from("job", versions[3])  # the next rank of this node
        assert store.jobs.versions("job").resume_point == again
        store.jobs.incarnations.resume_from("job", versions[1])  # that one could not be read after all
        assert store.jobs.versions("job").resume_point == ResumePoint(1, "a", 2, versions[1])
        store.jobs.incarnations.learn_resume_point("job", again)
        assert store.jobs.versions("job").resume_point == ResumePoint(1, "a", 2, versions[1])
        store.claim("job", "b")
        assert store.jobs.versions("job").resume_point == ResumePoint(2, "b", 0, versions[1])
        store.jobs.incarnations.learn_resume_point(
            "job", ResumePoint(1, "a", 7, versions[2])
        )  # a side that was cut off tried alone
        assert store.jobs.versions("job").resume_point == ResumePoint(2, "b", 0, versions[1])


def test_side_without_quorum_announces_no_resume_point_until_it_may_write():
    """Otherwise versions that the other side replicated meanwhile would count as left behind."""
    with memory_store() as store:
        cut_off = True

        def permit():
            if cut_off:
                raise NoQuorumError("sees 2 of 4 nodes")

        store.jobs.incarnations.set_replication_guard("job", guarded=True)
        store.claim("job", "a")
        versions = [record(version).key.version_id for version in range(2)]
        store.jobs.incarnations.set_replication_guard("job", guarded=True, permit=permit)
        store.jobs.incarnations.resume_from("job", versions[0])
        assert store.jobs.versions("job").resume_point is None
        store.replicas.apply_decision("job", CommitDecision(replicated=versions[1]))  # by a ping from the other side
        assert store.jobs.versions("job").replicated == versions[1]
        with pytest.raises(NoQuorumError):
            store.claim("job", "b")
        cut_off = False
        store.claim("job", "b")
        assert store.jobs.versions("job").resume_point == ResumePoint(2, "b", 0, versions[0])


def test_resume_point_of_an_overtaken_incarnation_is_dropped():
    with memory_store() as store:
        may = [NoQuorumError("sees 2 of 4 nodes")]

        def permit():
            if may:
                raise may.pop()

        store.jobs.incarnations.set_replication_guard("job", guarded=True, permit=permit)
        store.jobs.incarnations.resume_from("job", record(0).key.version_id)
        store.jobs.incarnations.fence("job", 2, "b")
        store.claim("job", "c")
        assert store.jobs.versions("job").resume_point is None


@pytest.mark.parametrize(("me", "gives_way"), [("n1", False), ("n3", True)])
def test_exactly_one_of_two_owners_of_a_shard_stays_owner(me, gives_way):
    with memory_store() as store:
        own = seal_own(store, 0)
        store.replicas.merge_holders(own.key, ("n2", me), me=me)
        assert store.replicas.list_shards("job")[0].holders == (("n2", me) if gives_way else ())
