"""A broken world is left without waiting for its ranks, and leaves nothing that affects the next one."""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch._dynamo  # imported later, it would hold the group as a default of a parameter
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elastic.control.control_plane import RankAssignment
from elastic.workers import native_connections
from elastic.workers.process_groups import ProcessGroups, parse_store_address
from tests.support.control_planes import start_all
from tests.support.local_nodes import wait_until


@pytest.fixture
def store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{server.port}"
    del server


def groups_of(store, epoch, size):
    place = RankAssignment(epoch, 0, size, 0, 1, 0, size, store)
    return ProcessGroups(place, backend="gloo", timeout=timedelta(seconds=0.5 if size > 1 else 60))


def name_of_a_world(store, epoch):
    groups = groups_of(store, epoch, 1)
    groups.initialize()
    try:
        return dist.group.WORLD.group_name
    finally:
        groups.destroy(broken=False)


def test_key_names_match_those_of_a_rank_that_missed_earlier_worlds(store):
    fresh = name_of_a_world(store, 0)
    for epoch in (1, 2):
        alone = groups_of(store, epoch, 2)
        with pytest.raises(RuntimeError):
            alone.initialize()
        alone.destroy(broken=True)
    assert name_of_a_world(store, 3) == fresh


def test_worlds_leave_no_hook_behind(store):
    before = sys.excepthook
    for epoch in range(3):
        name_of_a_world(store, epoch)
    assert sys.excepthook is before


@pytest.mark.parametrize("spread", [False, True], ids=["one store", "rootless"])
def test_unreachable_name_service_does_not_delay_leaving_a_broken_world(store, spread, monkeypatch):
    """Names are resolved when the world forms: an aborting thread holds a lock leaving needs."""
    place = RankAssignment(1, 0, 2, 0, 1, 0, 2, store, stores=(store,) if spread else ())
    groups = ProcessGroups(place, backend="gloo", timeout=timedelta(seconds=120))
    (entering,) = start_all(groups.initialize)
    wait_until(lambda: is_connected(store))
    asked = asked_on_the_way_in_only(threading.current_thread(), socket.getaddrinfo)
    monkeypatch.setattr(socket, "getaddrinfo", asked)
    wait_until(lambda: groups.close_connections() or entering.done())  # a client that is still connecting reconnects
    monkeypatch.undo()
    with pytest.raises(RuntimeError):
        entering.result()
    groups.destroy(broken=True)


def asked_on_the_way_in_only(cutting, ask):
    def getaddrinfo(*args, **options):
        if threading.current_thread() is cutting:
            pytest.fail("a name was looked up while a world was aborted")
        return ask(*args, **options)

    return getaddrinfo


def is_connected(store) -> bool:
    """Return whether a client of this process waits in a connection to the store."""
    remote = parse_store_address(store)
    numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return any(leads_to(number, remote) for number in numbers)


def leads_to(number, remote) -> bool:
    with contextlib.suppress(OSError), native_connections._borrowed(number) as one:
        return native_connections._remote(one) == remote
    return False


def test_model_is_dropped_while_a_collective_of_its_group_runs(ranks, tmp_path):
    """DDP's destructor keeps the interpreter's lock, so it must not be the last owner of a busy group."""
    assert ranks.run(2, _drop_model_during_collective, tmp_path) == ["left", "stayed"]


def _drop_model_during_collective(folder: Path) -> str:
    left = folder / "left"
    models = [DistributedDataParallel(torch.nn.Linear(4, 4), init_sync=False)]
    if dist.get_rank() == 1:
        wait_until(left.exists)  # with open connections, so that the other rank's collective does not end
        return "stayed"
    dist.all_reduce(torch.ones(1024), async_op=True)
    place = RankAssignment(0, 0, 2, 0, 1, 0, 2, "127.0.0.1:1")
    ProcessGroups(place, backend="gloo").destroy(broken=True, collect=lambda: (models.clear(), gc.collect()))
    left.touch()
    return "left"
