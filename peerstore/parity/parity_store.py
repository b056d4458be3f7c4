"""The parities that this node stores for its group, and the recovery of lost shards from them."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from peerstore.errors import (
    ArenaBusyError,
    ArenaFullError,
    PeerStoreError,
    PeerUnreachableError,
    RequestError,
    ShardNotFoundError,
    ShardPendingError,
)
from peerstore.membership.topology import NodeId
from peerstore.parity.parity_codec import MAX_PARITY_MEMBERS, ParityRecord, Stripe
from peerstore.parity.stripes import (
    ShardSources,
    StoredParity,
    parities_to_make,
    parity_sets_for,
    parse_stored_parity,
    superseded_parities,
    write_parity,
    write_rebuilt_shard,
)
from peerstore.peers.peer_inventory import JobInventory
from peerstore.peers.peer_messages import GetParities, GetShardRecords, ParityStatus, StripeReport
from peerstore.peers.range_reader import RangeReader
from peerstore.replication.replicator import ReplicationContext
from peerstore.shard_records import ShardInfo, ShardKey, ShardRecord, VersionId
from peerstore.store.record_validation import MAX_PARTS_PER_VERSION

log = logging.getLogger(__name__)

PARITY_RETRY_S = 1.0
_NO_ROOM_S = 20.0
_BUSY_S = 3.0
_MAX_VERSIONS = 64


@dataclass
class _ReceivedReport:
    """One member's report on its shards of one version."""

    members: tuple[str, ...]
    parts: dict[int, int]
    life: int
    """Generation of the member: reports of an earlier generation do not count, because shards may be lost."""


@dataclass(frozen=True)
class ParityTask:
    """A parity that this node has to make."""

    version_id: VersionId
    number: int
    members: tuple[str, ...]
    parts: dict[str, int]
    """Part by member."""


class ParityStore:
    """One job's parities on this node. Thread-safe, but only one thread makes parities."""

    def __init__(
        self, shared: ReplicationContext, *, fetch_blob: Callable[[str, tuple[str, ...]], bytes], patience_s: float
    ) -> None:
        self._shared = shared
        self._store = shared.store
        self._job = shared.job
        self._membership = shared.membership
        self._reader = RangeReader(shared.membership.client_for, streams=shared.policy.streams)
        self._fetch_blob = fetch_blob
        self._patience_s = patience_s
        self._clock = shared.clock
        self._lock = threading.Lock()
        self._reports: dict[str, dict[VersionId, _ReceivedReport]] = defaultdict(dict)
        self._generations: dict[str, tuple[int, float]] = {}
        """Each member's last known generation, and the time until which reports of the previous one count."""
        self._reported_at: dict[VersionId, float] = {}
        self._retry_at: dict[tuple[VersionId, int], tuple[float, str]] = {}
        self._no_room: set[tuple[VersionId, int]] = set()
        self._busy: dict[tuple[VersionId, int], float] = {}
        """Stripes that temporarily had no room, with the time of the first failure."""
        self._decoded: dict[ShardKey, StoredParity] = {}
        """Decoded records of parities."""

    # -- reports of members -------------------------------------------------------------------------------------------

    def record_report(self, sender: str, note: StripeReport) -> bool:
        """Record a member's report; return whether it is new."""
        if (
            len(note.members) > MAX_PARITY_MEMBERS
            or len(note.parts) > MAX_PARTS_PER_VERSION
            or min(note.parts, default=0) < 0
        ):
            raise RequestError(f"{sender} is in a group of {len(note.members)} with {len(note.parts)} parts")
        if sender not in note.members:
            raise RequestError(f"{sender} told of a group that it is not in: {', '.join(note.members)}")
        told = _ReceivedReport(note.members, dict(note.parts), note.generation)
        with self._lock:
            versions = self._reports[sender]
            before = versions.get(note.version_id)
            if before is not None and (before == told or before.life > told.life):
                return False
            versions[note.version_id] = told
            for group in sorted(versions)[:-_MAX_VERSIONS]:
                del versions[group]
            self._reported_at[note.version_id] = self._clock()
            return True

    def status_for(self, sender: str, group: VersionId, members: tuple[str, ...]) -> ParityStatus:
        """Return the state of a member's shards in this node's parities."""
        kept = [one for one in self.stored() if one.info.version_id == group and one.members == members]
        kept = self._undisturbed(kept)
        with self._lock:
            said = {
                member: versions[group] for member, versions in self._current_reports().items() if group in versions
            }
            mine = dict(said[sender].parts) if sender in said and said[sender].members == members else {}
            full = {number: self._retry_at[group, number][1] for at, number in self._no_room if at == group}
        # A part that two members have is protected in the parity of either.
        there = {
            part
            for one in kept
            for member, part in one.info.parts.items()
            if member == sender or (member in said and part in said[member].parts.values())
        }
        refused = tuple(part for number, part in mine.items() if number in full and part not in there)
        why = next((full[number] for number in mine if number in full), "")
        return ParityStatus(group, members, tuple(part for part in mine.values() if part in there), refused, why)

    def _undisturbed(self, kept: Iterable[StoredParity]) -> list[StoredParity]:
        """Return parities whose shards are all on their original members.

        A member that lost a shard may find its part on another member. Two shards of one parity on one node would be
        lost together.
        """
        with self._lock:
            current = self._current_reports()
            found = []
            for one in kept:
                group = one.info.version_id
                at = {
                    member: versions[group].parts.values() for member, versions in current.items() if group in versions
                }
                told = {member for member, versions in self._reports.items() if group in versions}
                elsewhere = {part for parts in at.values() for part in parts}
                if all(
                    part in at[member] if member in at else member not in told and part not in elsewhere
                    for member, part in one.info.parts.items()
                ):
                    found.append(one)
        return found

    def _current_reports(self) -> dict[str, dict[VersionId, _ReceivedReport]]:
        """Return members' reports of their current generation; the caller holds the lock.

        For ``patience_s`` seconds, reports of the previous generation count too: a member that only refuted a suspicion
        also has a higher generation, and reports again.
        """
        now, found = self._clock(), dict[str, dict[VersionId, _ReceivedReport]]()
        for member, versions in self._reports.items():
            life = self._membership.generation_of(member)
            known, until = self._generations.get(member, (life, now))
            if known != life:
                until = now + self._patience_s
            self._generations[member] = life, until
            found[member] = {group: told for group, told in versions.items() if told.life >= life or now < until}
        return found

    # -- stored parities ----------------------------------------------------------------------------------------------

    def stored(self) -> list[StoredParity]:
        """Return the sealed parities of this node; undecodable ones are reported as damaged."""
        found = {}
        for record in self._store.replicas.list_parities(self._job):
            known = self._decoded.get(record.key)
            try:
                found[record.key] = known if known is not None else parse_stored_parity(record)
            except RequestError as error:
                self._store.report_damage(record.key, str(error))
        self._decoded = found
        return list(found.values())

    def prune(self, kept: Sequence[StoredParity]) -> None:
        """Delete superseded parities, and reports on versions that are not needed."""
        for key in superseded_parities(kept, self._undisturbed(kept)):
            self._store.replicas.delete_parity(key)
        with self._lock:
            old = {group for told in self._reports.values() for group in told}
            known = self._store.jobs.versions(self._job)
            old = {group for group in old if not known.is_needed(group)}
            for told in self._reports.values():
                for group in old & told.keys():
                    del told[group]
            self._reported_at = {group: at for group, at in self._reported_at.items() if group not in old}
            self._retry_at = {which: later for which, later in self._retry_at.items() if which[0] not in old}
            self._no_room &= self._retry_at.keys()
            self._busy = {which: since for which, since in self._busy.items() if which[0] not in old}

    # -- new parities -------------------------------------------------------------------------------------------------

    def pending_tasks(self, members: tuple[str, ...], kept: Iterable[StoredParity]) -> tuple[list[ParityTask], float]:
        """Return the parities to make now, oldest version first, and the seconds until the next check."""
        now, useful = self._clock(), self._undisturbed(kept)
        mine: dict[VersionId, set[int]] = defaultdict(set)
        parts_of: dict[VersionId, int] = {}
        for fact in self._store.replicas.list_shards(self._job):
            mine[fact.key.version_id].add(fact.key.part)
            parts_of[fact.key.version_id] = fact.parts
        with self._lock:
            told = {member: versions for member, versions in self._current_reports().items() if member in members}
            news_at = dict(self._reported_at)
            later = {which: until for which, (until, _) in self._retry_at.items() if until > now}
            ends = [until for _, until in self._generations.values() if until > now]
        found, again = [], min((until - now for until in (*later.values(), *ends)), default=float("inf"))
        known = self._store.jobs.versions(self._job)
        for group in sorted({group for versions in told.values() for group in versions}):
            if not known.is_needed(group):
                continue
            numbers = {
                member: versions[group].parts
                for member, versions in told.items()
                if group in versions and versions[group].members == members
            }
            reported = mine[group] | {part for parts in numbers.values() for part in parts.values()}
            left_s = news_at.get(group, now) + self._patience_s - now
            complete = left_s <= 0 or len(reported) >= parts_of.get(group, 1 << 62)
            there = [one.info.parts for one in useful if one.info.version_id == group and one.members == members]
            me = self._membership.this_node.id
            for number, parts in parities_to_make(me, members, numbers, there, complete=complete).items():
                if (group, number) not in later:
                    found.append(ParityTask(group, number, members, parts))
            if not complete:
                again = min(again, left_s)
        return found, again

    def make(self, due: ParityTask) -> int:
        """Make one parity and report its state to the members; return the number of bytes read."""
        size = 0
        which = (due.version_id, due.number)
        try:
            size = self._make(due)
        except (PeerStoreError, OSError) as error:
            log.warning("job %s: no parity %d of version %d: %s", self._job, due.number, due.version_id.version, error)
            now = self._clock()
            full = isinstance(error, ArenaFullError)
            with self._lock:
                if isinstance(error, ArenaBusyError) and not isinstance(error, ShardPendingError):
                    # Old shards can be evicted only after a newer version is replicated, which must not wait for them.
                    full = now - self._busy.setdefault(which, now) >= _BUSY_S
                self._retry_at[which] = (now + (_NO_ROOM_S if full else PARITY_RETRY_S), f"{self._me}: {error}")
                (self._no_room.add if full else self._no_room.discard)(which)
            if not full:
                raise
        else:
            with self._lock:
                self._retry_at.pop(which, None)
                self._busy.pop(which, None)
                self._no_room.discard(which)
        for member in due.parts:
            note = self.status_for(member, due.version_id, due.members)
            try:
                self._membership.client_for(member).call("parity_status", note, type(None), timeout_s=5.0)
            except (PeerStoreError, OSError) as error:  # the member repeats its report
                log.debug("job %s: %s did not receive the status of its parity: %s", self._job, member, error)
        return size

    @property
    def _me(self) -> NodeId:
        return self._membership.this_node.id

    def _make(self, due: ParityTask) -> int:
        records = {NodeId(member): self._record(member, due.version_id, part) for member, part in due.parts.items()}
        for member, record in records.items():
            self._fetch_blobs(member, record)
        members = tuple(NodeId(member) for member in due.members)
        stripe = Stripe(due.number, members, tuple(records.get(member) for member in members))
        with ShardSources(self._store, self._reader, self._shared.pace, me=self._me, sources=len(records)) as ranges:
            reads = {
                segment.member: ranges.reader(records[segment.member], [segment.member], stop=segment.stop)
                for segment in stripe.parity(self._me).segments
            }
            whole = self._store.jobs.versions(self._job).is_committed(due.version_id)
            write_parity(self._store, stripe, self._me, reads, whole=whole, stopped=self._shared.stop.is_set)
            return ranges.bytes_read

    def _record(self, member: str, group: VersionId, part: int) -> ShardRecord:
        found: list[ShardRecord] = self._membership.client_for(member).call(
            "shard_records", GetShardRecords(group), list[ShardRecord]
        )
        for record in found:
            if record.key.job == self._job and record.key.version_id == group and record.key.part == part:
                return record
        raise ShardNotFoundError(f"{member} told of part {part} of version {group.version}, and has it no more")

    def _fetch_blobs(self, member: str, record: ShardRecord) -> None:
        """Fetch the blobs that readers of the shard need, so that they are not lost with its node."""
        fact = ShardInfo(record.key, record.parts, record.size_bytes, record.meta, record.sealed_ns, False)
        here = set(self._store.blobs.list_names(self._job))
        for name in self._shared.blobs_of(fact):
            if name not in here:
                self._fetch_blob(name, (member,))


class ShardRebuilder:
    """Rebuilds lost shards of one job on this node."""

    def __init__(self, shared: ReplicationContext, sight: Callable[[], JobInventory]) -> None:
        self._shared = shared
        self._store = shared.store
        self._job = shared.job
        self._membership = shared.membership
        self._reader = RangeReader(shared.membership.client_for, streams=shared.policy.streams)
        self._inventory = sight

    def rebuild(self, shard: ShardRecord, nodes: Collection[str], *, holders: tuple[str, ...]) -> bool:
        """Rebuild ``shard`` from parities on ``nodes``; return ``False`` if it is stored already."""
        began = time.monotonic()
        parities, silent = self._parities(shard.key.version_id, nodes)
        sources = self._inventory().sources
        rows = parity_sets_for(shard.key, [kept for kept, _ in parities.values()], held=sources.__contains__)
        if not rows and silent:
            raise PeerUnreachableError(
                f"cannot rebuild {shard.key} while parities on {', '.join(silent)} are unreachable"
            )
        if not rows:
            raise ShardNotFoundError(f"the parities on {', '.join(sorted(nodes))} do not give {shard.key} back")
        problem: PeerStoreError | None = None
        for member, row in rows:
            try:
                made = self._rebuild(shard, member, row, parities, sources=sources, holders=holders)
            except (ShardNotFoundError, RequestError) as error:
                problem = error
                continue
            seconds = time.monotonic() - began
            members = ", ".join(row[0].stripe.members)
            log.info("job %s: %s was rebuilt from the group %s in %.2f s", self._job, shard.key, members, seconds)
            return made
        raise problem or ShardNotFoundError(f"{shard.key} cannot be rebuilt")

    def _parities(
        self, group: VersionId, nodes: Collection[str]
    ) -> tuple[dict[ShardKey, tuple[ParityRecord, ShardRecord]], list[str]]:
        """Return the parities of a version, and the unreachable nodes."""
        found, silent = {}, []
        for node in sorted(nodes):
            try:
                records = self._records(node, group)
            except (PeerStoreError, OSError) as error:
                log.warning("job %s: %s did not tell of its parities: %s", self._job, node, error)
                silent.append(node)
                continue
            for record in records:
                try:
                    parity = parse_stored_parity(record).parity
                except RequestError as error:
                    log.error("job %s: %s has a parity that is none: %s", self._job, node, error)
                    continue
                if parity.keeper == node and record.key.job == self._job and record.key.version_id == group:
                    found[record.key] = (parity, record)
        return found, silent

    def _records(self, node: str, group: VersionId) -> list[ShardRecord]:
        if node == self._membership.this_node.id:
            return [
                record for record in self._store.replicas.list_parities(self._job) if record.key.version_id == group
            ]
        found: list[ShardRecord] = self._membership.client_for(node).call(
            "parities", GetParities(group), list[ShardRecord]
        )
        return found

    def _rebuild(
        self,
        shard: ShardRecord,
        member: NodeId,
        row: tuple[ParityRecord, ...],
        parities: Mapping[ShardKey, tuple[ParityRecord, ShardRecord]],
        *,
        sources: Mapping[ShardKey, tuple[str, ...]],
        holders: tuple[str, ...],
    ) -> bool:
        others = {
            other: there
            for parity in row
            for other, there in zip(parity.stripe.members, parity.stripe.shards, strict=True)
            if there is not None and other != member
        }
        wanted = next(parity.stripe.shard(member) for parity in row)
        if wanted is None or wanted.checksums != shard.checksums:
            raise RequestError(f"{shard.key} is another shard in the parities of {', '.join(row[0].stripe.members)}")
        kept = {parity.keeper: record for parity, record in parities.values() if parity in row}
        count = len(others) + len(kept)
        me, stopped = self._membership.this_node.id, self._shared.stop.is_set
        with ShardSources(self._store, self._reader, self._shared.pace, me=me, sources=count) as ranges:
            shards = {
                other: ranges.reader(record, sources[record.key])
                for other, record in others.items()
                if record.key in sources
            }
            parts = {keeper: ranges.reader(record, [keeper]) for keeper, record in kept.items()}
            return write_rebuilt_shard(
                self._store, wanted, member, row, shards=shards, kept=parts, holders=holders, stopped=stopped
            )
