"""The table of slot states: its picture, its transitions, and the indexes over the slots."""

import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerstore.daemon_process import current_process
from peerstore.settings import StoreSettings
from peerstore.shard_records import CHUNK_BYTES, Lease, ShardRecord
from peerstore.store import slots
from peerstore.store.arena import MemfdArena
from peerstore.store.node_store import NodeStore
from peerstore.store.slot_eviction import SlotLimits
from peerstore.store.slot_metadata import SealMetadata
from peerstore.store.slot_table import SlotTable
from peerstore.store.slots import LEASE_STATES, SHARD_STATES, TRANSITIONS, ArenaSlot, SlotState
from tests.support.slot_tables import assert_indexes_match
from tests.support.stores import save_shard, shard_key

OWNER = current_process()


def drawn_transitions(text: str) -> dict[SlotState, tuple[SlotState, ...]]:
    """Parse the picture of a docstring: one state a line, and the states that follow it."""
    found = {}
    for state, following in re.findall(r"^    (\w+) *->(.*)$", text, re.MULTILINE):
        found[SlotState(state)] = tuple(SlotState(one.strip()) for one in following.split(",") if one.strip())
    return found


def test_slots_docstring_draws_the_transitions():
    assert drawn_transitions(slots.__doc__) == TRANSITIONS


def test_slots_transitions_list_every_state():
    assert set(TRANSITIONS) == set(SlotState)
    assert {state for following in TRANSITIONS.values() for state in following} == set(SlotState) - {SlotState.NEW}


def new_table() -> SlotTable:
    return SlotTable(MemfdArena(), SlotLimits(1 << 30, 2, 1), lambda: 0.0)


def lease_of(number: int, version: int) -> Lease:
    return Lease(f"lease{number}-{version}", shard_key(version, number % 2), 2, 8, f"s{number}", number, 0, 8)


def seal_of(number: int, version: int) -> SealMetadata:
    record = ShardRecord(shard_key(version, number % 2), 2, 8, CHUNK_BYTES, b"12345678", b"", 0)
    return SealMetadata(f"lease{number}-{version}", record)


def change(table: SlotTable, slot: ArenaSlot, state: SlotState, version: int) -> None:
    number = slot.generation
    options = {}
    if state in LEASE_STATES and slot.state not in LEASE_STATES:
        options = {"lease": lease_of(number, version), "owner": OWNER}
    elif state in SHARD_STATES and slot.state not in SHARD_STATES:
        options = {"shard": seal_of(number, version)}
    table._change(slot, state, **options)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(list(SlotState)), st.integers(0, 2)), max_size=40))
def test_slots_change_only_as_drawn_and_stay_indexed(steps):
    table = new_table()
    made = [ArenaSlot(f"s{number}", number, 8, 0, "job", number % 2) for number in range(4)]
    for number, state, version in steps:
        slot, before = made[number], made[number].state
        if state in TRANSITIONS[before]:
            change(table, slot, state, version)
            assert slot.state is state
        else:
            with pytest.raises(RuntimeError, match=f"is {before.value} and cannot become {state.value}"):
                change(table, slot, state, version)
            assert slot.state is before
        assert (slot.lease is not None) == (slot.state in LEASE_STATES)
        assert (slot.record is not None) == (slot.state in SHARD_STATES)
        assert (slot.name in table.slots) == (slot.state not in (SlotState.NEW, SlotState.REMOVED))
        assert_indexes_match(table)


def test_slots_retired_shard_leaves_its_key_to_a_new_slot():
    table = new_table()
    old, new = (ArenaSlot(f"s{number}", number, 8, 0, "job", 0) for number in (0, 2))
    for state in (SlotState.FREE, SlotState.LEASED, SlotState.SEALED, SlotState.RETIRED):
        change(table, old, state, 1)
    assert table.slots.for_key(shard_key(1)) is None
    for state in (SlotState.FREE, SlotState.LEASED, SlotState.SEALED):
        change(table, new, state, 1)
    assert table.slots.for_key(shard_key(1)) is new
    assert table.slots.with_shard(shard_key(1)) == [old, new]


def test_slots_end_of_an_earlier_seal_does_not_disturb_a_later_one():
    table = new_table()
    slot = ArenaSlot("s0", 0, 8, 0, "job", 0)
    for state in (SlotState.FREE, SlotState.LEASED, SlotState.SEALING):
        change(table, slot, state, 1)
    earlier = slot.lease
    for state in (SlotState.SEALED, SlotState.FREE, SlotState.LEASED, SlotState.SEALING):
        change(table, slot, state, 2)
    with table.lock:
        table.resume_lease(slot, earlier)
        assert slot.state is SlotState.SEALING
        table.resume_lease(slot, slot.lease)
    assert slot.state is SlotState.LEASED


def test_slots_dropped_unrecognized_wake_waiting_writers():
    arena = MemfdArena()
    store = NodeStore(arena, StoreSettings(budget=str(1 << 20)), threads=1)
    waits = threading.Event()

    def wait() -> None:
        with store.table.lock:
            waits.set()
            store.table.lock.wait(None)

    try:
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        assert waits.wait(100)
        store.drop_unrecognized()
        waiting.join(20)
        assert not waiting.is_alive()
    finally:
        store.close()
        arena.purge()


@pytest.mark.parametrize("shards", [8, 64])
def test_slots_lease_looks_at_the_writers_slots_only(monkeypatch, shards):
    arena, looked = MemfdArena(), []
    store = NodeStore(arena, StoreSettings(budget=str(1 << 20)), threads=1)
    try:
        store.claim("job", "a")
        for part in range(shards):
            save_shard(store, shard_key(1, part), 64, parts=shards)
        save_shard(store, shard_key(2, 0), 64, parts=1)
        monkeypatch.setattr(
            ArenaSlot, "view", property(lambda slot, real=ArenaSlot.view.fget: looked.append(slot) or real(slot))
        )
        store.lease(shard_key(3, 0), 64, 1)
        assert {slot.part for slot in looked} == {0}
    finally:
        store.close()
        arena.purge()


def test_slots_revoked_lease_whose_file_stays_is_given_to_no_other_writer(monkeypatch):
    """The file cannot be removed while its fenced writer may still write into it."""
    arena = MemfdArena()
    store = NodeStore(arena, StoreSettings(budget="1024"), threads=1)
    try:
        store.claim("job", "a")
        fenced = store.lease(shard_key(1), 512, 1)
        with monkeypatch.context() as patch:
            patch.setattr(arena, "remove", failing_remove)
            with pytest.raises(OSError, match="input/output"):
                store.claim("job", "b")
        later = store.lease(shard_key(2, epoch=2, name="b"), 512, 1)
        assert later.slot != fenced.slot
        assert fenced.slot in arena.list_slots()
        store.sweep()
        assert arena.list_slots() == [later.slot]
    finally:
        store.close()
        arena.purge()


def failing_remove(name: str) -> None:
    raise OSError(5, "input/output error", name)
