import copy

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from tieredckpt.tensors.nested_state import nested_state

OPTIMIZER = {
    "state": {number: {"step": number} for number in range(12)},
    "param_groups": [{"lr": 0.1, "params": list(range(10))}, {"lr": 0.2, "params": [10, 11]}],
}
NAMED = {"state": {"0": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["0"]}]}


@pytest.mark.parametrize(
    "state",
    [
        {"optim": OPTIMIZER},
        OPTIMIZER,
        {"optimizer_states": [OPTIMIZER, {"state": {}, "param_groups": [{"params": [0]}]}]},
        {"optim": {**OPTIMIZER, "state": {3: {"step": 3}, "shared": 7}}},
        {"optim": {"state": {}, "param_groups": [{"params": [0]}]}},
        {"optim": NAMED},
        {"0": 1, "param_groups": 2, "state": [3, {"4": torch.tensor(4)}]},
        {"config": {"param_groups": [{"name": "decoder"}], "state": {"0": 1}}},
    ],
    ids=["nested", "whole", "list", "other-keys", "stateless", "named", "no-optimizer", "no-params"],
)
def test_nested_state_returns_the_saved_keys(state):
    flat, paths = flatten_state_dict(copy.deepcopy(state))
    assert nested_state(flat, paths) == state


def test_excluded_optimizer_state_is_not_replaced_by_an_empty_one():
    flat, paths = flatten_state_dict({"optim": copy.deepcopy(OPTIMIZER)})
    selected = {name: value for name, value in flat.items() if not name.startswith("optim.state.")}
    assert nested_state(selected, paths) == {"optim": {"param_groups": OPTIMIZER["param_groups"]}}


def test_state_without_parameter_groups_has_the_keys_of_its_paths():
    flat, paths = flatten_state_dict({"optim": copy.deepcopy(OPTIMIZER)})
    selected = {name: value for name, value in flat.items() if name.startswith("optim.state.1.")}
    assert nested_state(selected, paths) == {"optim": {"state": {"1": {"step": 1}}}}
