"""A non-finite state never replaces a finite one: ``memory.nonfinite``."""

from __future__ import annotations

import pytest
import torch

from tieredckpt import Checkpointer, Settings
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.errors import NonFiniteStateError
from tieredckpt.settings import MemorySettings
from tieredckpt.testing import memory_node

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def node():
    with memory_node() as one:
        yield one


def steps(node):
    return sorted({fact.key.version for fact in node.store.list_shards("finite")})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("first", [True, False], ids=["at the first save", "later"])
def test_the_last_finite_step_is_kept_and_the_tensor_is_named(node, dtype, first, caplog):
    state = {"model": {"a": torch.ones(70), "b": torch.zeros(5, 3, dtype=dtype)}, "n": torch.tensor(3)}
    with Checkpointer("tiered://finite") as ckpt:
        if not first:
            ckpt.save(state, 1).wait()
            ckpt.save(state, 2).wait()
        state["model"]["b"][4, 1] = NAN
        for step in (3, 4, 5):  # more saves than slots
            saved = ckpt.save(state, step)
            with pytest.raises(NonFiniteStateError, match=rf"step {step}.*rank 0.*model\.b.*memory\.nonfinite"):
                saved.wait()
            assert saved.state is SaveState.FAILED
        assert steps(node) == ([] if first else [2])
        assert "model.b" in caplog.text
        state["model"]["b"].zero_()
        assert ckpt.save(state, 6).wait() is SaveState.SEALED
        assert ckpt.restore(state) == 6


def test_initially_infinite_values_are_accepted(node):
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -INF)
    state = {"mask": mask, "weight": torch.ones(3)}
    with Checkpointer("tiered://finite") as ckpt:
        assert [ckpt.save(state, step).wait() for step in (1, 2)] == [SaveState.SEALED] * 2
        state["weight"][1] = INF
        with pytest.raises(NonFiniteStateError, match="weight"):
            ckpt.save(state, 3).wait()


def test_large_sums_of_finite_numbers_are_finite(node):
    state = {"weight": torch.full((300,), torch.finfo(torch.float32).max), "half": torch.full((99,), 6e4).half()}
    with Checkpointer("tiered://finite") as ckpt:
        assert [ckpt.save(state, step).wait() for step in (1, 2)] == [SaveState.SEALED] * 2


def test_nonfinite_state_is_saved_on_request(node):
    settings = Settings(memory=MemorySettings(nonfinite="save"))
    with Checkpointer("tiered://finite", settings=settings) as ckpt:
        for step in (1, 2):
            assert ckpt.save({"weight": torch.tensor([NAN])}, step).wait() is SaveState.SEALED


def test_a_step_that_the_scaler_skipped_is_as_good_as_any(node):
    """Gradients overflow and the scaler skips the optimizer's step: the saved state is unchanged."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    with Checkpointer("tiered://finite") as ckpt:
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale((weight * 2.0**100).sum()).backward()
            assert not weight.grad.isfinite().all()
            scaler.step(optimizer)
            scaler.update()
            state = {"weight": weight, "optim": optimizer, "scaler": scaler.state_dict()}
            assert ckpt.save(state, step).wait() is SaveState.SEALED
