"""A writer warns once where a restore would take a newer step than the saved one."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tieredckpt
from tieredckpt import TieredReader, TieredWriter
from tieredckpt.session.session import close_sessions
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(autouse=True)
def node():
    with memory_node() as one:
        yield one


def warned(caplog):
    return [record.getMessage() for record in caplog.records if "is behind step" in record.getMessage()]


def write(step):
    dcp.save({"w": torch.ones(3)}, storage_writer=TieredWriter("tiered://order", step=step), no_dist=True)


def test_writer_warns_once_of_a_step_behind_its_own(caplog):
    with caplog.at_level(logging.WARNING):
        for step in (5, 6, 3, 2):
            write(step)
    (said,) = warned(caplog)
    assert said.startswith("Step 3 of job 'order' is behind step 6: a restore or a load without a step takes step 6")


def test_save_warns_of_the_newer_step_of_an_earlier_run(caplog):
    write(5)
    close_sessions()
    with caplog.at_level(logging.WARNING):
        tieredckpt.save("tiered://order", {"w": torch.ones(3)}, 3)
    (said,) = warned(caplog)
    assert said.startswith("Step 3 of job 'order' is behind step 5")


def test_writer_does_not_warn_after_a_load_of_the_earlier_step(caplog):
    write(3)
    write(5)
    close_sessions()
    with caplog.at_level(logging.WARNING):
        dcp.load({"w": torch.zeros(3)}, storage_reader=TieredReader("tiered://order", step=3), no_dist=True)
        write(4)
    assert warned(caplog) == []
