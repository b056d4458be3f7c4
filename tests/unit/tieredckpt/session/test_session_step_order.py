"""A writer refuses a step that a restore would skip."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import tieredckpt
from tests.support.bits import assert_same_bits
from tieredckpt import TieredReader, TieredWriter
from tieredckpt.errors import UsageError
from tieredckpt.session.session import close_sessions
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(autouse=True)
def node():
    with memory_node() as one:
        yield one


def write(step, **options):
    state = {"w": torch.full((3,), float(step))}
    dcp.save(state, storage_writer=TieredWriter("tiered://order", step=step, **options), no_dist=True)


def newest():
    return int(tieredckpt.load("tiered://order")["w"][0])


def test_writer_refuses_a_step_behind_its_own():
    for step in (5, 6):
        write(step)
    with pytest.raises(CheckpointException, match="Step 3 of job 'order' is behind step 6, which this run saved"):
        write(3)
    assert newest() == 6
    write(7)
    assert newest() == 7


def test_save_refuses_a_step_behind_an_earlier_run(node):
    write(5)
    close_sessions()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"behind step 5 of an earlier run.*dcp\.load.*use another job name"):
            tieredckpt.save("tiered://order", {"w": torch.ones(3)}, 3)
    assert {info.key.version for info in node.store.list_shards("order")} == {5}


def test_checkpoint_id_refuses_a_step_behind_an_earlier_run():
    write(5)
    close_sessions()
    with tieredckpt.enable_urls(), pytest.raises(CheckpointException, match="behind step 5 of an earlier run"):
        dcp.save({"w": torch.ones(3)}, checkpoint_id="tiered://order/step-3", no_dist=True)


def test_asynchronous_save_refuses_a_step_behind_an_earlier_run():
    write(5)
    close_sessions()
    future = dcp.async_save({"w": torch.ones(3)}, storage_writer=TieredWriter("tiered://order", step=3), no_dist=True)
    with pytest.raises(CheckpointException, match="behind step 5 of an earlier run"):
        future.result()


def test_writer_saves_after_a_load_of_the_earlier_step():
    write(3)
    write(5)
    close_sessions()
    dcp.load({"w": torch.zeros(3)}, storage_reader=TieredReader("tiered://order", step=3), no_dist=True)
    write(4)
    assert newest() == 4


def test_writer_that_starts_over_leaves_the_earlier_steps_behind():
    write(5)
    close_sessions()
    for step in (0, 1):
        write(step, start_over=True)
    close_sessions()
    assert newest() == 1
    with pytest.raises(CheckpointException, match="behind step 1 of an earlier run"):
        write(0)


def test_asynchronous_saves_start_over_once():
    write(5)
    close_sessions()
    writer = TieredWriter("tiered://order", start_over=True)
    for step in (0, 1, 2):
        dcp.async_save(
            {"w": torch.full((3,), float(step))},
            storage_writer=writer,
            checkpoint_id=f"tiered://order/step-{step}",
            no_dist=True,
        ).result()
    assert newest() == 2


def test_start_over_save_continues_from_the_loaded_step():
    write(5)
    close_sessions()
    dcp.load({"w": torch.zeros(3)}, storage_reader=TieredReader("tiered://order"), no_dist=True)
    tieredckpt.save("tiered://order", {"w": torch.full((3,), 6.0)}, 6, start_over=True)
    assert newest() == 6
    assert_same_bits({"w": torch.full((3,), 5.0)}, tieredckpt.load("tiered://order", step=5))
