"""Server for requests of other nodes' agents, on authenticated connections of one job each."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from peerstore import message_codec
from peerstore.commit_protocol import CommitDecision, PartsReport
from peerstore.errors import (
    JobNotJoinedError,
    PeerStoreError,
    ProtocolError,
    RequestError,
    ShardDamagedError,
    ShardNotFoundError,
    UnavailableError,
)
from peerstore.failpoints import failpoint
from peerstore.membership.topology import NodeId
from peerstore.peers.peer_messages import (
    AbortReplica,
    CommitReplica,
    DeleteVersions,
    FlushChunks,
    GetMemberList,
    GetNodeInventory,
    GetParities,
    GetPartitionInventory,
    GetPeerBlob,
    GetPeerBlobs,
    GetShardRecords,
    IndirectPing,
    JoinJob,
    OfferReplica,
    ParityStatus,
    PeerRequest,
    PeerResponse,
    PingMessage,
    PutPeerBlob,
    ReadRanges,
    ReplicaChunk,
    StripeReport,
    UpdateHolders,
    VerifyChunks,
    VersionNotDurable,
)
from peerstore.peers.shard_server import RangeServer, ReplicaReceiver
from peerstore.server.job_peers import JobPeers
from peerstore.settings import BlobAccess
from peerstore.store.node_store import MAX_BLOB_BYTES, NodeStore
from peerstore.transport.authentication import PeerIdentity, authenticate_client
from peerstore.transport.base import MessageChannel, Payload

log = logging.getLogger(__name__)

_MAX_BLOBS_BYTES = 8 << 20
"""Largest size of all blobs in one response."""
_Answer = tuple[Any, Payload]


class PeerServer:
    """Server of other nodes' requests, for every job of this node; each connection belongs to one job."""

    def __init__(
        self,
        store: NodeStore,
        me: str,
        *,
        team_of: Callable[[str], JobPeers | None],
        join: Callable[[str, bytes, JoinJob], JobPeers],
        standby_secret: Callable[[], bytes | None] = lambda: None,
        version: str = "",
        shared: BlobAccess = BlobAccess(),  # noqa: B008 - it is never changed
        verified: Callable[[PeerIdentity], None] = lambda _peer: None,
    ) -> None:
        self._store = store
        self._me = me
        self._team_of = team_of
        self._join = join
        self._standby_secret = standby_secret
        self._version = version
        self.blob_access = shared
        self._verified = verified
        self.replica_receiver = ReplicaReceiver(store, me)
        self.range_server = RangeServer(store)
        self.rejected = 0

    def serve(self, channel: MessageChannel) -> None:
        """Authenticate the peer of one connection, and serve its requests."""
        standby = self._standby_secret()

        def secret_of(job: str) -> bytes | None:
            team = self._team_of(job)
            return team.credentials.secret if team is not None else standby

        try:
            client = authenticate_client(channel, me=self._me, secret_of=secret_of, version=self._version)  # type: ignore[arg-type]
        except PeerStoreError:
            self.rejected += 1
            raise
        team = self._team_of(client.job)
        if team is None and standby is not None:
            team = self._wait_join(client.job, standby, channel)
        if team is None:
            return
        self._verified(client)
        session = _PeerSession(self, team, client, channel)
        try:
            session.run()
        except ProtocolError:
            self.rejected += 1
            raise
        finally:
            session.end()

    def _wait_join(self, job: str, secret: bytes, channel: MessageChannel) -> JobPeers | None:
        """Join a job that this node has not joined if the peer's first request is to join; else refuse."""
        incoming = channel.receive()
        if incoming is None:
            return None
        request = message_codec.decode_message(incoming.header, PeerRequest)
        if incoming.payload_bytes:
            raise ProtocolError(f"{request.op!r} came with {incoming.payload_bytes} bytes for an unknown job")
        try:
            if request.op != "join_job":
                raise JobNotJoinedError(f"node {self._me} takes no part in job {job} yet")
            team = self._join(job, secret, message_codec.decode_message(request.body, JoinJob))
        except PeerStoreError as error:
            answer = PeerResponse(type(error).__name__, message_codec.encode_raw_message(str(error)))
            channel.send(message_codec.encode_message(answer))
            return None
        channel.send(message_codec.encode_message(PeerResponse("", message_codec.encode_raw_message(None))))
        return team

    def close(self) -> None:
        self.replica_receiver.close()


class _PeerSession:
    """Requests of one peer on one connection, in order."""

    def __init__(self, peer_server: PeerServer, team: JobPeers, client: PeerIdentity, channel: MessageChannel) -> None:
        self._server = peer_server
        self._store = peer_server._store
        self._job_peers = team
        self._client = client
        self._channel = channel
        self._damaged: list[int] = []
        self._offered: set[str] = set()
        """Transfers that began on this connection and are neither committed nor aborted."""
        self._payload_bytes = 0
        self._operations: dict[str, tuple[type[Any], Callable[[Any], Any]]] = {
            "offer_replica": (OfferReplica, self._offer),
            "flush_chunks": (FlushChunks, self._flush),
            "commit_replica": (CommitReplica, self._commit),
            "abort_replica": (AbortReplica, self._abort),
            "update_holders": (
                UpdateHolders,
                lambda a: self._store.replicas.set_holders(self._of_this_job(a.key), a.holders),
            ),
            "put_blob": (PutPeerBlob, self._put_blob),
            "node_inventory": (GetNodeInventory, lambda _: team.local_inventory()),
            "partition_inventory": (GetPartitionInventory, self._partition_inventory),
            "shard_records": (GetShardRecords, self._records),
            "blobs": (GetPeerBlobs, self._blobs),
            "blob": (
                GetPeerBlob,
                lambda a: self._store.get_blob(team.job, self._server.blob_access.check_readable(a.name)),
            ),
            "verify_chunks": (
                VerifyChunks,
                lambda a: peer_server.range_server.verify_chunks(self._of_this_job(a.key), a.chunks),
            ),
            "report_stripe": (StripeReport, lambda a: team.parity.handle_stripe_report(client.node, a)),
            "parity_status": (ParityStatus, lambda a: team.parity.handle_parity_status(client.node, a)),
            "parities": (GetParities, self._parities),
            "ping": (PingMessage, lambda a: team.membership.handle_ping(client.node, a)),
            "indirect_ping": (IndirectPing, lambda a: team.membership.can_reach(NodeId(a.node))),
            "member_list": (GetMemberList, self._member_list),
            "join_job": (JoinJob, lambda a: team.membership.set_member_list(a.member_list)),
            "report_parts": (PartsReport, team.replicator.commit_tracker.handle_report),
            "delete_versions": (DeleteVersions, self._delete_versions),
            "version_not_durable": (VersionNotDurable, self._not_durable),
            "commit_decision": (CommitDecision, team.replicator.commit_tracker.handle_decision),
        }

    def run(self) -> None:
        while (incoming := self._channel.receive()) is not None:
            request = message_codec.decode_message(incoming.header, PeerRequest)
            self._payload_bytes = incoming.payload_bytes
            if request.op == "replica_chunk":
                self._chunk(message_codec.decode_message(request.body, ReplicaChunk))
            elif request.op == "read_ranges":
                self._read(message_codec.decode_message(request.body, ReadRanges))
            else:
                self._answer(request)

    def end(self) -> None:
        """Abort the connection's unfinished transfers, which releases their slots."""
        for transfer in self._offered:
            self._server.replica_receiver.abort(self._client.node, transfer)

    def _answer(self, request: PeerRequest) -> None:
        found = self._operations.get(request.op)
        try:
            if found is None:
                raise RequestError(f"this agent ({self._server._version or 'unknown version'}) has no {request.op!r}")
            kind, work = found
            if self._payload_bytes and request.op != "put_blob":
                raise ProtocolError(f"{request.op!r} came with {self._payload_bytes} bytes that belong to nothing")
            self._send("", work(message_codec.decode_message(request.body, kind)))
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
            log.exception("%s of %s failed", request.op, self._client.node)
            self._send("PeerStoreError", f"internal error: {type(error).__name__}: {error}")

    def _send(self, error: str, body: object, payload: Payload = ()) -> None:
        if self._payload_bytes:
            self._channel.discard()
            self._payload_bytes = 0
        self._channel.send(
            message_codec.encode_message(PeerResponse(error, message_codec.encode_raw_message(body))), payload
        )

    def _of_this_job(self, key: Any) -> Any:
        """Return the key, or raise :class:`RequestError` if it belongs to another job than the connection."""
        if key.job != self._job_peers.job:
            raise RequestError(f"{key} was named on a connection of job {self._job_peers.job}")
        return key

    # -- replicas -------------------------------------------------------------------------------------------------

    def _offer(self, offer: OfferReplica) -> object:
        if len(offer.holders) > 8 or len(offer.blobs) > 64:
            raise RequestError(f"{offer.record.key}: {len(offer.holders)} holders and {len(offer.blobs)} blobs")
        wanted = self._server.replica_receiver.handle_offer(self._job_peers.job, self._client.node, offer)
        if wanted.transfer:
            self._offered.add(wanted.transfer)
        return wanted

    def _chunk(self, chunk: ReplicaChunk) -> None:
        bad = self._server.replica_receiver.receive_chunk(
            self._client.node, chunk.transfer, chunk.number, self._channel, self._payload_bytes
        )
        if bad is not None:
            self._damaged.append(bad)

    def _flush(self, _: FlushChunks) -> tuple[int, ...]:
        bad, self._damaged = tuple(self._damaged), []
        return bad

    def _commit(self, commit: CommitReplica) -> None:
        key = self._server.replica_receiver.commit(self._client.node, commit.transfer)
        self._offered.discard(commit.transfer)
        self._job_peers.replicator.confirm_holder(
            key, self._client.node, self._job_peers.membership.generation_of(self._client.node)
        )

    def _abort(self, abort: AbortReplica) -> None:
        self._server.replica_receiver.abort(self._client.node, abort.transfer)
        self._offered.discard(abort.transfer)

    def _delete_versions(self, dropped: DeleteVersions) -> None:
        """Delete the versions; versions that are not on this node are ignored."""
        job, groups = self._job_peers.job, set(dropped.versions)
        if dropped.superseded and groups:
            groups |= self._store.superseded_replicas(job, max(group.version for group in groups))
        self._store.delete_versions(job, sorted(groups))

    def _not_durable(self, said: VersionNotDurable) -> None:
        self._store.listeners.on_not_durable(
            self._job_peers.job, said.version_id, f"node {self._client.node}: {said.why}"
        )

    def _put_blob(self, blob: PutPeerBlob) -> None:
        name, size = self._server.blob_access.check_writable(blob.name, self._client.node), self._payload_bytes
        if size > MAX_BLOB_BYTES:
            raise RequestError(f"blob {blob.name} has {size} bytes, at most {MAX_BLOB_BYTES} are kept")
        data = bytearray(size)
        self._payload_bytes = 0
        self._channel.receive_into([memoryview(data)])
        if self._server.blob_access.is_common(
            name
        ):  # its name is a hash of its contents, so an existing blob is not replaced
            with contextlib.suppress(ShardNotFoundError, ShardDamagedError):
                self._store.get_blob(self._job_peers.job, name)
                return
        self._store.put_blob(self._job_peers.job, name, bytes(data))

    # -- inventories and reads ------------------------------------------------------------------------------------

    def _partition_inventory(self, asked: GetPartitionInventory) -> object:
        return self._job_peers.inventory_service.serve_partition(asked)

    def _read(self, read: ReadRanges) -> None:
        try:
            reply = self._server.range_server.open(self._job_peers.job, read)
        except PeerStoreError as error:
            self._send(type(error).__name__, str(error))
            if isinstance(error, ShardDamagedError):
                self._server.range_server.try_verify_chunks(read.key, [(0, 0)])
            return
        try:
            try:
                sent = reply.fill()
            except PeerStoreError as error:
                self._send(type(error).__name__, str(error))
                if isinstance(error, ShardDamagedError):
                    self._server.range_server.try_verify_chunks(read.key, _chunks(read, reply.chunk_bytes))
                return
            failpoint("peer.reading")
            self._send("", sent, reply.payload)
            self._server.range_server.sent_bytes += reply.size_bytes
        finally:
            reply.close()

    def _records(self, asked: GetShardRecords) -> object:
        wanted = set(asked.parts)
        found = self._store.reader.records(self._job_peers.job, asked.version_id)
        return [record for record in found if not wanted or record.key.part in wanted]

    def _blobs(self, asked: GetPeerBlobs) -> object:
        found: dict[str, bytes] = {}
        room = _MAX_BLOBS_BYTES
        for name in asked.names:
            try:
                data = self._store.get_blob(self._job_peers.job, self._server.blob_access.check_readable(name))
            except (ShardNotFoundError, ShardDamagedError):  # the requester tries another node
                continue
            room -= len(data)
            if found and room < 0:
                break
            found[name] = data
        return found

    def _parities(self, asked: GetParities) -> object:
        return [
            record
            for record in self._store.replicas.list_parities(self._job_peers.job)
            if record.key.version_id == asked.version_id
        ]

    def _member_list(self, _: GetMemberList) -> object:
        member_list = self._job_peers.membership.member_list
        if member_list is None:
            raise UnavailableError(f"{self._server._me} does not know who belongs to job {self._job_peers.job}")
        return member_list


def _chunks(read: ReadRanges, chunk_bytes: int) -> list[tuple[int, int]]:
    return [(start // chunk_bytes, -(-stop // chunk_bytes)) for start, stop in read.ranges]
