"""On SIGTERM, all ranks agree on a last step, save it, and pass the signal on."""

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
_others: list[None] = []


@contextmanager
def sigterm_handled_elsewhere() -> Iterator[None]:
    """While the block runs, whoever entered it decides what SIGTERM means: no :class:`PreemptionHandler` takes it."""
    _others.append(None)
    try:
        yield
    finally:
        _others.pop()


class PreemptionHandler:
    """Takes SIGTERM until it is closed; the handler before it is called when the last save is done.

    When no further save comes (a long step, a loop that has ended), half of the grace period passes without one:
    then what is staged already is flushed, and the signal is delivered all the same.
    """

    def __init__(self, flush: Callable[[float], None], grace_s: float) -> None:
        self._flush = flush
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._deadline: float | None = None
        self._flushed = False
        self._steps: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """What a handler may put into, whomever it has interrupted: that it came, and later that all is done."""
        self._before: Any = signal.SIG_DFL
        self._active = not _others and threading.current_thread() is threading.main_thread()
        self._waiting = threading.Thread(target=self._wait, name="tieredckpt-sigterm", daemon=True)
        if self._active:
            self._waiting.start()
            self._before = signal.signal(signal.SIGTERM, self._received)

    @property
    def active(self) -> bool:
        """Whether SIGTERM comes here."""
        return self._active

    @property
    def requested(self) -> bool:
        return self._deadline is not None

    def flush_and_exit(self) -> None:
        """The last save is staged: flush it, and go."""
        self._steps.put(False)
        self._flush_now()
        self._go()

    def close(self) -> None:
        """Give SIGTERM back to whoever had it; one that is waiting for its last save is delivered."""
        self._steps.put(False)
        if self._waiting.is_alive():
            self._waiting.join()
        if self._active and threading.current_thread() is threading.main_thread():
            if self.requested:
                self._flush_now()
                self._go()
            else:
                self._give_back()

    def _received(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._flushed or os.getpid() != self._pid:  # a forked process has no step to save
            self._go()
        elif self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s
            self._steps.put(True)

    def _wait(self) -> None:
        """When no save comes: only the main thread can change handlers, so it is told by the same signal again."""
        if not self._steps.get():
            return
        log.warning("SIGTERM: the next save is the last one, %.0f s are left", self._grace_s)
        try:
            self._steps.get(timeout=self._grace_s / 2)
        except queue.Empty:
            self._flush_now()
            os.kill(os.getpid(), signal.SIGTERM)

    def _flush_now(self) -> None:
        if not self._flushed:
            try:
                self._flush(max(0.0, (self._deadline or 0.0) - time.monotonic()))
            except Exception:
                log.exception("the last save was not flushed")
            self._flushed = True

    def _go(self) -> None:
        self._deadline = None  # whoever gets the signal now may go on: what it saves is not its last step any more
        self._give_back()
        signal.raise_signal(signal.SIGTERM)

    def _give_back(self) -> None:
        if self._active:
            self._active = False
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)


class LastStepAgreement:
    """Which step all ranks save as their last one, once some of them have been told to end.

    A rank that was told, or hears of it, says at its next save which step that is. When all of them stand at the same
    one within a moment, it is that one. Otherwise they go on, and it is the one after the newest that any of them
    named: nobody can be beyond it, because who spoke last still has its part in it to do.
    """

    def __init__(self, store: torch.distributed.Store, job: str, rank: int, size: int) -> None:
        self._store = store
        self._job = job
        self._rank = rank
        self._size = size
        self._round = 0
        self._said = False
        self._looked = 0.0

    def is_last(self, step: int, *, told: bool) -> bool:
        """Whether ``step`` is the last one; ``told``: this rank has been told to end."""
        try:
            return self._is_it(step, told=told)
        except (RuntimeError, NotImplementedError) as error:
            if told:
                log.warning("step %d is this rank's last, the others were not asked: %s", step, error)
            return told

    def _is_it(self, step: int, *, told: bool) -> bool:
        if not self._said:
            if not told and not self._heard():
                return False
            self._said = True
            last = self._say(step)
        else:
            last = self._decided()
        if last is None or step < last:
            return False
        self._round, self._said = self._round + 1, False
        if step > last:  # ranks that do not wait for each other in every step
            log.warning("the last step was to be %d, this rank is at %d", last, step)
        return told or step == last

    def _name(self, what: str) -> str:
        return f"tieredckpt/{self._job}/last/{self._round}/{what}"

    def _heard(self) -> bool:
        """Whether another rank has been told; not asked for at every step of a fast loop."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return False
        self._looked = now
        return self._store.check([self._name("said")])

    def _say(self, step: int) -> int | None:
        name = self._name("step")
        self._store.set(self._name(f"at/{self._rank}"), str(step))
        if self._store.add(self._name("said"), 1) == self._size:
            named = [int(one) for one in self._store.multi_get([self._name(f"at/{one}") for one in range(self._size)])]
            if min(named) == max(named) and self._store.compare_set(name, "", str(step)).decode() == str(step):
                return step
            self._store.set(name, str(max(named) + 1))
            return max(named) + 1
        try:
            self._store.wait([name], _MOMENT)
        except RuntimeError:
            # The others are still on their way to here, or past it and waiting for this rank.
            self._store.compare_set(name, "", _MOVED_ON)
        return self._decided()

    def _decided(self) -> int | None:
        name = self._name("step")
        if not self._store.check([name]):
            return None
        text = self._store.get(name).decode()
        return None if text == _MOVED_ON else int(text)


_LOOK_S = 1.0
_MOMENT = timedelta(seconds=1)
_MOVED_ON = "moved on"


def last_step_agreement(job: str, rank: int, size: int) -> LastStepAgreement | None:
    """Where there is more than one rank."""
    if not dist.is_initialized() or size < 2:
        return None
    return LastStepAgreement(dist.distributed_c10d._get_default_store(), job, rank, size)
