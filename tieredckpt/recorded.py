"""What a :class:`~tieredckpt.checkpointer.Checkpointer` writes into the run's ledger."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tieredckpt.ledger import Ledger, ledger_from_environ
from tieredckpt.ledger.events import HYDRATE, LOADER, Protection, Restored, Save, Stage
from tieredckpt.node import Protected
from tieredckpt.reader import RestoreReport
from tieredckpt.saved import Saved, SaveState


@dataclass
class Restoring:
    """What a restore came to, filled in while it runs."""

    step: int | None = None
    """``None``: it failed."""
    report: RestoreReport | None = None
    """Of the newest restore, which may be another one."""


class Recorded:
    """Where this process is, the ledger knows from who has it enter worlds; else its environment may."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or ledger_from_environ()
        self._protected: Protected | None = None

    @property
    def _rank(self) -> int:
        known, told = self._ledger.place.rank, os.environ.get("RANK", "")
        return known if known >= 0 or not told.isdecimal() else int(told)

    def saved(self, saved: Saved, blocked_s: float) -> None:
        """A call of ``save`` that was due."""
        if saved.state is not SaveState.NOT_DUE:
            began = time.time() - blocked_s
            epoch = self._ledger.place.epoch
            self._ledger.write(Save(self._rank, saved.step, saved.state.value, began, blocked_s, epoch))

    def protection(self, found: Protected | None, *, missed: int = 0) -> None:
        """What the agent says, where it has changed. One that says nothing has not heard of the ``missed`` saves."""
        if found is None:
            if not missed:
                return
            known = self._protected or Protected(-1)
            found = Protected(known.step, known.unprotected_since or time.time(), known.left_out + missed)
        if found != self._protected:
            self._protected = found
            self._ledger.write(Protection(time.time(), found.step, found.unprotected_since, found.left_out))

    @contextmanager
    def restoring(self) -> Iterator[Restoring]:
        """However it ends, its time is written down as a stage, where this process is on its way into a world."""
        told, where, began = Restoring(), self._ledger.place, time.time()
        entering = where.reached is not None
        if where.reached is not None:
            self._stage(LOADER, where.reached, began)
            where.reached = None
        try:
            yield told
        finally:
            ended = time.time()
            if entering:
                self._stage(HYDRATE, began, ended)
                where.reached = ended
            if told.step is not None:
                self._restored(told, began, ended)

    def _restored(self, told: Restoring, began: float, ended: float) -> None:
        where, step = self._ledger.place, told.step if told.step is not None else -1
        report = told.report if told.report is not None and told.report.step == step else None
        lost = None if report is None else report.lost
        if lost is None:
            lost = where.begun - step if where.begun >= step else -1
        self._ledger.write(
            Restored(
                rank=self._rank,
                step=step,
                mode=report.mode if report is not None else "nothing" if step < 0 else "snapshot",
                began=began,
                seconds=max(0.0, ended - began),
                bytes_by_tier={} if report is None else dict(report.bytes_by_tier),
                lost=lost,
                epoch=where.epoch,
            )
        )
        where.next_step = step + 1

    def _stage(self, name: str, began: float, ended: float) -> None:
        where = self._ledger.place
        self._ledger.write(Stage(where.epoch, self._rank, name, began, max(0.0, ended - began)))
