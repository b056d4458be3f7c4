"""Slots in a trainer's address space, registered with a device that keeps the pages it was shown."""

import ctypes
import mmap
import os

import pytest
import torch

from peerstore.records import ShardKey
from tests.support.stores import pinned_file
from tieredckpt import Settings
from tieredckpt.boxes import Box
from tieredckpt.copying import Piece
from tieredckpt.device import NoDevice
from tieredckpt.layout import TensorEntry, lay_out
from tieredckpt.session import open_session
from tieredckpt.testing import memory_node

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


class Range(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class KeepsPages(NoDevice):
    """A device: it takes references to the physical pages at registration, and sees these and no others ever after."""

    def __init__(self):
        self.pages = {}
        self.refuses = ""
        self.asked = 0

    def register(self, address, size_bytes):
        self.asked += 1
        if self.refuses:
            return self.refuses
        out, into = os.pipe()
        start = size_bytes // 4 * 3 // PAGE * PAGE  # what does not fit a pipe is not watched
        size = min(size_bytes - start, 8 * PAGE)
        given = _libc.vmsplice(into, ctypes.byref(Range(address + start, size)), ctypes.c_size_t(1), 0)
        assert given == size, os.strerror(ctypes.get_errno())
        self.pages[address] = (out, into, start, size)
        return ""

    def unregister(self, address):
        out, into, *_ = self.pages.pop(address)
        os.close(out)
        os.close(into)
        return ""

    def sees(self, address):
        """Some bytes of the pages of the registration, and where they begin in it."""
        out, _, start, size = self.pages[address]
        copy, into = os.pipe()
        try:
            assert _libc.tee(out, into, ctypes.c_size_t(size), 0) == size
            found = bytearray()
            while len(found) < size:
                found += os.read(copy, size - len(found))
            return start, bytes(found)
        finally:
            os.close(copy)
            os.close(into)


@pytest.fixture
def session(tmp_path):
    with memory_node():
        yield open_session("job", Settings())


def layout_of(elements):
    return lay_out([TensorEntry("w", "float32", (elements,), Box((0,), (elements,)), 4, True)], [], None)


def saved(session, host, step, elements):
    """One save the way a writer does it, into a slot that is registered first: the slot and what it must hold."""
    tensor = torch.arange(elements, dtype=torch.float32) + 1000 * step
    staged = session.stage(ShardKey("job", step, 1, "a", 0, 0), 1, layout_of(elements), 0, wait_s=5)
    staged.memory.register(host)
    staged.memory.fill([Piece(tensor, staged.layout.header_bytes)], session.copier)
    record = session.seal(staged, staged.lease.key, [], durable=False, table=None)
    return staged, record, tensor


def test_a_device_sees_the_slot_that_is_sealed_whatever_size_the_saves_have(session):
    """Large, small, large again, as after a resize and back: what a device was shown at first is what is sealed."""
    host = KeepsPages()
    for step, elements in enumerate([200_000, 200_000, 50_000, 50_000, 200_000, 200_000, 50_000]):
        staged, record, tensor = saved(session, host, step, elements)
        header = staged.layout.header_bytes
        pin = session.node.store.pin(record.key)
        sealed = pinned_file(pin).read_bytes()[: record.size_bytes]
        session.node.store.unpin(pin.id)
        assert sealed[header : header + tensor.nbytes] == tensor.numpy().tobytes()
        start, seen = host.sees(staged.memory.address)
        watched = sealed[start : start + len(seen)]
        assert seen[: len(watched)] == watched, f"save {step}: the device has other pages"


def test_a_refused_registration_is_said_once_and_not_tried_at_every_save(session, caplog):
    host = KeepsPages()
    host.refuses = "out of locked memory"
    memories = {saved(session, host, step, 50_000)[0].memory for step in range(6)}
    assert host.asked == len(memories) < 6
    assert len([one for one in caplog.records if "out of locked memory" in one.message]) == len(memories)
