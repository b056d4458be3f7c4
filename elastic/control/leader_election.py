"""Leader election: the leader record, the state machine of one candidate, and its thread.

:class:`LeaderRecordStore` stores the record. :class:`LeaderElection` decides what one candidate reads and writes,
without I/O. :class:`LeaderElector` runs it.

A leader acts only while its last answered renewal is younger than the record's ``duration_s``, less a margin. It uses
its own clock, which also counts while its machine sleeps. Another candidate takes the lead only after it has seen the
record unchanged for the whole ``duration_s``. So two leaders never act at the same time, even if their wall clocks
differ. Each lead has a higher term than all earlier ones. A node that has obeyed a newer term
refuses messages of an older one.
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
"""``over`` of a job that finished and must not be resumed."""
UNKNOWN_HOLDER = "?"
"""Holder of a new record, for which candidates wait: the holder of a deleted record may still act."""
replace = msgspec.structs.replace


class LeaderRecord(msgspec.Struct, frozen=True):
    """Leader record of one job. The store sets ``version`` to a new value at every write."""

    holder: str = ""
    """Name of the leader; "" if the lead is free."""
    term: NonNegativeInt = 0
    address: str = ""
    """Address of the holder."""
    epoch: NonNegativeIntOrMinusOne = -1
    """Epoch of the newest world, or -1."""
    duration_s: float = LEASE_DURATION_S
    over: str = ""
    """End of the job, a value of :class:`~elastic.control.control_messages.ExitReason`, or ""."""
    reason: str = ""
    version: str = ""
    incarnation_epoch: NonNegativeInt = 0
    """Epoch that was allocated for the incarnations of the newest world."""


class LeaderRecordStore(Protocol):
    """Storage of one job's leader record.

    Any process may call it, and every call returns within a few seconds. ``read`` and ``write`` raise
    :class:`~elastic.errors.ControlPlaneUnavailableError` if the state of the record is unknown: a failed
    write may have succeeded. They raise :class:`~elastic.errors.ControlPlaneRefusedError` if this process has no
    access.
    """

    duration_s: float
    """Seconds for which a holder leads without renewal."""

    def read(self) -> LeaderRecord | None:
        """Return the record, or ``None`` if it does not exist."""

    def write(self, record: LeaderRecord, over: LeaderRecord | None) -> LeaderRecord | None:
        """Replace ``over`` (``None`` for no record) with ``record``, and return the record as stored.

        Return ``None`` if the stored record differs from ``over``.
        """

    def close(self) -> None: ...


class LeaderRecordWrite(NamedTuple):
    record: LeaderRecord
    over: LeaderRecord | None


@dataclass
class LeaderElection:
    """State machine of one candidate. Pure.

    ``me`` names this start of the candidate. Only a start that is known to have ended may have had the same name.
    ``now`` is always the candidate's own clock, which must count while its machine sleeps.
    """

    me: str
    address: str
    duration_s: float
    new_term: Callable[[], int]
    """Returns a term above those of any deleted record, such as the wall clock in milliseconds."""
    since: int = 0
    """Term in which the job had a leader already, or 0.

    A job that ended in this term or later is not resumed."""
    term: int = 0
    """Term in which this candidate leads, or 0."""
    valid_until: float = float("-inf")
    must_read: bool = True
    lost: str = ""
    """Why this candidate lost the lead, or ""."""
    follows: str = ""
    """Another holder that was seen to renew its lease, or ""."""
    heard: int = 0
    """Greatest term of another leader, as nodes reported it."""
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
        """Seconds before the end of a lease in which the leader no longer acts.

        They cover messages in flight, and clocks that run at different rates.
        """
        return self.duration_s / 5

    @property
    def renew_s(self) -> float:
        return self.duration_s / 3

    def acts(self, now: float) -> bool:
        return self.term > 0 and now < self.valid_until

    # -- decisions ----------------------------------------------------------------------------------------------------

    def wanted(self, now: float) -> LeaderRecordWrite | None:
        """Return the write to attempt now, or ``None``. While ``must_read`` is set, there is no write."""
        if self.must_read:
            return None
        return self._plan_renewal(now) if self.term else self._plan_takeover(now)

    def next_at(self, now: float) -> float:
        """Return when to check again without other events."""
        if self.term:
            return self.renewed_at + self.renew_s
        return now + self.margin_s / 3

    def _plan_renewal(self, now: float) -> LeaderRecordWrite | None:
        own = LeaderRecord(
            *(self.me, self.term, self.address, self.epoch, self.duration_s),
            over=self.over,
            reason=self.reason,
            incarnation_epoch=self.incarnation_epoch,
        )
        if self.seen is None:
            if self.acts(now):  # the record was deleted, and no other candidate can lead before valid_until
                return LeaderRecordWrite(own, None)
            self._lose_lead("the record of who leads was deleted, and was not made again in time")
            return self._plan_takeover(now)
        if self.heard >= self.term:
            return LeaderRecordWrite(replace(own, holder="", term=self.heard), self.seen)
        if self.leaving:
            return LeaderRecordWrite(replace(own, holder="", address=""), self.seen)
        seen = self.seen
        is_changed = (self.epoch, self.incarnation_epoch, self.over) != (seen.epoch, seen.incarnation_epoch, seen.over)
        return LeaderRecordWrite(own, self.seen) if is_changed or now >= self.renewed_at + self.renew_s else None

    def _plan_takeover(self, now: float) -> LeaderRecordWrite | None:
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
        own = LeaderRecord(self.me, term, self.address, seen.epoch, self.duration_s)
        return LeaderRecordWrite(replace(own, incarnation_epoch=seen.incarnation_epoch), seen)

    # -- results ------------------------------------------------------------------------------------------------------

    def saw(self, record: LeaderRecord | None, now: float) -> None:
        """Record the result of a read that returned at ``now``."""
        self.must_read = False
        before, self.seen = self.seen, record
        if before is None or record is None or before.version != record.version:
            self.seen_at = now
            if (
                before is not None
                and record is not None
                and self._is_other_candidate(before)
                and self._is_other_candidate(record)
            ):
                self.follows, self.since = record.holder, max(self.since, record.term)
        if self.term and record is not None and (record.holder, record.term) != (self.me, self.term):
            name = record.holder if self._is_other_candidate(record) else "somebody else"
            self._lose_lead(f"{name} leads, or is about to, in term {record.term}")

    def wrote(self, write: LeaderRecordWrite, record: LeaderRecord | None, began: float, now: float) -> None:
        """Record the result of a write that started at ``began``; ``None`` if the stored record had changed."""
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
            self._lose_lead("it was given up" if self.leaving else f"another one has led in term {self.heard}")

    def unanswered(self) -> None:
        """Record a failed request. A write may have succeeded, so the record must be read."""
        self.must_read = True

    def _lose_lead(self, why: str) -> None:
        self.term, self.valid_until, self.lost = 0, float("-inf"), why

    def _is_other_candidate(self, record: LeaderRecord) -> bool:
        return record.holder not in ("", UNKNOWN_HOLDER, self.me)


# -- record stores ----------------------------------------------------------------------------------------------------

LeaderRecordStoreFactory = Callable[[SplitResult, float], LeaderRecordStore]
"""Opens a record store. Its arguments are the URL and the lease duration in seconds."""


def is_leader_url(coordinator: str) -> bool:
    """Return whether ``coordinator`` is the URL of a leader record, and not ``host:port``."""
    return "://" in coordinator


def leader_address(record: LeaderRecord | None) -> str:
    """Return the address of the job's coordinator.

    Raise :class:`~elastic.errors.ControlPlaneUnavailableError` if no coordinator leads.
    """
    if record is None or not record.address:
        raise ControlPlaneUnavailableError("no coordinator leads the job at the moment")
    return record.address


def open_leader_record(url: str, found: Iterable[EntryPoint] | None = None) -> LeaderRecordStore:
    """Open the record store of a URL with the plug-in for its scheme.

    ``?lease=SECONDS`` sets the lease duration.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    try:
        duration_s = float(query.pop("lease", LEASE_DURATION_S))
    except ValueError:
        raise PolicyError(f"{url}: lease= is not a number of seconds") from None
    if query or not MIN_LEASE_DURATION_S <= duration_s <= 3600:
        raise PolicyError(f"{url}: only ?lease=SECONDS is plugins, from {MIN_LEASE_DURATION_S:g} to 3600")
    plugins = {
        entry.name: entry for entry in (entry_points(group=LEADER_RECORD_ENTRY_POINTS) if found is None else found)
    }
    if parts.scheme == "file":
        from elastic.control.leader_file import LeaderRecordFile

        return LeaderRecordFile.at(parts, duration_s)
    if parts.scheme not in plugins:
        schemes = ", ".join(sorted({"file", *plugins}))
        raise PolicyError(f"{url}: no installed package supports {parts.scheme}://, only {schemes}")
    entry = plugins[parts.scheme]
    try:
        open_store: LeaderRecordStoreFactory = entry.load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"{entry.value}, which knows {parts.scheme}://, cannot be loaded: {error}") from error
    return open_store(parts, duration_s)


_RELEASE_S = 3.0


class LeaderElector:
    """Thread of one candidate, for at most one lead.

    A coordinator that loses the lead must start again with a new elector, as its state of the job may be outdated.
    ``changed`` is called from the elector's thread after each request to the record store.
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
        self._store, self._on_changed, self._clock = leadership, changed, clock
        self._election = LeaderElection(me, address, leadership.duration_s, _now_ms, since=since_term)
        self._changed = threading.Condition()
        self._closed = False
        self._last_error = ""
        self._thread = threading.Thread(target=self._run, name="elastic-elector", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def acts(self) -> bool:
        with self._changed:
            return self._election.acts(self._clock())

    @property
    def term(self) -> int:
        """Term of this candidate, even if its lease may have expired; 0 if it does not lead."""
        with self._changed:
            return self._election.term

    @property
    def epoch(self) -> int:
        """Epoch of the newest world, or -1."""
        with self._changed:
            return self._election.epoch

    @property
    def incarnation_epoch(self) -> int:
        """Epoch that was allocated for the incarnations of the newest world."""
        with self._changed:
            return self._election.incarnation_epoch

    @property
    def lost(self) -> str:
        """Why the lead was lost; "" if it was not, or before the first lead."""
        with self._changed:
            return self._election.lost

    @property
    def follows(self) -> str:
        """Another holder that was seen to renew its lease, or ""."""
        with self._changed:
            return self._election.follows

    @property
    def finished(self) -> tuple[str, str]:
        """End of the job in the record, and its reason; ("", "") for a job that has not ended."""
        with self._changed:
            seen = self._election.seen
            return ("", "") if seen is None else (seen.over, seen.reason)

    def noted(self, epoch: int, incarnation_epoch: int = 0, over: str = "", reason: str = "") -> bool:
        """Return whether the record contains these values and the candidate still leads.

        Values that are new are written next.
        """
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
        """Record that a node has obeyed another leader in ``term``."""
        with self._changed:
            self._election.heard = max(self._election.heard, term)
            self._changed.notify_all()

    def close(self) -> None:
        """Release the lead if this candidate has it, so that others need not wait, and stop the thread."""
        with self._changed:
            self._election.leaving = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            with self._changed:
                self._changed.wait_for(lambda: not self._election.term, _RELEASE_S)
                self._closed = True
                self._changed.notify_all()
            self._thread.join(2 * _RELEASE_S)
        self._store.close()

    # -- the elector's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed and not self._election.lost:
            with self._changed:
                write = self._election.wanted(self._clock())
                must_read = self._election.must_read
                if write is None and not must_read:
                    pause_s = max(0.01, self._election.next_at(self._clock()) - self._clock())
                    self._changed.wait(min(pause_s, self._election.margin_s))
                    if not self._closed and not self._election.term:
                        self._election.must_read = True  # a candidate without the lead polls the record
                    continue
            try:
                self._read() if write is None else self._write(write)
                self._last_error = ""
            except ControlPlaneUnavailableError as error:
                self._record_failure(str(error))
            except Exception as error:  # an unexpected answer counts as no answer
                log.exception("cannot read or write the leader record")
                self._record_failure(str(error))
            self._on_changed()
        write = self._election.wanted(self._clock())  # release a lead that was won during close()
        if write is not None and self._election.term:
            with contextlib.suppress(ControlPlaneUnavailableError):
                self._write(write)

    def _read(self) -> None:
        record = self._store.read()
        with self._changed:
            self._election.saw(record, self._clock())
            self._changed.notify_all()

    def _write(self, write: LeaderRecordWrite) -> None:
        began = self._clock()
        record = self._store.write(write.record, write.over)
        with self._changed:
            before = self._election.term
            self._election.wrote(write, record, began, self._clock())
            if self._election.term and not before:
                log.info("%s leads in term %d", self._election.me, self._election.term)
            self._changed.notify_all()

    def _record_failure(self, why: str) -> None:
        with self._changed:
            if why != self._last_error:
                self._last_error = why
                log.warning("the leader of the job is unknown: %s", why)
            self._election.unanswered()
            self._changed.wait_for(lambda: self._closed, self._election.margin_s / 3)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
