"""The thread that holds or seeks a job's lead: the shell around :class:`~elastic.control.leadership.Election`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from elastic.control.leadership import Election, Leadership, Write
from elastic.control.running_clock import since_boot
from elastic.errors import ControlLostError

log = logging.getLogger(__name__)

_RELEASE_S = 3.0


class Elector:
    """Of one lead: who has lost it needs another one, as what it knew of the job is of the past.

    ``changed`` is called from its thread after everything that may have changed something.
    """

    def __init__(
        self,
        leadership: Leadership,
        me: str,
        address: str,
        *,
        changed: Callable[[], None],
        since_term: int = 0,
        clock: Callable[[], float] = since_boot,
    ) -> None:
        self._leadership, self._changed_call, self._clock = leadership, changed, clock
        self._election = Election(me, address, leadership.duration_s, _milliseconds, since=since_term)
        self._changed = threading.Condition()
        self._ended = False
        self._quiet = ""
        self._thread = threading.Thread(target=self._run, name="elastic-elector", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def acts(self) -> bool:
        with self._changed:
            return self._election.acts(self._clock())

    @property
    def term(self) -> int:
        """In which it leads, or would if it were sure of it; 0: it does not."""
        with self._changed:
            return self._election.term

    @property
    def epoch(self) -> int:
        """No world has had a greater number."""
        with self._changed:
            return self._election.epoch

    @property
    def lost(self) -> str:
        """Why it leads no longer; "" while it does, or has not yet."""
        with self._changed:
            return self._election.lost

    @property
    def follows(self) -> str:
        """Another holder, which was seen to renew."""
        with self._changed:
            return self._election.follows

    @property
    def finished(self) -> tuple[str, str]:
        """How the job ended that is noted there, and why; ("", "") where it has not."""
        with self._changed:
            seen = self._election.seen
            return ("", "") if seen is None else (seen.over, seen.reason)

    def noted(self, epoch: int, over: str = "", reason: str = "") -> bool:
        """Whether that is in the record, and it still leads; if not, it is written next."""
        with self._changed:
            election, seen = self._election, self._election.seen
            if epoch > election.epoch or over != election.over:
                election.epoch, election.over, election.reason = max(epoch, election.epoch), over, reason
                self._changed.notify_all()
            written = seen is not None and seen.epoch >= epoch and seen.over == over
            return written and election.acts(self._clock())

    def heard(self, term: int) -> None:
        """A node has obeyed another leader in that term."""
        with self._changed:
            self._election.heard = max(self._election.heard, term)
            self._changed.notify_all()

    def close(self) -> None:
        """Who leads gives up the lead, so that nobody has to wait for it."""
        with self._changed:
            self._election.leaving = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            with self._changed:
                self._changed.wait_for(lambda: not self._election.term, _RELEASE_S)
                self._ended = True
                self._changed.notify_all()
            self._thread.join(2 * _RELEASE_S)
        self._leadership.close()

    # -- its thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended and not self._election.lost:
            with self._changed:
                write = self._election.wanted(self._clock())
                must_read = self._election.must_read
                if write is None and not must_read:
                    pause_s = max(0.01, self._election.next_at(self._clock()) - self._clock())
                    self._changed.wait(min(pause_s, self._election.margin_s))
                    if not self._ended and not self._election.term:
                        self._election.must_read = True  # who does not lead looks who does
                    continue
            try:
                self._read() if write is None else self._write(write)
                self._quiet = ""
            except ControlLostError as error:
                self._unanswered(str(error))
            except Exception as error:  # a place that answers what nobody has thought of is one that does not answer
                log.exception("who leads the job cannot be asked")
                self._unanswered(str(error))
            self._changed_call()
        write = self._election.wanted(self._clock())  # a lead that came while it was given up
        if write is not None and self._election.term:
            with contextlib.suppress(ControlLostError):
                self._write(write)

    def _read(self) -> None:
        record = self._leadership.read()
        with self._changed:
            self._election.saw(record, self._clock())
            self._changed.notify_all()

    def _write(self, write: Write) -> None:
        began = self._clock()
        record = self._leadership.write(write.record, write.over)
        with self._changed:
            before = self._election.term
            self._election.wrote(write, record, began, self._clock())
            if self._election.term and not before:
                log.info("%s leads in term %d", self._election.me, self._election.term)
            self._changed.notify_all()

    def _unanswered(self, why: str) -> None:
        with self._changed:
            if why != self._quiet:
                self._quiet = why
                log.warning("who leads the job is unknown: %s", why)
            self._election.unanswered()
            self._changed.wait_for(lambda: self._ended, self._election.margin_s / 3)


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000
