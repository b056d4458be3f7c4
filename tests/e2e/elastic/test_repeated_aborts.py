"""Two ranks form groups, hang in a collective, are aborted and form them again, many times in the same processes."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.control.control_plane import RankAssignment
from elastic.workers.process_groups import ProcessGroups, default_backend
from tests.support import nccl_like
from tests.support.golden_training import ProcessSize
from tests.support.zygote import Zygote
from tieredckpt.tensors.device import accelerator

pytestmark = pytest.mark.e2e

TIMES, SHORT, SETTLED, AROUND = 100, 25, 10, 5
"""A push aborts as often as it takes to see growth; the night and a machine with a device go on to the end."""
ELEMENTS = 1 << 16
GROWTH = {"descriptors": 2, "threads": 2, "rss": 64 << 20, "device": 32 << 20}
"""Growth allowed in a rank, and on the device, from the first few epochs to the last."""
REAL = [default_backend()] if accelerator().device_count() else []
PATIENCE = timedelta(minutes=5)


class AbortingRank:
    """One rank's way."""

    def __init__(self, rank: int, store_port: int, meeting_port: int, backend: str, times: int) -> None:
        self._times = times
        self._rank, self._address, self._backend = rank, f"127.0.0.1:{store_port}", backend
        # Another server than the groups': connections to theirs are cut with them.
        self._meeting = dist.TCPStore("127.0.0.1", meeting_port, is_master=False, timeout=PATIENCE)
        self.took_s: list[float] = []
        self.sizes: dict[int, dict[str, int]] = {}

    def run(self) -> None:
        for epoch in range(self._times + 1):
            began = time.monotonic()
            groups = ProcessGroups(
                RankAssignment(epoch, self._rank, 2, self._rank, 2, 0, 1, self._address), backend=self._backend
            )
            groups.initialize()
            other = dist.new_group()
            for group in (None, other):
                self._sums(epoch, group)
            if epoch:
                self.took_s.append(time.monotonic() - began)
            self._hang(groups, epoch)
            groups.destroy(broken=True)
            self._meet(f"left/{epoch}")
            self.sizes[epoch] = {**ProcessSize.measure("self"), "device": self._device_bytes()}
            self._meet(f"measured/{epoch}")  # the ranks share a device, whose memory is that of both

    def _meet(self, where: str) -> None:
        self._meeting.set(f"{where}/{self._rank}", b"")
        self._meeting.wait([f"{where}/{rank}" for rank in range(2)])

    def _device_bytes(self) -> int:
        """Bytes in use on the device, by everything; 0 without one."""
        if self._backend not in REAL:
            return 0
        free, total = torch.get_device_module(accelerator().type).mem_get_info()
        return total - free

    def _ones(self) -> torch.Tensor:
        device = accelerator()
        return torch.ones(
            ELEMENTS, device=device.current() if device.device_count() and self._backend in REAL else "cpu"
        )

    def _sums(self, epoch: int, group: dist.ProcessGroup | None) -> None:
        tensor = self._ones() * (epoch + self._rank)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor.cpu(), torch.full((ELEMENTS,), 2.0 * epoch + 1)), f"epoch {epoch}"

    def _hang(self, groups: ProcessGroups, epoch: int) -> None:
        """Rank 0 in a collective that the other one does not come to; both abort, as after a fault."""
        begun = threading.Event()

        def abort() -> None:
            begun.wait()
            groups.abort()

        thread = threading.Thread(target=abort)
        thread.start()
        if self._rank:
            self._meeting.wait([f"hangs/{epoch}"])
        else:
            self._meeting.set(f"hangs/{epoch}", b"")
        begun.set()
        if not self._rank:
            try:
                dist.all_reduce(self._ones())
                device = accelerator()
                device.synchronize(device.current())
            except RuntimeError as error:  # gloo's; what is silent has left anything in its output
                if groups.aborts_silently:
                    raise AssertionError("an abort that was to be silent") from error
        thread.join()


def rank_of_two(rank: int, store_port: int, meeting_port: int, backend: str, times: int):
    if backend == nccl_like.NAME:
        nccl_like.register()
    os.environ["NCCL_HOSTID"] = f"rank-{os.getpid()}"  # else NCCL takes no two ranks on one device
    one = AbortingRank(rank, store_port, meeting_port, backend, times)
    one.run()
    return one.took_s, one.sizes


def forked(_say: Callable[[str], None], *args: Any) -> Any:
    return rank_of_two(*args)


def two_ranks(zygote: Zygote, *args: Any) -> list[Any]:
    """What both ranks return: forked ones, or on a device new interpreters."""
    if args[2] not in REAL:
        return [one.wait(380).result for one in [zygote.start(forked, rank, *args) for rank in range(2)]]
    # A process that is forked after the first use of CUDA cannot use it.
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return [one.get(380) for one in [pool.apply_async(rank_of_two, (rank, *args)) for rank in range(2)]]


def growth_of(sizes: dict[int, dict[str, int]], what: str, times: int) -> int:
    """From the most of some early epochs to the least of the last: a group may end a little after it was left."""
    early = max(sizes[epoch][what] for epoch in range(SETTLED - AROUND, SETTLED + AROUND))
    return min(sizes[epoch][what] for epoch in range(times - AROUND, times + 1)) - early


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
