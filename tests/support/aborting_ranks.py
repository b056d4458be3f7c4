"""A rank that repeatedly forms process groups, hangs in a collective and is aborted, in one process.

``python -m tests.support.aborting_ranks RANK STORE_PORT MEETING_PORT BACKEND TIMES UNTIL`` runs one and prints a JSON
line for each stage that begins and for each epoch that ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic.control.control_plane import RankAssignment
from elastic.workers.process_groups import ProcessGroups, default_backend
from tests.support import nccl_like
from tests.support.golden_training import ProcessSize
from tieredckpt.tensors.device import accelerator

SETTLED, AROUND = 10, 5
"""The epoch whose memory is compared with the last one's, and epochs around both."""
LEAST = SETTLED + 3 * AROUND
"""Aborts that are enough to see growth."""
ELEMENTS = 1 << 16
GROWTH = {"descriptors": 2, "threads": 2, "rss": 64 << 20, "device": 32 << 20}
"""Growth allowed in a rank, and on the device, from the first few epochs to the last."""
STAGES = ("initialize", "first all-reduce", "abort", "collective returns", "destroy")
REAL = [default_backend()] if accelerator().device_count() else []
PATIENCE = timedelta(minutes=5)


def _silent(**_values: Any) -> None:
    """Report nothing."""


class AbortingRank:
    """One of two ranks. It stops after ``times`` aborts, or once the monotonic clock has passed ``until``."""

    def __init__(
        self,
        rank: int,
        store_port: int,
        meeting_port: int,
        backend: str,
        times: int,
        *,
        until: float = float("inf"),
        report: Callable[..., None] = _silent,
    ) -> None:
        self._times, self._until, self._report = times, until, report
        self._rank, self._address, self._backend = rank, f"127.0.0.1:{store_port}", backend
        # A separate store: an abort cuts the connections to the groups' own stores.
        self._meeting = dist.TCPStore("127.0.0.1", meeting_port, is_master=False, timeout=PATIENCE)
        self.took_s: list[float] = []
        self.sizes: dict[int, dict[str, int]] = {}
        self.stages_s: defaultdict[str, list[float]] = defaultdict(list)

    def run(self) -> None:
        for epoch in range(self._times + 1):
            if not self._continues(epoch):
                return
            began = time.monotonic()
            groups = ProcessGroups(
                RankAssignment(epoch, self._rank, 2, self._rank, 2, 0, 1, self._address), backend=self._backend
            )
            with self._timed("initialize", epoch):
                groups.initialize()
                other = dist.new_group()
            with self._timed("first all-reduce", epoch):
                for group in (None, other):
                    self._sums(epoch, group)
            if epoch:
                self.took_s.append(time.monotonic() - began)
            self._hang(groups, epoch)
            with self._timed("destroy", epoch):
                groups.destroy(broken=True)
            self._meet(f"left/{epoch}")
            self.sizes[epoch] = {**ProcessSize.measure("self"), "device": self._device_bytes()}
            stages = {name: took[-1] for name, took in self.stages_s.items()}
            self._report(epoch=epoch, stages=stages, sizes=self.sizes[epoch], took_s=self.took_s[-1:])
            self._meet(f"measured/{epoch}")  # the ranks share a device, whose memory is that of both

    def _continues(self, epoch: int) -> bool:
        """Return rank 0's decision: both ranks stop before the same epoch."""
        key = f"continues/{epoch}"
        if self._rank == 0:
            self._meeting.set(key, b"1" if time.monotonic() < self._until else b"0")
        return bool(self._meeting.get(key) == b"1")

    @contextlib.contextmanager
    def _timed(self, stage: str, epoch: int) -> Iterator[None]:
        self._report(epoch=epoch, begins=stage)
        began = time.monotonic()
        yield
        self.stages_s[stage].append(time.monotonic() - began)

    def _meet(self, where: str) -> None:
        self._meeting.set(f"{where}/{self._rank}", b"")
        self._meeting.wait([f"{where}/{rank}" for rank in range(2)])

    def _device_bytes(self) -> int:
        """Bytes in use on the device, by everything; 0 without one."""
        if self._backend not in REAL:
            return 0
        free, total = torch.get_device_module(accelerator().type).mem_get_info()
        return int(total - free)

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
        """Hang rank 0 in a collective that rank 1 never joins; both ranks abort, as after a fault."""
        begun = threading.Event()

        def abort() -> None:
            begun.wait()
            with self._timed("abort", epoch):
                groups.abort()

        thread = threading.Thread(target=abort)
        thread.start()
        if self._rank:
            self._meeting.wait([f"hangs/{epoch}"])
        else:
            self._meeting.set(f"hangs/{epoch}", b"")
        begun.set()
        if not self._rank:
            with self._timed("collective returns", epoch):
                try:
                    dist.all_reduce(self._ones())
                    device = accelerator()
                    device.synchronize(device.current())
                except RuntimeError as error:  # gloo raises; a silent abort leaves arbitrary output
                    if groups.aborts_silently:
                        raise AssertionError("the abort must be silent and has raised") from error
        thread.join()


def rank_of_two(
    rank: int, store_port: int, meeting_port: int, backend: str, times: int, **options: Any
) -> AbortingRank:
    """Run one rank until it stops and return it."""
    if backend == nccl_like.NAME:
        nccl_like.register()
    os.environ["NCCL_HOSTID"] = f"rank-{os.getpid()}"  # NCCL otherwise refuses two ranks on one device
    one = AbortingRank(rank, store_port, meeting_port, backend, times, **options)
    one.run()
    return one


def growth_of(sizes: Mapping[int, Mapping[str, int]], what: str, times: int) -> int:
    """Return the growth from the early epochs' maximum to the last epochs' minimum.

    A group may end a little after its epoch.
    """
    early = max(sizes[epoch][what] for epoch in range(SETTLED - AROUND, SETTLED + AROUND))
    return min(sizes[epoch][what] for epoch in range(times - AROUND, times + 1)) - early


if __name__ == "__main__":
    torch.set_num_threads(1)
    numbers = (int(word) for word in (*sys.argv[1:4], sys.argv[5]))
    own_rank, store, meeting, most = numbers
    rank_of_two(
        own_rank, store, meeting, sys.argv[4], most, until=float(sys.argv[6]),
        report=lambda **values: print(json.dumps(values), flush=True),
    )  # fmt: skip
    os._exit(0)  # do not wait for a communicator that does not end: all epochs were measured
