"""Two ranks form groups, hang in a collective, are aborted and start over, many times."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tests.support import nccl_like
from tests.support.aborting_ranks import GROWTH, LEAST, REAL, SETTLED, growth_of, rank_of_two
from tests.support.zygote import Zygote

pytestmark = pytest.mark.e2e

TIMES, SHORT = 100, LEAST
"""Numbers of aborts: all at night and on a device, only enough to detect growth otherwise."""


def measured(*args: Any) -> Any:
    one = rank_of_two(*args)
    return one.took_s, one.sizes


def forked(_say: Callable[[str], None], *args: Any) -> Any:
    return measured(*args)


def two_ranks(zygote: Zygote, *args: Any) -> list[Any]:
    """Return both ranks' results, from forked processes or, on a device, new interpreters."""
    if args[2] not in REAL:
        return [one.wait(380).result for one in [zygote.start(forked, rank, *args) for rank in range(2)]]
    # A process cannot use CUDA if its parent used it before the fork.
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return [one.get(380) for one in [pool.apply_async(measured, (rank, *args)) for rank in range(2)]]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("backend", "times"),
    [
        ("gloo", SHORT),
        (nccl_like.NAME, SHORT),
        pytest.param("gloo", TIMES, marks=pytest.mark.nightly),
        pytest.param(nccl_like.NAME, TIMES, marks=pytest.mark.nightly),
        *((backend, TIMES) for backend in REAL),
    ],
)
def test_process_groups_survive_repeated_aborts(zygote, backend, times, record_property):
    store, meeting = (dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2))
    for took_s, sizes in two_ranks(zygote, store.port, meeting.port, backend, times):
        assert len(took_s) == times
        for what, growth in GROWTH.items():
            assert growth_of(sizes, what, times) <= growth, (what, sizes[SETTLED], sizes[times])
    record_property(f"aborted to the next all-reduce, 2 ranks, {backend}", 1e3 * statistics.median(took_s))
    for what in ("rss", "device"):
        growth_mib = growth_of(sizes, what, times) / 2**20
        record_property(f"{what} memory grows in {times - SETTLED} aborts, {backend}", (growth_mib, "MiB"))
