"""Steps that some rank left out: what the others have of them can never be whole, and takes the room of what can."""

from __future__ import annotations

import logging
from collections.abc import Callable

from peerstore.errors import PeerStoreError
from tieredckpt.board import Skips, skips_for
from tieredckpt.session import Session

log = logging.getLogger(__name__)


class Torn:
    """One rank's view of them."""

    def __init__(self, job: str, session: Callable[[], Session]) -> None:
        self._job = job
        self._session = session
        self._skips: Skips | None = None
        self._steps: set[int] = set()
        """Left out by some rank, and not given up here yet."""
        self._made_anew: set[int] = set()
        """Left out by some rank first, and then tried again by all of them."""

    @property
    def is_told(self) -> bool:
        """Whether ranks tell each other what they leave out."""
        return self._skips is not None

    def follow(self, session: Session) -> None:
        """From the first save on."""
        self._skips = self._skips or skips_for(session)

    def made_anew(self, step: int) -> None:
        """All ranks make another attempt of it."""
        self._made_anew.add(step)
        self._steps.discard(step)

    def left_out(self, step: int) -> None:
        """In the background: the others are not to keep what they have of this step."""
        if self._skips is not None:
            self._skips.tell(step)
            self.give_up(before=step)

    def give_up(self, *, before: int) -> None:
        if self._skips is None:
            return
        self._steps |= self._skips.news() - self._made_anew
        torn = {step for step in self._steps if step < before}
        if not torn:
            return
        try:
            self._session().forget_steps(torn)
            self._steps -= torn
        except PeerStoreError as error:  # tried again with the next save
            log.warning("steps %s of %s were not given up: %s", sorted(torn), self._job, error)
