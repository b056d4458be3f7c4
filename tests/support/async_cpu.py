"""CPU tensors with asynchronous operations, so that the training thread runs ahead as on a GPU.

Inside :func:`run_ahead` the given tensors, and every tensor computed from them, count as device tensors. An operation
on them is queued on one stream, whose thread runs operations in order. The call returns at once, with tensors that are
filled later. Operations that return a value to the host (``item``, ``equal``) or draw random numbers wait for the
stream. Reads that bypass torch's dispatcher (``tolist``, ``memcpy``) do not wait and may see stale memory. Collectives
of :mod:`tests.support.nccl_like` also run on the stream: their ``wait`` returns before the result is ready.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import nccl_like
from tieredckpt.tensors.device import CpuBackend, DeviceCopy, use_device_backend

_ANSWERS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "allclose", "item")


class CpuEvent:
    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        self.done.wait()


class CpuStream:
    def __init__(self) -> None:
        self._given: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="late-stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        below = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(below):
            while (work := self._given.get()) is not None:
                work()

    def enqueue(self, work: Callable[[], object]) -> None:
        self._given.put(work)

    def record_event(self) -> CpuEvent:
        event = CpuEvent()
        self.enqueue(event.done.set)
        return event

    def wait_event(self, event: CpuEvent) -> None:
        self.enqueue(event.synchronize)

    def wait_stream(self, stream: CpuStream) -> None:
        if stream is not self:
            self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def close(self) -> None:
        self._given.put(None)
        self._thread.join()


class AsyncCpu(CpuBackend):
    """A CPU backend with one asynchronous stream."""

    def __init__(self, stream: CpuStream) -> None:
        self.stream = stream
        self._storages: dict[int, StorageWeakRef] = {}

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = StorageWeakRef(storage)
        return tensor

    def is_initialized(self) -> bool:
        return True

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        if tensor.layout is not torch.strided:
            return None
        known = self._storages.get(tensor.untyped_storage().data_ptr())
        return None if known is None or known.expired() else torch.device("cpu")

    def current_stream(self, place: torch.device) -> Any:
        return self.stream

    new_stream = current_stream

    def copy(self, copies: Sequence[DeviceCopy], stream: Any) -> None:
        for target, source in copies:
            stream.enqueue(lambda target=target, source=source: target.copy_(source.detach()))

    def synchronize(self, place: torch.device) -> None:
        self.stream.synchronize()


class _Enqueued(TorchDispatchMode):
    def __init__(self, device: AsyncCpu) -> None:
        super().__init__()
        self._device = device
        self._stream = device.stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if func.is_view or not any(map(self._device.device_of, tensors)):
            return func(*args, **kwargs)
        late = None
        if func.overloadpacket.__name__ not in _ANSWERS and torch.Tag.nondeterministic_seeded not in func.tags:
            late = (
                _in_place_operation(func, args, kwargs) if func._schema.is_mutable else _new_tensors(func, args, kwargs)
            )
        if late is None:
            self._stream.synchronize()
            found = func(*args, **kwargs)
        else:
            work, found = late
            self._stream.enqueue(work)
        for one in (*tensors, *pytree.tree_leaves(found)):
            if isinstance(one, torch.Tensor):
                self._device.to_device(one)
        return found


def _in_place_operation(func: Any, args: Any, kwargs: Any) -> tuple[Callable[[], object], Any] | None:
    """Return the work and result of an in-place operation: the result is among its arguments."""
    returns = func._schema.returns
    if not returns:
        return lambda: func(*args, **kwargs), None
    named = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    written = [one.name for one in func._schema.arguments if one.alias_info and one.alias_info.is_write]
    if len(returns) != len(written) or any(one.alias_info is None for one in returns):
        return None
    found = [named[name] for name in written]
    return lambda: func(*args, **kwargs), found[0] if len(found) == 1 else tuple(found)


def _new_tensors(func: Any, args: Any, kwargs: Any) -> tuple[Callable[[], object], Any] | None:
    """Return the work and result of an operation that creates tensors of predictable shapes."""
    try:
        shapes = func(*_meta(args), **_meta(kwargs))
    except (RuntimeError, NotImplementedError):
        return None
    found = pytree.tree_map_only(
        torch.Tensor, lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cpu"), shapes
    )

    def work() -> None:
        for target, made in zip(pytree.tree_leaves(found), pytree.tree_leaves(func(*args, **kwargs)), strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(made)

    return work, found


def _meta(values: Any) -> Any:
    made = pytree.tree_map_only(
        torch.Tensor, lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta"), values
    )
    return {**made, "device": torch.device("meta")} if isinstance(made, dict) and "device" in made else made


@contextlib.contextmanager
def run_ahead(tensors: Iterable[torch.Tensor]) -> Iterator[CpuStream]:
    """Make operations on ``tensors`` asynchronous in the block; finish them all at its end."""
    stream = CpuStream()
    device = AsyncCpu(stream)
    for one in tensors:
        device.to_device(one)
    nccl_like.stream = stream
    try:
        with use_device_backend(device), _Enqueued(device):
            yield stream
    finally:
        stream.close()
        nccl_like.stream = None
