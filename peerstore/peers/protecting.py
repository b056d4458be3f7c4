"""Copies of this node's shards on other nodes, kept up to what was asked for, behind everybody's back."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from peerstore import deadlines
from peerstore.bandwidth import Bandwidth
from peerstore.checksum import chunk_count
from peerstore.cluster.nodes import Node
from peerstore.errors import PeerStoreError, ShardDamagedError, ShardNotFoundError
from peerstore.peers.accounts import AGAIN_S, Accounts, Outlook, Protection, is_whole
from peerstore.peers.duties import Duty, Standing
from peerstore.peers.messages import Suspect
from peerstore.peers.paths import Paths
from peerstore.peers.sending import Push
from peerstore.peers.settling import Settlement, Totals
from peerstore.peers.tending import FAREWELL_S, Tending
from peerstore.records import ShardFact, ShardKey
from peerstore.store import NodeStore

__all__ = ["Protecting", "Protection", "Totals"]

log = logging.getLogger(__name__)


class Protecting:
    """One job's duties to other nodes: one thread that sends, and a tally of what is settled."""

    def __init__(
        self,
        store: NodeStore,
        job: str,
        tending: Tending,
        protection: Protection,
        *,
        pace: Bandwidth,
        blobs_of: Callable[[ShardFact], tuple[str, ...]] = lambda _fact: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._job = job
        self._tending = tending
        self.protection = protection
        self._pace = pace
        self._blobs_of = blobs_of
        self._clock = clock
        self._accounts = Accounts(tending.me.id, protection)
        self._changed = threading.Condition()
        self._news = True
        self._stop = threading.Event()
        self.totals = Totals()
        self.settlement = Settlement(
            store, job, tending, reports=self._accounts.reports, totals=self.totals, changed=self._changed
        )
        self.paths = Paths()
        self.sending: tuple[Duty, int] | None = None
        """What is on its way right now, and its size."""
        self._thread = threading.Thread(target=self._run, name="peerstore-protect", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """What is on its way may come to its end, if it does that soon."""
        self._stop.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(deadlines.left(FAREWELL_S))
            if self._thread.is_alive():
                self._tending.hang_up()
                self._thread.join()
        self.settlement.close()

    def wake(self) -> None:
        """Something changed: a shard was sealed, a node came or went."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    # -- how things stand ---------------------------------------------------------------------------------------------

    def _look(self) -> Outlook:
        """The job as this node sees it right now."""
        facts = self._store.copies.facts(self._job)
        settled = self._store.copies.settled(self._job)
        epoch, _ = self._store.copies.owner_of(self._job)
        base = self._store.copies.base(self._job)
        left_out = self._store.copies.left_out(self._job)
        living, life = self._tending.living, self._tending.life
        return Outlook(self._clock(), living, facts, settled, epoch, base, life, left_out)

    @property
    def partners(self) -> tuple[str, ...]:
        """Where copies of what this node writes go."""
        living = self._tending.living
        with self._changed:
            return self._accounts.partners(living)

    def standings(self) -> list[Standing]:
        """How well every shard here is kept."""
        look = self._look()
        with self._changed:
            return self._accounts.standings(look)

    def holders(self, key: ShardKey) -> tuple[Node, ...]:
        """The living nodes that are known to hold a shard of this node, this one first."""
        living = self._tending.living
        with self._changed:
            confirmed = self._accounts.confirmed(key, self._tending.life)
        return (self._tending.me, *(living[node] for node in confirmed if node in living))

    def redundancy(self, key: ShardKey, level: str) -> tuple[int, int]:
        """In how many copies a shard is kept, and in how many domains."""
        holders = self.holders(key)
        return len(holders), len({node.label(level) for node in holders})

    def trouble(self, key: ShardKey) -> str:
        """Why a shard lacks copies, as far as it is known."""
        with self._changed:
            return self._accounts.trouble(key)

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Until ``ready`` says so; it is asked again after every copy."""
        with self._changed:
            return self._changed.wait_for(lambda: ready() or self._stop.is_set(), timeout_s) and not self._stop.is_set()

    @property
    def busy(self) -> bool:
        """Whether there are copies to be made that can be made."""
        return any(one.mine and one.lacking for one in self.standings())

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                duty = self._next()
                if duty is not None:
                    self._do(duty)
                self._tell_scribe()
            except Exception:  # the thread must outlive any one shard
                log.exception("job %s: protecting failed", self._job)
                self._stop.wait(AGAIN_S)

    def _next(self) -> Duty | None:
        """The next thing to send; ``None`` when something changed, or it is time to look again."""
        with self._changed:
            self._news = False
        look = self._look()
        with self._changed:
            found = self._accounts.next(look)
        if isinstance(found, Duty):
            return found
        self._tell_scribe()
        with self._changed:
            self._changed.wait_for(lambda: self._news or self._stop.is_set(), found)
        return None

    def _do(self, duty: Duty) -> None:
        key = duty.key
        fact = next((fact for fact in self._store.copies.facts(self._job) if fact.key == key), None)
        if fact is None:
            return
        try:
            pin = self._store.pin(key)
        except (ShardNotFoundError, ShardDamagedError):
            return
        self.sending = duty, fact.size_bytes
        life = self._tending.life(duty.to)
        whole = is_whole(fact, self._store.copies.settled(self._job))
        try:
            push = Push(
                self._tending.peer(duty.to),
                pin.record,
                pin.fd,
                pace=self._pace,
                streams=self.protection.streams,
                blob=lambda name: self._store.get_blob(self._job, name),
                stopped=self._stop.is_set,
            )
            base = self._store.copies.base(self._job)
            done = push.run(holders=duty.holders, whole=whole, blobs=self._blobs_of(fact), base=base)
        except (PeerStoreError, OSError) as error:
            self._failed(duty, error)
        else:
            with self._changed:
                self._accounts.done(duty, life, base)
                self._changed.notify_all()
            self.totals.copies += 1
            self.totals.sent_bytes += done.sent_bytes
            self.totals.skipped_bytes += done.skipped_bytes
            self.totals.seconds += done.seconds
            if not self._pace.limited:
                self.paths.took(duty.to, self._tending.peer(duty.to).address, done.sent_bytes, done.seconds)
            self.totals.lag_s = max(0.0, time.time() - fact.sealed_ns / 1e9)
        finally:
            self.sending = None
            pin.close()
            self._store.unpin(pin.id)

    def _failed(self, duty: Duty, error: Exception) -> None:
        self.totals.errors += 1
        log.warning("job %s: no copy of %s on %s: %s", self._job, duty.key, duty.to, error)
        with self._changed:
            doubtful = self._accounts.failed(duty, error, self._clock())
            self._changed.notify_all()
        if doubtful:
            with contextlib.suppress(PeerStoreError, OSError):
                self._compare(duty)

    def _compare(self, duty: Duty) -> None:
        """Two nodes do not mean the same bytes: who has others than it says drops them, and gets them elsewhere."""
        for record in self._store.records(self._job, duty.key.group):
            if record.key == duty.key and not self._store.verify(duty.key):
                chunks = (0, chunk_count(record.size_bytes, record.chunk_bytes))
                self._tending.peer(duty.to).call("suspect", Suspect(duty.key, (chunks,)), bool)

    def confirm(self, key: ShardKey, node: str, life: int) -> None:
        """``node`` has been seen, in this one of its lives, to hold a shard of this node."""
        with self._changed:
            self._accounts.confirm(key, node, life)
            self._changed.notify_all()

    # -- what is decided ----------------------------------------------------------------------------------------------

    def _tell_scribe(self) -> None:
        """Say which parts of which versions are here, and have their copies; who counts says what follows."""
        if not (self.protection.settles and self._tending.knows):  # others may be there that have no copies yet
            return
        look = self._look()
        with self._changed:
            teller, notes = self._accounts.unreported(look)
        if not self.settlement.tell(teller, notes):
            with self._changed:
                self._accounts.unreached(teller, self._clock())
