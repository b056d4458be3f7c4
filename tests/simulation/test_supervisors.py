"""Simulated supervisors of a large job against the real coordinator process. Times are printed only."""

from __future__ import annotations

import pytest

from peerstore.daemon_process import raise_open_file_limit
from tests.simulation.supervisors import Figures, measure


def _assert_complete(figures: Figures, losses: int) -> None:
    """Check that every surviving node received every loss and the next world."""
    expected = losses * (figures.nodes - 1)
    assert (len(figures.broken_s), len(figures.formed_s), figures.reconnects) == (expected, expected, 0)


def test_lost_nodes_are_replaced_in_succession():
    figures = measure(60, losses=2, rest_s=0.5)
    print(f"figure: {figures}")
    _assert_complete(figures, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [500, 1000, 2000])
def test_lost_nodes_of_a_large_job_are_replaced(nodes):
    raise_open_file_limit()
    figures = measure(nodes, losses=5, rest_s=20.0)
    print(f"figure: {figures}")
    _assert_complete(figures, 5)
    assert figures.peak_bytes < 1 << 30
