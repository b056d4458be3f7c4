"""Saves that reuse state dicts of an unchanged state detect every change of it."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

from tests.support.bits import assert_same_bits
from tieredckpt import Checkpointer
from tieredckpt.tensors.state_dict import flatten_state, resolve_stateful
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WAIT_S = 60.0
WIDTH = 16


class Recipe:
    """A ``Stateful`` that a user wrote."""

    def __init__(self) -> None:
        self.values = {"cursor": 0, "mean": torch.zeros(3)}

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, values):
        self.values = dict(values)


class Training:
    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.recipe = Recipe()
        self.state = {
            "model": self.model,
            "optim": self.optimizer,
            "schedule": self.schedule,
            "recipe": self.recipe,
            "extra": {"at": 0, "noise": torch.rand(40)},
        }

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        self.recipe.values["cursor"] += 1

    def held(self):
        return copy.deepcopy(flatten_state(resolve_stateful(self.state)))


def nothing(training: Training) -> None:
    pass


def memory_of_a_parameter(training: Training) -> None:
    training.model[0].weight.data = torch.rand(WIDTH, WIDTH)


def a_parameter(training: Training) -> None:
    training.model[0].weight = nn.Parameter(torch.rand(WIDTH, WIDTH))


def a_buffer(training: Training) -> None:
    training.model[1].running_mean = torch.rand(WIDTH)


def a_layer(training: Training) -> None:
    training.model[2] = nn.Linear(WIDTH, 2 * WIDTH)


def moments(training: Training) -> None:
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def one_moment(training: Training) -> None:
    training.optimizer.state[training.model[0].weight]["exp_avg"] = torch.rand(WIDTH, WIDTH)


def the_optimizer(training: Training) -> None:
    training.optimizer = training.state["optim"] = torch.optim.AdamW(training.model.parameters(), lr=0.3)


def the_learning_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 0.7


def a_group_of_parameters(training: Training) -> None:
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.rand(3))], "lr": 0.2})


def own_values(training: Training) -> None:
    training.recipe.values = {"cursor": 9, "mean": torch.ones(3)}


def own_names(training: Training) -> None:
    training.recipe.values["more"] = torch.ones(2)


def extra_values(training: Training) -> None:
    training.state["extra"]["noise"] = torch.rand(40)
    training.state["extra"]["at"] = 7


def extra_shapes(training: Training) -> None:
    training.state["extra"]["noise"] = torch.rand(50)


def type_of_the_model(training: Training) -> None:
    training.model.to(torch.bfloat16)


CHANGES = [
    nothing,
    memory_of_a_parameter,
    a_parameter,
    a_buffer,
    a_layer,
    moments,
    one_moment,
    the_optimizer,
    the_learning_rate,
    a_group_of_parameters,
    own_values,
    own_names,
    extra_values,
    extra_shapes,
    type_of_the_model,
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_save_is_of_the_state_as_it_is(change):
    training = Training()
    with memory_node(), Checkpointer("tiered://job") as checkpointer:
        for step in range(4):
            training.step()
            checkpointer.save(training.state, step).wait(timeout_s=WAIT_S)
        change(training)
        expected = {}
        for step in range(4, 7):
            expected[step] = training.held()
            checkpointer.save(training.state, step, keep=True).wait(timeout_s=WAIT_S)
            with torch.no_grad():
                for one in training.model.parameters():
                    one.add_(1)
            training.recipe.values["cursor"] += 1
        for step, state in expected.items():
            found = {name: zero_of(one) for name, one in state.items()}
            assert checkpointer.restore(found, step) == step
            assert_same_bits(state, found)


def zero_of(value):
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()


def test_unchanged_state_is_not_asked_for_its_state_dicts(monkeypatch):
    training, asked = Training(), []
    real = nn.Module.state_dict
    with memory_node(), Checkpointer("tiered://job") as checkpointer:
        for step in range(3):
            training.step()
            checkpointer.save(training.state, step).wait(timeout_s=WAIT_S)

        def counted(self, *args, **kwargs):
            asked.append(self)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "state_dict", counted)
        training.step()
        checkpointer.save(training.state, 3).wait(timeout_s=WAIT_S)
        assert asked == []


def test_closed_checkpointer_keeps_no_tensor():
    training = Training()
    with memory_node():
        with Checkpointer("tiered://job") as checkpointer:
            for step in range(4):
                training.step()
                checkpointer.save(training.state, step).wait(timeout_s=WAIT_S)
            gone = weakref.ref(training.model[0].weight)
        del training
        assert checkpointer.settings is not None
        assert gone() is None
