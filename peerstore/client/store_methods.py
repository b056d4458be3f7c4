"""The table of the store's operations, for the client and the server."""

from __future__ import annotations

from typing import Any

import msgspec

from peerstore.rpc import Method
from peerstore.shard_records import (
    Lease,
    NonNegativeInt,
    PinResponse,
    ShardInfo,
    ShardKey,
    ShardRecord,
    SlotInfo,
    StoreStatus,
    VersionId,
)

MAX_REQUEST_WAIT_S = 300.0
"""Seconds that a server waits for one request at most; a client that waits longer repeats it."""


class JobRequest(msgspec.Struct, frozen=True):
    job: str


class ClaimRequest(msgspec.Struct, frozen=True):
    job: str
    incarnation: str
    at_least: int = 0


class LeaseRequest(msgspec.Struct, frozen=True):
    key: ShardKey
    size_bytes: int
    parts: int
    wait_s: float = 0.0


class GrowRequest(msgspec.Struct, frozen=True):
    lease_id: str
    size_bytes: int
    wait_s: float = 0.0


class OpenSlotRequest(msgspec.Struct, frozen=True):
    slot: str


class RelabelRequest(msgspec.Struct, frozen=True):
    lease_id: str
    key: ShardKey


class SealRequest(msgspec.Struct, frozen=True):
    lease_id: str
    size_bytes: int
    meta: bytes = b""
    blobs: tuple[str, ...] = ()
    """Names of blobs that must exist."""


class ReleaseLeaseRequest(msgspec.Struct, frozen=True):
    lease_id: str


class ReserveRequest(msgspec.Struct, frozen=True):
    job: str
    part: int
    size_bytes: int
    slots: int = 0


class ListShardsRequest(msgspec.Struct, frozen=True):
    job: str | None = None


class PinRequest(msgspec.Struct, frozen=True):
    key: ShardKey


class UnpinRequest(msgspec.Struct, frozen=True):
    pin_id: str


class VerifyRequest(msgspec.Struct, frozen=True):
    key: ShardKey
    chunks: tuple[int, int] | None = None


class ReportDamageRequest(msgspec.Struct, frozen=True):
    key: ShardKey
    reason: str


class MarkCommittedRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId


class AbortPartRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId
    part: NonNegativeInt


class DeleteVersionsRequest(msgspec.Struct, frozen=True):
    job: str
    versions: list[VersionId] | None = None


class RetainVersionRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId
    retained: bool = True


class PutBlobRequest(msgspec.Struct, frozen=True):
    job: str
    name: str
    data: bytes


class BlobRequest(msgspec.Struct, frozen=True):
    job: str
    name: str


class DropUnrecognizedRequest(msgspec.Struct, frozen=True):
    names: list[str] | None = None


class StoreStatusRequest(msgspec.Struct, frozen=True):
    pass


EPOCH: Method[JobRequest, int] = Method(
    "epoch", JobRequest, int, "Return the newest epoch that the store knows of a job"
)
CLAIM: Method[ClaimRequest, int] = Method(
    "claim", ClaimRequest, int, "Claim an epoch for an incarnation; older writers are fenced from then on"
)
LEASE: Method[LeaseRequest, Lease] = Method(
    "lease", LeaseRequest, Lease, "Lease a slot for a shard; wait until memory is free"
)
GROW: Method[GrowRequest, Lease] = Method("grow", GrowRequest, Lease, "Replace the slot of a lease by a larger one")
OPEN_SLOT: Method[OpenSlotRequest, None] = Method(
    "open_slot", OpenSlotRequest, type(None), "Return the file of a leased slot, open for writing"
)
RELABEL: Method[RelabelRequest, Lease] = Method(
    "relabel", RelabelRequest, Lease, "Change the shard for which a slot is leased"
)
SEAL: Method[SealRequest, ShardRecord] = Method(
    "seal", SealRequest, ShardRecord, "Hash the bytes of a slot and seal them as a shard"
)
RELEASE: Method[ReleaseLeaseRequest, None] = Method(
    "release", ReleaseLeaseRequest, type(None), "Return a leased slot unsealed"
)
RESERVE: Method[ReserveRequest, list[SlotInfo]] = Method(
    "reserve", ReserveRequest, list[SlotInfo], "Create the slots of a part in advance"
)
LIST_SHARDS: Method[ListShardsRequest, list[ShardInfo]] = Method(
    "list_shards", ListShardsRequest, list[ShardInfo], "List the sealed shards of a job or of all jobs"
)
PIN: Method[PinRequest, PinResponse] = Method(
    "pin", PinRequest, PinResponse, "Pin a shard and return its file, open for reading"
)
UNPIN: Method[UnpinRequest, bool] = Method(
    "unpin", UnpinRequest, bool, "Release a pin; return false if it had been revoked"
)
VERIFY: Method[VerifyRequest, tuple[int, ...]] = Method(
    "verify", VerifyRequest, tuple[int, ...], "Return the damaged chunks of a shard"
)
REPORT_DAMAGE: Method[ReportDamageRequest, None] = Method(
    "report_damage", ReportDamageRequest, type(None), "Drop a shard that a reader found damaged"
)
MARK_COMMITTED: Method[MarkCommittedRequest, None] = Method(
    "mark_committed", MarkCommittedRequest, type(None), "Record that all parts of a version were sealed"
)
ABORT_PART: Method[AbortPartRequest, None] = Method(
    "abort_part",
    AbortPartRequest,
    type(None),
    "Record that a part of a version will not be sealed, and delete the version",
)
NEWEST_COMMITTED: Method[JobRequest, VersionId | None] = Method(
    "newest_committed", JobRequest, VersionId | None, "Return the newest committed version of a job"
)
DELETE_VERSIONS: Method[DeleteVersionsRequest, int] = Method(
    "delete_versions",
    DeleteVersionsRequest,
    int,
    "Delete versions of a job, or all of them; return the number of shards",
)
RETAIN: Method[RetainVersionRequest, None] = Method(
    "retain", RetainVersionRequest, type(None), "Exclude a version from eviction, or end that"
)
RETAINED: Method[JobRequest, set[VersionId]] = Method(
    "retained", JobRequest, set[VersionId], "Return the retained versions of a job"
)
PUT_BLOB: Method[PutBlobRequest, None] = Method("put_blob", PutBlobRequest, type(None), "Store a small value of a job")
GET_BLOB: Method[BlobRequest, bytes] = Method("get_blob", BlobRequest, bytes, "Return a small value of a job")
REMOVE_BLOB: Method[BlobRequest, None] = Method("remove_blob", BlobRequest, type(None), "Delete a small value of a job")
LIST_BLOBS: Method[JobRequest, list[str]] = Method(
    "list_blobs", JobRequest, list[str], "Return the names of the small values of a job"
)
DROP_UNRECOGNIZED: Method[DropUnrecognizedRequest, int] = Method(
    "drop_unrecognized", DropUnrecognizedRequest, int, "Delete slots that this release cannot read; return their number"
)
STATUS: Method[StoreStatusRequest, StoreStatus] = Method(
    "status", StoreStatusRequest, StoreStatus, "Return the store's memory, jobs and leases"
)

STORE_METHODS: tuple[Method[Any, Any], ...] = (
    EPOCH,
    CLAIM,
    LEASE,
    GROW,
    OPEN_SLOT,
    RELABEL,
    SEAL,
    RELEASE,
    RESERVE,
    LIST_SHARDS,
    PIN,
    UNPIN,
    VERIFY,
    REPORT_DAMAGE,
    MARK_COMMITTED,
    ABORT_PART,
    NEWEST_COMMITTED,
    DELETE_VERSIONS,
    RETAIN,
    RETAINED,
    PUT_BLOB,
    GET_BLOB,
    REMOVE_BLOB,
    LIST_BLOBS,
    DROP_UNRECOGNIZED,
    STATUS,
)
"""All operations of a store that an agent serves."""


def clamp_wait_s(wait_s: float) -> float:
    """Return the client's wait in seconds, limited to 0 to ``MAX_REQUEST_WAIT_S``; NaN becomes 0."""
    return min(max(0.0, wait_s), MAX_REQUEST_WAIT_S)
