"""Server for requests of other nodes' agents, on authenticated connections of one job each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

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
from peerstore.membership.topology import MemberList, NodeId
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
    NodeInventory,
    OfferReplica,
    OfferReply,
    ParityStatus,
    PartitionInventory,
    PingMessage,
    PutPeerBlob,
    RangeDigests,
    ReadRanges,
    ReplicaChunk,
    StripeReport,
    UpdateHolders,
    VerifyChunks,
    VersionNotDurable,
)
from peerstore.peers.shard_server import RangeServer, ReplicaReceiver
from peerstore.rpc import Dispatcher, Operation, Reply
from peerstore.server.job_peers import JobPeers
from peerstore.settings import BlobAccess
from peerstore.shard_records import MAX_BLOB_BYTES, ShardKey, ShardRecord
from peerstore.store.node_store import NodeStore
from peerstore.transport.authentication import PeerIdentity, authenticate_client
from peerstore.transport.base import MessageChannel

_MAX_BLOBS_BYTES = 8 << 20
"""Largest size of all blobs in one response."""
_MAX_HOLDERS, _MAX_OFFERED_BLOBS = 8, 64
_NONE = type(None)


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
        self._member_requests = Dispatcher(self._operations(), version=version)

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
        session = PeerSession(team, client, channel)
        try:
            self._member_requests.serve(channel, session)
        except ProtocolError:
            self.rejected += 1
            raise
        finally:
            for transfer in session.transfers:  # which releases their slots
                self.replica_receiver.abort(client.node, transfer)

    def _wait_join(self, job: str, secret: bytes, channel: MessageChannel) -> JobPeers | None:
        """Join a job that this node has not joined if the peer's first request is to join; else refuse."""
        joined: list[JobPeers] = []

        def join(request: JoinJob, _: object) -> None:
            joined.append(self._join(job, secret, request))

        first = Dispatcher(
            {"join_job": Operation(JoinJob, _NONE, join)},
            unknown=lambda _: JobNotJoinedError(f"node {self._me} takes no part in job {job} yet"),
        )
        incoming = channel.receive()
        if incoming is not None:
            first.handle(channel, incoming, None)
        return joined[0] if joined else None

    def close(self) -> None:
        self.replica_receiver.close()

    def _operations(self) -> dict[str, Operation]:
        """Return the requests of a job's members; each handler also gets the :class:`PeerSession`."""
        replicas = self._store.replicas

        def of(session: PeerSession, key: ShardKey) -> ShardKey:
            """Return the key, or raise :class:`RequestError` if it belongs to another job than the connection."""
            if key.job != session.job:
                raise RequestError(f"{key} was named on a connection of job {session.job}")
            return key

        return {
            "offer_replica": Operation(OfferReplica, OfferReply, self._offer),
            "replica_chunk": Operation(ReplicaChunk, _NONE, self._chunk, takes_payload=True, is_one_way=True),
            "flush_chunks": Operation(FlushChunks, tuple[int, ...], lambda _, peer: peer.take_damaged()),
            "commit_replica": Operation(CommitReplica, _NONE, self._commit),
            "abort_replica": Operation(AbortReplica, _NONE, self._abort),
            "update_holders": Operation(
                UpdateHolders, _NONE, lambda a, peer: replicas.set_holders(of(peer, a.key), a.holders)
            ),
            "put_blob": Operation(PutPeerBlob, _NONE, self._put_blob, takes_payload=True),
            "node_inventory": Operation(
                GetNodeInventory, NodeInventory, lambda _, peer: peer.job_peers.local_inventory()
            ),
            "partition_inventory": Operation(
                GetPartitionInventory,
                PartitionInventory,
                lambda a, peer: peer.job_peers.inventory_service.serve_partition(a),
            ),
            "shard_records": Operation(GetShardRecords, list[ShardRecord], self._records),
            "read_ranges": Operation(ReadRanges, RangeDigests, self._read),
            "blobs": Operation(GetPeerBlobs, dict[str, bytes], self._blobs),
            "blob": Operation(
                GetPeerBlob,
                bytes,
                lambda a, peer: self._store.blobs.get(peer.job, self.blob_access.check_readable(a.name)),
            ),
            "verify_chunks": Operation(
                VerifyChunks, bool, lambda a, peer: self.range_server.verify_chunks(of(peer, a.key), a.chunks)
            ),
            "report_stripe": Operation(
                StripeReport, ParityStatus, lambda a, peer: peer.job_peers.parity.handle_stripe_report(peer.node, a)
            ),
            "parity_status": Operation(
                ParityStatus, _NONE, lambda a, peer: peer.job_peers.parity.handle_parity_status(peer.node, a)
            ),
            "parities": Operation(GetParities, list[ShardRecord], self._parities),
            "ping": Operation(
                PingMessage, PingMessage, lambda a, peer: peer.job_peers.membership.handle_ping(peer.node, a)
            ),
            "indirect_ping": Operation(
                IndirectPing, bool, lambda a, peer: peer.job_peers.membership.can_reach(NodeId(a.node))
            ),
            "member_list": Operation(GetMemberList, MemberList, self._member_list),
            "join_job": Operation(
                JoinJob, _NONE, lambda a, peer: peer.job_peers.membership.set_member_list(a.member_list)
            ),
            "report_parts": Operation(
                PartsReport, _NONE, lambda a, peer: peer.job_peers.replicator.commit_tracker.handle_report(a)
            ),
            "commit_decision": Operation(
                CommitDecision, _NONE, lambda a, peer: peer.job_peers.replicator.commit_tracker.handle_decision(a)
            ),
            "delete_versions": Operation(DeleteVersions, _NONE, self._delete_versions),
            "version_not_durable": Operation(VersionNotDurable, _NONE, self._not_durable),
        }

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _offer(self, offer: OfferReplica, peer: PeerSession) -> object:
        if len(offer.holders) > _MAX_HOLDERS or len(offer.blobs) > _MAX_OFFERED_BLOBS:
            raise RequestError(f"{offer.record.key}: {len(offer.holders)} holders and {len(offer.blobs)} blobs")
        wanted = self.replica_receiver.handle_offer(peer.job, peer.node, offer)
        if wanted.transfer:
            peer.transfers.add(wanted.transfer)
        return wanted

    def _chunk(self, chunk: ReplicaChunk, peer: PeerSession, payload_bytes: int) -> None:
        damaged = self.replica_receiver.receive_chunk(
            peer.node, chunk.transfer, chunk.number, peer.channel, payload_bytes
        )
        if damaged is not None:
            peer.damaged_chunks.append(damaged)

    def _commit(self, commit: CommitReplica, peer: PeerSession) -> None:
        key = self.replica_receiver.commit(peer.node, commit.transfer)
        peer.transfers.discard(commit.transfer)
        generation = peer.job_peers.membership.generation_of(peer.node)
        peer.job_peers.replicator.confirm_holder(key, peer.node, generation)

    def _abort(self, abort: AbortReplica, peer: PeerSession) -> None:
        self.replica_receiver.abort(peer.node, abort.transfer)
        peer.transfers.discard(abort.transfer)

    def _delete_versions(self, dropped: DeleteVersions, peer: PeerSession) -> None:
        """Delete the versions; versions that are not on this node are ignored."""
        versions = set(dropped.versions)
        if dropped.superseded and versions:
            versions |= self._store.versions.superseded_replicas(peer.job, max(one.version for one in versions))
        self._store.versions.delete(peer.job, sorted(versions))

    def _not_durable(self, report: VersionNotDurable, peer: PeerSession) -> None:
        self._store.listeners.on_not_durable(peer.job, report.version_id, f"node {peer.node}: {report.why}")

    def _put_blob(self, blob: PutPeerBlob, peer: PeerSession, payload_bytes: int) -> None:
        name = self.blob_access.check_writable(blob.name, peer.node)
        if payload_bytes > MAX_BLOB_BYTES:
            raise RequestError(f"blob {blob.name} has {payload_bytes} bytes, at most {MAX_BLOB_BYTES} are kept")
        data = bytearray(payload_bytes)
        peer.channel.receive_into([memoryview(data)])
        if self.blob_access.is_common(name):  # its name is a hash of its contents: an existing blob is not replaced
            with contextlib.suppress(ShardNotFoundError, ShardDamagedError):
                self._store.blobs.get(peer.job, name)
                return
        self._store.blobs.put(peer.job, name, bytes(data))

    # -- inventories and reads ----------------------------------------------------------------------------------------

    def _read(self, read: ReadRanges, peer: PeerSession) -> Reply:
        """Send the ranges.

        A damaged shard is verified after the response, so that the reader need not wait.
        """

        def verify_after(error: PeerStoreError, chunks: list[tuple[int, int]]) -> Reply:
            damaged = isinstance(error, ShardDamagedError)
            return Reply(
                None,
                error=error,
                done=lambda _: self.range_server.try_verify_chunks(read.key, chunks) if damaged else None,
            )

        try:
            reply = self.range_server.open(peer.job, read)
        except PeerStoreError as error:
            return verify_after(error, [(0, 0)])
        try:
            digests = reply.fill()
            failpoint("peer.reading")
        except PeerStoreError as error:
            reply.close()
            return verify_after(error, _chunks(read, reply.chunk_bytes))
        except BaseException:
            reply.close()
            raise

        def done(sent: bool) -> None:
            reply.close()
            if not sent:
                self.range_server.sent_bytes -= reply.size_bytes

        self.range_server.sent_bytes += reply.size_bytes  # before the reader can look at the count
        return Reply(digests, reply.payload, done=done)

    def _records(self, asked: GetShardRecords, peer: PeerSession) -> object:
        wanted = set(asked.parts)
        found = self._store.reader.records(peer.job, asked.version_id)
        return [record for record in found if not wanted or record.key.part in wanted]

    def _blobs(self, asked: GetPeerBlobs, peer: PeerSession) -> object:
        found: dict[str, bytes] = {}
        room = _MAX_BLOBS_BYTES
        for name in asked.names:
            try:
                data = self._store.blobs.get(peer.job, self.blob_access.check_readable(name))
            except (ShardNotFoundError, ShardDamagedError):  # the requester tries another node
                continue
            room -= len(data)
            if found and room < 0:
                break
            found[name] = data
        return found

    def _parities(self, asked: GetParities, peer: PeerSession) -> object:
        parities = self._store.replicas.list_parities(peer.job)
        return [record for record in parities if record.key.version_id == asked.version_id]

    def _member_list(self, _: GetMemberList, peer: PeerSession) -> object:
        member_list = peer.job_peers.membership.member_list
        if member_list is None:
            raise UnavailableError(f"{self._me} does not know who belongs to job {peer.job}")
        return member_list


class PeerSession:
    """State of one peer's connection."""

    def __init__(self, job_peers: JobPeers, client: PeerIdentity, channel: MessageChannel) -> None:
        self.job_peers = job_peers
        self.job = job_peers.job
        self.node = client.node
        self.channel = channel
        self.damaged_chunks: list[int] = []
        """Chunks received since the last flush that do not match the record."""
        self.transfers: set[str] = set()
        """Transfers that began on this connection and are neither committed nor aborted."""

    def take_damaged(self) -> tuple[int, ...]:
        damaged, self.damaged_chunks = tuple(self.damaged_chunks), []
        return damaged


def _chunks(read: ReadRanges, chunk_bytes: int) -> list[tuple[int, int]]:
    return [(start // chunk_bytes, -(-stop // chunk_bytes)) for start, stop in read.ranges]
