"""Messages between the node agents of a job. Every request except a replica's chunk has a response.

A connection belongs to one job: both sides have proven that they know its secret, and nothing of another job can be
named on it.
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
"""Ranges in one read: enough to fill a message, few enough to check first."""
MAX_BLOBS_PER_REQUEST = 1024
"""Small things that one question may be for."""
MAX_NODES_PER_REQUEST = 1024
"""Nodes that one other may be asked to look for."""
MAX_REASON_CHARS = 1000
"""Characters of a reason."""


class PeerRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    op: str
    body: msgspec.Raw


class PeerResponse(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    error: str
    """Class name of the error, or "" for a result."""
    body: msgspec.Raw


# -- copies -----------------------------------------------------------------------------------------------------------


class OfferReplica(msgspec.Struct, frozen=True):
    """Take a copy of this shard."""

    record: ShardRecord
    holders: tuple[str, ...]
    """Who is to hold it, the writer's node first."""
    committed: bool
    """Every part of its version is sealed, as far as the sender knows."""
    blobs: tuple[str, ...] = ()
    """What one needs beside it to make sense of it."""
    resume_point: ResumePoint | None = None
    """What the job went on from: a copy of a new incarnation must not take the place of that."""


class OfferReply(msgspec.Struct, frozen=True):
    """What the receiver does not have of an offered shard."""

    transfer: str
    """Empty when the whole copy is there already."""
    missing: tuple[tuple[int, int], ...] = ()
    """Runs ``[first, stop)`` of chunks to send."""
    blobs: tuple[str, ...] = ()


class ReplicaChunk(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of a transfer; its bytes follow. Not answered, so that the next one can follow at once."""

    transfer: str
    number: int


class FlushChunks(msgspec.Struct, frozen=True):
    """Which of the chunks sent on this connection are not what the record says? The answer is their numbers."""

    transfer: str


class CommitReplica(msgspec.Struct, frozen=True):
    """Everything was sent. Answered when every chunk has been verified and the copy is sealed."""

    transfer: str


class AbortReplica(msgspec.Struct, frozen=True):
    transfer: str


class UpdateHolders(msgspec.Struct, frozen=True):
    """Who holds a shard has changed."""

    key: ShardKey
    holders: tuple[str, ...]


class PutPeerBlob(msgspec.Struct, frozen=True):
    name: str
    """The bytes follow as payload."""


# -- parities ---------------------------------------------------------------------------------------------------------


class StripeReport(msgspec.Struct, frozen=True):
    """Which parts of a version the sender has to protect, each in a numbered stripe of its group."""

    version_id: VersionId
    members: tuple[str, ...]
    parts: dict[int, int]
    """Number of the stripe -> part."""
    generation: int
    """Which of its lives the sender is in: one that starts again may have lost them."""


class ParityStatus(msgspec.Struct, frozen=True):
    """What became of the parts that a member told of: the answer, and said again when it changes."""

    version_id: VersionId
    members: tuple[str, ...]
    stored: tuple[int, ...] = ()
    """Parts that are in a sealed parity of these members on the sender."""
    rejected: tuple[int, ...] = ()
    """Parts for which it has no room, for now."""
    why: str = ""


class GetParities(msgspec.Struct, frozen=True):
    """The records of the parities of this version; they can be read like shards."""

    version_id: VersionId


class ParityInfo(msgspec.Struct, frozen=True):
    """One line about a parity, for those who want to know what could be rebuilt."""

    version_id: VersionId
    number: int
    members: tuple[str, ...]
    keeper: str
    parts: dict[str, int]
    """Which part of the version is in it, by member."""

    @property
    def stripe_id(self) -> tuple[VersionId, int, tuple[str, ...]]:
        """The same for all parities of one stripe."""
        return self.version_id, self.number, self.members


# -- looking and reading ----------------------------------------------------------------------------------------------


class GetNodeInventory(msgspec.Struct, frozen=True):
    """What is there of the job."""


class NodeInventory(msgspec.Struct, frozen=True):
    shards: tuple[ShardInfo, ...]
    epoch: int
    incarnation: str
    replicated: VersionId | None
    verifying: int
    """Shards that are there and not verified yet."""
    parities: tuple[ParityInfo, ...] = ()
    last_committed: VersionId | None = None
    """The newest version that is known there to have been whole, whether any of it is left or not."""


class GetPartitionInventory(msgspec.Struct, frozen=True):
    """Look, as of now, at these nodes of your partition, yourself included. They are sent a ``GetNodeInventory``."""

    nodes: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=128)], ...], msgspec.Meta(max_length=MAX_NODES_PER_REQUEST)
    ]


class PartitionInventory(msgspec.Struct, frozen=True):
    nodes: dict[str, msgspec.Raw]
    """What each of them said, a ``NodeInventory``; decoded only for nodes that were asked for."""
    unreachable: dict[str, str]
    """Of whom nothing can be said here, and why."""


class GetShardRecords(msgspec.Struct, frozen=True):
    version_id: VersionId
    parts: tuple[int, ...] = ()
    """Only of these; of all that are there where none is named."""


class GetPeerBlob(msgspec.Struct, frozen=True):
    name: str


class GetPeerBlobs(msgspec.Struct, frozen=True):
    """As many of these as are there and fit into one answer, in this order; at least the first that is there."""

    names: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_BLOBS_PER_REQUEST)]


class ReadRanges(msgspec.Struct, frozen=True):
    """Bytes ``[start, stop)`` of a sealed shard, for every range; they follow the answer, one behind the other."""

    key: ShardKey
    checksums: int
    """xxh3-64 of the record's checksums: both sides mean the same bytes."""
    ranges: tuple[tuple[int, int], ...]


class RangeDigests(msgspec.Struct, frozen=True):
    digests: bytes
    """xxh3-64 of each range (8 bytes, little-endian), taken from bytes that were compared with the seal's checksums."""


class VerifyChunks(msgspec.Struct, frozen=True):
    """What came from there differs from what was sealed: the holder looks at it itself."""

    key: ShardKey
    chunks: tuple[tuple[int, int], ...]


# -- who is there -----------------------------------------------------------------------------------------------------


class PingMessage(msgspec.Struct, frozen=True):
    """Both the question and the answer."""

    gossip: GossipMessage
    replicated: VersionId | None = None
    """The newest version the sender knows to have all its copies."""
    has_clients: bool = False
    """Processes of the sender's node take part in the job: what is kept for it is still wanted."""
    resume_point: ResumePoint | None = None
    """What the job went on from, as far as the sender has heard."""
    retention: Annotated[tuple[RetentionMark, ...], msgspec.Meta(max_length=2 * MAX_RETAINED_VERSIONS)] = ()
    """Versions that somebody wants kept, or not any more."""
    committed: VersionId | None = None
    """The newest version the sender knows to be whole."""
    aborted: Annotated[tuple[VersionId, ...], msgspec.Meta(max_length=MAX_ABORTED_VERSIONS)] = ()
    """Versions the sender knows to be torn."""


class DeleteVersions(msgspec.Struct, frozen=True):
    """The job's owner gives up these versions, wherever they are."""

    versions: Annotated[tuple[VersionId, ...], msgspec.Meta(max_length=1024)]


class VersionNotDurable(msgspec.Struct, frozen=True):
    """The sender's part of this version does not become durable, so the version does not. It stays where it is."""

    version_id: VersionId
    why: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]


class IndirectPing(msgspec.Struct, frozen=True):
    """Whether who is asked reaches ``node``, which did not answer who asks: a bool."""

    node: str


class JoinJob(msgspec.Struct, frozen=True):
    """Join this connection's job, which the receiver does not know yet."""

    member_list: MemberList
    settings: ReplicationSettings


class GetMemberList(msgspec.Struct, frozen=True):
    """Who belongs to the job, as far as the other node knows?"""
