"""Backend that fails like NCCL when its world breaks, over gloo and without a device.

``register()`` registers it with torch as ``nccl-like``, for ``init_process_group`` and
``RecoveryPolicy(backend="nccl-like")``. ``tests/unit/repository/test_nccl_like.py`` checks what it copies from NCCL:

- A collective whose peer is lost hangs and raises nothing. Only the watchdog sees the error.
- After ``abort`` every pending and later collective returns as if it had succeeded. Its outputs hold garbage (seeded,
  finite, of the right shape).
- The first collective creates the communicator, which blocks until all ranks have arrived. Neither an abort nor a lost
  rank ends that wait. With ``TORCH_NCCL_USE_COMM_NONBLOCKING`` an abort raises in the waiting thread.
- Aborting one communicator while others of the process live deadlocks (pytorch#119797), except between
  ``_group_start`` and ``_group_end``.
- When a peer is lost, the watchdog kills the process. With ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` at 0 it does nothing, at
  2 it silently aborts the communicator.
- Before that, in all modes, the watchdog sleeps for four times ``TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC`` (a minute by
  default) and holds the lock that collectives start under. The destructor of the group joins it.
- With a stream (``tests/support/async_cpu.py``) ``wait`` returns at once. The data is ready for later work in the
  stream, and for the host after a synchronization.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from elastic.workers.native_connections import close_gloo_connections

log = logging.getLogger(__name__)

NAME = "nccl-like"
_LOOK_S = 0.01
_HANDLING, _NONBLOCKING = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_USE_COMM_NONBLOCKING"
_DUMP, _DUMP_MS, _DUMPS = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", 15_000, 4
_NOTHING, _CLEAN_UP = "0", "2"
_LIVE = set["NcclLike"]()
"""Live communicators of this process."""
_lock = threading.RLock()
_grouped = threading.local()
deadlocked = threading.Event()
"""Set while a thread is blocked forever."""
_released = threading.Event()
_threads = weakref.WeakSet[threading.Thread]()
stream: Any = None
"""Stream that runs collectives in order with other work; ``None``: the host waits for each."""


def register() -> None:
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> NcclLike:
    return NcclLike(store, rank, size, timeout)


class _Work(dist.Work):
    """A started collective."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.outputs = list(outputs)
        self.over = threading.Event()
        """Set once the outputs hold the result or garbage."""
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._is_ahead = stream is not None
        if self._is_ahead:
            self._future.set_result(self.outputs)  # users of the outputs run in the stream too

    def finish(self) -> None:
        self.over.set()
        if not self._is_ahead:
            self._future.set_result(self.outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._is_ahead:
            self.over.wait()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def is_completed(self) -> bool:
        return self.over.is_set()

    def is_success(self) -> bool:
        return self.over.is_set()

    def synchronize(self) -> None:
        self.wait()


class _Call(NamedTuple):
    work: _Work
    own: list[torch.Tensor]
    """Buffers of the outputs before they are complete."""
    call: Callable[[Any, list[torch.Tensor]], Any]


class Watchdog:
    """The watchdog of one group. It does not keep the group alive: the group's destructor joins it."""

    def __init__(self) -> None:
        self._sleep_s = _DUMPS * int(os.environ.get(_DUMP, _DUMP_MS)) / 1e3
        self._thread: threading.Thread | None = None
        self.starting = threading.Lock()
        """Lock that collectives start under."""
        self.asleep = threading.Event()

    def report_error(self, error: str, handle: Callable[[], None]) -> None:
        log.error("watchdog: %s", error)
        self._thread = _start("nccl-like-watchdog", self._run, handle)

    def _run(self, handle: Callable[[], None]) -> None:
        with self.starting:
            self.asleep.set()
            _released.wait(self._sleep_s)
        handle()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


class NcclLike(dist.ProcessGroup):
    """One group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._inner: Any = None
        self._given: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._pending: list[_Work] = []
        self._aborted = threading.Event()
        self._garbage = torch.Generator().manual_seed(1000 + rank)
        self.watchdog = Watchdog()
        self.communicator: threading.Thread | None = None
        """Thread that references the group until its communicator is aborted or has lost a peer."""

    def __del__(self) -> None:
        self.watchdog.join()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return NAME

    def _get_backend(self, _device: torch.device) -> NcclLike:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def supports_splitting(self) -> bool:
        return False

    # -- the end ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _group_start() -> None:
        _grouped.depth = getattr(_grouped, "depth", 0) + 1

    @staticmethod
    def _group_end() -> None:
        _grouped.depth -= 1

    def abort(self) -> None:
        with _lock:
            if self._aborted.is_set():
                return
            others = _LIVE - {self}
            is_alone = not getattr(_grouped, "depth", 0)
            if self not in _LIVE or not others or not is_alone:
                self._end()
                return
        log.error("deadlock: one of %d communicators is aborted without the others", len(others) + 1)
        _block_forever()

    def _end(self) -> None:
        self._aborted.set()
        _LIVE.discard(self)
        for work in self._pending:
            self._fill_with_garbage(work.outputs)
            work.finish()
        self._pending.clear()
        self._given.put(None)

    def shutdown(self) -> None:
        with _lock:
            if not self._aborted.is_set():
                self._end()
        self.watchdog.join()

    def _fill_with_garbage(self, outputs: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for one in outputs:
                if one.is_floating_point():
                    one.detach().copy_(torch.rand(one.shape, generator=self._garbage) * 2 - 1)
                else:
                    one.detach().copy_(torch.randint(0, 2, one.shape, generator=self._garbage))

    # -- communication ------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Create the communicator, in the thread of the first collective."""
        with _lock:
            if self._inner is not None or self._aborted.is_set():
                return
        try:
            self._store.set(f"here/{self._rank}", "")
            names = [f"here/{rank}" for rank in range(self._size)]
            while not self._store.check(names):
                if self._aborted.is_set() and _is_nonblocking():
                    break
                time.sleep(_LOOK_S)
            else:
                inner = dist.ProcessGroupGloo(self._store, self._rank, self._size, self._timeout)
                with _lock:
                    self._inner = inner
                    if not self._aborted.is_set():
                        _LIVE.add(self)
                self.communicator = _start("nccl-like", self._communicate)
                return
        except RuntimeError as error:
            log.warning("cannot create a communicator: %s", error)
            while _is_nonblocking() and not self._aborted.wait(_LOOK_S):
                pass
        if not _is_nonblocking():
            _block_forever()
        raise dist.DistBackendError("NCCL communicator was aborted while it was made")

    def _communicate(self) -> None:
        while (given := self._given.get()) is not None:
            try:
                done = given.call(self._inner, given.own)
                if done is not None:
                    done.wait()
            except RuntimeError as error:
                self._report_lost(error)
                return
            with _lock:
                if self._aborted.is_set():
                    return
                with torch.no_grad():
                    for one, own in zip(given.work.outputs, given.own, strict=True):
                        one.detach().copy_(own)
                self._pending.remove(given.work)
                given.work.finish()

    def _report_lost(self, error: RuntimeError) -> None:
        """Report the error to the watchdog only."""
        if not self._aborted.is_set():
            self.watchdog.report_error(str(error), partial(_handle, weakref.ref(self)))

    def _collective(self, outputs: Sequence[torch.Tensor], call: Callable[[Any, list[torch.Tensor]], Any]) -> _Work:
        self._connect()
        work = _Work(outputs)
        if stream is None:
            self._submit(work, call)
        else:
            stream.enqueue(lambda: (self._submit(work, call), work.over.wait()))
        return work

    def _submit(self, work: _Work, call: Callable[[Any, list[torch.Tensor]], Any]) -> None:
        is_over = self._aborted.is_set()
        with contextlib.nullcontext() if is_over else self.watchdog.starting, _lock:
            if self._aborted.is_set():
                self._fill_with_garbage(work.outputs)
                work.finish()
                return
            self._pending.append(work)
            with torch.no_grad():
                own = [one.detach().clone(memory_format=torch.contiguous_format) for one in work.outputs]
            self._given.put(_Call(work, own, call))

    # -- collectives --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        options = opts or dist.AllreduceOptions()
        return self._collective(tensors, lambda inner, own: inner.allreduce(own, options))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp

        def call(inner: Any, own: list[torch.Tensor]) -> None:
            for one in own:
                inner.allreduce([one], options).wait()

        return self._collective(tensors, call)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> _Work:
        return self._collective(tensors, lambda inner, own: inner.broadcast(own, opts))

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> _Work:
        return self._collective(tensors, lambda inner, own: inner.reduce(own, opts))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> _Work:
        return self._collective(outputs[0], lambda inner, own: inner.allgather([own], _contiguous(inputs)))

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> _Work:
        return self._collective([output], lambda inner, own: inner._allgather_base(own[0], *_contiguous([given])))

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> _Work:
        def call(inner: Any, own: list[torch.Tensor]) -> None:
            for one, given in zip(own, _contiguous(inputs), strict=True):
                inner._allgather_base(one, given).wait()

        return self._collective(outputs, call)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> _Work:
        options = opts or dist.ReduceScatterOptions()
        return self._collective(
            outputs, lambda inner, own: inner.reduce_scatter(own, [_contiguous(inputs[0])], options)
        )

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> _Work:
        options = opts or dist.ReduceScatterOptions()
        return self._collective(
            [output], lambda inner, own: inner._reduce_scatter_base(own[0], *_contiguous([given]), options)
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> _Work:
        options = opts or dist.ReduceScatterOptions()

        def call(inner: Any, own: list[torch.Tensor]) -> None:
            for one, given in zip(own, _contiguous(inputs), strict=True):
                inner._reduce_scatter_base(one, given, options).wait()

        return self._collective(outputs, call)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> _Work:
        return self._collective(
            [output], lambda inner, own: inner.alltoall_base(own[0], *_contiguous([given]), output_sizes, input_sizes)
        )

    def barrier(self, opts: Any = None) -> _Work:
        return self.allreduce([torch.zeros(1)])

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> _Work:
        return self._collective([], lambda inner, _own: inner.send(_contiguous(tensors), to, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Work:
        return self._collective(tensors, lambda inner, own: inner.recv(own, source, tag))

    # Names in older versions of torch.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _start(name: str, run: Callable[..., None], *given: Any) -> threading.Thread:
    """Start a thread that :func:`cleaned_up` joins."""
    thread = threading.Thread(target=run, args=given, name=name, daemon=True)
    with _lock:
        thread.start()
        _threads.add(thread)
    return thread


def _running() -> list[threading.Thread]:
    with _lock:
        return [thread for thread in _threads if thread.is_alive()]


def _handle(lost: weakref.ref[NcclLike]) -> None:
    """Act on a lost peer as ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` says."""
    handling = os.environ.get(_HANDLING, "3")
    group = lost()
    if handling == _NOTHING or group is None or group._aborted.is_set():
        return
    if handling == _CLEAN_UP:
        with _lock:
            group._end()
    else:
        os.kill(os.getpid(), signal.SIGABRT)


def _contiguous(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [one.detach().contiguous() for one in tensors]


def _is_nonblocking() -> bool:
    return os.environ.get(_NONBLOCKING, "0") == "1"


def _block_forever() -> None:
    deadlocked.set()
    _released.wait()


@contextlib.contextmanager
def cleaned_up() -> Iterator[None]:
    """Release blocked threads and end all communicators after the block."""
    global _released  # noqa: PLW0603 - blocked threads wait for the old one
    try:
        yield
    finally:
        with _lock:
            for one in list(_LIVE):
                one._end()
        close_gloo_connections()
        _released.set()
        while running := _running():
            for thread in running:  # a joined thread may have started another
                thread.join()
        deadlocked.clear()
        _released = threading.Event()
