"""Contract of every store: in this process, over anonymous memory, and behind an agent's socket."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from peerstore import deadlines
from peerstore.client.store_api import Store
from peerstore.daemon_process import current_process, process_identity
from peerstore.errors import (
    ArenaBusyError,
    ArenaFullError,
    FencedError,
    InvalidNameError,
    LeaseLostError,
    RequestError,
    ShardNotFoundError,
)
from peerstore.settings import StoreSettings
from peerstore.store.arena import FileMapping, TmpfsArena, closing_fd, prefault_address
from peerstore.store.node_store import NodeStore
from peerstore.testing import memory_store
from tests.support.stores import (
    MIB,
    flip_byte,
    load_shard,
    pinned_file,
    save_shard,
    shard_content,
    shard_key,
    store_agent,
    store_directory,
    write_slot,
)


@contextlib.contextmanager
def in_process_store(budget: str) -> Iterator[Store]:
    with (
        store_directory() as directory,
        contextlib.closing(NodeStore(TmpfsArena(directory), StoreSettings(budget=budget))) as store,
    ):
        yield store


@contextlib.contextmanager
def agent_process_store(budget: str) -> Iterator[Store]:
    with store_directory() as directory, store_agent(directory, "--budget", budget) as agent:
        with agent.client(retry_s=20) as client:
            yield client
        assert agent.end() == 0


@pytest.fixture(scope="module")
def agent_store() -> Iterator[Store]:
    with agent_process_store("64MiB") as store:
        yield store


@pytest.fixture(params=["node", "memory", "agent"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Yield a store without jobs. Tests share one agent, and each deletes its jobs."""
    if request.param == "agent":
        store = request.getfixturevalue("agent_store")
        yield store
        delete_all_jobs(store)
    else:
        with (in_process_store if request.param == "node" else memory_store)("64MiB") as store:
            yield store


def delete_all_jobs(store: Store) -> None:
    for job in store.status().jobs:
        store.claim(job.job, "end-of-test")  # ends all leases
        store.versions.delete(job.job)
    status = store.status()
    assert status.jobs == ()
    assert status.arena.slots == 0


# -- writing and reading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, MIB + 1, 5 * MIB + 17])
def test_sealed_shard_is_read_back_exactly(store, size):
    record = save_shard(store, shard_key(), size, meta=b"about it")
    assert (record.key, record.size_bytes, record.meta, len(record.checksums)) == (
        shard_key(),
        size,
        b"about it",
        8 * -(-size // MIB),
    )
    assert load_shard(store, shard_key()) == shard_content(shard_key(), size)
    assert store.verify(shard_key()) == ()


def test_inventory_lists_only_sealed_shards(store):
    save_shard(store, shard_key(3, part=8), parts=9, meta=b"m")
    store.lease(shard_key(4, part=8), 10, 9)
    (fact,) = store.list_shards("job")
    assert (fact.key, fact.parts, fact.size_bytes, fact.meta, fact.marked_committed) == (
        shard_key(3, part=8),
        9,
        MIB,
        b"m",
        False,
    )
    assert store.list_shards("nobody") == []
    assert store.list_shards() == [fact]


def test_absent_shard_is_distinguished_from_errors(store):
    save_shard(store, shard_key(1))
    for other in (
        shard_key(2),
        shard_key(1, part=1),
        shard_key(1, epoch=2),
        shard_key(1, job="job2"),
        shard_key(1, attempt=1),
        shard_key(1, name="b"),
    ):
        with pytest.raises(ShardNotFoundError):
            store.pin(other)
        with pytest.raises(ShardNotFoundError):
            store.verify(other)


def test_fewer_bytes_than_leased_may_be_sealed_never_more(store):
    lease = store.lease(shard_key(), 1000, 1)
    write_slot(lease, b"x" * 1000)
    for size in (1001, -1):
        with pytest.raises(RequestError, match="cannot seal"):
            store.seal(lease.id, size)
    store.seal(lease.id, 10)
    assert load_shard(store, shard_key()) == b"x" * 10


def test_writers_and_jobs_are_separate(store):
    keys = [shard_key(part=part, job=job) for part in (0, 8, 16) for job in ("job", "job.job", "j")]
    for of in keys:
        save_shard(store, of, 5000, parts=17)
    for of in keys:
        assert load_shard(store, of) == shard_content(of, 5000)


def test_oversized_metadata_is_refused(store):
    lease = store.lease(shard_key(), 10, 1)
    with pytest.raises(RequestError, match="meta has"):
        store.seal(lease.id, 0, b"x" * ((16 << 20) + 1))
    store.seal(lease.id, 0, b"x" * (1 << 20))


# -- repeated calls ---------------------------------------------------------------------------------------------------


def test_sealing_again_gives_the_same_answer(store):
    lease = store.lease(shard_key(), 100, 1)
    first = store.seal(lease.id, 50, b"meta")
    assert store.seal(lease.id, 50, b"meta") == first


def test_leasing_again_gives_the_same_slot(store):
    first = store.lease(shard_key(), 100, 1)
    again = store.lease(shard_key(), 100, 1)
    assert (again.slot, again.generation) == (first.slot, first.generation)
    assert store.status().arena.leases == 1


def test_leasing_again_for_more_stays_within_the_budget(store):
    store.lease(shard_key(job="other"), 40 * MIB, 1)
    store.lease(shard_key(), MIB, 1)
    with pytest.raises(ArenaBusyError):
        store.lease(shard_key(), 40 * MIB, 1)
    assert store.lease(shard_key(), 20 * MIB, 1).size_bytes == 20 * MIB


def test_a_sealed_key_is_not_written_again(store):
    save_shard(store, shard_key())
    with pytest.raises(RequestError, match="sealed already"):
        store.lease(shard_key(), 10, 1)


def test_second_release_has_no_effect(store):
    lease = store.lease(shard_key(), 100, 1)
    store.release(lease.id)
    store.release(lease.id)
    store.release("never")
    with pytest.raises(LeaseLostError):
        store.seal(lease.id, 10)
    assert store.lease(shard_key(), 100, 1).slot == lease.slot, "the slot was not free"


def test_a_seal_from_several_threads_happens_once(store):
    lease = store.lease(shard_key(), 8 * MIB, 1)
    write_slot(lease, shard_content(shard_key(), 8 * MIB))
    found = []
    threads = [threading.Thread(target=lambda: found.append(store.seal(lease.id, 8 * MIB))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({record.sealed_ns for record in found}) == 1


# -- slots ------------------------------------------------------------------------------------------------------------


def test_two_slots_alternate_and_keep_the_newest_committed_version(store):
    slots = []
    for version in range(6):
        lease = store.lease(shard_key(version), MIB, 1)
        slots.append(lease.slot)
        write_slot(lease, shard_content(shard_key(version), MIB))
        if version:
            assert load_shard(store, shard_key(version - 1)) == shard_content(shard_key(version - 1), MIB)
        store.seal(lease.id, MIB)
    assert len(set(slots)) == 2
    assert slots[0::2] == [slots[0]] * 3


def test_saves_of_similar_size_reuse_the_same_files(store):
    """Slots are reused, so that a writer maps each of them once."""
    sizes = [10 * MIB, 10 * MIB + 4000, 10 * MIB - 70_000, 9 * MIB, 10 * MIB + 1, 10 * MIB]
    leases = []
    for version, size in enumerate(sizes):
        leases.append(store.lease(shard_key(version), size, 1))
        write_slot(leases[-1], shard_content(shard_key(version), size))
        assert store.seal(leases[-1].id, size).size_bytes == size
        assert load_shard(store, shard_key(version)) == shard_content(shard_key(version), size)
    assert len({(lease.slot, lease.generation, lease.slot_bytes) for lease in leases}) == 3  # the first was too small


def test_a_save_of_another_size_gets_another_file(store):
    found = {}
    for version, size in enumerate([8 * MIB, 8 * MIB, MIB, MIB, 8 * MIB, 8 * MIB]):
        lease = store.lease(shard_key(version), size, 1)
        assert found.setdefault(lease.slot, lease.slot_bytes) == lease.slot_bytes, "it has one size for its life"
        write_slot(lease, shard_content(shard_key(version), size))
        store.seal(lease.id, size)
    assert sorted(found.values()) == [MIB] * 2 + [8 * MIB] * 4
    assert store.status().arena.allocated_bytes == 16 * MIB


def test_only_leased_or_free_slots_open_for_writing(store):
    lease = store.lease(shard_key(), MIB, 1)
    with closing_fd(store.open_slot(lease.slot)) as fd:
        assert os.fstat(fd).st_size == lease.slot_bytes
        os.pwrite(fd, shard_content(shard_key(), MIB), 0)
    store.seal(lease.id, MIB)
    assert load_shard(store, shard_key()) == shard_content(shard_key(), MIB)
    for name in (lease.slot, "slot.job.0.nowhere", "../slot", ""):
        with pytest.raises(LeaseLostError):
            store.open_slot(name)
    (free, *_) = store.reserve("job", 1, MIB)
    os.close(store.open_slot(free.slot))


def test_newest_committed_version_is_never_evicted_for_unfinished_ones(store):
    for part in (0, 1):
        save_shard(store, shard_key(1, part), parts=2)
    for version in (2, 3):
        save_shard(store, shard_key(version, 0), parts=2)  # part 1 never comes
    with pytest.raises(ArenaBusyError, match="the newest complete one"):
        store.lease(shard_key(4, 0), MIB, 2)
    assert load_shard(store, shard_key(1, 0)) == shard_content(shard_key(1, 0), MIB)


def test_external_mark_commits_a_version(store):
    save_shard(store, shard_key(1, 0), parts=2)
    save_shard(store, shard_key(2, 0), parts=2)
    store.versions.mark_committed("job", shard_key(2).version_id)
    assert [fact.marked_committed for fact in sorted(store.list_shards("job"), key=lambda fact: fact.key)] == [
        False,
        True,
    ]
    save_shard(store, shard_key(3, 0), parts=2)
    save_shard(store, shard_key(4, 0), parts=2)
    assert 1 not in {fact.key.version for fact in store.list_shards("job")}
    assert load_shard(store, shard_key(2, 0)) == shard_content(shard_key(2, 0), MIB)


def test_unfinished_past_incarnations_do_not_block_the_job(store):
    for epoch in (1, 2, 3, 4, 5, 6):
        save_shard(store, shard_key(5, 0, epoch=epoch), parts=2)
    assert len(store.list_shards("job")) <= 3
    save_shard(store, shard_key(6, 1, epoch=6), parts=2)


def test_superseded_versions_of_other_jobs_are_evicted(store):
    for version in range(2):
        save_shard(store, shard_key(version, job="old"), 20 * MIB)
    save_shard(store, shard_key(0), 44 * MIB)
    assert load_shard(store, shard_key(1, job="old")) == shard_content(shard_key(1, job="old"), 20 * MIB)


def test_impossible_lease_reports_the_needed_budget(store):
    save_shard(store, shard_key(1), 40 * MIB)
    with pytest.raises(ArenaFullError, match=rf"raise the budget to 80\.0 MiB \({80 * MIB} bytes\) or more"):
        store.lease(shard_key(2), 40 * MIB, 1)
    with pytest.raises(ArenaFullError):
        store.lease(shard_key(2), 1 << 62, 1, wait_s=60)


def required_budget(budget, use):
    """Return the budget that the first error of ``use`` names, or ``None`` without an error."""
    with in_process_store(str(budget)) as store:
        try:
            use(store)
        except (ArenaBusyError, ArenaFullError) as error:
            told = (
                r"raise the budget to .* \(([0-9]+) bytes\) or more \(`tieredckpt agent restart --dir /\S+ --budget \1`"
            )
            return int(re.search(told, str(error))[1])
    return None


def test_reported_budget_is_sufficient():
    """It also suffices for a second version without evicting the first."""

    def use(store):
        for version in range(5):
            save_shard(store, shard_key(version), 46 * MIB - 12345)

    assert required_budget(required_budget(40 * MIB, use), use) is None


def test_reported_budget_is_sufficient_for_growing_slots():
    def use(store):
        for version in range(5):
            lease = store.lease(shard_key(version), 10 * MIB, 1)
            store.grow(lease.id, 23 * MIB + 1)
            store.seal(lease.id, 23 * MIB + 1)

    assert required_budget(required_budget(30 * MIB, use), use) is None


def test_reported_budget_is_sufficient_for_all_writers():
    """It includes the slots that other writers had not requested at the first error."""
    others = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]

    def use(store):
        for part, owner in enumerate((current_process(), *(process_identity(other.pid) for other in others))):
            store.jobs.clients.client_connected(owner, "job")
            if not part:
                store.jobs.clients.client_connected(owner, "job")  # it may have several connections
        for version in range(4):
            for part in range(3):
                save_shard(store, shard_key(version, part), 10 * MIB + 1, parts=3)

    try:
        assert required_budget(required_budget(8 * MIB, use), use) is None
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_waiting_lease_ends_when_a_slot_is_free(store):
    held = store.lease(shard_key(job="other"), 50 * MIB, 1)
    timer = threading.Timer(0.05, store.release, [held.id])
    timer.start()
    assert store.lease(shard_key(), 50 * MIB, 1, wait_s=60).size_bytes == 50 * MIB
    timer.join()


def test_slots_are_reserved_within_the_budget(store):
    slots = store.reserve("job", 0, MIB)
    assert len(slots) == 2
    assert store.lease(shard_key(), MIB, 1).slot in {slot.slot for slot in slots}
    assert store.reserve("job", 1, 40 * MIB) == store.reserve("job", 1, 40 * MIB)
    assert store.status().arena.allocated_bytes <= 64 * MIB


def test_reserve_returns_sealed_slots_of_the_same_part(store):
    """A process that resumes a job maps them before its first save without changing their shards."""
    for version in range(2):
        save_shard(store, shard_key(version))
    slots = store.reserve("job", 0, MIB)
    assert len(slots) == 2
    for slot in slots:
        with closing_fd(store.open_slot(slot.slot)) as fd, FileMapping(fd, slot.size_bytes, writable=True) as mapping:
            prefault_address(mapping.address, slot.size_bytes)
    for version in range(2):
        assert load_shard(store, shard_key(version)) == shard_content(shard_key(version), MIB)
    assert store.lease(shard_key(2), MIB, 1).slot in {slot.slot for slot in slots}


# -- readers ----------------------------------------------------------------------------------------------------------


def test_a_pinned_shard_never_changes(store):
    save_shard(store, shard_key(0))
    pin = store.pin(shard_key(0))
    for version in range(1, 6):
        save_shard(store, shard_key(version))
    with FileMapping(pin.fd, MIB) as mapping, mapping.view as view:
        assert bytes(view) == shard_content(shard_key(0), MIB)
    assert store.unpin(pin.id) is True
    assert store.unpin(pin.id) is False
    save_shard(store, shard_key(6))
    save_shard(store, shard_key(7))
    assert shard_key(0) not in {fact.key for fact in store.list_shards("job")}


def test_a_pin_brings_a_file_to_read_and_not_to_write(store):
    save_shard(store, shard_key(0))
    pin = store.pin(shard_key(0))
    assert os.pread(pin.fd, MIB, 0) == shard_content(shard_key(0), MIB)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(pin.fd, b"other", 0)
    pin.close()
    pin.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pread(pin.fd, 1, 0)
    assert store.unpin(pin.id) is True


def test_pinned_shard_stays_readable_when_dropped(store):
    """A damage report by another reader drops the shard, so ``unpin`` returns False."""
    save_shard(store, shard_key(0))
    pin = store.pin(shard_key(0))
    store.report_damage(shard_key(0), "a reader saw other bytes")
    for version in range(1, 4):
        save_shard(store, shard_key(version))
    assert os.pread(pin.fd, MIB, 0) == shard_content(shard_key(0), MIB)
    assert store.unpin(pin.id) is False


def test_pinned_shard_outlives_its_deletion_but_is_not_offered(store):
    save_shard(store, shard_key(0))
    pin = store.pin(shard_key(0))
    assert store.versions.delete("job", [shard_key(0).version_id]) == 1
    assert store.list_shards("job") == []
    with pytest.raises(ShardNotFoundError):
        store.pin(shard_key(0))
    for version in range(1, 4):
        save_shard(store, shard_key(version))
    with FileMapping(pin.fd, MIB) as mapping, mapping.view as view:
        assert bytes(view) == shard_content(shard_key(0), MIB)
    assert store.unpin(pin.id) is True
    assert store.status().arena.free_slots == 1


def test_damage_is_found_reported_and_the_shard_dropped(store):
    save_shard(store, shard_key(1), 3 * MIB)
    pin = store.pin(shard_key(1))
    flip_byte(pinned_file(pin), 2 * MIB)
    assert store.verify(shard_key(1), (0, 2)) == ()
    assert store.verify(shard_key(1), (1, 3)) == (2,)
    assert store.unpin(pin.id) is False, "what was read in between has to be looked at again"
    with pytest.raises(ShardNotFoundError):
        store.verify(shard_key(1))
    assert any("job/1 part 0" in damage.what for damage in store.status().damage_reports)


def test_version_with_a_lost_part_cannot_be_committed(store):
    for version in (1, 2):
        save_shard(store, shard_key(version))
        store.versions.mark_committed("job", shard_key(version).version_id)
    store.report_damage(shard_key(2), "a reader saw other bytes")
    store.versions.mark_committed("job", shard_key(2).version_id)
    assert store.status().jobs[0].newest_committed == 1
    for version in (3, 4):
        save_shard(store, shard_key(version), parts=2)
    with pytest.raises(ArenaBusyError):
        store.lease(shard_key(5), MIB, 2)
    assert load_shard(store, shard_key(1)) == shard_content(shard_key(1), MIB)


@pytest.mark.parametrize("chunks", [(-1, 1), (1, 0), (0, 2), (0, 1 << 60)])
def test_nonexistent_chunks_are_refused(store, chunks):
    save_shard(store, shard_key())
    with pytest.raises(RequestError, match="chunks"):
        store.verify(shard_key(), chunks)
    assert store.status().arena.pins == 0
    assert load_shard(store, shard_key()) == shard_content(shard_key(), MIB)


# -- forgetting -------------------------------------------------------------------------------------------------------


def test_deleted_version_is_not_committed(store):
    for version in (1, 2):
        save_shard(store, shard_key(version))
        store.versions.mark_committed("job", shard_key(version).version_id)
    assert store.versions.delete("job", [shard_key(2).version_id]) == 1
    assert store.status().jobs[0].newest_committed == 1
    for version in (3, 4):
        save_shard(store, shard_key(version), parts=2)
    with pytest.raises(ArenaBusyError):
        store.lease(shard_key(5), MIB, 2)
    assert load_shard(store, shard_key(1)) == shard_content(shard_key(1), MIB)


def test_deleting_a_job_removes_all_of_it_and_no_other(store):
    for job in ("job", "job2"):
        save_shard(store, shard_key(job=job))
        store.blobs.put(job, "layout", b"x")
    assert store.versions.delete("job") == 1
    assert store.versions.delete("job") == 0
    assert [fact.key.job for fact in store.list_shards()] == ["job2"]
    assert (store.blobs.list_names("job"), store.blobs.list_names("job2")) == ([], ["layout"])


# -- incarnations -----------------------------------------------------------------------------------------------------


def test_a_newer_incarnation_fences_the_older(store):
    old = store.lease(shard_key(1), 100, 1)
    assert store.claim("job", "newer") == 2
    assert store.claim("job", "newer") == 2
    assert store.epoch("job") == 2
    with pytest.raises(FencedError):
        store.seal(old.id, 10)
    with pytest.raises(FencedError, match="must stop writing"):
        store.lease(shard_key(2), 100, 1)
    with pytest.raises(FencedError):
        store.lease(shard_key(2, epoch=2, name="pretender"), 100, 1)
    save_shard(store, shard_key(2, epoch=2, name="newer"))


def test_slot_of_a_fenced_writer_is_not_reused_while_it_may_write(store):
    old = store.lease(shard_key(1), 4096, 1)
    with (
        closing_fd(store.open_slot(old.slot)) as fd,
        FileMapping(fd, 4096, writable=True) as mapping,
        mapping.view as view,
    ):
        record = save_shard(store, shard_key(1, epoch=2, name="newer"), 4096)
        view[:] = b"z" * 4096
        assert load_shard(store, record.key) == shard_content(record.key, 4096)


def test_epoch_of_another_node_fences_older_writers(store):
    assert store.claim("job", "a", at_least=7) == 8
    assert store.epoch("job") == 8
    for number in (-1, 1 << 62):
        with pytest.raises(RequestError):
            store.claim("job", "b", at_least=number)


def test_a_slot_can_be_labelled_later(store):
    lease = store.lease(shard_key(0, attempt=9), MIB, 1)
    write_slot(lease, shard_content(shard_key(7), MIB))
    assert store.relabel(lease.id, shard_key(7)).key == shard_key(7)
    store.seal(lease.id, MIB)
    assert load_shard(store, shard_key(7)) == shard_content(shard_key(7), MIB)
    other = store.lease(shard_key(8, attempt=9), MIB, 1)
    for wrong in (shard_key(7), shard_key(9, part=1), shard_key(9, job="other")):
        with pytest.raises(RequestError):
            store.relabel(other.id, wrong)


def test_relabeled_slot_survives_a_newer_incarnation(store):
    lease = store.lease(shard_key(0, attempt=9), MIB, 1)
    write_slot(lease, shard_content(shard_key(7, epoch=5), MIB))
    other = store.lease(shard_key(1, job="job", attempt=9), MIB, 1)
    later = shard_key(7, epoch=5, name="later")
    assert store.relabel(lease.id, later).key == later
    with pytest.raises(LeaseLostError):
        store.seal(other.id, MIB)
    store.seal(lease.id, MIB)
    assert load_shard(store, later) == shard_content(shard_key(7, epoch=5), MIB)
    past = store.lease(shard_key(8, epoch=5, name="later"), MIB, 1)
    with pytest.raises(FencedError):
        store.relabel(past.id, shard_key(8, epoch=4))
    assert store.seal(past.id, MIB).key == past.key


# -- blobs ------------------------------------------------------------------------------------------------------------


def test_blobs_are_stored_per_job(store):
    save_shard(store, shard_key())
    store.blobs.put("job", "a", b"1")
    store.blobs.put("job", "a", b"2")
    store.blobs.put("job.a", "a", b"3")
    store.blobs.put("job", "a@b-c.d_E", bytes(1 << 20))
    assert store.blobs.get("job", "a") == b"2"
    assert store.blobs.list_names("job") == ["a", "a@b-c.d_E"]
    store.blobs.remove("job", "a")
    store.blobs.remove("job", "a")
    with pytest.raises(ShardNotFoundError):
        store.blobs.get("job", "a")
    assert store.blobs.get("job.a", "a") == b"3"
    store.blobs.remove("job.a", "a")


def test_the_longest_names_are_kept_too(store):
    job = "j" * 128
    save_shard(store, shard_key(part=(1 << 20) - 1, job=job, name="i" * 64), 10, parts=1 << 20)
    store.blobs.put(job, "b" * 240, b"1")
    assert store.blobs.list_names(job) == ["b" * 240]
    store.versions.delete(job)
    assert store.blobs.list_names(job) == []


def test_a_large_blob_is_refused(store):
    with pytest.raises(RequestError, match="blob large has"):
        store.blobs.put("job", "large", bytes((48 << 20) + 1))


# -- wrong requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\0", "a b", "é", "x" * 129, "a\n"])
def test_names_invalid_as_files_are_refused(store, name):
    attempts = [
        lambda: store.lease(shard_key(job=name), 10, 1),
        lambda: store.claim(name, "a"),
        lambda: store.reserve(name, 0, 10),
        lambda: store.blobs.put(name, "a", b""),
        lambda: store.versions.mark_committed(name, shard_key().version_id),
        lambda: store.epoch(name),
    ]
    for attempt in attempts:
        with pytest.raises(InvalidNameError, match="not allowed"):
            attempt()
    assert store.status().jobs == ()


@pytest.mark.parametrize("name", ["", ".", "../a", "/etc/passwd", "a/b", "-a", ".a", "a\0", "x" * 241])
def test_blob_names_that_leave_the_folder_are_refused(store, name):
    for attempt in (
        lambda: store.blobs.put("job", name, b""),
        lambda: store.blobs.get("job", name),
        lambda: store.blobs.remove("job", name),
    ):
        with pytest.raises(InvalidNameError, match="blob name"):
            attempt()


@pytest.mark.parametrize(
    ("wrong", "size", "parts"),
    [
        (shard_key(-1), 10, 1),
        (shard_key(1 << 62), 10, 1),
        (shard_key(epoch=-1), 10, 1),
        (shard_key(epoch=1 << 62), 10, 1),
        (shard_key(attempt=1 << 62), 10, 1),
        (shard_key(part=-1), 10, 1),
        (shard_key(part=1), 10, 1),
        (shard_key(), 10, 0),
        (shard_key(), 10, (1 << 20) + 1),
        (shard_key(), -1, 1),
        (shard_key(name=""), 10, 1),
        (shard_key(name="a/../b"), 10, 1),
    ],
)
def test_numbers_out_of_range_are_refused(store, wrong, size, parts):
    with pytest.raises(RequestError):
        store.lease(wrong, size, parts)
    assert store.status().arena.slots == 0


def test_nan_timeout_does_not_wait(store):
    store.lease(shard_key(job="other"), 40 * MIB, 1)
    with pytest.raises(ArenaBusyError):
        store.lease(shard_key(), 40 * MIB, 1, wait_s=float("nan"))


def test_wait_ends_at_the_callers_deadline(store):
    """The request carries the caller's remaining time, whichever process has the store."""
    store.lease(shard_key(job="other"), 40 * MIB, 1)
    lease = store.lease(shard_key(), 10 * MIB, 1)
    for wait in (
        lambda: store.lease(shard_key(2), 40 * MIB, 1, wait_s=60),
        lambda: store.grow(lease.id, 40 * MIB, wait_s=60),
    ):
        began = time.monotonic()
        with deadlines.timeout_scope(0.3), pytest.raises(ArenaBusyError):
            wait()
        assert time.monotonic() - began < 20


# -- growing ----------------------------------------------------------------------------------------------------------


def test_leased_slot_grows_and_keeps_its_data(store):
    lease = store.lease(shard_key(), 1000, 1)
    write_slot(lease, b"first")
    grown = store.grow(lease.id, 3 * MIB)
    assert (grown.id, grown.key, grown.size_bytes) == (lease.id, lease.key, 3 * MIB)
    assert grown.generation != lease.generation, "it is another file"
    assert grown.slot_bytes >= 3 * MIB
    write_slot(grown, b"last", 3 * MIB - 4)
    store.seal(grown.id, 3 * MIB)
    assert load_shard(store, shard_key()) == b"first" + bytes(3 * MIB - 9) + b"last"


def test_growing_to_a_smaller_size_changes_nothing(store):
    lease = store.lease(shard_key(), MIB, 1)
    assert store.grow(lease.id, 10) == lease
    assert store.grow(lease.id, 2 * MIB) == store.grow(lease.id, 2 * MIB)


def test_growth_of_a_slot_is_accounted_for(store):
    lease = store.lease(shard_key(), MIB, 1)
    store.grow(lease.id, 40 * MIB)
    assert store.status().arena.allocated_bytes == 40 * MIB
    with pytest.raises(ArenaBusyError):
        store.lease(shard_key(part=1), 30 * MIB, 2)


def test_growth_above_the_budget_reports_the_need_and_loses_no_data(store):
    save_shard(store, shard_key(0))
    lease = store.lease(shard_key(1), MIB, 1)
    write_slot(lease, b"kept")
    with pytest.raises(ArenaFullError, match=rf"budget is 64\.0 MiB, of which 1\.0 MiB .* \({129 * MIB} bytes\)"):
        store.grow(lease.id, 64 * MIB)
    store.seal(lease.id, 4)
    assert load_shard(store, shard_key(1)) == b"kept"
    assert load_shard(store, shard_key(0)) == shard_content(shard_key(0), MIB)


def test_growth_evicts_superseded_versions_and_free_slots_only(store):
    for version in range(2):
        save_shard(store, shard_key(version), 20 * MIB)
    store.release(store.lease(shard_key(0, job="other"), 10 * MIB, 1).id)
    lease = store.lease(shard_key(2), MIB, 1)
    store.grow(lease.id, 43 * MIB)  # the smaller file is removed once its bytes are in the larger one
    assert [fact.key.version for fact in store.list_shards("job")] == [1]
    assert load_shard(store, shard_key(1)) == shard_content(shard_key(1), 20 * MIB)


def test_growth_does_not_wait_by_default(store):
    store.lease(shard_key(job="other"), 40 * MIB, 1)
    lease = store.lease(shard_key(), MIB, 1)
    with pytest.raises(ArenaBusyError, match="grows to"):
        store.grow(lease.id, 40 * MIB)


def test_only_a_lease_can_grow(store):
    lease = store.lease(shard_key(), 10, 1)
    store.seal(lease.id, 0)
    with pytest.raises(RequestError, match="sealed already"):
        store.grow(lease.id, 20)
    with pytest.raises(LeaseLostError):
        store.grow("nobody", 20)
