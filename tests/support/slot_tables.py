"""A check of the slot table's indexes against its slots."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from peerstore.store.slot_table import SlotTable
from peerstore.store.slots import SlotState


def assert_indexes_match(table: SlotTable) -> None:
    """Assert that each index lists the slots that a scan over all slots finds."""
    indexes = table.slots
    by_scan: dict[str, dict[Any, set[str]]] = {
        name: defaultdict(set) for name in ("states", "keys", "shards", "leases", "jobs", "writers")
    }
    parts: dict[Any, set[int]] = defaultdict(set)
    available: dict[Any, set[int]] = defaultdict(set)
    for slot in table.slots.all():
        by_scan["states"][slot.state].add(slot.name)
        by_scan["jobs"][slot.job].add(slot.name)
        by_scan["writers"][slot.job, slot.part].add(slot.name)
        if slot.lease is not None:
            by_scan["keys"][slot.lease.key].add(slot.name)
            by_scan["leases"][slot.lease.id].add(slot.name)
        if slot.record is not None:
            key = slot.record.key
            by_scan["shards"][key].add(slot.name)
            if slot.state is not SlotState.RETIRED:
                by_scan["keys"][key].add(slot.name)
            if slot.state is SlotState.SEALED:
                by_scan["leases"][slot.sealed_lease_id].add(slot.name)
                if not key.kind:
                    available[key.job, key.version_id].add(key.part)
            if not key.kind:
                parts[key.job, key.version_id].add(key.part)
    for name, found in by_scan.items():
        assert {key: set(named) for key, named in getattr(indexes, f"_{name}").items()} == found, name
    versions = {(job, one): shards for job, known in indexes._versions.items() for one, shards in known.items()}
    assert {key: set(shards.parts) for key, shards in versions.items()} == parts
    assert {key: set(shards.available_parts) for key, shards in versions.items() if shards.available_parts} == available
    assert indexes.size_bytes == sum(slot.size_bytes for slot in table.slots.all())
