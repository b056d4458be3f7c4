"""Whether a version is whole when its parts are on several nodes: a counter per step in the job's own store.

Two small messages per rank and step, no collective. On one node nobody needs it: the agent sees every part.
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
                if self._store.add(name, 1) == self._session.parts:  # not known yet when the board was made
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
