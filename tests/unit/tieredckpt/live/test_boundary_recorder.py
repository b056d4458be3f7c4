"""Snapshots of a step boundary, and the changes that make them stale."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tieredckpt.live.boundary_recorder import BoundaryRecorder
from tieredckpt.live.survivor_state import current_survivor_state, track_step_boundaries
from tieredckpt.settings import load_settings, override_settings
from tieredckpt.tensors.state_dict import flatten_state, resolve_stateful


class Numbers(torch.optim.Optimizer):
    """An optimizer that changes data unobserved and whose state includes a plain number."""

    def __init__(self, own):
        super().__init__(own, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                one.data.sub_(0.1 * one.grad)
                self.state[one]["step"] = self.state[one].get("step", 0) + 1


KINDS = {
    "sgd": lambda own: torch.optim.SGD(own, lr=0.1),
    "momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, foreach=True),
    "fused momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda own: torch.optim.Adam(own, foreach=False),
    "adamw": lambda own: torch.optim.AdamW(own, foreach=True),
    "fused adamw": lambda own: torch.optim.AdamW(own, fused=True),
    "adagrad": torch.optim.Adagrad,
    "lbfgs": torch.optim.LBFGS,
    "numbers": Numbers,
}


class Cursor:
    def __init__(self):
        self.seen = [0]

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.tied = self.two.weight
        self.other = nn.InstanceNorm1d(6, track_running_stats=True)

    def forward(self, x):
        return self.two(self.other(self.norm(self.one(x)).unsqueeze(-1).expand(-1, -1, 3)).mean(-1))


class Trained:
    """A model that trains step by step and records each boundary."""

    def __init__(self, kind="adamw", job="job"):
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = KINDS[kind](self.model.parameters())
        self.rates = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.cursor = Cursor()
        self.state = {"model": self.model, "optim": self.optimizer, "rates": self.rates, "data": self.cursor, "n": 0}
        self.noter = BoundaryRecorder(job, load_settings())

    def forward(self):
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(5, 4)).square().sum()
        loss.backward()
        return loss

    def step(self, number):
        loss = self.forward()
        self.optimizer.step(lambda: loss) if isinstance(self.optimizer, torch.optim.LBFGS) else self.optimizer.step()
        self.rates.step()
        self.cursor.seen.append(number)
        self.state["n"] = number
        self.noter.record(self.state, number)

    def now(self):
        return copy.deepcopy(flatten_state(resolve_stateful(self.state)))


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_outside_of_the_optimizer_leaves_the_boundary(kind):
    with track_step_boundaries() as held:
        trained = Trained(kind)
        for number in range(3):
            trained.step(number)
        expected = trained.now()
        trained.forward()  # also changes the state of the norms
        trained.cursor.seen.append(7)
        held.retain_after_fault()
        kept = held.retained["job"]
        assert kept.step == 2
        assert_equal(kept.values, expected)
        assert {item.index.fqn for item in kept.plan.items} == expected.keys()
        assert kept.plan.planner_data.keys() == expected.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_after_an_optimizer_has_begun_leaves_nothing(kind):
    with track_step_boundaries() as held:
        trained = Trained(kind)
        trained.step(0)
        trained.forward()
        loss = trained.forward()
        trained.optimizer.step(*[lambda: loss] * (kind == "lbfgs"))
        held.retain_after_fault()
        assert held.retained == {}
        assert held.reached_steps == {"job": 0}


@pytest.mark.parametrize(
    "change",
    [
        lambda trained: trained.model.one.weight.requires_grad_(False).mul_(2),
        lambda trained: setattr(trained.model.one.weight, "data", trained.model.one.weight.data.clone()),
        lambda trained: next(iter(trained.optimizer.state.values()))["exp_avg"].zero_(),
    ],
    ids=["in place", "exchanged", "a moment"],
)
def test_other_changes_are_seen(change):
    with track_step_boundaries() as held:
        trained = Trained()
        trained.step(0)
        trained.step(1)
        change(trained)
        held.retain_after_fault()
        assert held.retained == {}


def test_boundary_without_an_observed_optimizer_is_not_trusted():
    with track_step_boundaries() as held:
        trained = Trained()
        trained.noter.record(trained.state, 0)
        held.retain_after_fault()
        assert held.retained == {}


@pytest.mark.parametrize("what", ["a buffer", "a layer", "loaded", "a group", "a key"])
def test_replaced_state_between_boundaries_is_detected(what):
    with track_step_boundaries() as held:
        trained = Trained()
        trained.step(0)
        trained.step(1)
        if what == "a buffer":
            trained.model.norm.running_mean = torch.full((6,), 3.0)
        elif what == "a layer":
            trained.model.more = nn.Linear(2, 2)
        elif what == "loaded":
            trained.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
        elif what == "a group":
            trained.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        else:
            trained.state["rng"] = torch.get_rng_state()
        trained.noter.record(trained.state, 2)
        expected = trained.now()
        trained.forward()
        held.retain_after_fault()
        assert_equal(held.retained["job"].values, expected)


def test_large_tensors_outside_of_optimizers_are_not_copied():
    with track_step_boundaries() as held:
        trained = Trained()
        trained.state["table"] = table = torch.zeros(400_000)
        trained.step(0)
        held.retain_after_fault()
        assert held.retained["job"].values["table"].data_ptr() == table.data_ptr()
        trained.step(1)
        table[3] = 1
        held.retained.clear()
        held.retain_after_fault()
        assert held.retained == {}


def test_repeated_step_is_recorded_once():
    with track_step_boundaries() as held:
        trained = Trained()
        trained.step(0)
        noted = held.boundaries["job"]
        trained.noter.record(trained.state, 0)
        assert held.boundaries["job"] is noted


def test_only_the_state_that_trained_last_is_retained():
    with track_step_boundaries() as held:
        one, other = Trained(job="one"), Trained(job="other")
        one.step(3)
        other.step(4)
        held.retain_after_fault()
        assert held.retained.keys() == {"other"}


def test_unrecordable_state_warns_once(caplog):
    class Broken:
        def state_dict(self):
            raise ZeroDivisionError("not today")

        def load_state_dict(self, state):
            pass

    with track_step_boundaries() as held:
        trained = Trained()
        trained.state["broken"] = Broken()
        trained.noter.record(trained.state, 0)
        trained.noter.record(trained.state, 1)
        assert held.boundaries == {}
    assert [one.message for one in caplog.records] == [
        "job: step boundaries are not recorded: ZeroDivisionError: not today"
    ]


def test_boundaries_are_not_recorded_when_live_recovery_is_off():
    trained = Trained()
    trained.step(0)
    assert current_survivor_state() is None
    with track_step_boundaries() as held:
        BoundaryRecorder("job", override_settings(load_settings(), memory={"live": False})).record(trained.state, 0)
        assert held.boundaries == {}


def test_all_memory_is_given_back():
    with track_step_boundaries() as held:
        trained = Trained()
        trained.step(0)
        trained.forward()
        weight, gradient = trained.model.one.weight, weakref.ref(trained.model.one.weight.grad)
        alive = weakref.ref(weight)
        held.retain_after_fault()
        trained.noter.release_tensors()
        storage = held.retained["job"].values["model.one.weight"]
        assert storage.data_ptr() == weight.data_ptr()
        kept = weakref.ref(storage)
        del trained, weight, storage
        gc.collect()
        assert gradient() is None
        assert alive() is None
        assert kept() is not None
        held.enter_world(1)
        assert kept() is None


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_shards_of_fsdp(world_of_one, how):
    """Where foreach counts nothing on DTensors at all, and parameters are exchanged in every forward pass."""
    from torch.distributed.fsdp import fully_shard

    with track_step_boundaries() as held:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        fully_shard(model[0])
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), **how)
        state, noter = {"model": model, "optim": optimizer}, BoundaryRecorder("job", load_settings())
        for number in range(3):
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            noter.record(state, number)
        structure = noter._structure
        expected = {
            name: value.to_local().clone() if hasattr(value, "to_local") else copy.deepcopy(value)
            for name, value in flatten_state(resolve_stateful(state)).items()
        }
        loss = model(torch.randn(3, 4)).square().sum()  # in the middle of it
        noted = held.boundaries["job"]
        held.retain_after_fault()
        assert_equal(held.retained["job"].values, expected)
        assert noter._structure is structure
        held.retained.clear()
        loss.backward()
        held.boundaries["job"] = noted
        optimizer.step()
        held.retain_after_fault()
        assert held.retained == {}
