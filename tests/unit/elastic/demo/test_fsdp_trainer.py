"""Example trainers move samples from host memory to the device of the model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import elastic
from elastic.demo.fsdp_trainer import DemoTraining, TextDataset
from tieredckpt.testing import memory_node

EXAMPLE = Path(__file__).parents[4] / "examples" / "elastic_loop.py"


class OnHost(torch.Tensor):
    """A tensor that computes only with its own kind, like one on a GPU; ``to`` converts others."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.to:
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].as_subclass(torch.Tensor).to(*args[1:], **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if not all(isinstance(one, OnHost) for one in tensors):
            raise RuntimeError(f"{function.__name__}: tensors are on two devices")
        return super().__torch_function__(function, types, args, kwargs)


@pytest.fixture
def samples_on_host(monkeypatch):
    def patch(dataset) -> None:
        given = dataset.__getitem__
        monkeypatch.setattr(
            dataset, "__getitem__", lambda self, index: tuple(one.as_subclass(OnHost) for one in given(self, index))
        )

    return patch


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_example_moves_batches_to_the_device(samples_on_host):
    spec = importlib.util.spec_from_file_location("elastic_loop", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.STEPS = 2
    samples_on_host(example.Data)
    with memory_node():
        assert elastic.run(example.train).steps == 2


def test_demo_moves_batches_to_the_device(samples_on_host):
    samples_on_host(TextDataset)
    training = DemoTraining()
    with training.data:
        training.step(0)
