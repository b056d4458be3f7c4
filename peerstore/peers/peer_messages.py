"""Messages between the node agents of a job. Every request except a replica's chunk has a response.

A connection belongs to one job: both sides have proven that they know its secret, and requests for
other jobs are refused.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from peerstore.commit_protocol import MAX_ABORTED_VERSIONS, MAX_RETAINED_VERSIONS
from peerstore.membership.swim import GossipMessage
from peerstore.membership.topology import MemberList
from peerstore.settings import ReplicationSettings
from peerstore.shard_records import ResumePoint, RetentionMark, ShardInfo, ShardKey, ShardRecord, VersionId

MAX_RANGES_PER_READ = 4096
"""Largest number of ranges in one read: enough to fill a message, and few enough to check first."""
MAX_BLOBS_PER_REQUEST = 1024
"""Largest number of blobs in one request."""
MAX_NODES_PER_REQUEST = 1024
"""Largest number of nodes that one request to a delegate lists."""
MAX_REASON_CHARS = 1000
"""Characters of a reason."""


# -- replicas ---------------------------------------------------------------------------------------------------------


class OfferReplica(msgspec.Struct, frozen=True):
    """Offer a replica of this shard."""

    record: ShardRecord
    holders: tuple[str, ...]
    """Nodes chosen to hold it, the writer's node first."""
    committed: bool
    """Whether every part of its version is sealed, as far as the sender knows."""
    blobs: tuple[str, ...] = ()
    """Names of the job's blobs that a reader of the shard needs."""
    resume_point: ResumePoint | None = None
    """The version that the job resumed from: a replica of a new incarnation must not evict it."""


class OfferReply(msgspec.Struct, frozen=True):
    """The parts of an offered shard that the receiver lacks."""

    transfer: str
    """Id of the transfer; empty if the replica is stored already."""
    missing: tuple[tuple[int, int], ...] = ()
    """Runs ``[first, stop)`` of chunks to send."""
    blobs: tuple[str, ...] = ()


class ReplicaChunk(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of a transfer; its bytes follow.

    It has no response, so that the next chunk can follow at once.
    """

    transfer: str
    number: int


class FlushChunks(msgspec.Struct, frozen=True):
    """Request the numbers of the chunks sent on this connection that do not match the record."""

    transfer: str


class CommitReplica(msgspec.Struct, frozen=True):
    """Complete the transfer; the response is sent after every chunk is verified and the replica is sealed."""

    transfer: str


class AbortReplica(msgspec.Struct, frozen=True):
    transfer: str


class UpdateHolders(msgspec.Struct, frozen=True):
    """New holders of a shard."""

    key: ShardKey
    holders: tuple[str, ...]


class PutPeerBlob(msgspec.Struct, frozen=True):
    name: str
    """The bytes follow as payload."""


# -- parities ---------------------------------------------------------------------------------------------------------


class StripeReport(msgspec.Struct, frozen=True):
    """The parts of a version that the sender wants protected, each in a numbered stripe of its group."""

    version_id: VersionId
    members: tuple[str, ...]
    parts: dict[int, int]
    """Part by stripe number."""
    generation: int
    """Generation of the sender: a restarted node may have lost the parts."""


class ParityStatus(msgspec.Struct, frozen=True):
    """The state of a member's reported parts: the response, sent again after each change."""

    version_id: VersionId
    members: tuple[str, ...]
    stored: tuple[int, ...] = ()
    """Parts that are in a sealed parity of these members on the sender."""
    rejected: tuple[int, ...] = ()
    """Parts for which the sender currently has no room."""
    why: str = ""


class GetParities(msgspec.Struct, frozen=True):
    """Request the records of this version's parities, which are read like shards."""

    version_id: VersionId


class ParityInfo(msgspec.Struct, frozen=True):
    """A summary of one parity, to determine which parts can be rebuilt."""

    version_id: VersionId
    number: int
    members: tuple[str, ...]
    keeper: str
    parts: dict[str, int]
    """The part that the parity includes, by member."""

    @property
    def stripe_id(self) -> tuple[VersionId, int, tuple[str, ...]]:
        """Identity of the stripe, equal for all its parities."""
        return self.version_id, self.number, self.members


# -- inventories and reads --------------------------------------------------------------------------------------------


class GetNodeInventory(msgspec.Struct, frozen=True):
    """Request the node's inventory of the job."""


class NodeInventory(msgspec.Struct, frozen=True):
    shards: tuple[ShardInfo, ...]
    epoch: int
    incarnation: str
    replicated: VersionId | None
    verifying: int
    """Number of recovered shards that are not verified yet."""
    parities: tuple[ParityInfo, ...] = ()
    last_committed: VersionId | None = None
    """The newest version that the node knew to be committed, even if none of it remains."""


class GetPartitionInventory(msgspec.Struct, frozen=True):
    """Request current inventories of these nodes of the receiver's partition.

    The receiver sends ``GetNodeInventory`` to them.
    """

    nodes: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=128)], ...], msgspec.Meta(max_length=MAX_NODES_PER_REQUEST)
    ]


class PartitionInventory(msgspec.Struct, frozen=True):
    nodes: dict[str, msgspec.Raw]
    """A ``NodeInventory`` by node, decoded only for requested nodes."""
    unreachable: dict[str, str]
    """Nodes without an inventory, and the reason."""


class GetShardRecords(msgspec.Struct, frozen=True):
    version_id: VersionId
    parts: tuple[int, ...] = ()
    """Parts to return; empty: all parts on the node."""


class GetPeerBlob(msgspec.Struct, frozen=True):
    name: str


class GetPeerBlobs(msgspec.Struct, frozen=True):
    """Request these blobs, in this order, as far as they exist and fit into one response (at least one)."""

    names: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_BLOBS_PER_REQUEST)]


class ReadRanges(msgspec.Struct, frozen=True):
    """Request bytes ``[start, stop)`` of a sealed shard for every range.

    The bytes follow the response, concatenated.
    """

    key: ShardKey
    checksums: int
    """xxh3-64 of the record's checksums, so that both nodes mean the same bytes."""
    ranges: tuple[tuple[int, int], ...]


class RangeDigests(msgspec.Struct, frozen=True):
    digests: bytes
    """xxh3-64 of each unaligned range (8 bytes, little-endian), computed from verified bytes."""


class VerifyChunks(msgspec.Struct, frozen=True):
    """Request that the holder verify these chunks, because the received bytes did not match the seal."""

    key: ShardKey
    chunks: tuple[tuple[int, int], ...]


# -- membership and versions ------------------------------------------------------------------------------------------


class PingMessage(msgspec.Struct, frozen=True):
    """A ping, and its response."""

    gossip: GossipMessage
    replicated: VersionId | None = None
    """The newest version that the sender knows to be replicated."""
    has_clients: bool = False
    """Whether processes of the sender's node work on the job, so that its shards do not expire."""
    resume_point: ResumePoint | None = None
    """The version that the job resumed from, as far as the sender knows."""
    retention: Annotated[tuple[RetentionMark, ...], msgspec.Meta(max_length=2 * MAX_RETAINED_VERSIONS)] = ()
    """Marks that retain versions on request, or no longer do."""
    committed: VersionId | None = None
    """The newest version that the sender knows to be committed."""
    aborted: Annotated[tuple[VersionId, ...], msgspec.Meta(max_length=MAX_ABORTED_VERSIONS)] = ()
    """Versions that the sender knows to be aborted."""


class DeleteVersions(msgspec.Struct, frozen=True):
    """Request to delete these versions of the job, on behalf of its owner."""

    versions: Annotated[tuple[VersionId, ...], msgspec.Meta(max_length=1024)]
    superseded: bool = False
    """Whether nodes that wrote no shard of the job also delete all older versions."""


class VersionNotDurable(msgspec.Struct, frozen=True):
    """Report that the sender failed to upload its part, so the version is not durable; it stays in memory."""

    version_id: VersionId
    why: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]


class IndirectPing(msgspec.Struct, frozen=True):
    """Request whether the receiver reaches ``node``, which did not answer the sender.

    The response is a bool.
    """

    node: str


class JoinJob(msgspec.Struct, frozen=True):
    """Request to join this connection's job, which the receiver does not know so far."""

    member_list: MemberList
    settings: ReplicationSettings


class GetMemberList(msgspec.Struct, frozen=True):
    """Request the receiver's member list of the job."""
