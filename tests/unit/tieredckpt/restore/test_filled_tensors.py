"""Tensors that must be read again after a load, and tensors that need not."""

import pytest
import torch
from torch import nn

from tieredckpt.restore.filled_tensors import FilledTensors, takes_over_in_place


def filled(*targets):
    kept = FilledTensors()
    for number, target in enumerate(targets):
        kept.add_target(number, target.detach())
        kept.add_verified(number, target.detach())
    kept.drop_shared()
    return kept


def test_target_itself_is_unchanged():
    weight = nn.Parameter(torch.ones(3, 4))
    kept = filled(weight)
    assert kept.is_unchanged(0, weight)
    assert kept.is_unchanged(0, weight.detach())
    assert not kept.is_unchanged(1, weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(1),
        lambda t: t.data.clone(),
        lambda t: t.detach()[:2],
        lambda t: t.detach().view(4, 3),
        lambda t: t.detach().t(),
        lambda t: t.detach().view(torch.int32),
        lambda t: t.detach().to(torch.float64),
        torch.empty_like,
    ],
    ids=["write", "copy", "part", "shape", "strides", "type", "conversion", "other"],
)
def test_another_tensor_or_a_written_one_is_not(change):
    target = torch.ones(3, 4)
    kept = filled(target)
    assert not kept.is_unchanged(0, change(target))


def test_conjugated_view_is_not_unchanged():
    target = torch.ones(3, dtype=torch.complex64)
    assert not filled(target).is_unchanged(0, target.conj())


@pytest.mark.parametrize(
    "parts",
    [
        lambda base: (base[:60], base[40:]),
        lambda base: (base, base[10:20]),
        lambda base: (base[10:20], base),
        lambda base: (base, base),
        lambda base: (base.view(10, 10)[:, :5], base.view(10, 10)[:, 5:]),
    ],
)
def test_targets_sharing_memory_are_read_again(parts):
    one, other = parts(torch.zeros(100))
    kept = filled(one, other)
    assert not kept.is_unchanged(0, one)
    assert not kept.is_unchanged(1, other)


def test_neighbors_in_one_storage_are_not_shared():
    base = torch.zeros(100)
    kept = filled(base[:50], base[50:])
    assert kept.is_unchanged(0, base[:50])
    assert kept.is_unchanged(1, base[50:])


def test_inference_tensors_are_read_again():
    with torch.inference_mode():
        target = torch.ones(5)
    assert not filled(target).is_unchanged(0, target)


class OwnLoading(nn.Linear):
    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)


class Extra(nn.Linear):
    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        pass


class OwnSGD(torch.optim.SGD):
    pass


def hooked(model):
    model[0].register_load_state_dict_post_hook(lambda *_: None)
    return model


def optimizer(kind=torch.optim.AdamW):
    return kind(nn.Linear(2, 2).parameters(), lr=0.1)


def hooked_optimizer():
    made = optimizer()
    made.register_load_state_dict_post_hook(lambda _: None)
    return made


def patched():
    model = nn.Linear(2, 2)
    model.load_state_dict = lambda *_: None
    return model


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.zeros(3), True),
        ({"a": torch.zeros(3)}, True),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2), nn.MultiheadAttention(2, 1)), True),
        (nn.Sequential(OwnLoading(2, 2)), False),
        (nn.Sequential(Extra(2, 2)), False),
        (hooked(nn.Sequential(nn.Linear(2, 2))), False),
        (patched(), False),
        (optimizer(), True),
        (optimizer(OwnSGD), False),
        (hooked_optimizer(), False),
        (torch.optim.lr_scheduler.StepLR(optimizer(), 1), False),
    ],
)
def test_only_torch_loads_in_place(value, expected):
    assert takes_over_in_place(value) is expected
