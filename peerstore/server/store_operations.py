"""The table of the store's operations, as the agent serves them to local processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from peerstore.client.store_api import (
    AbortPartRequest,
    BlobRequest,
    ClaimRequest,
    DeleteVersionsRequest,
    DropUnrecognizedRequest,
    GrowRequest,
    JobRequest,
    LeaseRequest,
    ListShardsRequest,
    MarkCommittedRequest,
    OpenSlotRequest,
    PinRequest,
    PutBlobRequest,
    RelabelRequest,
    ReleaseLeaseRequest,
    ReportDamageRequest,
    ReserveRequest,
    RetainVersionRequest,
    SealRequest,
    StoreStatusRequest,
    UnpinRequest,
    VerifyRequest,
    clamp_wait_s,
)
from peerstore.daemon_process import ProcessIdentity
from peerstore.rpc import Operation, Reply
from peerstore.shard_records import (
    Lease,
    PinResponse,
    ShardInfo,
    ShardKey,
    ShardRecord,
    SlotInfo,
    StoreStatus,
    VersionId,
)
from peerstore.store.node_store import NodeStore


def store_operations(store: NodeStore) -> Mapping[str, Operation]:
    """Return every operation of :class:`Store`, implemented by ``store``."""
    none = type(None)

    def pin(key: ShardKey, client: ProcessIdentity) -> Reply:
        pinned = store.pin(key, owner=client)

        def done(sent: bool) -> None:
            if not sent:
                store.unpin(pinned.id)
            pinned.close()

        return Reply(PinResponse(pinned.id, pinned.record), fd=pinned.fd, done=done)

    def open_slot(slot: str) -> Reply:
        fd = store.open_slot(slot)
        return Reply(None, fd=fd, done=lambda _sent: os.close(fd))

    return {
        "epoch": Operation(JobRequest, int, lambda a, _: store.epoch(a.job)),
        "claim": Operation(ClaimRequest, int, lambda a, _: store.claim(a.job, a.incarnation, at_least=a.at_least)),
        "lease": Operation(
            LeaseRequest,
            Lease,
            lambda a, client: store.lease(a.key, a.size_bytes, a.parts, wait_s=clamp_wait_s(a.wait_s), owner=client),
        ),
        "grow": Operation(
            GrowRequest, Lease, lambda a, _: store.grow(a.lease_id, a.size_bytes, wait_s=clamp_wait_s(a.wait_s))
        ),
        "open_slot": Operation(OpenSlotRequest, none, lambda a, _: open_slot(a.slot)),
        "relabel": Operation(RelabelRequest, Lease, lambda a, _: store.relabel(a.lease_id, a.key)),
        "seal": Operation(SealRequest, ShardRecord, lambda a, _: store.seal(a.lease_id, a.size_bytes, a.meta, a.blobs)),
        "release": Operation(ReleaseLeaseRequest, none, lambda a, _: store.release(a.lease_id)),
        "reserve": Operation(
            ReserveRequest, list[SlotInfo], lambda a, _: store.reserve(a.job, a.part, a.size_bytes, slots=a.slots)
        ),
        "list_shards": Operation(ListShardsRequest, list[ShardInfo], lambda a, _: store.list_shards(a.job)),
        "pin": Operation(PinRequest, PinResponse, lambda a, client: pin(a.key, client)),
        "unpin": Operation(UnpinRequest, bool, lambda a, _: store.unpin(a.pin_id)),
        "verify": Operation(VerifyRequest, tuple[int, ...], lambda a, _: store.verify(a.key, a.chunks)),
        "report_damage": Operation(ReportDamageRequest, none, lambda a, _: store.report_damage(a.key, a.reason)),
        "mark_committed": Operation(
            MarkCommittedRequest, none, lambda a, _: store.versions.mark_committed(a.job, a.version_id)
        ),
        "abort_part": Operation(
            AbortPartRequest, none, lambda a, _: store.versions.abort_part(a.job, a.version_id, a.part)
        ),
        "newest_committed": Operation(
            JobRequest, VersionId | None, lambda a, _: store.versions.newest_committed(a.job)
        ),
        "delete_versions": Operation(DeleteVersionsRequest, int, lambda a, _: store.versions.delete(a.job, a.versions)),
        "retain": Operation(
            RetainVersionRequest, none, lambda a, _: store.versions.retain(a.job, a.version_id, kept=a.retained)
        ),
        "retained": Operation(JobRequest, set[VersionId], lambda a, _: store.versions.retained(a.job)),
        "put_blob": Operation(PutBlobRequest, none, lambda a, _: store.blobs.put(a.job, a.name, a.data)),
        "get_blob": Operation(BlobRequest, bytes, lambda a, _: store.blobs.get(a.job, a.name)),
        "remove_blob": Operation(BlobRequest, none, lambda a, _: store.blobs.remove(a.job, a.name)),
        "list_blobs": Operation(JobRequest, list[str], lambda a, _: store.blobs.list_names(a.job)),
        "drop_unrecognized": Operation(DropUnrecognizedRequest, int, lambda a, _: store.drop_unrecognized(a.names)),
        "status": Operation(StoreStatusRequest, StoreStatus, lambda *_: store.status()),
    }
