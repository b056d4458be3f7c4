"""The only module that talks to accelerators: streams, events, pinned memory.

A device does what it is given *later*: a call that returns says nothing about the bytes. Only an event that has
completed, or a stream that was synchronised, does. So whoever moves bytes names streams and events (torch's own words
for them), and the same code runs on any implementation: without a device (:class:`CpuBackend`), on the accelerator that
torch reports (:class:`AcceleratorBackend`), and on the devices of the tests, which are as late as they may be.
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
    """A point in what a stream was given."""

    def query(self) -> bool:
        """Whether everything before it has completed."""

    def synchronize(self) -> None:
        """Wait until everything before it has completed."""


class DeviceStream(Protocol):
    """What one device does in order."""

    def record_event(self) -> DeviceEvent:
        """The end of what the stream was given so far."""

    def wait_event(self, event: Any) -> None:
        """What the stream is given from now on begins after ``event``."""

    def wait_stream(self, stream: Any) -> None:
        """What the stream is given from now on begins after what ``stream`` was given so far."""

    def synchronize(self) -> None:
        """Wait until the stream has done all it was given."""


class DeviceCopy(NamedTuple):
    """The elements of ``source`` go to ``target``, which has the same shape."""

    target: torch.Tensor
    source: torch.Tensor


class DeviceBackend(Protocol):
    """The devices of one kind, as this process sees them.

    Promises every implementation makes (``tests/contract/test_device.py`` holds it to them):

    - ``copy`` is done in the stream's order, at some time before ``synchronize`` of the stream, or of an event that was
      recorded behind it, returns. Until then nobody reads a target, and nobody changes, frees or unregisters a source.
      Whoever gives a stream other tensors than those of its own work keeps them until then.
    - Two streams have no order but by ``wait_stream`` and ``wait_event``.
    - Registered memory keeps its pages until it is unregistered. A registration that fails is said, not raised.
    - The current device and the current stream are the calling thread's.
    """

    type: str
    """As in ``torch.device(type)``; ``cpu`` where there is none."""

    def device_count(self) -> int: ...

    def is_initialized(self) -> bool:
        """Whether this process has begun to use them: what asks before does not make it begin."""

    def current(self) -> torch.device:
        """The calling thread's."""

    def set_current(self, index: int) -> None:
        """For the calling thread."""

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """Which of these devices has the tensor's elements; ``None``: none of them has."""

    def current_stream(self, place: torch.device) -> DeviceStream:
        """The calling thread's stream on ``place``: what it computes next is done there."""

    def new_stream(self, place: torch.device) -> DeviceStream:
        """Another one, with no order to any that there is."""

    def copy(self, copies: Sequence[DeviceCopy], stream: DeviceStream) -> None:
        """Between memory of this process and the device of ``stream``."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in this process's memory, with all that the calling thread's stream did to the tensor."""

    def synchronize(self, place: torch.device) -> None:
        """Wait until the device has done all it was given by anybody. From any thread."""

    def register_host_memory(self, address: int, size_bytes: int, place: torch.device) -> str:
        """Let the devices reach memory of this process by themselves. What went wrong, or nothing.

        From any thread: ``place``, a device that this process uses, is asked, not the one that is current there.
        """

    def unregister_host_memory(self, address: int, place: torch.device) -> str:
        """What :meth:`register_host_memory` did is undone, before the memory goes. What went wrong, or nothing."""

    def default_generator(self) -> torch.Generator | None:
        """What random numbers on the current device are drawn from; ``None``: there is no device. Begins to use it."""

    def memory_allocated(self) -> int:
        """Of the current device's memory, by this process's tensors."""

    def empty_cache(self) -> None:
        """Give memory back to the devices that no tensor of this process needs."""

    def is_capturing(self) -> bool:
        """Return whether the calling thread's stream is capturing a graph."""

    def on_replay(self, call: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """While the block runs ``call`` is called, in whichever thread, before work captured in a graph is replayed."""


class CpuBackend:
    """A process that computes on its CPU: a call that returns has done its work, and there is nothing to wait for."""

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
    """The stream, and the event, of who has done everything."""

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
    """The devices that torch reports (CUDA and ROCm as ``cuda``, XPU and others where they have the generic calls)."""

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
        with self._on(stream):
            # One call for all of them: a step of Python for each of thousands of tensors is what takes the time.
            torch._foreach_copy_([to for to, _ in copies], [of for _, of in copies], non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def synchronize(self, place: torch.device) -> None:
        torch.accelerator.synchronize(place)

    def register_host_memory(self, address: int, size_bytes: int, place: torch.device) -> str:
        if not hasattr(self._module, "cudart"):
            return f"torch cannot register memory with {self.type} devices"
        return self._called("cudaHostRegister", place, address, size_bytes, 0)

    def unregister_host_memory(self, address: int, place: torch.device) -> str:
        return self._called("cudaHostUnregister", place, address)

    def _called(self, name: str, place: torch.device, *arguments: int) -> str:
        with self._module.device(place):  # where nothing was done yet, the call would take memory of another device
            code = int(getattr(self._module.cudart(), name)(*arguments))
            if code:
                # The runtime keeps the error for whoever asks next, and torch asks after each kernel of the training.
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=place)
        return f"{name}: error {code}" if code else ""

    def default_generator(self) -> torch.Generator | None:
        index = self._module.current_device()  # first: there are none before the devices are in use
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
                watched.enter_context(_replays(graph, call))
            yield

    def _graphs(self) -> list[type]:
        """``torch.compile(mode="reduce-overhead")`` and ``make_graphed_callables`` use them, too."""
        own = getattr(self._module, f"{self.type.upper()}Graph", None)
        generic = getattr(torch.accelerator, "Graph", None)  # from torch 2.12 on
        return [graph for graph in (own, generic) if graph is not None]

    @contextlib.contextmanager
    def _on(self, stream: torch.Stream) -> Iterator[None]:
        """``with stream``, which torch has from 2.8 on."""
        with self._module.device(stream.device):
            before = torch.accelerator.current_stream(stream.device)
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)


@contextlib.contextmanager
def _replays(graph: type, call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` before each replay. Torch has no hook, so the method is replaced while there are watchers."""
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
    """What the devices had been given at one moment. Any thread may ask whether it has completed."""

    def __init__(self, events: Sequence[DeviceEvent]) -> None:
        self._events = events

    def has_completed(self) -> bool:
        """Never waits. Also ``False`` where a device is broken and cannot say."""
        try:
            return all(event.query() for event in self._events)
        except RuntimeError as error:
            log.warning("a device cannot say whether it has done its work: %s", error)
            return False

    def wait(self) -> None:
        """Until it has completed. What a broken device raises is raised."""
        for event in self._events:
            event.synchronize()


def record_device_work(tensors: Iterable[torch.Tensor] | None = None) -> DeviceWork:
    """What the calling thread has given its current streams: on the devices of ``tensors``, or on the current one.

    On the CPU there is nothing: what was called has been done.
    """
    device = accelerator()
    if tensors is None:
        places = {device.current()} if device.is_initialized() else set()
    else:
        places = {place for place in map(device.device_of, tensors) if place is not None}
    return DeviceWork([device.current_stream(place).record_event() for place in places])


def answered(limit_s: float, call: Callable[[], T]) -> T:
    """What ``call`` returns or raises; ``TimeoutError`` where it does not come back within ``limit_s``.

    It runs on a thread that is left behind then: a driver that hangs cannot be woken.
    """
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - handed over
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
    """Of the one torch was built with; empty where it has none."""
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""


def accelerator() -> DeviceBackend:
    """The devices of this process."""
    return _installed[-1] if _installed else _reported()


@contextlib.contextmanager
def use_device_backend(device: DeviceBackend) -> Iterator[DeviceBackend]:
    """While the block runs, in all threads, :func:`accelerator` is ``device``: for tests."""
    _installed.append(device)
    try:
        yield device
    finally:
        _installed.remove(device)


_installed: list[DeviceBackend] = []


@functools.cache
def _reported() -> DeviceBackend:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return CpuBackend() if kind is None else AcceleratorBackend(kind.type)
