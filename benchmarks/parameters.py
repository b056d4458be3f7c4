"""Scope of a run: subjects, states, ranks, sizes and rounds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ON_DEVICES = ("P1", "P3", "P5", "P9")
SUBJECTS = ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9", "P10", "P11", "P12", "P13", "P14")
STATES = ("A", "B", "C", "U")
WORLDS = ((2, 3), (4, 3), (8, 6), (6, 8))
"""Pairs of saving and loading ranks."""
PART_BYTES = 32 << 20
CONCURRENCY = 4


@dataclass(frozen=True)
class Parameters:
    subjects: tuple[str, ...] = SUBJECTS
    states: tuple[str, ...] = STATES
    ranks: tuple[int, ...] = (1, 2)
    worlds: tuple[tuple[int, int], ...] = WORLDS
    size_bytes: int = 1 << 30
    rounds: int = 5
    threads: tuple[int, ...] = ()
    """Numbers of threads in each rank; empty for one, and an equal share of the cores."""
    spoil: tuple[str, ...] = ()
    """Contenders whose results get one flipped byte before the comparison, to test the comparison."""
    device: str = ""
    """torch device kind of states and of P9's job. If set, opponents are not measured."""


@dataclass(frozen=True)
class Scene:
    """One subject with one state and one number of ranks, as sent to each rank."""

    subject: str
    state: str
    ranks: int
    threads: int
    """Threads of torch and of the copier in each rank."""
    size_bytes: int
    rounds: int
    folder: Path
    """Folder on tmpfs for the agent's directory and the files of all contenders."""
    spoil: tuple[str, ...] = ()
    rclone: str = ""
    """Endpoint of rclone's S3 server; empty if the subject needs none."""
    moto: str = ""
    """Endpoint of moto's S3 server, which is slow and works with every client."""
    null: str = ""
    """Endpoint of a server that drops everything."""
    writers: int = 0
    """Number of ranks that saved the state, if it differs from ``ranks``."""
    device: str = ""
    """torch device kind of the state; empty for CPU memory, with opponents."""

    @property
    def part_bytes(self) -> int:
        """Size of an upload part, so that small runs have several parts too."""
        return max(5 << 20, min(PART_BYTES, self.size_bytes // 4))


def thread_counts(ranks: int) -> tuple[int, ...]:
    """Return one thread per rank, and an equal share of this machine's cores."""
    share = max(1, len(os.sched_getaffinity(0)) // ranks)
    return tuple(sorted({1, share}))
