"""What ranks tell each other of their saves through the job's own store: no collective, a few small messages.

:class:`Board` says whether a version is whole when its parts are on several nodes. On one node nobody needs it: the
agent sees every part. :class:`Skips` says which versions never will be.
"""

from __future__ import annotations

import logging
import os
import threading

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
