"""What this node does for the others: the answers to their requests, on connections that have proven whose they are."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from peerstore import frames
from peerstore.cluster.nodes import NodeId
from peerstore.commit import Decided, Settling
from peerstore.crashpoints import reach
from peerstore.errors import (
    PeerStoreError,
    ProtocolError,
    RequestError,
    ShardDamagedError,
    ShardNotFoundError,
    UnavailableError,
)
from peerstore.peers.lending import Lending
from peerstore.peers.messages import (
    Abort,
    Answer,
    AskBlob,
    AskBlobs,
    AskParities,
    AskRecords,
    AskRoster,
    Chunk,
    Commit,
    Dropped,
    Flush,
    Look,
    LookFor,
    NotDurable,
    Offer,
    Ping,
    PingFor,
    PutBlob,
    Read,
    Relist,
    Request,
    Settled,
    Stake,
    Striped,
    Suspect,
)
from peerstore.peers.plan import SharedNames
from peerstore.peers.receiving import Receiving
from peerstore.peers.team import Team
from peerstore.store import MAX_BLOB_BYTES, NodeStore
from peerstore.transport.handshake import PeerIdentity, admit
from peerstore.transport.seam import Channel, Payload

log = logging.getLogger(__name__)

_MOST_BLOB_BYTES = 8 << 20
"""In one answer that has several of them."""
_Answer = tuple[Any, Payload]


class Desk:
    """Serves every job this node takes part in, each on connections of its own."""

    def __init__(
        self,
        store: NodeStore,
        me: str,
        *,
        team_of: Callable[[str], Team | None],
        version: str = "",
        shared: SharedNames = SharedNames(),  # noqa: B008 - it is never changed
        verified: Callable[[PeerIdentity], None] = lambda _peer: None,
    ) -> None:
        self._store = store
        self._me = me
        self._team_of = team_of
        self._version = version
        self.shared = shared
        self._verified = verified
        self.receiving = Receiving(store, me)
        self.lending = Lending(store)
        self.refused = 0

    def serve(self, channel: Channel) -> None:
        """One connection, from its greeting to its end."""
        try:
            who = admit(channel, me=self._me, secret_of=self._secret_of, version=self._version)  # type: ignore[arg-type]
        except PeerStoreError:
            self.refused += 1
            raise
        team = self._team_of(who.job)
        if team is None:
            return
        self._verified(who)
        conversation = _Conversation(self, team, who, channel)
        try:
            conversation.run()
        except ProtocolError:
            self.refused += 1
            raise
        finally:
            conversation.end()

    def _secret_of(self, job: str) -> bytes | None:
        team = self._team_of(job)
        return team.credentials.secret if team is not None else None

    def close(self) -> None:
        self.receiving.close()


class _Conversation:
    """One peer's requests on one connection, one after the other."""

    def __init__(self, desk: Desk, team: Team, who: PeerIdentity, channel: Channel) -> None:
        self._desk = desk
        self._store = desk._store
        self._team = team
        self._who = who
        self._channel = channel
        self._bad: list[int] = []
        self._offered: set[str] = set()
        """Copies that were begun on this connection and are neither finished nor given up."""
        self._payload_bytes = 0
        self._operations: dict[str, tuple[type[Any], Callable[[Any], Any]]] = {
            "offer": (Offer, self._offer),
            "flush": (Flush, self._flush),
            "commit": (Commit, self._commit),
            "abort": (Abort, self._abort),
            "relist": (Relist, lambda a: self._store.copies.relist(self._mine(a.key), a.holders)),
            "put_blob": (PutBlob, self._put_blob),
            "look": (Look, lambda _: team.look()),
            "look_for": (LookFor, self._look_for),
            "records": (AskRecords, self._records),
            "blobs": (AskBlobs, self._blobs),
            "blob": (AskBlob, lambda a: self._store.get_blob(team.job, self._desk.shared.readable(a.name))),
            "suspect": (Suspect, lambda a: desk.lending.suspected(self._mine(a.key), a.chunks)),
            "striped": (Striped, lambda a: team.sharing.striped(who.node, a)),
            "stake": (Stake, lambda a: team.sharing.staked(who.node, a)),
            "parities": (AskParities, self._parities),
            "ping": (Ping, lambda a: team.tending.pinged(who.node, a)),
            "ping_for": (PingFor, lambda a: team.tending.reaches(NodeId(a.node))),
            "roster": (AskRoster, self._roster),
            "settling": (Settling, team.protecting.settlement.settling),
            "dropped": (Dropped, self._drop),
            "not_durable": (NotDurable, self._not_durable),
            "settled": (Settled, lambda a: team.protecting.settlement.decided(Decided(a.group, a.group))),
            "decided": (Decided, team.protecting.settlement.decided),
        }

    def run(self) -> None:
        while (incoming := self._channel.receive()) is not None:
            request = frames.decode(incoming.header, Request)
            self._payload_bytes = incoming.payload_bytes
            if request.op == "chunk":
                self._chunk(frames.decode(request.body, Chunk))
            elif request.op == "read":
                self._read(frames.decode(request.body, Read))
            else:
                self._answer(request)

    def end(self) -> None:
        """Copies that were offered on this connection and not finished are given up: their slots are free again."""
        for transfer in self._offered:
            self._desk.receiving.abort(self._who.node, transfer)

    def _answer(self, request: Request) -> None:
        found = self._operations.get(request.op)
        try:
            if found is None:
                raise RequestError(f"this agent ({self._desk._version or 'unknown version'}) has no {request.op!r}")
            kind, work = found
            if self._payload_bytes and request.op != "put_blob":
                raise ProtocolError(f"{request.op!r} came with {self._payload_bytes} bytes that belong to nothing")
            self._send("", work(frames.decode(request.body, kind)))
        except ProtocolError as error:
            self._send(type(error).__name__, str(error))
            raise
        except PeerStoreError as error:
            self._send(type(error).__name__, str(error))
        except UnicodeDecodeError as error:
            self._send("RequestError", str(error))
        except OSError:
            raise
        except Exception as error:
            log.exception("%s of %s failed", request.op, self._who.node)
            self._send("PeerStoreError", f"internal error: {type(error).__name__}: {error}")

    def _send(self, error: str, body: object, payload: Payload = ()) -> None:
        if self._payload_bytes:
            self._channel.discard()
            self._payload_bytes = 0
        self._channel.send(frames.encode(Answer(error, frames.encode_raw(body))), payload)

    def _mine(self, key: Any) -> Any:
        """A key on this connection is of this connection's job."""
        if key.job != self._team.job:
            raise RequestError(f"{key} was named on a connection of job {self._team.job}")
        return key

    # -- copies ---------------------------------------------------------------------------------------------------

    def _offer(self, offer: Offer) -> object:
        if len(offer.holders) > 8 or len(offer.blobs) > 64:
            raise RequestError(f"{offer.record.key}: {len(offer.holders)} holders and {len(offer.blobs)} blobs")
        wanted = self._desk.receiving.offer(self._team.job, self._who.node, offer)
        if wanted.transfer:
            self._offered.add(wanted.transfer)
        return wanted

    def _chunk(self, chunk: Chunk) -> None:
        bad = self._desk.receiving.chunk(
            self._who.node, chunk.transfer, chunk.number, self._channel, self._payload_bytes
        )
        if bad is not None:
            self._bad.append(bad)

    def _flush(self, _: Flush) -> tuple[int, ...]:
        bad, self._bad = tuple(self._bad), []
        return bad

    def _commit(self, commit: Commit) -> None:
        key = self._desk.receiving.commit(self._who.node, commit.transfer)
        self._offered.discard(commit.transfer)
        self._team.protecting.confirm(key, self._who.node, self._team.tending.life(self._who.node))

    def _abort(self, abort: Abort) -> None:
        self._desk.receiving.abort(self._who.node, abort.transfer)
        self._offered.discard(abort.transfer)

    def _drop(self, dropped: Dropped) -> None:
        """Also where nothing of them is here: that is no error."""
        self._store.forget(self._team.job, list(dropped.groups))

    def _not_durable(self, said: NotDurable) -> None:
        self._store.not_durable(self._team.job, said.group, f"node {self._who.node}: {said.why}")

    def _put_blob(self, blob: PutBlob) -> None:
        name, size = self._desk.shared.writable(blob.name, self._who.node), self._payload_bytes
        if size > MAX_BLOB_BYTES:
            raise RequestError(f"blob {blob.name} has {size} bytes, at most {MAX_BLOB_BYTES} are kept")
        data = bytearray(size)
        self._payload_bytes = 0
        self._channel.receive_into([memoryview(data)])
        if self._desk.shared.is_common(name):  # named by what is in it: what is there is not replaced
            with contextlib.suppress(ShardNotFoundError, ShardDamagedError):
                self._store.get_blob(self._team.job, name)
                return
        self._store.put_blob(self._team.job, name, bytes(data))

    # -- reading --------------------------------------------------------------------------------------------------

    def _look_for(self, asked: LookFor) -> object:
        return self._team.looking.look_for(asked)

    def _read(self, read: Read) -> None:
        try:
            loan = self._desk.lending.prepare(self._team.job, read)
        except PeerStoreError as error:
            self._send(type(error).__name__, str(error))
            if isinstance(error, ShardDamagedError):
                self._desk.lending.suspect(read.key, [(0, 0)])
            return
        try:
            try:
                sent = loan.fill()
            except PeerStoreError as error:
                self._send(type(error).__name__, str(error))
                if isinstance(error, ShardDamagedError):
                    self._desk.lending.suspect(read.key, _chunks(read, loan.chunk_bytes))
                return
            reach("peer.reading")
            self._send("", sent, loan.payload)
            self._desk.lending.sent_bytes += loan.size_bytes
        finally:
            loan.close()

    def _records(self, asked: AskRecords) -> object:
        wanted = set(asked.parts)
        found = self._store.records(self._team.job, asked.group)
        return [record for record in found if not wanted or record.key.part in wanted]

    def _blobs(self, asked: AskBlobs) -> object:
        found: dict[str, bytes] = {}
        room = _MOST_BLOB_BYTES
        for name in asked.names:
            try:
                data = self._store.get_blob(self._team.job, self._desk.shared.readable(name))
            except (ShardNotFoundError, ShardDamagedError):  # who asks looks elsewhere
                continue
            room -= len(data)
            if found and room < 0:
                break
            found[name] = data
        return found

    def _parities(self, asked: AskParities) -> object:
        return [record for record in self._store.copies.parities(self._team.job) if record.key.group == asked.group]

    def _roster(self, _: AskRoster) -> object:
        roster = self._team.tending.roster
        if roster is None:
            raise UnavailableError(f"{self._desk._me} does not know who belongs to job {self._team.job}")
        return roster


def _chunks(read: Read, chunk_bytes: int) -> list[tuple[int, int]]:
    return [(start // chunk_bytes, -(-stop // chunk_bytes)) for start, stop in read.ranges]
