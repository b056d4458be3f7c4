"""The two train functions of docs/how-to/loop.md run and have the same losses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.scripts import run_script

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[3] / "docs/how-to/loop.md"
BEFORE = """
import torch
from torch.distributed.fsdp import fully_shard

import elastic
from tieredckpt import Checkpointer

x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

def build_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))

def loss_sum(output, target):
    return (output - target).square().sum()
"""


def printed_losses(folder, train):
    folder.mkdir()
    ended = run_script(folder, BEFORE + train.replace("1000", "6"))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_both_train_functions_of_the_page_have_the_same_losses(agent_dir, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    with_loop, with_parts = (printed_losses(tmp_path / str(at), block) for at, block in enumerate(blocks))
    assert [line.split()[0] for line in with_loop] == [*"012345"]
    assert with_loop == with_parts
