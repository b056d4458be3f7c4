"""Copies between tensors, devices and mapped slots: threads, memcpy, pinned double buffers.

A few threads copy contiguous memory with ``memcpy``, which releases the interpreter. Devices copy their tensors
straight into the slot on separate streams. All other tensors (strides, conjugates) are copied with ``copy_`` into a
view of the slot.

::

    tiers ──read──> buffer 0 ──copy──> device       the process fills one buffer
                    buffer 1 ──copy──> device       while the devices empty the other
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple, TypeVar

import torch

from peerstore.failpoints import failpoint
from peerstore.store.arena import prefault_address
from tieredckpt.tensors.device import DeviceBackend, DeviceCopy, DeviceEvent, DeviceStream, accelerator
from tieredckpt.tensors.state_dict import is_contiguous_in_memory

log = logging.getLogger(__name__)

_BATCH_BYTES = 8 << 20
_PAGE = 4096
T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)
_memcpy = _libc.memcpy
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcpy.restype = ctypes.c_void_p
_pread = _libc.pread
_pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
_pread.restype = ctypes.c_ssize_t


class SlotWrite(NamedTuple):
    """Tensor and the offset of its bytes in a slot."""

    tensor: torch.Tensor
    start: int


class MemoryCopy(NamedTuple):
    """Copy of ``size_bytes`` from one address to another."""

    target: int
    source: int
    size_bytes: int


_address_space = memoryview((ctypes.c_char * (1 << 62)).from_address(1)).cast("B")
"""View of the whole address space. A slice of it costs a tenth of a new view."""


def memory_at_address(address: int, size_bytes: int) -> memoryview:
    """Return a writable view of the bytes at an address, whose owner must outlive the view."""
    return _address_space[address - 1 : address - 1 + size_bytes]


def read_into(fd: int, target: int, offset: int, size_bytes: int) -> None:
    """Read bytes of a file to an address; raise ``OSError`` if the file is unreadable or too short."""
    while size_bytes:
        count = _pread(fd, target, size_bytes, offset)
        if count <= 0:
            code = ctypes.get_errno() if count < 0 else 0
            raise OSError(code, os.strerror(code) if code else f"the file ends {size_bytes} bytes early")
        target, offset, size_bytes = target + count, offset + count, size_bytes - count


def copy_memory(target: int, source: int, size_bytes: int) -> None:
    """Copy bytes from one address to another; other threads run meanwhile."""
    _memcpy(target, source, size_bytes)


class Copier:
    """Threads that copy memory."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="tieredckpt-copy")

    def copy(
        self, moves: Sequence[MemoryCopy], *, base: int = 0, before: Callable[[MemoryCopy], None] | None = None
    ) -> None:
        """Do all copies, to targets relative to ``base``; ``before`` receives each piece ahead of its copy."""

        def copy_piece(move: MemoryCopy) -> None:
            if before is not None:
                before(move)
            target, source, size_bytes = move
            _memcpy(base + target, source, size_bytes)

        self._run_batches(moves, copy_piece, "stage.half")

    def run_parallel(
        self,
        jobs: Sequence[T],
        do: Callable[[T], None],
        size_bytes: int,
        *,
        bytes_per_thread: int = _BATCH_BYTES,
        halfway: str = "",
    ) -> None:
        """Run ``do`` for every job in the caller and one thread per ``bytes_per_thread`` of ``size_bytes``."""
        numbers = itertools.count()
        failed: list[BaseException] = []

        def work() -> None:
            while not failed:
                number = next(numbers)
                if number >= len(jobs):
                    return
                try:
                    do(jobs[number])
                    if halfway and number == len(jobs) // 2:
                        failpoint(halfway)
                except BaseException as error:  # noqa: BLE001 - the calling thread raises it
                    failed.append(error)
                    return

        thread_count = min(self.threads, len(jobs), -(-size_bytes // bytes_per_thread))
        helpers = [self._pool.submit(work) for _ in range(thread_count - 1)]
        work()
        wait(helpers)
        if failed:
            raise failed[0]

    def copy_from_file(self, fd: int, moves: Sequence[MemoryCopy]) -> None:
        """Do all copies out of a file, with offsets as sources; raise ``OSError`` if the file is too short."""
        self._run_batches(moves, lambda move: read_into(fd, *move), "load.half")

    def _run_batches(self, moves: Sequence[MemoryCopy], do: Callable[[MemoryCopy], None], halfway: str) -> None:
        def batch(moves: list[MemoryCopy]) -> None:
            for one in moves:
                do(one)

        self.run_parallel(list(_batches(moves)), batch, sum(move.size_bytes for move in moves), halfway=halfway)

    def close(self) -> None:
        self._pool.shutdown()


def _batches(moves: Sequence[MemoryCopy]) -> Iterator[list[MemoryCopy]]:
    """Yield the copies in batches of about the same size, and split large ones."""
    batch: list[MemoryCopy] = []
    size = 0
    for move in moves:
        target, source, left = move
        if 0 < left < _BATCH_BYTES - size:
            batch.append(move)
            size += left
            continue
        while left:
            part = min(left, _BATCH_BYTES - size)
            batch.append(MemoryCopy(target, source, part))
            target, source, left, size = target + part, source + part, left - part, size + part
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


class MappedSlot:
    """Writable mapping of a slot of the node's arena in this process.

    A slot's file has a fixed size and keeps its pages. So a mapping, populated pages and a registration with a device
    remain valid until the slot has another file (of another generation).
    """

    def __init__(self, fd: int, size_bytes: int, generation: int) -> None:
        """Own ``fd``, which :meth:`close` closes."""
        self.size_bytes = size_bytes
        self.generation = generation
        self._fd = fd
        try:
            found = os.fstat(fd)
            if found.st_size < size_bytes:
                raise ValueError(f"a slot of {size_bytes} bytes has only {found.st_size}: its file was truncated")
            self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(fd)
            raise
        self._had_name = found.st_nlink > 0
        self._file = found.st_dev, found.st_ino
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._shared: torch.Tensor | None = None
        self._populated_bytes = 0
        """Number of bytes from the start whose pages this process has populated."""
        self._device: DeviceBackend | None = None
        """Backend that has registered the slot through the device ``_place``, and must unregister it."""
        self._place = torch.device("cpu")
        self._is_registered = False
        self._is_closed = False
        self._in_flight = 0
        """Number of unfinished copies of devices into the slot."""
        self._lock = threading.Lock()
        self.ready = threading.Event()
        """Set unless the slot is being populated and registered ahead of a save."""
        self.ready.set()

    @property
    def place(self) -> torch.device | None:
        """Device that the slot was registered for; ``None`` before :meth:`register`."""
        return None if self._device is None else self._place

    def maps_file(self, fd: int, size_bytes: int) -> bool:
        """Return whether an open file is the slot's and its first ``size_bytes`` are populated."""
        found = os.fstat(fd)
        whole = size_bytes <= min(found.st_size, self.size_bytes)
        return (found.st_dev, found.st_ino) == self._file and whole and self.is_populated(size_bytes)

    @property
    def is_evicted(self) -> bool:
        """Whether the agent has deleted the slot's file, so that only this mapping holds its memory."""
        return self._had_name and os.fstat(self._fd).st_nlink == 0

    def tensor(self, start: int, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
        """Return a tensor over bytes of the slot."""
        return tensor_view(self._bytes, start, dtype, sizes)

    def shared_tensor(self, lease_bytes: int, start: int, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
        """Return a tensor over bytes of the slot for another process, with one descriptor per slot.

        Call this only while the slot is leased, with the lease's size, which must not exceed the file's. Torch would
        extend a shorter file and overwrite its first byte with zero.
        """
        shared = self._shared
        if shared is None or shared.numel() != lease_bytes:
            if self.size_bytes < lease_bytes:
                raise ValueError(f"a slot of {self.size_bytes} bytes is smaller than its lease of {lease_bytes}")
            fd = os.dup(self._fd)  # torch owns this one
            storage = torch.UntypedStorage._new_shared_fd_cpu(fd, lease_bytes)  # type: ignore[attr-defined]
            shared = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (lease_bytes,))  # type: ignore[call-overload]
            self._shared = shared
        return tensor_view(shared, start, dtype, sizes)

    def write(self, start: int, data: bytes | memoryview) -> None:
        if len(data):
            end = start + len(data)
            if end > self._populated_bytes:
                self._populate_pages(start, len(data))
                self._populated_bytes = end if start <= self._populated_bytes else self._populated_bytes
            ctypes.memmove(self.address + start, bytes(data) if isinstance(data, memoryview) else data, len(data))

    def copy_in(self, pieces: Sequence[SlotWrite], copier: Copier) -> None:
        """Copy all pieces into the slot, and return when the sources may change."""
        copy = SlotCopy(self, CopyPlan(pieces))
        copy.start()
        copy.finish(copier)
        failpoint("stage.filled")

    def is_populated(self, size_bytes: int) -> bool:
        """Return whether the first ``size_bytes`` have pages in this process."""
        return self._populated_bytes >= size_bytes

    def populate(self, start: int, size_bytes: int) -> None:
        """Populate the pages of these bytes unless the process has populated them before."""
        if start + size_bytes > self._populated_bytes:
            self._populate_pages(start, size_bytes)

    def hold(self) -> None:
        """Preserve the registration until :meth:`unhold`, even if the slot is closed before."""
        with self._lock:
            self._in_flight += 1

    def unhold(self) -> None:
        with self._lock:
            self._in_flight -= 1
            self._unregister_if_done()

    def note_populated(self, first: int, end: int) -> None:
        """Record that the bytes from ``first`` to ``end`` have been written."""
        populated = self._populated_bytes
        if populated < first <= populated + _BATCH_BYTES:  # the header, which is written last
            self._populate_pages(populated, first - populated)
            populated = first
        if first <= populated < end:
            self._populated_bytes = max(self._populated_bytes, end)

    def register(self, device: DeviceBackend, place: torch.device) -> bool:
        """Register the slot, once, for direct copies by devices; return whether that succeeded."""
        with self._lock:
            if self._device is None and not self._is_closed:
                self._device = device
                self._place = place
                problem = device.register_host_memory(self.address, self.size_bytes, place)
                self._is_registered = not problem
                if problem:
                    log.warning(
                        "a slot of %d bytes could not be registered with the device (%s): copies into it go through "
                        "another buffer and take longer. Most often the limit on locked memory is too low (ulimit -l)",
                        self.size_bytes,
                        problem,
                    )
            return self._is_registered

    def _unregister_if_done(self) -> None:
        """Unregister a closed slot once no device copies into it, before the mapping ends."""
        if self._is_closed and not self._in_flight and self._is_registered and self._device is not None:
            self._is_registered = False
            problem = self._device.unregister_host_memory(self.address, self._place)
            if problem:
                log.warning("a slot of %d bytes stays registered with the device: %s", self.size_bytes, problem)

    def close(self) -> None:
        """Close the file. Tensors over the mapping hold the mapping until they are collected."""
        with self._lock:
            self._is_closed = True
            self._unregister_if_done()
        self._shared = None
        os.close(self._fd)

    def prefault(self, copier: Copier, stopped: Callable[[], bool]) -> None:
        """Populate all pages in the copier's threads, until ``stopped`` returns ``True``."""

        def populate(start: int) -> None:
            if not stopped():
                self._populate_pages(start, min(_BATCH_BYTES, self.size_bytes - start))

        copier.run_parallel(range(0, self.size_bytes, _BATCH_BYTES), populate, self.size_bytes)
        if not stopped():
            self._populated_bytes = self.size_bytes

    def _populate_pages(self, start: int, size_bytes: int) -> None:
        first = (self.address + start) // _PAGE * _PAGE
        stop = self.address + start + size_bytes
        prefault_address(first, stop - first)


class CopyPlan:
    """Tensors grouped by their kind of copy, for any slot."""

    def __init__(self, pieces: Sequence[SlotWrite]) -> None:
        self.moves: list[MemoryCopy] = []
        """Copies with offsets in the slot as targets."""
        self.others: list[SlotWrite] = []
        self.on_devices: dict[torch.device, list[SlotWrite]] = {}
        first, end = (pieces[0].start if pieces else 0), 0
        device_of = accelerator().device_of
        for piece in pieces:  # a state may have many small tensors, so this loop is short
            tensor, start = piece
            size = tensor.nbytes
            first = min(first, start)
            end = max(end, start + size)
            place = device_of(tensor)
            if place is not None:
                self.on_devices.setdefault(place, []).append(piece)
            elif is_contiguous_in_memory(tensor):
                self.moves.append(MemoryCopy(start, tensor.data_ptr(), size))
            else:
                self.others.append(piece)
        self.first, self.end = first, end


class SlotCopy:
    """One copy of tensors into a slot. The tensors must not change before its end.

    :meth:`start` enqueues the devices' copies, :meth:`finish` copies the tensors in this process's memory and waits for
    the devices. Any thread may finish.
    """

    def __init__(self, slot: MappedSlot, plan: CopyPlan) -> None:
        self._slot = slot
        self._plan = plan
        self._device = accelerator()
        self._streams: list[DeviceStream] = []
        self._is_held = False

    @property
    def has_host_part(self) -> bool:
        return bool(self._plan.moves or self._plan.others)

    def start(self) -> dict[torch.device, DeviceEvent]:
        """Enqueue the devices' copies; return an event after the copies of each device."""
        events: dict[torch.device, DeviceEvent] = {}
        on_devices = self._plan.on_devices
        if not on_devices:
            return events
        self._slot.hold()
        self._is_held = True
        try:
            self._slot.register(self._device, next(iter(on_devices)))
            for place, some in on_devices.items():
                stream = self._device.new_stream(place)
                self._streams.append(stream)
                stream.wait_stream(self._device.current_stream(place))  # the work that computed the state
                copies = [DeviceCopy(self._target(*piece), piece.tensor.detach()) for piece in some]
                self._device.copy(copies, stream)
                events[place] = stream.record_event()
        except BaseException:
            self.wait_for_devices()
            raise
        return events

    def finish(self, copier: Copier) -> None:
        """Copy the tensors in this process's memory, and wait for the devices even after an error."""
        try:
            self.copy_host_part(copier)
        finally:
            self.wait_for_devices()
        self._slot.note_populated(self._plan.first, self._plan.end)

    def copy_host_part(self, copier: Copier) -> None:
        for tensor, start in self._plan.others:
            self._target(tensor, start).copy_(tensor.detach())
        slot = self._slot

        def populate(move: MemoryCopy) -> None:
            slot.populate(move.target, move.size_bytes)

        before = None if slot.is_populated(self._plan.end) else populate
        copier.copy(self._plan.moves, base=slot.address, before=before)

    def wait_for_devices(self) -> None:
        """Wait until no device writes into the slot, so that it may be released."""
        streams, self._streams = self._streams, []
        try:
            with contextlib.ExitStack() as stack:
                for stream in streams:
                    stack.callback(stream.synchronize)
        finally:
            if self._is_held:
                self._is_held = False
                self._slot.unhold()

    def _target(self, tensor: torch.Tensor, start: int) -> torch.Tensor:
        self._slot.populate(start, tensor.nbytes)
        return self._slot.tensor(start, tensor.dtype, tensor.shape)


def tensor_view(data: torch.Tensor, start: int, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
    """Return a tensor over a range of the bytes of ``data``."""
    return data[start : start + math.prod(sizes) * dtype.itemsize].view(dtype).view(tuple(sizes))


BUFFER_BYTES = 32 << 20


class StagingBuffers:
    """Two buffers of one load, for the loading thread only."""

    def __init__(self, device: DeviceBackend, place: torch.device, size_bytes: int = BUFFER_BYTES) -> None:
        """``place``: one of the devices, which registers the buffers."""
        self.size_bytes = size_bytes
        self._device = device
        self._place = place
        self._streams: dict[torch.device, DeviceStream] = {}
        self._registers = True
        self._buffers = (_PinnedBuffer(size_bytes), _PinnedBuffer(size_bytes))

    def acquire(self) -> _PinnedBuffer:
        """Return the buffer to fill next, after the devices have emptied it."""
        self._buffers = self._buffers[::-1]
        buffer = self._buffers[0]
        buffer.wait()
        if self._registers and not buffer.is_registered:
            problem = self._device.register_host_memory(buffer.address, self.size_bytes, self._place)
            self._registers = buffer.is_registered = not problem
            if problem:
                log.warning(
                    "a buffer of %d bytes could not be registered with the device (%s): this load takes longer. Most "
                    "often the limit on locked memory is too low (ulimit -l)",
                    self.size_bytes,
                    problem,
                )
        return buffer

    def submit(self, copies: Mapping[torch.device, Sequence[DeviceCopy]]) -> None:
        """Enqueue the devices' copies out of the buffer that was filled last."""
        for place, some in copies.items():
            stream = self._streams.get(place)
            if stream is None:
                stream = self._streams[place] = self._device.new_stream(place)
            stream.wait_stream(self._device.current_stream(place))  # pending work on the targets
            try:
                self._device.copy(some, stream)
            finally:
                self._buffers[0].emptied.append(stream.record_event())

    def synchronize(self) -> None:
        """Wait until all submitted copies are done."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Wait for the devices, even after an error, and unregister the buffers."""
        with contextlib.ExitStack() as stack:
            for buffer in self._buffers:
                if buffer.is_registered:
                    stack.callback(self._unregister, buffer)
            for stream in self._streams.values():
                stack.callback(stream.synchronize)

    def _unregister(self, buffer: _PinnedBuffer) -> None:
        buffer.is_registered = False
        problem = self._device.unregister_host_memory(buffer.address, self._place)
        if problem:
            log.warning("a buffer of %d bytes stays registered with the device: %s", self.size_bytes, problem)


class _PinnedBuffer:
    def __init__(self, size_bytes: int) -> None:
        self._map = mmap.mmap(-1, size_bytes)  # whole pages, populated at their first use
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.is_registered = False
        self.emptied: list[DeviceEvent] = []
        """Events after the devices' copies out of this buffer."""

    def wait(self) -> None:
        for event in self.emptied:
            event.synchronize()
        self.emptied.clear()

    def tensor(self, start: int, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
        return tensor_view(self._bytes, start, dtype, sizes)
