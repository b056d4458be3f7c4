"""Synthetic event logs of any length with any number of faults, reproducible by seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from tieredckpt.event_log.event_types import (
    FaultEvent,
    FaultInjected,
    LogEvent,
    ProcessBegan,
    ProcessEnded,
    RestoreEvent,
    SaveEvent,
    StageEvent,
    StepEvent,
    StopRequested,
    WorldFormed,
)

START = 1_790_000_000.0
_KINDS = (
    ("process", "SIGKILL: exit code -9"),
    ("error", "CUDA error: uncorrectable ECC error encountered"),
    ("hang", "a step did not end within 30 s"),
    ("node", "the node was last heard of 2.0 s before"),
)
_STAGES = (
    ("abort", 0.12),
    ("rendezvous", 0.05),
    ("groups", 0.25),
    ("hydrate", 0.6),
    ("loader", 0.04),
    ("first_step", 0.3),
)


class SyntheticJob:
    """Events of a job of ``steps`` steps of ``step_s``, with faults and resizes spread over them."""

    def __init__(
        self,
        *,
        steps: int = 400,
        step_s: float = 1.0,
        ranks: int = 8,
        faults: int = 3,
        resizes: int = 1,
        seed: int = 0,
        losses: bool = True,
        slow: float = 1.0,
        every: int = 1,
    ) -> None:
        self._random = random.Random(seed)
        self._steps, self._step_s, self._ranks, self._losses = steps, step_s, ranks, losses
        self._slow, self._every = slow, every
        chosen = self._random.sample(range(1, steps), min(steps - 1, faults + resizes))
        self._changes = dict.fromkeys(chosen[:faults], "fault") | dict.fromkeys(chosen[faults:], "resize")
        self._now = START
        self._epoch = -1
        self._size = ranks
        self.events: list[LogEvent] = list(self._all_events())

    def _advance(self, seconds: float) -> float:
        began = self._now
        self._now += seconds
        return began

    def _random_around(self, seconds: float) -> float:
        return seconds * math.exp(self._random.gauss(0, 0.35))

    def _all_events(self) -> Iterator[LogEvent]:
        yield ProcessBegan(self._now, job="llama-8b", who="coordinator")
        self._advance(2.5 * self._slow)
        yield from self._world("start", -1)
        step = 0
        while step < self._steps:
            what = self._changes.pop(step, "")
            if what == "fault":
                yield from self._fault(step)
                step = max(0, step - self._random.choice((0, 0, 1, 2)) * self._every)
            elif what == "resize":
                yield from self._resize(step)
            yield from self._step(step)
            step += 1
        yield ProcessEnded(
            self._now + 0.4, job="llama-8b", who="coordinator", how="finished", words="all ranks are done"
        )

    def _step(self, step: int) -> Iterator[LogEvent]:
        took = self._step_s * self._ranks / self._size * self._random.uniform(0.97, 1.06)
        stall = self._random_around(0.03) * min(1.0, self._step_s) if step % self._every == 0 else 0.0
        began = self._advance(took)
        if stall:
            yield SaveEvent(0, step, "staged", self._now - stall, stall, self._epoch)
        loss = 1.9 + 9 * math.exp(-step / (0.12 * self._steps)) + self._random.gauss(0, 0.05)
        said = {"loss": loss, "tokens": 262_144, "samples": 128} if self._losses else {}
        yield StepEvent(self._epoch, 0, step, began, took, **said)

    def _fault(self, step: int) -> Iterator[LogEvent]:
        kind, reason = self._random.choice(_KINDS)
        node, local = f"n{self._random.randrange(4)}", self._random.randrange(max(1, self._ranks // 4))
        happened = self._advance(0.4 * self._step_s)
        if self._random.random() < 0.3:
            yield FaultInjected(happened, kind, self._epoch, node, local, step=step)
        waited = self._random_around({"hang": 30.0, "node": 2.0}.get(kind, 0.3)) * min(1.0, self._slow)
        self._advance(waited)
        yield FaultEvent(self._now, self._epoch, node, local, kind, reason, since=happened)
        for rank in range(min(self._size, 4)):
            yield StageEvent(self._epoch, rank, "detect", self._now, 0.0)
        how = self._random.choice(("respawn", "respawn", "replace", "shrink"))
        if how == "shrink":
            how = "grow" if self._size < self._ranks else "shrink"
            self._size = self._ranks if how == "grow" else max(self._ranks // 2, 1)
        yield from self._world(how, step - 1, reason)

    def _resize(self, step: int) -> Iterator[LogEvent]:
        yield StopRequested(self._now, self._epoch, reason="asked for by a person", by="person")
        self._size = self._ranks if self._size < self._ranks else max(self._ranks // 2, 1)
        yield from self._world("grow" if self._size == self._ranks else "shrink", step - 1, "asked for by a person")

    def _world(self, how: str, restored: int, reason: str = "") -> Iterator[LogEvent]:
        self._epoch += 1
        nodes = tuple(f"n{number}" for number in range(min(4, self._size)))
        told = False
        for name, usual in _STAGES:
            if name == "abort" and how == "start":
                continue
            took = self._random_around(usual) * self._slow
            away = name == "abort"
            if not away and not told:
                told = True
                yield WorldFormed(self._now, self._epoch, self._size, nodes, self._size // len(nodes), how, reason)
            if name == "first_step":
                return
            for rank in range(min(self._size, 4)):
                lasted = took * (1 if rank == 0 else self._random.uniform(0.6, 1))
                yield StageEvent(self._epoch - away, rank, name, self._now, lasted)
                if name == "hydrate":
                    mode = "nothing" if restored < 0 else self._random.choice(("snapshot", "snapshot", "live"))
                    tiers = {} if restored < 0 else {"memory": 3 << 28, "peer": (1 << 28) * (rank == 0)}
                    yield RestoreEvent(rank, restored, mode, self._now, lasted, tiers, epoch=self._epoch)
            self._advance(took)
