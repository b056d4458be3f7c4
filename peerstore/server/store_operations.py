"""The store's operations as the agent serves them to local processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from peerstore.client import store_methods as methods
from peerstore.client.store_methods import clamp_wait_s
from peerstore.daemon_process import ProcessIdentity
from peerstore.rpc import Operation, Reply
from peerstore.shard_records import PinResponse, ShardKey
from peerstore.store.node_store import NodeStore


def store_operations(store: NodeStore) -> Mapping[str, Operation]:
    """Return every operation of :class:`Store`, implemented by ``store``."""

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

    return dict(
        (
            methods.EPOCH.serve(lambda a, _: store.epoch(a.job)),
            methods.CLAIM.serve(lambda a, _: store.claim(a.job, a.incarnation, at_least=a.at_least)),
            methods.LEASE.serve(
                lambda a, client: store.lease(a.key, a.size_bytes, a.parts, wait_s=clamp_wait_s(a.wait_s), owner=client)
            ),
            methods.GROW.serve(lambda a, _: store.grow(a.lease_id, a.size_bytes, wait_s=clamp_wait_s(a.wait_s))),
            methods.OPEN_SLOT.serve(lambda a, _: open_slot(a.slot)),
            methods.RELABEL.serve(lambda a, _: store.relabel(a.lease_id, a.key)),
            methods.SEAL.serve(lambda a, _: store.seal(a.lease_id, a.size_bytes, a.meta, a.blobs)),
            methods.RELEASE.serve(lambda a, _: store.release(a.lease_id)),
            methods.RESERVE.serve(lambda a, _: store.reserve(a.job, a.part, a.size_bytes, slots=a.slots)),
            methods.LIST_SHARDS.serve(lambda a, _: store.list_shards(a.job)),
            methods.PIN.serve(lambda a, client: pin(a.key, client)),
            methods.UNPIN.serve(lambda a, _: store.unpin(a.pin_id)),
            methods.VERIFY.serve(lambda a, _: store.verify(a.key, a.chunks)),
            methods.REPORT_DAMAGE.serve(lambda a, _: store.report_damage(a.key, a.reason)),
            methods.MARK_COMMITTED.serve(lambda a, _: store.versions.mark_committed(a.job, a.version_id)),
            methods.ABORT_PART.serve(lambda a, _: store.versions.abort_part(a.job, a.version_id, a.part)),
            methods.NEWEST_COMMITTED.serve(lambda a, _: store.versions.newest_committed(a.job)),
            methods.DELETE_VERSIONS.serve(lambda a, _: store.versions.delete(a.job, a.versions)),
            methods.RETAIN.serve(lambda a, _: store.versions.retain(a.job, a.version_id, kept=a.retained)),
            methods.RETAINED.serve(lambda a, _: store.versions.retained(a.job)),
            methods.PUT_BLOB.serve(lambda a, _: store.blobs.put(a.job, a.name, a.data)),
            methods.GET_BLOB.serve(lambda a, _: store.blobs.get(a.job, a.name)),
            methods.REMOVE_BLOB.serve(lambda a, _: store.blobs.remove(a.job, a.name)),
            methods.LIST_BLOBS.serve(lambda a, _: store.blobs.list_names(a.job)),
            methods.DROP_UNRECOGNIZED.serve(lambda a, _: store.drop_unrecognized(a.names)),
            methods.STATUS.serve(lambda *_: store.status()),
        )
    )
