"""Which steps count in the end: those that training never went back behind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tieredckpt.goodput.model import StepView
from tieredckpt.goodput.runs import Run, us
from tieredckpt.ledger.events import Restored, Save, Step, when


@dataclass
class Done:
    """A step that was done."""

    event: Step
    run: int
    ranks: int
    first: bool
    """Of its world."""
    start: int
    end: int
    saving: tuple[int, int]
    """When it waited for its state to be staged; of no length where it did not."""
    counts: bool = True
    undone_by: tuple[int, int] | None = None
    """Run and world that went back behind it; ``None`` also where nothing was done after going back."""

    @property
    def step(self) -> int:
        return self.event.step

    @property
    def epoch(self) -> int:
        return self.event.epoch

    @property
    def rank(self) -> int:
        return self.event.rank

    @property
    def net_us(self) -> int:
        return self.end - self.start - (self.saving[1] - self.saving[0])

    @property
    def view(self) -> StepView:
        one = self.event
        return StepView(
            one.step,
            self.start,
            self.end,
            one.epoch,
            self.ranks,
            self.counts,
            one.loss,
            one.tokens,
            one.samples,
            self.run,
            one.not_finite,
        )


def settle(runs: Sequence[Run]) -> list[Done]:
    """All steps of all runs, in order of time, and whether they count.

    A step counts unless training later came to it again, or to one before it, or restored a state from before it.
    """
    done: list[Done] = []
    for run in runs:
        saves = {(save.epoch, save.step, save.rank): save for save in run.saves}
        for stretch in run.stretches:
            for index, step in enumerate(stretch.steps):
                start, end = us(step.began), us(when(step))
                saving = _within(saves.get((step.epoch, step.step, step.rank)), start, end)
                done.append(Done(step, run.number, stretch.ranks, index == 0, start, end, saving))
    restores = [(us(when(one)), one) for run in runs for one in run.restores]
    _undo(done, sorted(restores, key=lambda item: (item[0], item[1].step)))
    return done


def _within(save: Save | None, start: int, end: int) -> tuple[int, int]:
    if save is None:
        return start, start
    first, last = max(us(save.began), start), min(us(when(save)), end)
    return (first, last) if first < last else (start, start)


def _undo(done: Sequence[Done], restores: Sequence[tuple[int, Restored]]) -> None:
    """From the last to the first: what is at or above the least step that came after has been undone."""
    least: float = math.inf
    waiting = list(restores)
    for one in reversed(done):
        while waiting and waiting[-1][0] >= one.end:
            least = min(least, waiting.pop()[1].step + 1)
        one.counts = one.step < least
        least = min(least, one.step)
    _attribute(done)


def _attribute(done: Sequence[Done]) -> None:
    """The first world after it that came to the step again, or to one before it."""
    firsts = [((one.run, one.epoch), one.step) for one in done if one.first]
    order = {key: place for place, (key, _) in enumerate(firsts)}
    for one in done:
        if not one.counts:
            later = firsts[order[one.run, one.epoch] + 1 :]
            one.undone_by = next((key for key, step in later if step <= one.step), None)


def usual_us(done: Iterable[Done]) -> dict[tuple[int, int], int]:
    """By run and world, how long a step takes without its save, of those that are not the first there.

    Where there is only that one: of those anywhere.
    """
    worlds: dict[tuple[int, int], list[int]] = {}
    for one in done:
        times = worlds.setdefault((one.run, one.epoch), [])
        if not one.first:
            times.append(one.net_us)
    anywhere = [time for times in worlds.values() for time in times]
    return {key: round(statistics.median(times or anywhere)) for key, times in worlds.items() if times or anywhere}
