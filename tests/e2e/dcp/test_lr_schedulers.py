"""Every learning rate scheduler of torch continues after a restore, also from a plain checkpoint."""

import warnings

import pytest
import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

from tieredckpt import Checkpointer

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

SCHEDULERS = {
    "StepLR": lambda of: lrs.StepLR(of, 2),
    "MultiStepLR": lambda of: lrs.MultiStepLR(of, [2, 5, 5, 7]),
    "ConstantLR": lambda of: lrs.ConstantLR(of, total_iters=5),
    "LinearLR": lambda of: lrs.LinearLR(of, total_iters=8),
    "ExponentialLR": lambda of: lrs.ExponentialLR(of, 0.9),
    "PolynomialLR": lambda of: lrs.PolynomialLR(of, 9),
    "CosineAnnealingLR": lambda of: lrs.CosineAnnealingLR(of, 8),
    "CosineAnnealingWarmRestarts": lambda of: lrs.CosineAnnealingWarmRestarts(of, 3),
    "CyclicLR": lambda of: lrs.CyclicLR(of, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda of: lrs.OneCycleLR(of, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda of: lrs.ReduceLROnPlateau(of, patience=1),
    "LambdaLR": lambda of: lrs.LambdaLR(of, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda of: lrs.MultiplicativeLR(of, lambda _: 0.9),
    "SWALR": lambda of: SWALR(of, 0.01, anneal_epochs=6),
    "SequentialLR": lambda of: lrs.SequentialLR(of, [lrs.ConstantLR(of), lrs.MultiStepLR(of, [2, 4])], [3]),
    "ChainedScheduler": lambda of: lrs.ChainedScheduler([lrs.ConstantLR(of), lrs.MultiStepLR(of, [3, 6])]),
}
SAVED_AT, STEPS = 4, 10


def training(name):
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optimizer, SCHEDULERS[name](optimizer)


def rates(optimizer, schedule, steps):
    found = []
    for _ in range(steps):
        optimizer.step()
        schedule.step(*([1.0] if isinstance(schedule, lrs.ReduceLROnPlateau) else []))
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_continues_after_a_restore(agent_dir, monkeypatch, tmp_path, name, enabled):
    monkeypatch.setenv("TIEREDCKPT_ENABLED", str(enabled).lower())
    options = {"durable": f"file://{tmp_path}", "on_sigterm": "ignore"}
    optimizer, schedule = training(name)
    rates(optimizer, schedule, SAVED_AT)
    with Checkpointer("tiered://schedule", **options) as ckpt:
        ckpt.save({"optim": optimizer, "schedule": schedule}, SAVED_AT).wait()
        saved = schedule.state_dict()
        found, restored = training(name)
        assert ckpt.restore({"optim": found, "schedule": restored}) == SAVED_AT
    state = restored.state_dict()
    assert {name: type(value) for name, value in state.items()} == {name: type(value) for name, value in saved.items()}
    if name != "SequentialLR":  # its state has other schedulers' states, which have no equality
        assert state == saved
    assert rates(found, restored, STEPS) == rates(optimizer, schedule, STEPS)


def test_values_below_numbers_as_keys_are_restored_in_place(agent_dir):
    def state(value):
        return {"counts": {1: value, "two": {3: [value, {4: value}]}}, "tensors": {5: torch.full((2,), float(value))}}

    with Checkpointer("tiered://numbers") as ckpt:
        ckpt.save(state(7), 1).wait()
        found = state(0)
        assert ckpt.restore(found) == 1
    assert found["counts"] == state(7)["counts"]
    assert torch.equal(found["tensors"][5], torch.full((2,), 7.0))
    assert [*found["tensors"]] == [5]
