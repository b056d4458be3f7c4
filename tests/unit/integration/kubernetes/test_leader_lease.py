"""A coordinator that restarts with only the Lease allocates no number that was used before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from elastic.control.leader_election import LeaderElector, LeaderRecordStore
from elastic.coordinator.world_reconciler import WorldReconciler
from integration.kubernetes.api_client import ApiServerClient
from integration.kubernetes.leader_lease import LeaderLease
from peerstore.shard_records import EPOCHS_PER_WORLD
from tests.support import leadership_contract as contract
from tests.support.control_simulation import ControlSimulation
from tests.support.kube_api import FakeApiServer, official_client
from tests.support.local_nodes import wait_until


@pytest.fixture
def lease() -> Iterator[LeaderRecordStore]:
    with FakeApiServer().running() as api, official_client(api.url) as client:
        yield LeaderLease(ApiServerClient(client), "training", "job", duration_s=1.0)


@contextlib.contextmanager
def leader(lease: LeaderRecordStore, name: str) -> Iterator[LeaderElector]:
    elector = LeaderElector(lease, name, f"{name}:1", changed=lambda: None)
    elector.start()
    try:
        wait_until(lambda: elector.acts)
        yield elector
    finally:
        elector.close()


def new_desk(table: ControlSimulation, elector: LeaderElector) -> WorldReconciler:
    """A coordinator that has only the Lease."""
    table.restart_coordinator(remembers=False)
    table.desk.leads(elector.term, elector.epoch, elector.incarnation_epoch)
    return table.desk


def test_lease_keeps_the_content_of_the_record(lease: LeaderRecordStore) -> None:
    contract.check_read_after_write(lease)


def test_coordinator_with_only_the_lease_allocates_greater_epochs(
    lease: LeaderRecordStore,
) -> None:
    table = ControlSimulation(1)
    with leader(lease, "a") as elector:
        desk = new_desk(table, elector)
        table.run_without_faults(15)
        first = desk.snapshot().world_spec
        wait_until(lambda: elector.noted(desk.snapshot().world.epoch, desk.snapshot().allocated_epoch))
    table.lose_node(0)  # the only node that has the number
    table.clock_offset_s = -900.0
    with leader(lease, "b") as elector:
        desk = new_desk(table, elector)
        table.add()
        table.run_without_faults(15)
    assert desk.snapshot().world_spec.epoch > first.epoch
    assert desk.snapshot().world_spec.incarnation_epoch == first.incarnation_epoch + EPOCHS_PER_WORLD
