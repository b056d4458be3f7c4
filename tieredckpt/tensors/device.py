"""Access to accelerators: streams, events, pinned memory. No other module uses them.

A device works asynchronously: a copy is done only when an event after it has completed, or its stream is synchronized.
So code that moves bytes names streams and events, as in torch. The same code runs on every backend:

- :class:`CpuBackend`, without a device.
- :class:`AcceleratorBackend`, on the accelerator that torch reports.
- Devices of the tests, which do their work as late as possible.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")


class DeviceEvent(Protocol):
    """Point in the work of a stream."""

    def query(self) -> bool:
        """Return whether all work before the event has completed."""

    def synchronize(self) -> None:
        """Wait until all work before the event has completed."""


class DeviceStream(Protocol):
    """Ordered work of one device."""

    def record_event(self) -> DeviceEvent:
        """Return an event after the work enqueued so far."""

    def wait_event(self, event: Any) -> None:
        """Make later work on this stream wait for ``event``."""

    def wait_stream(self, stream: Any) -> None:
        """Make later work on this stream wait for the work enqueued on ``stream`` so far."""

    def synchronize(self) -> None:
        """Wait until all enqueued work has completed."""


class DeviceCopy(NamedTuple):
    """Copy of the elements of ``source`` to ``target``, which has the same shape."""

    target: torch.Tensor
    source: torch.Tensor


class DeviceBackend(Protocol):
    """Devices of one kind, as seen by this process.

    Every implementation has these properties, which ``tests/contract/test_device.py`` tests:

    - ``copy`` runs in the stream's order. It is done when ``synchronize`` of the stream, or of an event recorded after
      it, returns. Until then the caller must not read a target, and must not change, free or unregister a source. It
      must hold references to the tensors until then.
    - Two streams are ordered only by ``wait_stream`` and ``wait_event``.
    - Registered memory retains its pages until it is unregistered. A failed registration returns an error text and
      raises no exception.
    - The current device and the current stream belong to the calling thread.
    """

    type: str
    """Type as in ``torch.device(type)``; ``cpu`` without a device."""

    def device_count(self) -> int: ...

    def is_initialized(self) -> bool:
        """Return whether this process uses the devices already, without initializing them."""

    def current(self) -> torch.device:
        """Return the calling thread's current device."""

    def set_current(self, index: int) -> None:
        """Set the calling thread's current device."""

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """Return the device with the tensor's elements, or ``None`` if it is none of these devices."""

    def current_stream(self, place: torch.device) -> DeviceStream:
        """Return the calling thread's current stream on the device ``place``."""

    def new_stream(self, place: torch.device) -> DeviceStream:
        """Return a new stream on the device ``place``, without an order to other streams."""

    def copy(self, copies: Sequence[DeviceCopy], stream: DeviceStream) -> None:
        """Enqueue copies between memory of this process and the device of ``stream``."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in this process's memory, after the work of the calling thread's stream."""

    def synchronize(self, place: torch.device) -> None:
        """Wait until all work of the device has completed. Any thread may call it."""

    def register_host_memory(self, address: int, size_bytes: int, place: torch.device) -> str:
        """Register memory of this process for direct access by devices; return an error text, or "".

        Any thread may call it. It uses the device ``place``, not the thread's current device.
        """

    def unregister_host_memory(self, address: int, place: torch.device) -> str:
        """Unregister memory, which the caller must do before it frees it; return an error text, or ""."""

    def default_generator(self) -> torch.Generator | None:
        """Return the current device's random generator, or ``None`` without a device; may initialize it."""

    def memory_allocated(self) -> int:
        """Return the bytes of the current device's memory in use by this process's tensors."""

    def empty_cache(self) -> None:
        """Release unused cached memory of this process to the devices."""

    def is_capturing(self) -> bool:
        """Return whether the calling thread's stream is capturing a graph."""

    def on_replay(self, call: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Call ``call`` before each replay of a captured graph while the block runs, in the replaying thread."""


class CpuBackend:
    """Backend without a device: all work is done when a call returns."""

    type = "cpu"

    def device_count(self) -> int:
        return 0

    def is_initialized(self) -> bool:
        return False

    def current(self) -> torch.device:
        return torch.device("cpu")

    def set_current(self, index: int) -> None:
        pass

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return None

    def current_stream(self, place: torch.device) -> DeviceStream:
        return _CompletedStream()

    new_stream = current_stream

    def copy(self, copies: Sequence[DeviceCopy], stream: DeviceStream) -> None:
        for target, source in copies:
            target.copy_(source)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def synchronize(self, place: torch.device) -> None:
        pass

    def register_host_memory(self, address: int, size_bytes: int, place: torch.device) -> str:
        return "there is no device"

    def unregister_host_memory(self, address: int, place: torch.device) -> str:
        return ""

    def default_generator(self) -> torch.Generator | None:
        return None

    def memory_allocated(self) -> int:
        return 0

    def empty_cache(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def on_replay(self, call: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _CompletedStream:
    """Stream and event whose work has always completed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def record_event(self) -> _CompletedStream:
        return self

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


class AcceleratorBackend:
    """Backend of the devices that torch reports: CUDA, ROCm (as ``cuda``), XPU and similar ones."""

    def __init__(self, type: str) -> None:  # noqa: A002 - torch's own word
        self.type = type
        self._module: ModuleType = torch.get_device_module(type)

    def device_count(self) -> int:
        return int(self._module.device_count())

    def is_initialized(self) -> bool:
        return bool(getattr(self._module, "is_initialized", self._module.is_available)())

    def current(self) -> torch.device:
        return torch.device(self.type, int(self._module.current_device()))

    def set_current(self, index: int) -> None:
        self._module.set_device(index)

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return tensor.device if tensor.device.type == self.type else None

    def current_stream(self, place: torch.device) -> DeviceStream:
        return torch.accelerator.current_stream(place)

    def new_stream(self, place: torch.device) -> DeviceStream:
        return torch.Stream(place)

    def copy(self, copies: Sequence[DeviceCopy], stream: Any) -> None:
        if not copies:
            return
        with self._use_stream(stream):
            # One call for all tensors, because a Python call for each of thousands would be slow.
            torch._foreach_copy_([to for to, _ in copies], [of for _, of in copies], non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def synchronize(self, place: torch.device) -> None:
        torch.accelerator.synchronize(place)

    def register_host_memory(self, address: int, size_bytes: int, place: torch.device) -> str:
        if not hasattr(self._module, "cudart"):
            return f"torch cannot register memory with {self.type} devices"
        return self._call_runtime("cudaHostRegister", place, address, size_bytes, 0)

    def unregister_host_memory(self, address: int, place: torch.device) -> str:
        return self._call_runtime("cudaHostUnregister", place, address)

    def _call_runtime(self, name: str, place: torch.device, *arguments: int) -> str:
        with self._module.device(place):  # otherwise the call may allocate memory on another device
            code = int(getattr(self._module.cudart(), name)(*arguments))
            if code:
                # Clear the error of the runtime, which the next kernel of the training would report otherwise.
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=place)
        return f"{name}: error {code}" if code else ""

    def default_generator(self) -> torch.Generator | None:
        index = self._module.current_device()  # this call initializes the devices and their generators
        generators = getattr(self._module, "default_generators", ())
        return generators[index] if generators else None

    def memory_allocated(self) -> int:
        return int(self._module.memory_allocated())

    def empty_cache(self) -> None:
        self._module.empty_cache()

    def is_capturing(self) -> bool:
        return bool(getattr(self._module, "is_current_stream_capturing", bool)())

    @contextlib.contextmanager
    def on_replay(self, call: Callable[[], None]) -> Iterator[None]:
        with contextlib.ExitStack() as watched:
            for graph in self._graphs():
                watched.enter_context(_on_graph_replay(graph, call))
            yield

    def _graphs(self) -> list[type]:
        """Return the graph classes, which ``torch.compile(mode="reduce-overhead")`` uses too."""
        own = getattr(self._module, f"{self.type.upper()}Graph", None)
        generic = getattr(torch.accelerator, "Graph", None)  # from torch 2.12 on
        return [graph for graph in (own, generic) if graph is not None]

    @contextlib.contextmanager
    def _use_stream(self, stream: torch.Stream) -> Iterator[None]:
        """Use ``stream`` as the current one in the block; ``with stream`` needs torch 2.8."""
        with self._module.device(stream.device):
            before = torch.accelerator.current_stream(stream.device)
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)


@contextlib.contextmanager
def _on_graph_replay(graph: type, call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` before each replay. Torch has no hook, so this replaces the method while in use."""
    replay: Any = graph.replay  # type: ignore[attr-defined]
    if not hasattr(replay, "watchers"):
        replay = _watched_replay(replay)
        graph.replay = replay  # type: ignore[attr-defined]
    replay.watchers.append(call)
    try:
        yield
    finally:
        replay.watchers.remove(call)
        if not replay.watchers:
            graph.replay = replay.__wrapped__  # type: ignore[attr-defined]


def _watched_replay(before: Callable[[object], None]) -> Any:
    watchers: list[Callable[[], None]] = []

    @functools.wraps(before)
    def replay(self: object) -> None:
        for call in watchers:
            call()
        before(self)

    replay.watchers = watchers  # type: ignore[attr-defined]
    return replay


class DeviceWork:
    """Work that the devices had at one moment. Any thread may query or wait for it."""

    def __init__(self, events: Sequence[DeviceEvent]) -> None:
        self._events = events

    def has_completed(self) -> bool:
        """Return whether the work has completed, without a wait; ``False`` for a broken device."""
        try:
            return all(event.query() for event in self._events)
        except RuntimeError as error:
            log.warning("a device cannot say whether it has done its work: %s", error)
            return False

    def wait(self) -> None:
        """Wait until the work has completed; raise the error of a broken device."""
        for event in self._events:
            event.synchronize()


def record_device_work(tensors: Iterable[torch.Tensor] | None = None) -> DeviceWork:
    """Return the work of the calling thread's current streams on the devices of ``tensors``.

    ``None``: on the current device. Without a device there is no work.
    """
    device = accelerator()
    if tensors is None:
        places = {device.current()} if device.is_initialized() else set()
    else:
        places = {place for place in map(device.device_of, tensors) if place is not None}
    return DeviceWork([device.current_stream(place).record_event() for place in places])


def answered(limit_s: float, call: Callable[[], T]) -> T:
    """Return the result of ``call``, or raise ``TimeoutError`` after ``limit_s`` seconds.

    The call runs in a daemon thread, which remains after a timeout because a driver that hangs cannot be interrupted.
    """
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            done.put((None, error))

    threading.Thread(target=work, name="tieredckpt-device", daemon=True).start()
    try:
        value, error = done.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {limit_s:g} s") from None
    if error is not None:
        raise error
    return cast(T, value)


def nccl_version() -> str:
    """Return the version of torch's NCCL, or an empty string without NCCL."""
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""


def accelerator() -> DeviceBackend:
    """Return the device backend of this process."""
    return _installed[-1] if _installed else _detect()


@contextlib.contextmanager
def use_device_backend(device: DeviceBackend) -> Iterator[DeviceBackend]:
    """Make :func:`accelerator` return ``device`` in all threads while the block runs, for tests."""
    _installed.append(device)
    try:
        yield device
    finally:
        _installed.remove(device)


_installed: list[DeviceBackend] = []


@functools.cache
def _detect() -> DeviceBackend:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return CpuBackend() if kind is None else AcceleratorBackend(kind.type)
