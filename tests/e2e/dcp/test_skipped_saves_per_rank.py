"""Ranks that skip different steps still find free slots."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tieredckpt import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.errors import StoreBusyError
from tieredckpt.session.slot_pool import SlotPool

pytestmark = pytest.mark.e2e

STEPS = 16
LEFT_OUT = {0: (3, 5, 7), 1: (4, 6, 8)}


def apart():
    """Skip different steps on each rank, and return every save's outcome and the restored step."""
    rank = dist.get_rank()
    stage = SlotPool.lease

    def busy(slots, key, *args, **more):
        if key.version in LEFT_OUT[rank]:
            raise StoreBusyError("no room just now")
        return stage(slots, key, *args, **more)

    SlotPool.lease = busy
    try:
        state = {"w": torch.zeros(1000)}
        with Checkpointer("tiered://apart") as ckpt:
            assert ckpt.restore(state) == -1
            ends = []
            for step in range(STEPS):
                state["w"].fill_(step)
                saved = ckpt.save(state, step)
                ckpt.wait()
                dist.barrier()
                ends.append(saved.state)
    finally:
        SlotPool.lease = stage
    other = {"w": torch.zeros(1000)}
    with Checkpointer("tiered://apart") as ckpt:
        found = ckpt.restore(other)
    return [end.name for end in ends], found, other["w"][0].item()


def test_ranks_that_skip_different_steps_have_slots_for_the_next_ones(agent_dir, ranks):
    assert os.environ["TIEREDCKPT_AGENT_DIRECTORY"] == str(agent_dir)
    for rank, (ends, found, value) in enumerate(ranks.run(2, apart)):
        skipped = [step for step, end in enumerate(ends) if end == SaveState.SKIPPED.name]
        assert set(LEFT_OUT[rank]) <= set(skipped)
        assert max(skipped) < STEPS - 3  # at some point every rank had free slots again
        assert (found, value) == (STEPS - 1, STEPS - 1)
