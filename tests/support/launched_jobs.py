"""Jobs whose launcher starts all processes of a world at once: ``torchrun``, HyperPod's process level.

The ranks are real control planes in this process. The launcher is a double: when one process fails or exits early, it
ends the others and restarts all of them on the same nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from elastic.control.control_plane import ControlPlane, NoticeKind, RankAssignment
from elastic.control.hang_detector import HangTimeouts
from elastic.workers.launch_environment import connect_store
from elastic.workers.store_control_plane import StoreControlPlane
from integration.hyperpod.elastic_agent.environment import launched_worker
from integration.hyperpod.elastic_agent.process_mode import ProcessControlPlane
from integration.hyperpod.elastic_agent.stop_signal import GroupSignalListener
from tests.support.control_planes import PATIENCE_S, start_all, wait_results
from tests.support.ports import free_port


class LaunchedJob:
    """Job under ``torchrun``, whose store outlives the processes."""

    starts_anew = True
    ends_leftovers = False
    resize_is = NoticeKind.STOP
    """The notice of a resize. The ranks see only a stop, as the next world is another start."""

    def __init__(self, size: int) -> None:
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._restarts = 0
        self.planes: list[Any] = []
        self._start(size)

    def _start(self, size: int) -> None:
        self.planes = [self._plane(rank, size) for rank in range(size)]

    def _plane(self, rank: int, size: int) -> StoreControlPlane:
        address = f"127.0.0.1:{self._server.port}"
        place = RankAssignment(0, rank, size, 0, 1, rank, size, address, restarts=self._restarts, reason="started")
        return StoreControlPlane(lambda: connect_store("127.0.0.1", self._server.port), place, limits=HangTimeouts())

    def restart(self, size: int, *, fault: bool = True) -> list[Any]:
        """End all remaining processes and start ``size`` new ones."""
        self.close()
        self._restarts += fault
        self._start(size)
        return self.planes

    def close(self) -> None:
        wait_results(start_all(*(seat.close for seat in self.planes)))

    # -- Job ----------------------------------------------------------------------------------------------------------

    def add_rank(self) -> ControlPlane:
        raise NotImplementedError("a launcher that starts all processes of a world at once has no newcomers")

    def resize(self, nodes: int) -> None:
        self.planes[0].request_change(NoticeKind.RESIZE, "resized", nodes=nodes)

    def stop(self) -> None:
        self.planes[0].request_change(NoticeKind.STOP, "stopped")

    def lose_rank(self, seat: Any) -> None:
        """Lose one process; the launcher then ends all others."""
        self.close()


class FakeSignalListener(GroupSignalListener):
    """Signal of an agent, delivered without a process group."""

    def send(self) -> None:
        self._hear()


class ProcessLevelJob(LaunchedJob):
    """Job at HyperPod's process level: rank 0 serves the store, and a signal requests a resize."""

    resize_is = NoticeKind.RESIZE

    def _start(self, size: int) -> None:
        self._port, self._asked = free_port(), [FakeSignalListener() for _ in range(size)]
        super()._start(size)

    def _plane(self, rank: int, size: int) -> StoreControlPlane:
        said = {
            "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank,
            "MASTER_PORT": self._port, "JOB_RESTART_COUNT": self._restarts,
        }  # fmt: skip
        worker = launched_worker({"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in said.items()})
        return ProcessControlPlane(worker, self._asked[rank], PATIENCE_S, limits=HangTimeouts())

    def resize(self, nodes: int) -> None:
        for asked in self._asked:
            asked.send()

    def stop(self) -> None:
        self.resize(0)
        super().stop()


@contextlib.contextmanager
def launched_job(size: int, spares: int = 0, *, grace_s: float = 60.0, grow_s: float = 60.0) -> Iterator[LaunchedJob]:
    """Run a job under ``torchrun``. It has no spares."""
    with contextlib.closing(LaunchedJob(size)) as job:
        yield job


@contextlib.contextmanager
def process_level_job(
    size: int, spares: int = 0, *, grace_s: float = 60.0, grow_s: float = 60.0
) -> Iterator[ProcessLevelJob]:
    with contextlib.closing(ProcessLevelJob(size)) as job:
        yield job
