"""Which step is to be the last one: agreed by ranks through the job's own store, without a collective."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class LastStep:
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

    def is_it(self, step: int, *, told: bool) -> bool:
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


def last_step_for(job: str, rank: int, size: int) -> LastStep | None:
    """Where there is more than one rank."""
    if not dist.is_initialized() or size < 2:
        return None
    return LastStep(dist.distributed_c10d._get_default_store(), job, rank, size)
