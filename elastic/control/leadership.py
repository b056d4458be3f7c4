"""Who leads a job that any of its machines may lead: one record, which is changed only by who has read it as it is.

:class:`Leadership` is where the record is kept. :class:`Election` decides what one candidate does with it; it is pure
but for its own memory. :class:`~elastic.control.elector.Elector` is its shell.

A leader acts only while its last answered renewal is younger than the record's ``duration_s``, less a margin, by its
own clock, which also counts while its machine sleeps. Another candidate takes the lead only when it has itself seen the
record unchanged for the whole ``duration_s``. So no two of them act at a time, whatever their clocks on the wall say.
Each lead has a term above all before it; what carries an older one is refused by who has heard a newer one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple, Protocol
from urllib.parse import SplitResult, parse_qsl, urlsplit

import msgspec

from elastic.errors import ControlLostError, PolicyError
from peerstore.names import Counted, Number

GROUP = "elastic.leadership"
DURATION_S = 15.0
LEAST_S = 1.0
FINISHED = "finished"
"""How a job has ended that nobody goes on with."""
UNKNOWN = "?"
"""Holds a record that was just made. There may have been one before, whose holder still acts: it is waited for."""
replace = msgspec.structs.replace


class LeaderRecord(msgspec.Struct, frozen=True):
    """As it was read. ``version`` is the store's: it is another one after every change, also of a record made anew."""

    holder: str = ""
    """Who leads; ``""``: nobody does, and whoever comes may."""
    term: Number = 0
    address: str = ""
    """Where the holder is reached."""
    epoch: Counted = -1
    """No world has had a greater number."""
    duration_s: float = DURATION_S
    over: str = ""
    """How the job ended: a value of :class:`~elastic.control.messages.Over`; ``""`` while it has not."""
    reason: str = ""
    version: str = ""


class Leadership(Protocol):
    """Where one job's record is. Any process may call; every call has an end, a few seconds away at the most.

    Both raise :class:`~elastic.errors.ControlLostError` where it is unknown what is there (whether or not something was
    written), and :class:`~elastic.errors.RefusedError` where this process may not ask.
    """

    duration_s: float
    """How long a holder leads without renewing."""

    def read(self) -> LeaderRecord | None:
        """``None``: there is none."""

    def write(self, record: LeaderRecord, over: LeaderRecord | None) -> LeaderRecord | None:
        """Put ``record`` in the place of ``over`` (``None``: where none is). ``None``: something else was there."""

    def close(self) -> None: ...


class Write(NamedTuple):
    record: LeaderRecord
    over: LeaderRecord | None


@dataclass
class Election:
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

    def wanted(self, now: float) -> Write | None:
        """What it would write now. Nothing while it ``must_read``."""
        if self.must_read:
            return None
        return self._renewal(now) if self.term else self._taking(now)

    def next_at(self, now: float) -> float:
        """When to look again, where nothing happens before."""
        if self.term:
            return self.renewed_at + self.renew_s
        return now + self.margin_s / 3

    def _renewal(self, now: float) -> Write | None:
        mine = LeaderRecord(
            self.me, self.term, self.address, self.epoch, self.duration_s, over=self.over, reason=self.reason
        )
        if self.seen is None:
            if self.acts(now):  # it was deleted, and nobody else can have led since
                return Write(mine, None)
            self._step_back("the record of who leads was deleted, and was not made again in time")
            return self._taking(now)
        if self.heard >= self.term:
            return Write(replace(mine, holder="", term=self.heard), self.seen)
        if self.leaving:
            return Write(replace(mine, holder="", address=""), self.seen)
        news = (self.epoch, self.over) != (self.seen.epoch, self.seen.over)
        return Write(mine, self.seen) if news or now >= self.renewed_at + self.renew_s else None

    def _taking(self, now: float) -> Write | None:
        seen = self.seen
        if self.leaving:
            return None
        if seen is None:
            return Write(LeaderRecord(UNKNOWN, self.new_term(), duration_s=self.duration_s), None)
        if seen.over and (seen.over == FINISHED or seen.term >= self.since > 0):
            return None
        if seen.holder not in ("", self.me) and now - self.seen_at < seen.duration_s:
            return None
        term = max(seen.term, self.heard) + 1
        return Write(LeaderRecord(self.me, term, self.address, seen.epoch, self.duration_s), seen)

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

    def wrote(self, write: Write, record: LeaderRecord | None, began: float, now: float) -> None:
        """What came of a write that was begun then; ``None``: something else was there."""
        if record is None:
            self.must_read = True
            return
        self.seen, self.seen_at = record, now
        if record.holder == self.me:
            if not self.term:
                self.epoch, self.over, self.reason, self.lost = record.epoch, "", "", ""
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
        return record.holder not in ("", UNKNOWN, self.me)


# -- where records are ------------------------------------------------------------------------------------------------

Open = Callable[[SplitResult, float], Leadership]
"""Called with the URL, and how long a holder leads without renewing."""


def is_url(coordinator: str) -> bool:
    """Whether that says where it is noted who leads, and not where the coordinator is."""
    return "://" in coordinator


def address_of(record: LeaderRecord | None) -> str:
    """Where the job's coordinator is."""
    if record is None or not record.address:
        raise ControlLostError("nobody leads the job at the moment")
    return record.address


def leadership_at(url: str, found: Iterable[EntryPoint] | None = None) -> Leadership:
    """Of the package that knows the URL's scheme. ``?lease=SECONDS`` says how long a holder leads without renewing."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    try:
        duration_s = float(query.pop("lease", DURATION_S))
    except ValueError:
        raise PolicyError(f"{url}: lease= is not a number of seconds") from None
    if query or not LEAST_S <= duration_s <= 3600:
        raise PolicyError(f"{url}: only ?lease=SECONDS is known, from {LEAST_S:g} to 3600")
    known = {entry.name: entry for entry in (entry_points(group=GROUP) if found is None else found)}
    if parts.scheme == "file":
        from elastic.control.leader_file import FileLeadership

        return FileLeadership.at(parts, duration_s)
    if parts.scheme not in known:
        schemes = ", ".join(sorted({"file", *known}))
        raise PolicyError(f"{url}: nobody here knows {parts.scheme}://, only {schemes}")
    entry = known[parts.scheme]
    try:
        opened: Open = entry.load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"{entry.value}, which knows {parts.scheme}://, cannot be loaded: {error}") from error
    return opened(parts, duration_s)
