"""The states of P6: finite, and the same bits for every number of ranks."""

from __future__ import annotations

import pytest
import torch

from benchmarks.reshard import _bits, shapes


@pytest.mark.parametrize("kind", ["A", "B", "U"])
def test_states_have_no_element_that_a_checkpointer_refuses(kind):
    for seed, (rows, columns) in enumerate(shapes(kind, 1 << 20).values()):
        assert torch.isfinite(_bits(seed, 0, rows * columns)).all()


def test_bits_depend_on_their_place_alone():
    whole = _bits(3, 0, 1000)
    assert torch.equal(_bits(3, 300, 700), whole[300:700])
    assert len(whole.unique()) > 400
