"""Restores with a progress hook whose expected step is restored, required, or missing."""

from __future__ import annotations

import pytest
import torch

from tests.support.local_nodes import wait_until
from tieredckpt import Checkpointer
from tieredckpt.checkpointer.progress_hook import ExpectedStep, newest_complete_step, use_progress_hook
from tieredckpt.errors import CheckpointNotFoundError

pytestmark = pytest.mark.e2e
TARGET = "tiered://overseen"


class Ledger:
    """A progress hook that returns one expected step and records its calls."""

    def __init__(self, expected=None):
        self.told = expected
        self.asked, self.sealed_steps = [], []

    def expected_step(self, job):
        self.asked.append(job)
        return self.told

    def on_sealed(self, session):
        self.sealed_steps.append((session.job, session.sealed_step, newest_complete_step(session, ask=True)))


def state(value=0.0):
    return {"w": torch.full((64,), value)}


def restored(told):
    ledger, found = Ledger(told), state()
    with use_progress_hook(ledger), Checkpointer(TARGET) as ckpt:
        step = ckpt.restore(found)
    assert ledger.asked == ["overseen"]
    return step, found["w"][0].item()


def test_expected_step_decides_only_when_it_insists(agent_dir):
    with pytest.raises(CheckpointNotFoundError, match="would lose 9 steps"):
        restored(ExpectedStep(8, "the operator has 8"))
    assert restored(None) == (-1, 0.0)
    ledger = Ledger()
    with use_progress_hook(ledger), Checkpointer(TARGET) as ckpt:
        for step in (1, 2):
            ckpt.save(state(float(step)), step).wait()
    wait_until(lambda: len(ledger.sealed_steps) == 2)
    assert ledger.sealed_steps == [("overseen", 1, 1), ("overseen", 2, 2)]
    assert restored(ExpectedStep(1, "the operator has 1")) == (2, 2.0)
    assert restored(ExpectedStep(8, "the operator has 8")) == (2, 2.0)
    assert restored(ExpectedStep(1, "the operator has 1", is_required=True)) == (1, 1.0)
    with pytest.raises(CheckpointNotFoundError):
        restored(ExpectedStep(8, "the operator has 8", is_required=True))
    with use_progress_hook(ledger), Checkpointer(TARGET) as ckpt:
        assert ckpt.restore(state(), 1) == 1  # a step that the caller names needs no expected step
    assert ledger.asked == []
    assert ledger.sealed_steps[-1] == ("overseen", 2, 2)
