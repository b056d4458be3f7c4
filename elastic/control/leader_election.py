"""Leader election: the leader record, the pure state machine of one candidate, and the thread that runs it.

:class:`LeaderRecordStore` is where the record is kept. :class:`LeaderElection` decides what one candidate does with it;
it is pure but for its own memory. :class:`~elastic.control.leader_election.LeaderElector` is its shell.

A leader acts only while its last answered renewal is younger than the record's ``duration_s``, less a margin, by its
own clock, which also counts while its machine sleeps. Another candidate takes the lead only when it has itself seen the
record unchanged for the whole ``duration_s``. So no two of them act at a time, whatever their clocks on the wall say.
Each lead has a term above all before it; what carries an older one is refused by who has heard a newer one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple, Protocol
from urllib.parse import SplitResult, parse_qsl, urlsplit

import msgspec

from elastic.control.running_clock import since_boot
from elastic.errors import ControlPlaneUnavailableError, PolicyError
from peerstore.shard_records import NonNegativeInt, NonNegativeIntOrMinusOne

log = logging.getLogger(__name__)


LEADER_RECORD_ENTRY_POINTS = "elastic.leader_records"
LEASE_DURATION_S = 15.0
MIN_LEASE_DURATION_S = 1.0
JOB_FINISHED = "finished"
"""How a job has ended that nobody goes on with."""
UNKNOWN_HOLDER = "?"
"""Holds a record that was just made. There may have been one before, whose holder still acts: it is waited for."""
replace = msgspec.structs.replace


class LeaderRecord(msgspec.Struct, frozen=True):
    """As it was read. ``version`` is the store's: it is another one after every change, also of a record made anew."""

    holder: str = ""
    """Who leads; ``""``: nobody does, and whoever comes may."""
    term: NonNegativeInt = 0
    address: str = ""
    """Where the holder is reached."""
    epoch: NonNegativeIntOrMinusOne = -1
    """No world has had a greater number."""
    duration_s: float = LEASE_DURATION_S
    over: str = ""
    """How the job ended: a value of :class:`~elastic.control.control_messages.ExitReason`; ``""`` while it has not."""
    reason: str = ""
    version: str = ""
    incarnation_epoch: NonNegativeInt = 0
    """The epoch that was allocated for the incarnations of the newest world."""


class LeaderRecordStore(Protocol):
    """Where one job's record is. Any process may call; every call has an end, a few seconds away at the most.

    Both raise :class:`~elastic.errors.ControlPlaneUnavailableError` where it is unknown what is there (whether or not
    something was written), and :class:`~elastic.errors.ControlPlaneRefusedError` where this process may not ask.
    """

    duration_s: float
    """How long a holder leads without renewing."""

    def read(self) -> LeaderRecord | None:
        """``None``: there is none."""

    def write(self, record: LeaderRecord, over: LeaderRecord | None) -> LeaderRecord | None:
        """Put ``record`` in the place of ``over`` (``None``: where none is). ``None``: something else was there."""

    def close(self) -> None: ...


class LeaderRecordWrite(NamedTuple):
    record: LeaderRecord
    over: LeaderRecord | None


@dataclass
class LeaderElection:
    """One candidate. ``me`` names this start of it and no other, unless that one is known to have ended.

    ``now`` is always the candidate's own clock, which must count while its machine sleeps.
    """

    me: str
    address: str
    duration_s: float
    new_term: Callable[[], int]
    """Above all terms of a record that was deleted, as far as anybody can know: milliseconds on the wall, say."""
    since: int = 0
    """A term in which its job was led already: one that has ended since is not begun again."""
    term: int = 0
    """In which it leads; 0: it does not."""
    valid_until: float = float("-inf")
    must_read: bool = True
    lost: str = ""
    """Why it leads no longer."""
    follows: str = ""
    """Another holder, which was seen to renew."""
    heard: int = 0
    """The greatest term in which another one has led, as nodes say."""
    epoch: int = -1
    incarnation_epoch: int = 0
    over: str = ""
    reason: str = ""
    leaving: bool = False
    seen: LeaderRecord | None = None
    seen_at: float = float("-inf")
    renewed_at: float = float("-inf")

    @property
    def margin_s(self) -> float:
        """For what is on its way when the time is up, and for clocks that do not run alike."""
        return self.duration_s / 5

    @property
    def renew_s(self) -> float:
        return self.duration_s / 3

    def acts(self, now: float) -> bool:
        return self.term > 0 and now < self.valid_until

    # -- what it wants ------------------------------------------------------------------------------------------------

    def wanted(self, now: float) -> LeaderRecordWrite | None:
        """What it would write now. Nothing while it ``must_read``."""
        if self.must_read:
            return None
        return self._renewal(now) if self.term else self._taking(now)

    def next_at(self, now: float) -> float:
        """When to look again, where nothing happens before."""
        if self.term:
            return self.renewed_at + self.renew_s
        return now + self.margin_s / 3

    def _renewal(self, now: float) -> LeaderRecordWrite | None:
        mine = LeaderRecord(
            *(self.me, self.term, self.address, self.epoch, self.duration_s),
            over=self.over,
            reason=self.reason,
            incarnation_epoch=self.incarnation_epoch,
        )
        if self.seen is None:
            if self.acts(now):  # it was deleted, and nobody else can have led since
                return LeaderRecordWrite(mine, None)
            self._step_back("the record of who leads was deleted, and was not made again in time")
            return self._taking(now)
        if self.heard >= self.term:
            return LeaderRecordWrite(replace(mine, holder="", term=self.heard), self.seen)
        if self.leaving:
            return LeaderRecordWrite(replace(mine, holder="", address=""), self.seen)
        seen = self.seen
        news = (self.epoch, self.incarnation_epoch, self.over) != (seen.epoch, seen.incarnation_epoch, seen.over)
        return LeaderRecordWrite(mine, self.seen) if news or now >= self.renewed_at + self.renew_s else None

    def _taking(self, now: float) -> LeaderRecordWrite | None:
        seen = self.seen
        if self.leaving:
            return None
        if seen is None:
            return LeaderRecordWrite(LeaderRecord(UNKNOWN_HOLDER, self.new_term(), duration_s=self.duration_s), None)
        if seen.over and (seen.over == JOB_FINISHED or seen.term >= self.since > 0):
            return None
        if seen.holder not in ("", self.me) and now - self.seen_at < seen.duration_s:
            return None
        term = max(seen.term, self.heard) + 1
        mine = LeaderRecord(self.me, term, self.address, seen.epoch, self.duration_s)
        return LeaderRecordWrite(replace(mine, incarnation_epoch=seen.incarnation_epoch), seen)

    # -- what it learns -----------------------------------------------------------------------------------------------

    def saw(self, record: LeaderRecord | None, now: float) -> None:
        """What a read brought, when it had come back."""
        self.must_read = False
        before, self.seen = self.seen, record
        if before is None or record is None or before.version != record.version:
            self.seen_at = now
            if before is not None and record is not None and self._is_anothers(before) and self._is_anothers(record):
                self.follows, self.since = record.holder, max(self.since, record.term)
        if self.term and record is not None and (record.holder, record.term) != (self.me, self.term):
            who = record.holder if self._is_anothers(record) else "somebody else"
            self._step_back(f"{who} leads, or is about to, in term {record.term}")

    def wrote(self, write: LeaderRecordWrite, record: LeaderRecord | None, began: float, now: float) -> None:
        """What came of a write that was begun then; ``None``: something else was there."""
        if record is None:
            self.must_read = True
            return
        self.seen, self.seen_at = record, now
        if record.holder == self.me:
            if not self.term:
                self.epoch, self.over, self.reason, self.lost = record.epoch, "", "", ""
                self.incarnation_epoch = record.incarnation_epoch
            self.term, self.renewed_at = record.term, began
            self.valid_until = began + self.duration_s - self.margin_s
        elif self.term:
            self._step_back("it was given up" if self.leaving else f"another one has led in term {self.heard}")

    def unanswered(self) -> None:
        """Whether or not something was written is unknown."""
        self.must_read = True

    def _step_back(self, why: str) -> None:
        self.term, self.valid_until, self.lost = 0, float("-inf"), why

    def _is_anothers(self, record: LeaderRecord) -> bool:
        return record.holder not in ("", UNKNOWN_HOLDER, self.me)


# -- where records are ------------------------------------------------------------------------------------------------

LeaderRecordStoreFactory = Callable[[SplitResult, float], LeaderRecordStore]
"""Called with the URL, and how long a holder leads without renewing."""


def is_leader_url(coordinator: str) -> bool:
    """Whether that says where it is noted who leads, and not where the coordinator is."""
    return "://" in coordinator


def leader_address(record: LeaderRecord | None) -> str:
    """Where the job's coordinator is."""
    if record is None or not record.address:
        raise ControlPlaneUnavailableError("nobody leads the job at the moment")
    return record.address


def open_leader_record(url: str, found: Iterable[EntryPoint] | None = None) -> LeaderRecordStore:
    """Of the package that knows the URL's scheme. ``?lease=SECONDS`` says how long a holder leads without renewing."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    try:
        duration_s = float(query.pop("lease", LEASE_DURATION_S))
    except ValueError:
        raise PolicyError(f"{url}: lease= is not a number of seconds") from None
    if query or not MIN_LEASE_DURATION_S <= duration_s <= 3600:
        raise PolicyError(f"{url}: only ?lease=SECONDS is known, from {MIN_LEASE_DURATION_S:g} to 3600")
    known = {
        entry.name: entry for entry in (entry_points(group=LEADER_RECORD_ENTRY_POINTS) if found is None else found)
    }
    if parts.scheme == "file":
        from elastic.control.leader_file import LeaderRecordFile

        return LeaderRecordFile.at(parts, duration_s)
    if parts.scheme not in known:
        schemes = ", ".join(sorted({"file", *known}))
        raise PolicyError(f"{url}: nobody here knows {parts.scheme}://, only {schemes}")
    entry = known[parts.scheme]
    try:
        opened: LeaderRecordStoreFactory = entry.load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"{entry.value}, which knows {parts.scheme}://, cannot be loaded: {error}") from error
    return opened(parts, duration_s)


_RELEASE_S = 3.0


class LeaderElector:
    """Of one lead: who has lost it needs another one, as what it knew of the job is of the past.

    ``changed`` is called from its thread after everything that may have changed something.
    """

    def __init__(
        self,
        leadership: LeaderRecordStore,
        me: str,
        address: str,
        *,
        changed: Callable[[], None],
        since_term: int = 0,
        clock: Callable[[], float] = since_boot,
    ) -> None:
        self._leadership, self._changed_call, self._clock = leadership, changed, clock
        self._election = LeaderElection(me, address, leadership.duration_s, _milliseconds, since=since_term)
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
    def incarnation_epoch(self) -> int:
        """Incarnations of all worlds but the newest have smaller epochs."""
        with self._changed:
            return self._election.incarnation_epoch

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

    def noted(self, epoch: int, incarnation_epoch: int = 0, over: str = "", reason: str = "") -> bool:
        """Whether that is in the record, and it still leads; if not, it is written next."""
        with self._changed:
            election, seen = self._election, self._election.seen
            known = election.epoch, election.incarnation_epoch
            if epoch > known[0] or incarnation_epoch > known[1] or over != election.over:
                election.epoch, election.over, election.reason = max(epoch, known[0]), over, reason
                election.incarnation_epoch = max(incarnation_epoch, known[1])
                self._changed.notify_all()
            written = (
                seen is not None
                and seen.epoch >= epoch
                and seen.incarnation_epoch >= incarnation_epoch
                and seen.over == over
            )
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
            except ControlPlaneUnavailableError as error:
                self._unanswered(str(error))
            except Exception as error:  # a place that answers what nobody has thought of is one that does not answer
                log.exception("who leads the job cannot be asked")
                self._unanswered(str(error))
            self._changed_call()
        write = self._election.wanted(self._clock())  # a lead that came while it was given up
        if write is not None and self._election.term:
            with contextlib.suppress(ControlPlaneUnavailableError):
                self._write(write)

    def _read(self) -> None:
        record = self._leadership.read()
        with self._changed:
            self._election.saw(record, self._clock())
            self._changed.notify_all()

    def _write(self, write: LeaderRecordWrite) -> None:
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
