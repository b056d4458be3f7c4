"""Handling of SIGTERM: all ranks agree on a last step, save it, and deliver the signal."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)
_other_handlers: list[None] = []
"""One entry for each running :func:`sigterm_handled_elsewhere`."""


@contextmanager
def sigterm_handled_elsewhere() -> Iterator[None]:
    """Leave SIGTERM to the caller while the block runs: a new :class:`PreemptionHandler` is inactive."""
    _other_handlers.append(None)
    try:
        yield
    finally:
        _other_handlers.pop()


class PreemptionHandler:
    """Handler of SIGTERM that waits for the last save and then calls the previous handler.

    In a long step or after the loop, no save may follow within half of the grace period. Then it flushes the staged
    saves and delivers the signal.
    """

    def __init__(
        self, flush: Callable[[float], object], grace_s: float, agreement: LastStepAgreement | None = None
    ) -> None:
        """``agreement``: of the ranks that have to end after the same step."""
        self._agreement = agreement
        self._flush = flush
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._deadline: float | None = None
        self._flushed = False
        self._steps: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """``True`` for a signal, ``False`` to end the wait. A signal handler may put into it at any point."""
        self._previous: Any = signal.SIG_DFL
        self._active = not _other_handlers and threading.current_thread() is threading.main_thread()
        self._waiter = threading.Thread(target=self._wait_for_save, name="tieredckpt-sigterm", daemon=True)
        if self._active:
            self._waiter.start()
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)

    @property
    def active(self) -> bool:
        """Whether this handler receives SIGTERM."""
        return self._active

    @property
    def requested(self) -> bool:
        return self._deadline is not None

    def is_last(self, step: int) -> bool:
        """Return whether ``step`` is the last one of all ranks, because some of them received SIGTERM."""
        if not self._active:
            return False
        requested = self.requested
        return requested if self._agreement is None else self._agreement.is_last(step, told=requested)

    def flush_and_exit(self) -> None:
        """Flush the staged last save and deliver the signal."""
        self._steps.put(False)
        self._flush_once()
        self._deliver()

    def exit_on_all_ranks(self) -> None:
        """Deliver SIGTERM on every rank after its last step, whether or not this rank received it."""
        if self._agreement is not None:
            dist.barrier()  # the first rank that ends makes the launcher kill the others
        if self.requested:
            self.flush_and_exit()
        else:
            self.close()
            signal.raise_signal(signal.SIGTERM)

    def close(self) -> None:
        """Restore the handler before this one, and deliver a signal that waits for its last save."""
        self._steps.put(False)
        if self._waiter.is_alive():
            self._waiter.join()
        if self._active and threading.current_thread() is threading.main_thread():
            if self.requested:
                self._flush_once()
                self._deliver()
            else:
                self._restore_handler()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._flushed or os.getpid() != self._pid:  # a forked process has no step to save
            self._deliver()
        elif self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s
            self._steps.put(True)

    def _wait_for_save(self) -> None:
        """Flush without a further save, then repeat the signal: only the main thread can change handlers."""
        if not self._steps.get():
            return
        log.warning("SIGTERM: the next save is the last one, %.0f s are left", self._grace_s)
        try:
            self._steps.get(timeout=self._grace_s / 2)
        except queue.Empty:
            self._flush_once()
            os.kill(os.getpid(), signal.SIGTERM)

    def _flush_once(self) -> None:
        if not self._flushed:
            try:
                self._flush(max(0.0, (self._deadline or 0.0) - time.monotonic()))
            except Exception:
                log.exception("the last save was not flushed")
            self._flushed = True

    def _deliver(self) -> None:
        self._deadline = None  # the process may survive the next handler, and then its saves are not the last
        self._restore_handler()
        signal.raise_signal(signal.SIGTERM)

    def _restore_handler(self) -> None:
        if self._active:
            self._active = False
            signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)


class LastStepAgreement:
    """Agreement of all ranks on their last step, after some of them received SIGTERM.

    Each rank names the step of its next save in the store, once it has received the signal or seen another rank's
    entry. If all ranks name the same step within a second, it is the last one. Otherwise they continue, and the last
    step is the one after the newest named step. No rank can be past it, because the last rank to name a step still has
    to take part in it.
    """

    def __init__(self, store: torch.distributed.Store, job: str, rank: int, size: int) -> None:
        self._store = store
        self._job = job
        self._rank = rank
        self._size = size
        self._round = 0
        self._has_named = False
        self._checked_at = 0.0

    def is_last(self, step: int, *, told: bool) -> bool:
        """Return whether ``step`` is the last one; ``told``: whether this rank has received SIGTERM."""
        try:
            return self._agree(step, told=told)
        except (RuntimeError, NotImplementedError) as error:
            if told:
                log.warning(
                    "step %d is the last one of this rank, but the ranks could not agree on it: %s", step, error
                )
            return told

    def _agree(self, step: int, *, told: bool) -> bool:
        if not self._has_named:
            if not told and not self._other_has_named():
                return False
            self._has_named = True
            last = self._name_step(step)
        else:
            last = self._agreed_step()
        if last is None or step < last:
            return False
        self._round, self._has_named = self._round + 1, False
        if step > last:  # possible if ranks do not wait for each other in every step
            log.warning("the last step was to be %d, this rank is at %d", last, step)
        return told or step == last

    def _key(self, what: str) -> str:
        return f"tieredckpt/{self._job}/last/{self._round}/{what}"

    def _other_has_named(self) -> bool:
        """Return whether another rank has named a step; a fast loop checks at most once a second."""
        now = time.monotonic()
        if now - self._checked_at < _CHECK_S:
            return False
        self._checked_at = now
        return self._store.check([self._key("said")])

    def _name_step(self, step: int) -> int | None:
        name = self._key("step")
        self._store.set(self._key(f"at/{self._rank}"), str(step))
        if self._store.add(self._key("said"), 1) == self._size:
            named = [int(one) for one in self._store.multi_get([self._key(f"at/{one}") for one in range(self._size)])]
            if min(named) == max(named) and self._store.compare_set(name, "", str(step)).decode() == str(step):
                return step
            self._store.set(name, str(max(named) + 1))
            return max(named) + 1
        try:
            self._store.wait([name], _NAMING_TIME)
        except RuntimeError:
            # The other ranks have not reached this step, or are past it and wait for this rank.
            self._store.compare_set(name, "", _MOVED_ON)
        return self._agreed_step()

    def _agreed_step(self) -> int | None:
        name = self._key("step")
        if not self._store.check([name]):
            return None
        text = self._store.get(name).decode()
        return None if text == _MOVED_ON else int(text)


_CHECK_S = 1.0
"""Seconds between two checks whether another rank has named a step."""
_NAMING_TIME = timedelta(seconds=1)
"""Wait of a rank for the others to name the same step."""
_MOVED_ON = "moved on"


def last_step_agreement(job: str, rank: int, size: int) -> LastStepAgreement | None:
    """Return the agreement of this job's ranks, or ``None`` for a single rank."""
    if not dist.is_initialized() or size < 2:
        return None
    return LastStepAgreement(dist.distributed_c10d._get_default_store(), job, rank, size)
