"""A world that ends while its ranks still meet leaves nothing that the next one could stumble over."""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from elastic.control.plane import Assignment
from elastic.workers.groups import Groups


@pytest.fixture
def store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{server.port}"
    del server


def groups_of(store, epoch, size):
    place = Assignment(epoch, 0, size, 0, 1, 0, size, store)
    return Groups(place, backend="gloo", timeout=timedelta(seconds=0.5 if size > 1 else 60))


def name_of_a_world(store, epoch):
    groups = groups_of(store, epoch, 1)
    groups.enter()
    try:
        return dist.group.WORLD.group_name
    finally:
        groups.leave(broken=False)


def test_its_keys_have_the_names_that_they_have_at_a_rank_that_was_not_there(store):
    fresh = name_of_a_world(store, 0)
    for epoch in (1, 2):
        alone = groups_of(store, epoch, 2)
        with pytest.raises(RuntimeError):
            alone.enter()
        alone.leave(broken=True)
    assert name_of_a_world(store, 3) == fresh


def test_worlds_leave_no_hook_behind(store):
    before = sys.excepthook
    for epoch in range(3):
        name_of_a_world(store, epoch)
    assert sys.excepthook is before
