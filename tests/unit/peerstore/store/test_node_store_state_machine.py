"""Random histories of a store, checked against a small model.

The model tracks acknowledged shards and possible evictions. The store must agree after every
call, even when it is killed and opened again and when bytes are flipped.
"""

import itertools
import secrets
import shutil
import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from peerstore.errors import ArenaBusyError, ArenaFullError, FencedError, ShardNotFoundError
from peerstore.settings import StoreSettings
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from tests.support.example_counts import examples
from tests.support.leaks import process_prefix
from tests.support.slot_tables import assert_indexes_match
from tests.support.stores import flip_byte, load_shard, shard_content, shard_key, write_slot

KIB = 1 << 10
BUDGET = 512 * KIB
PARTS = 2


class StoreLife(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.directory = Path("/dev/shm") / (process_prefix("peerstore") + uuid.uuid4().hex[:8])
        self.store = None
        self.patch = pytest.MonkeyPatch()
        numbers = itertools.count(1 << 40)  # names of slots, so that a history can be replayed step by step
        self.patch.setattr(secrets, "randbits", lambda bits: next(numbers))

    @initialize()
    def begin(self):
        self.epoch, self.name, self.attempt = 1, "i1", 0
        self.leases = {}  # lease id -> lease
        self.sealed = {}  # key -> size of acknowledged shards that are neither forgotten nor damaged
        self.lost = set()  # groups that had a part forgotten or damaged
        self.damaged = set()  # those of them that count as incomplete, even if a node reports them complete
        self.deleted = set()  # versions that the owner deleted
        self.marked = set()
        self.pins = {}
        self.open()
        assert self.store.claim("job", self.name) == self.epoch

    def open(self):
        self.store = NodeStore(TmpfsArena(self.directory), StoreSettings(budget=str(BUDGET)), threads=1)

    # -- what a job does ----------------------------------------------------------------------------------------------

    @rule(version=st.integers(0, 5), part=st.integers(0, PARTS - 1), size=st.integers(0, 200 * KIB))
    def lease(self, version, part, size):
        self.attempt += 1
        of = shard_key(version, part, epoch=self.epoch, name=self.name, attempt=self.attempt // 2)
        if of in self.sealed or any(lease.key == of for lease in self.leases.values()) or of.version_id in self.lost:
            return
        if any(group == of.version_id for group, _ in self.marked):
            return  # a complete version has no writers
        before = self.whole()
        try:
            lease = self.store.lease(of, size, PARTS)
        except (ArenaBusyError, ArenaFullError):
            assert self.here() == set(self.sealed), "a refusal costs nothing"
            return
        self.leases[lease.id] = lease
        self.settle(before)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), size=st.integers(0, 300 * KIB))
    def grow(self, data, size):
        lease = self.leases[data.draw(st.sampled_from(list(self.leases)))]
        before = self.whole()
        try:
            self.leases[lease.id] = self.store.grow(lease.id, size)
        except (ArenaBusyError, ArenaFullError):
            return
        self.settle(before)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def seal(self, data):
        lease = self.leases.pop(data.draw(st.sampled_from(list(self.leases))))
        size = data.draw(st.integers(0, lease.size_bytes))
        write_slot(lease, shard_content(lease.key, size))
        record = self.store.seal(lease.id, size)
        assert self.store.seal(lease.id, size) == record
        self.sealed[lease.key] = size

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def abandon(self, data):
        lease = self.leases.pop(data.draw(st.sampled_from(list(self.leases))))
        self.store.release(lease.id)

    @rule()
    def restart_the_job(self):
        self.epoch += 1
        self.name = f"i{self.epoch}"
        assert self.store.claim("job", self.name) == self.epoch
        for lease in self.leases.values():
            try:
                self.store.seal(lease.id, 0)
            except FencedError:
                continue
            raise AssertionError("a fenced writer sealed")
        self.leases.clear()

    # -- what its readers and owners do -------------------------------------------------------------------------------

    @precondition(lambda self: self.sealed)
    @rule(data=st.data())
    def mark(self, data):
        of = data.draw(st.sampled_from(sorted(self.sealed)))
        if any(lease.key.version_id == of.version_id for lease in self.leases.values()):
            return
        self.store.versions.mark_committed("job", of.version_id)
        if of.version_id not in self.damaged | self.deleted:
            self.marked.add((of.version_id, frozenset(k.part for k in self.sealed if k.version_id == of.version_id)))

    @precondition(lambda self: self.sealed and len(self.pins) < 2)
    @rule(data=st.data())
    def pin(self, data):
        of = data.draw(st.sampled_from(sorted(self.sealed)))
        self.pins[self.store.pin(of).id] = of

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        pin = data.draw(st.sampled_from(list(self.pins)))
        of = self.pins.pop(pin)
        assert self.store.unpin(pin) == (of.version_id not in self.damaged_groups())

    @precondition(lambda self: self.sealed)
    @rule(data=st.data())
    def forget(self, data):
        of = data.draw(st.sampled_from(sorted(self.sealed)))
        gone = {k for k in self.sealed if k.version_id == of.version_id}
        assert self.store.versions.delete("job", [of.version_id]) == len(gone)
        self.deleted.add(of.version_id)
        self.lose(gone)

    @precondition(lambda self: any(self.sealed.values()) and not self.pins)
    @rule(data=st.data())
    def flip_a_byte(self, data):
        of = data.draw(st.sampled_from(sorted(k for k, size in self.sealed.items() if size)))
        flip_byte(self.store.reader.shard_path(of), data.draw(st.integers(0, self.sealed[of] - 1)))
        if data.draw(st.booleans()):
            assert self.store.verify(of) == (0,)
        else:
            self.kill_the_agent()
        assert any(str(of) == damage.what for damage in self.store.status().damage_reports)
        self.damaged.add(of.version_id)
        self.lose({of})

    @rule()
    def kill_the_agent(self):
        """Kill the agent without notice; the next one reads the arena."""
        self.store.close()
        self.pins.clear()
        self.open()
        self.store.list_shards()

    # -- the model ----------------------------------------------------------------------------------------------------

    def lose(self, keys):
        for of in keys:
            del self.sealed[of]
        gone = {of.version_id for of in keys}
        self.lost |= gone
        self.marked = {(group, parts) for group, parts in self.marked if group not in gone}

    def damaged_groups(self):
        return set()  # bytes are flipped only while no client reads

    def here(self):
        return {fact.key for fact in self.store.list_shards("job")}

    def whole(self):
        groups = {of.version_id for of in self.sealed}
        found = {g for g in groups if sum(of.version_id == g for of in self.sealed) == PARTS}
        return found | {g for g, parts in self.marked if all(key_of(g, part) in self.sealed for part in parts)}

    def settle(self, before):
        """Check the evictions of this call.

        The store evicts no part of the newest complete version, no newer part of this incarnation, and no pinned part.
        """
        newest = max(before, default=None)
        for of in set(self.sealed) - self.here():
            superseded = newest is not None and of.version_id < newest
            stranded = of.epoch < self.epoch and of.version_id not in before
            assert superseded or stranded, of
            assert of not in self.pins.values()
            del self.sealed[of]

    # -- always -------------------------------------------------------------------------------------------------------

    @invariant()
    def what_was_acknowledged_is_here(self):
        if self.store is not None:
            assert self.here() == set(self.sealed)
            for of, size in self.sealed.items():
                assert load_shard(self.store, of) == shard_content(of, size)

    @invariant()
    def the_budget_holds(self):
        if self.store is not None:
            arena = self.store.status().arena
            assert arena.allocated_bytes <= BUDGET
            assert arena.leases == len(self.leases)
            files = list((self.directory / "slots").iterdir())
            assert sum(file.stat().st_size for file in files) == arena.allocated_bytes
            assert len(files) == arena.slots

    @invariant()
    def the_newest_whole_version_is_what_the_store_says(self):
        if self.store is not None:
            jobs = self.store.status().jobs
            newest = max(self.whole(), default=None)
            assert [job.newest_committed for job in jobs if job.newest_committed is not None] == (
                [newest.version] if newest else []
            )

    @invariant()
    def the_indexes_match_the_slots(self):
        if self.store is not None:
            with self.store.table.lock:
                assert_indexes_match(self.store.table)

    @invariant()
    def what_is_gone_is_absent(self):
        if self.store is not None:
            try:
                self.store.pin(shard_key(99))
            except ShardNotFoundError:
                return
            raise AssertionError

    def teardown(self):
        self.patch.undo()
        if self.store is not None:
            self.store.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def key_of(group, part):
    return shard_key(group.version, part, epoch=group.epoch, name=group.incarnation, attempt=group.attempt)


StoreLife.TestCase.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStoreLife = StoreLife.TestCase
