"""Copies between tensors, devices and mapped slots: threads, memcpy, pinned double buffers.

A copy of memory is done piece by piece with ``memcpy`` by a few threads (each call releases the interpreter), what is
on a device is copied by that device straight into the slot, on a stream of its own; everything else (strides,
conjugates) is a ``copy_`` into a view of the slot.

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
    """A tensor and where its bytes go in a slot."""

    tensor: torch.Tensor
    start: int


class MemoryCopy(NamedTuple):
    """``size_bytes`` from one address to another."""

    target: int
    source: int
    size_bytes: int


_everywhere = memoryview((ctypes.c_char * (1 << 62)).from_address(1)).cast("B")
"""All addresses there are, as one view: cutting some out of it is a tenth of the work of making a new one."""


def memory_at_address(address: int, size_bytes: int) -> memoryview:
    """The bytes at an address, writable. Whoever owns them has to keep them there."""
    return _everywhere[address - 1 : address - 1 + size_bytes]


def read_into(fd: int, target: int, offset: int, size_bytes: int) -> None:
    """Read bytes of a file to an address. ``OSError`` when they cannot be read, or the file ends before."""
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
    """A few threads that move memory."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="tieredckpt-copy")

    def copy(self, moves: Sequence[MemoryCopy], *, before: Callable[[MemoryCopy], None] | None = None) -> None:
        """Do all moves; ``before`` is called with each piece's target range first (to put pages behind it)."""

        def one(move: MemoryCopy) -> None:
            if before is not None:
                before(move)
            _memcpy(move.target, move.source, move.size_bytes)

        self._share(moves, one, "stage.half")

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
        tickets = itertools.count()
        failed: list[BaseException] = []

        def work() -> None:
            while not failed:
                number = next(tickets)
                if number >= len(jobs):
                    return
                try:
                    do(jobs[number])
                    if halfway and number == len(jobs) // 2:
                        failpoint(halfway)
                except BaseException as error:  # noqa: BLE001 - raised by the thread that asked
                    failed.append(error)
                    return

        most = min(self.threads, len(jobs), -(-size_bytes // bytes_per_thread))
        helpers = [self._pool.submit(work) for _ in range(most - 1)]
        work()
        wait(helpers)
        if failed:
            raise failed[0]

    def copy_from_file(self, fd: int, moves: Sequence[MemoryCopy]) -> None:
        """Do all moves out of a file: their sources are offsets in it. Raises when the file is too short."""
        self._share(moves, lambda move: read_into(fd, *move), "load.half")

    def _share(self, moves: Sequence[MemoryCopy], do: Callable[[MemoryCopy], None], halfway: str) -> None:
        def batch(moves: list[MemoryCopy]) -> None:
            for one in moves:
                do(one)

        self.run_parallel(list(_batches(moves)), batch, sum(move.size_bytes for move in moves), halfway=halfway)

    def close(self) -> None:
        self._pool.shutdown()


def _batches(moves: Sequence[MemoryCopy]) -> Iterator[list[MemoryCopy]]:
    """Moves in groups of about the same size, large ones split."""
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
    """A slot of the node's arena in this process's address space, writable.

    A slot's file has one size for its life, and the pages it once has are its own: what was mapped, touched or
    registered with a device stays so until the file is another one (of another generation).
    """

    def __init__(self, fd: int, size_bytes: int, generation: int) -> None:
        """``fd`` is this object's from here on."""
        self.size_bytes = size_bytes
        self.generation = generation
        self._fd = fd
        try:
            found = os.fstat(fd)
            if found.st_size < size_bytes:
                raise ValueError(f"a slot of {size_bytes} bytes has only {found.st_size}: somebody has truncated it")
            self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(fd)
            raise
        self._named = found.st_nlink > 0
        self._file = found.st_dev, found.st_ino
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._shared: torch.Tensor | None = None
        self._touched = 0
        """How many bytes from the front on have been touched by this process."""
        self._device: DeviceBackend | None = None
        """Who was asked to register the slot, and has to be asked to undo it; in the name of ``_place``."""
        self._place = torch.device("cpu")
        self._is_registered = False
        self._is_closed = False
        self._in_flight = 0
        """How many threads have given devices copies into the slot and have not seen them done."""
        self._lock = threading.Lock()
        self.ready = threading.Event()
        """Not set while the slot is being populated and registered ahead of a save."""
        self.ready.set()

    @property
    def place(self) -> torch.device | None:
        """The device that copies into the slot by itself; ``None`` where none was asked to."""
        return None if self._device is None else self._place

    def maps_file(self, fd: int, size_bytes: int) -> bool:
        """Return whether an open file is the slot's and its first ``size_bytes`` are populated."""
        found = os.fstat(fd)
        whole = size_bytes <= min(found.st_size, self.size_bytes)
        return (found.st_dev, found.st_ino) == self._file and whole and self.is_populated(size_bytes)

    @property
    def is_evicted(self) -> bool:
        """Whether the agent has given the slot up: nothing but this mapping keeps its memory."""
        return self._named and os.fstat(self._fd).st_nlink == 0

    def tensor(self, start: int, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
        """A tensor over bytes of the slot."""
        return tensor_view(self._bytes, start, dtype, sizes)

    def shared_tensor(self, lease_bytes: int, start: int, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
        """The same, to be handed to another process: all tensors of a slot travel as one descriptor.

        Only while the slot is leased, with the lease's size: no more than the file has. Torch's own mapping of a file
        that is shorter extends it, and writes a zero over its first byte.
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
            if end > self._touched:
                self._put_pages(start, len(data))
                self._touched = end if start <= self._touched else self._touched
            ctypes.memmove(self.address + start, bytes(data) if isinstance(data, memoryview) else data, len(data))

    def copy_in(self, pieces: Sequence[SlotWrite], copier: Copier) -> None:
        """Copy every piece to its place. Returns when the sources may change again."""
        copy = SlotCopy(self, CopyPlan(pieces))
        copy.start()
        copy.finish(copier)
        failpoint("stage.filled")

    def is_populated(self, size_bytes: int) -> bool:
        """Return whether the first ``size_bytes`` have pages in this process."""
        return self._touched >= size_bytes

    def populate(self, start: int, size_bytes: int) -> None:
        """Populate the pages of these bytes if this process has touched none of them yet."""
        if start + size_bytes > self._touched:
            self._put_pages(start, size_bytes)

    def hold(self) -> None:
        """Stay registered until :meth:`unhold`, even if the slot is closed meanwhile."""
        with self._lock:
            self._in_flight += 1

    def unhold(self) -> None:
        with self._lock:
            self._in_flight -= 1
            self._unregister_if_done()

    def note_populated(self, first: int, end: int) -> None:
        """Record that the bytes from ``first`` to ``end`` have been written."""
        warm = self._touched
        if warm < first <= warm + _BATCH_BYTES:  # the header, which is written last
            self._put_pages(warm, first - warm)
            warm = first
        if first <= warm < end:
            self._touched = max(self._touched, end)

    def register(self, device: DeviceBackend, place: torch.device) -> bool:
        """Let devices copy straight into the slot: once, for as long as the mapping lives; whether they can."""
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
        """Before the mapping goes, and never under a copy."""
        if self._is_closed and not self._in_flight and self._is_registered and self._device is not None:
            self._is_registered = False
            problem = self._device.unregister_host_memory(self.address, self._place)
            if problem:
                log.warning("a slot of %d bytes stays registered with the device: %s", self.size_bytes, problem)

    def close(self) -> None:
        """Let go of the file; tensors over the mapping keep it until they are gone."""
        with self._lock:
            self._is_closed = True
            self._unregister_if_done()
        self._shared = None
        os.close(self._fd)

    def prefault(self, copier: Copier, stopped: Callable[[], bool]) -> None:
        """Put a page behind every byte, in the copier's threads, unless it is ``stopped``."""

        def put(start: int) -> None:
            if not stopped():
                self._put_pages(start, min(_BATCH_BYTES, self.size_bytes - start))

        copier.run_parallel(range(0, self.size_bytes, _BATCH_BYTES), put, self.size_bytes)
        if not stopped():
            self._touched = self.size_bytes

    def _put_pages(self, start: int, size_bytes: int) -> None:
        first = (self.address + start) // _PAGE * _PAGE
        stop = self.address + start + size_bytes
        prefault_address(first, stop - first)


class CopyPlan:
    """Tensors grouped by the way in which they are copied; usable with any slot."""

    def __init__(self, pieces: Sequence[SlotWrite]) -> None:
        self.moves: list[MemoryCopy] = []
        """Targets are offsets in the slot."""
        self.others: list[SlotWrite] = []
        self.on_devices: dict[torch.device, list[SlotWrite]] = {}
        self.first, self.end = (pieces[0].start if pieces else 0), 0
        device = accelerator()
        for piece in pieces:
            tensor, start = piece
            size = tensor.nbytes
            self.first = min(self.first, start)
            self.end = max(self.end, start + size)
            place = device.device_of(tensor)
            if place is not None:
                self.on_devices.setdefault(place, []).append(piece)
            elif is_contiguous_in_memory(tensor):
                self.moves.append(MemoryCopy(start, tensor.data_ptr(), size))
            else:
                self.others.append(piece)


class SlotCopy:
    """One copy of tensors into a slot. Nothing may change them before it has ended.

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
            slot.populate(move.target - slot.address, move.size_bytes)

        moves = [MemoryCopy(slot.address + target, source, size) for target, source, size in self._plan.moves]
        copier.copy(moves, before=None if slot.is_populated(self._plan.end) else populate)

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
    """A tensor over some of the bytes of ``data``."""
    return data[start : start + math.prod(sizes) * dtype.itemsize].view(dtype).view(tuple(sizes))


BUFFER_BYTES = 32 << 20


class StagingBuffers:
    """Two buffers, for one load, used by the thread that loads."""

    def __init__(self, device: DeviceBackend, place: torch.device, size_bytes: int = BUFFER_BYTES) -> None:
        """``place``: one of the devices, in whose name the buffers are registered."""
        self.size_bytes = size_bytes
        self._device = device
        self._place = place
        self._streams: dict[torch.device, DeviceStream] = {}
        self._registers = True
        self._buffers = (_PinnedBuffer(size_bytes), _PinnedBuffer(size_bytes))

    def acquire(self) -> _PinnedBuffer:
        """The buffer that is filled next: the devices are done with what it held."""
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
        """Have the devices empty the buffer that was filled last."""
        for place, some in copies.items():
            stream = self._streams.get(place)
            if stream is None:
                stream = self._streams[place] = self._device.new_stream(place)
            stream.wait_stream(self._device.current_stream(place))  # what still computes with the targets
            try:
                self._device.copy(some, stream)
            finally:
                self._buffers[0].emptied.append(stream.record_event())

    def synchronize(self) -> None:
        """Everything that was sent is where it belongs."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Nothing reads the buffers any more, whatever has failed; then they go."""
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
        self._map = mmap.mmap(-1, size_bytes)  # whole pages, and none before they are used
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.is_registered = False
        self.emptied: list[DeviceEvent] = []
        """What the devices copy out of it has ended with these."""

    def wait(self) -> None:
        for event in self.emptied:
            event.synchronize()
        self.emptied.clear()

    def tensor(self, start: int, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
        return tensor_view(self._bytes, start, dtype, sizes)
