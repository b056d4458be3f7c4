"""Registered memory of this process through which bytes reach devices.

::

    tiers ──read──> buffer 0 ──copy──> device       the process fills one buffer
                    buffer 1 ──copy──> device       while the devices empty the other
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections.abc import Mapping, Sequence

import torch

from tieredckpt.copying import view_of
from tieredckpt.device import Copy, Device, Event, Stream

log = logging.getLogger(__name__)

BUFFER_BYTES = 32 << 20


class StagingBuffers:
    """Two buffers, for one load, used by the thread that loads."""

    def __init__(self, device: Device, place: torch.device, size_bytes: int = BUFFER_BYTES) -> None:
        """``place``: one of the devices, in whose name the buffers are registered."""
        self.size_bytes = size_bytes
        self._device = device
        self._place = place
        self._streams: dict[torch.device, Stream] = {}
        self._registers = True
        self._buffers = (_Buffer(size_bytes), _Buffer(size_bytes))

    def next(self) -> _Buffer:
        """The buffer that is filled next: the devices are done with what it held."""
        self._buffers = self._buffers[::-1]
        buffer = self._buffers[0]
        buffer.wait()
        if self._registers and not buffer.is_registered:
            problem = self._device.register(buffer.address, self.size_bytes, self._place)
            self._registers = buffer.is_registered = not problem
            if problem:
                log.warning(
                    "a buffer of %d bytes could not be registered with the device (%s): this load takes longer. Most "
                    "often the limit on locked memory is too low (ulimit -l)",
                    self.size_bytes,
                    problem,
                )
        return buffer

    def send(self, copies: Mapping[torch.device, Sequence[Copy]]) -> None:
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

    def finish(self) -> None:
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

    def _unregister(self, buffer: _Buffer) -> None:
        buffer.is_registered = False
        problem = self._device.unregister(buffer.address, self._place)
        if problem:
            log.warning("a buffer of %d bytes stays registered with the device: %s", self.size_bytes, problem)


class _Buffer:
    def __init__(self, size_bytes: int) -> None:
        self._map = mmap.mmap(-1, size_bytes)  # whole pages, and none before they are used
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.is_registered = False
        self.emptied: list[Event] = []
        """What the devices copy out of it has ended with these."""

    def wait(self) -> None:
        for event in self.emptied:
            event.synchronize()
        self.emptied.clear()

    def tensor(self, start: int, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
        return view_of(self._bytes, start, dtype, sizes)
