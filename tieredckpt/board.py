"""What ranks tell each other of their saves through the job's own store: no collective, a few small messages.

:class:`Board` says whether a version is whole when its parts are on several nodes. On one node nobody needs it: the
agent sees every part. :class:`Skips` says which versions never will be, :class:`LastStep` which one is to be the last.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from peerstore.records import Group
from tieredckpt.session import Session

log = logging.getLogger(__name__)


class Board:
    """Counts sealed parts per version."""

    def __init__(self, store: torch.distributed.Store, session: Session) -> None:
        self._store = store
        self._prefix = f"tieredckpt/{session.job}"
        self._session = session
        self._lock = threading.Lock()

    def sealed(self, group: Group) -> None:
        """This rank's part of ``group`` is sealed."""
        name = f"{self._prefix}/{group.epoch}/{group.incarnation}/{group.version}/{group.attempt}"
        try:
            with self._lock:
                if self._store.add(name, 1) == self._session.owner.parts:  # not known yet when the board was made
                    text = f"{group.epoch} {group.version} {group.attempt} {group.incarnation}"
                    self._store.set(f"{self._prefix}/whole", text)
                    self._store.delete_key(name)
        except (RuntimeError, NotImplementedError) as error:
            log.debug("the job's store did not take a seal: %s", error)

    def newest(self) -> Group | None:
        """The last version that became whole."""
        try:
            with self._lock:
                if not self._store.check([f"{self._prefix}/whole"]):
                    return None
                epoch, version, attempt, incarnation = self._store.get(f"{self._prefix}/whole").decode().split(" ")
        except RuntimeError as error:
            log.debug("the job's store did not answer: %s", error)
            return None
        return Group(int(epoch), int(version), int(attempt), incarnation)


def board_for(session: Session) -> Board | None:
    """A board where one is needed: ranks on more than one node."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))  # set by every launcher that starts several nodes
    if not dist.is_initialized() or local in (0, dist.get_world_size()):
        return None
    return Board(dist.distributed_c10d._get_default_store(), session)


class Skips:
    """Steps that some rank left out, for lack of room or by a failure. What others have of them is torn for good.

    Without this, ranks that leave out different steps would soon hold nothing but torn versions. None of them makes an
    older one superfluous, so no rank would have room ever again.
    """

    def __init__(self, store: torch.distributed.Store, session: Session) -> None:
        self._store = store
        self._session = session
        self._lock = threading.Lock()
        self._heard = 0
        self._of = ""

    def _name(self) -> str | None:
        """Where this incarnation's are; ``None`` before it has one."""
        incarnation = self._session.owner.current
        if incarnation is None:
            return None
        name = f"tieredckpt/{self._session.job}/{incarnation.epoch}/{incarnation.name}/skipped"
        if name != self._of:
            self._of, self._heard = name, 0
        return name

    def tell(self, step: int) -> None:
        """This rank has nothing of ``step``."""
        try:
            with self._lock:
                if (name := self._name()) is not None:
                    self._store.set(f"{name}/{self._store.add(name, 1)}", str(step))
        except (RuntimeError, NotImplementedError) as error:
            log.debug("the job's store did not hear of a skipped step: %s", error)

    def news(self) -> set[int]:
        """Steps that were left out somewhere since this was asked last."""
        found: set[int] = set()
        try:
            with self._lock:
                if (name := self._name()) is None:
                    return found
                count = self._store.add(name, 0)
                while self._heard < count and self._store.check([f"{name}/{self._heard + 1}"]):
                    self._heard += 1
                    found.add(int(self._store.get(f"{name}/{self._heard}")))
        except (RuntimeError, NotImplementedError) as error:
            log.debug("the job's store did not say which steps were skipped: %s", error)
        return found


def skips_for(session: Session) -> Skips | None:
    """Where there is more than one rank."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    return Skips(dist.distributed_c10d._get_default_store(), session)


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
