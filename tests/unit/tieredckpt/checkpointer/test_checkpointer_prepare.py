"""Memory of the next saves: created, populated and registered before the call that uses it."""

from __future__ import annotations

import logging
import threading
from collections import Counter

import pytest
import torch

from peerstore.store.slot_table import SlotTable
from tests.support.async_device import AsyncDevice
from tests.support.bits import assert_same_bits, zeros_like_state
from tieredckpt import Checkpointer, TieredReader, TieredWriter
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.errors import SaveFailedError
from tieredckpt.session.session import close_sessions, open_session
from tieredckpt.settings import load_settings
from tieredckpt.tensors.device import use_device_backend
from tieredckpt.tensors.slot_copy import MappedSlot
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB = "tiered://job"
WAIT_S = 60.0
WORK = {SlotTable: ("create",), MappedSlot: ("__init__", "_populate_pages")}


@pytest.fixture
def node():
    with memory_node() as one:
        yield one


@pytest.fixture
def work(monkeypatch):
    """Calls that make, map or populate memory, counted by thread."""
    counts: Counter[tuple[int, str]] = Counter()

    def watch(owner, name):
        real = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[threading.get_ident(), name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for owner, names in WORK.items():
        for name in names:
            watch(owner, name)
    return counts


def state_at(step):
    return {f"w{number}": torch.arange(1 << 20, dtype=torch.float32) + step + number for number in range(6)} | {
        "step": step
    }


def prepared(job="job"):
    open_session(job, load_settings()).slots.wait_until_prepared()


def work_of(counts, call):
    """Return the memory calls of this thread in ``call``."""
    before = Counter(counts)
    result = call()
    done = counts - before
    return {name for thread, name in done if thread == threading.get_ident()}, result


def test_prepared_saves_find_their_memory_populated(node, work):
    with Checkpointer(JOB) as ckpt:
        ckpt.prepare(state_at(0))
        prepared()
        for step in range(4):
            done, saved = work_of(work, lambda step=step: ckpt.save(state_at(step), step))
            assert (step, done) == (step, set())
            assert saved.wait(timeout_s=WAIT_S) is SaveState.SEALED
        state = zeros_like_state(state_at(3))
        assert ckpt.restore(state) == 3
        assert_same_bits(state_at(3), state)


def test_second_save_finds_its_memory_populated(node, work):
    with Checkpointer(JOB) as ckpt:
        ckpt.save(state_at(0), 0).wait(timeout_s=WAIT_S)
        prepared()
        for step in range(1, 4):
            done, saved = work_of(work, lambda step=step: ckpt.save(state_at(step), step))
            assert (step, done) == (step, set())
            saved.wait(timeout_s=WAIT_S)
        state = zeros_like_state(state_at(3))
        assert ckpt.restore(state) == 3
        assert_same_bits(state_at(3), state)


@pytest.mark.parametrize("is_async", [False, True])
def test_second_dcp_save_finds_its_memory_populated(node, work, is_async):
    def save(step):
        writer = TieredWriter(JOB, step)
        if is_async:
            saving = torch.distributed.checkpoint.async_save(
                state_at(step), storage_writer=writer, async_stager=writer, no_dist=True
            )
            return getattr(saving, "upload_completion", saving)
        return torch.distributed.checkpoint.save(state_at(step), storage_writer=writer, no_dist=True)

    for step in range(4):
        done, saving = work_of(work, lambda step=step: save(step))
        if is_async:
            saving.result(WAIT_S)
        if step:
            assert (step, done) == (step, set())
        prepared()
    state = zeros_like_state(state_at(3))
    torch.distributed.checkpoint.load(state, storage_reader=TieredReader(JOB), no_dist=True)
    assert_same_bits(state_at(3), state)


def test_process_that_restores_finds_the_memory_of_an_earlier_one(node, work):
    with Checkpointer(JOB) as ckpt:
        for step in range(3):
            ckpt.save(state_at(step), step).wait(timeout_s=WAIT_S)
    close_sessions()
    with Checkpointer(JOB) as ckpt:
        state = zeros_like_state(state_at(2))
        assert ckpt.restore(state) == 2
        prepared()
        for step in range(3, 6):
            done, saved = work_of(work, lambda step=step: ckpt.save(state_at(step), step))
            assert (step, done) == (step, set())
            saved.wait(timeout_s=WAIT_S)
        assert ckpt.restore(state) == 5
        assert_same_bits(state_at(5), state)


def test_prepared_memory_is_registered_before_the_save(node):
    device = AsyncDevice()
    with use_device_backend(device), Checkpointer(JOB) as ckpt:
        state = {name: device.to_device(one) for name, one in state_at(0).items() if name != "step"}
        ckpt.prepare(state)
        prepared()
        before = set(device.registered)
        assert len(before) == 2
        for step in range(4):
            ckpt.save(state, step).wait(timeout_s=WAIT_S)
        assert device.registered == before
        close_sessions()
        device.close()
    assert device.violations == []


def test_save_waits_only_for_the_slot_it_needs(node, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tieredckpt")
    first, second, waits = threading.Event(), threading.Event(), threading.Event()
    order: list[MappedSlot] = []
    populate = MappedSlot.prefault

    def held(slot, *args):
        order.append(slot)
        assert (first if len(order) == 1 else second).wait(WAIT_S)
        populate(slot, *args)
        first.set()

    class Heard(logging.Handler):
        def emit(self, record):
            if "still being prepared" in record.getMessage():
                waits.set()

    monkeypatch.setattr(MappedSlot, "prefault", held)
    handler = Heard()
    logging.getLogger("tieredckpt").addHandler(handler)
    try:
        with Checkpointer(JOB) as ckpt:
            ckpt.prepare(state_at(0))
            while not order:
                assert not first.wait(0.001)
            found: list[object] = []
            saving = threading.Thread(target=lambda: found.append(ckpt.save(state_at(0), 0)))
            saving.start()
            assert waits.wait(WAIT_S)
            assert found == []
            first.set()
            saving.join(WAIT_S)
            assert len(found) == 1
            assert not second.is_set()
            second.set()
            found[0].wait(timeout_s=WAIT_S)
            state = zeros_like_state(state_at(0))
            assert ckpt.restore(state) == 0
            assert_same_bits(state_at(0), state)
    finally:
        first.set(), second.set()
        logging.getLogger("tieredckpt").removeHandler(handler)


def test_first_save_returns_before_its_seal(node, monkeypatch):
    sealing, sealed = node.store.seal, threading.Event()

    def seal(*args, **kwargs):
        assert sealed.wait(WAIT_S)
        return sealing(*args, **kwargs)

    monkeypatch.setattr(node.store, "seal", seal)
    with Checkpointer(JOB) as ckpt:
        try:
            state = state_at(0)
            saved = ckpt.save(state, 0)
            assert saved.state is SaveState.STAGED
            for one in state.values():
                if isinstance(one, torch.Tensor):
                    one.zero_()
        finally:
            sealed.set()
        assert saved.wait(timeout_s=WAIT_S) is SaveState.SEALED
        assert ckpt.restore(state) == 0
        assert_same_bits(state_at(0), state)


def test_first_save_that_another_rank_fails_releases_its_slot(node, monkeypatch):
    def finish(*_args, **_kwargs):
        raise SaveFailedError("rank 1 has no slot")

    with Checkpointer(JOB) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(TieredWriter, "finish", finish)
            saved = ckpt.save(state_at(0), 0)
        assert saved.state is SaveState.FAILED
        assert "rank 1 has no slot" in str(saved.error)
        assert [slot.lease for slot in node.store.table.slots.all() if slot.lease] == []
        assert node.store.list_shards("job") == []
        assert ckpt.save(state_at(1), 1).wait(timeout_s=WAIT_S) is SaveState.SEALED
        state = zeros_like_state(state_at(1))
        assert ckpt.restore(state) == 1
        assert_same_bits(state_at(1), state)


def test_save_after_a_first_save_that_was_not_sealed_is_planned(node, monkeypatch):
    """Otherwise this rank would wait for the other ranks in the collectives of planning."""
    sealing, fails = node.store.seal, [True]

    def seal(*args, **kwargs):
        if fails.pop():
            raise OSError("no memory for a note")
        fails.append(False)
        return sealing(*args, **kwargs)

    monkeypatch.setattr(node.store, "seal", seal)
    with Checkpointer(JOB) as ckpt:
        saved = ckpt.save(state_at(0), 0)
        with pytest.raises(Exception, match="no memory for a note"):
            saved.wait(timeout_s=WAIT_S)
        fails.append(False)
        monkeypatch.setattr(TieredWriter, "prepare_local_plan", None)
        assert ckpt.save(state_at(1), 1).wait(timeout_s=WAIT_S) is SaveState.SEALED
        state = zeros_like_state(state_at(1))
        assert ckpt.restore(state) == 1
        assert_same_bits(state_at(1), state)
