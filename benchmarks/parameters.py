"""What a run measures, and how much of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ON_DEVICES = ("P1", "P3", "P5", "P9")
SUBJECTS = ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9", "P10", "P11", "P12", "P13", "P14")
STATES = ("A", "B", "C", "U")
WORLDS = ((2, 3), (4, 3), (8, 6), (6, 8))
"""How many ranks saved, and how many load."""
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
    """In each rank; by default one, and a fair share of the cores."""
    spoil: tuple[str, ...] = ()
    """Contenders whose results get one flipped byte before they are compared: shows that the comparison works."""
    device: str = ""
    """Where the states are and P9's job computes, as torch names its kind; then only ours is measured."""


@dataclass(frozen=True)
class Scene:
    """One subject with one state on so many ranks: what a rank has to know to take part."""

    subject: str
    state: str
    ranks: int
    threads: int
    """Of torch and of our copier alike, in each rank."""
    size_bytes: int
    rounds: int
    folder: Path
    """On tmpfs: the agent's directory, and everybody's files."""
    spoil: tuple[str, ...] = ()
    rclone: str = ""
    """Endpoint of a real S3 server, where the subject needs one."""
    moto: str = ""
    """Of another one, slow, which understands every client."""
    null: str = ""
    """Of a server that drops everything."""
    writers: int = 0
    """Ranks that saved what is loaded, where those are others."""
    device: str = ""
    """Where the state is; empty: in memory, and opponents take part, which move bytes by themselves."""

    @property
    def part_bytes(self) -> int:
        """Of uploads; small runs have several parts too."""
        return max(5 << 20, min(PART_BYTES, self.size_bytes // 4))


def thread_counts(ranks: int) -> tuple[int, ...]:
    """One thread a rank, and a fair share of this machine's cores."""
    share = max(1, len(os.sched_getaffinity(0)) // ranks)
    return tuple(sorted({1, share}))
