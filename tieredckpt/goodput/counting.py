"""Which steps count in the end: those that training never went back behind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tieredckpt.goodput.model import StepView
from tieredckpt.goodput.runs import Run, us
from tieredckpt.ledger.events import Restored, Step, when


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
        )


def settle(runs: Sequence[Run]) -> list[Done]:
    """All steps of all runs, in order of time, and whether they count.

    A step counts unless training later came to it again, or to one before it, or restored a state from before it.
    """
    done: list[Done] = []
    for run in runs:
        for stretch in run.stretches:
            done += [
                Done(step, run.number, stretch.ranks, index == 0, us(step.began), us(when(step)))
                for index, step in enumerate(stretch.steps)
            ]
    restores = [(us(when(one)), one) for run in runs for one in run.restores]
    _undo(done, sorted(restores, key=lambda item: (item[0], item[1].step)))
    return done


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
    """By run and world, how long a step takes that is not the first there; where there is only that one, anywhere."""
    worlds: dict[tuple[int, int], list[int]] = {}
    for one in done:
        times = worlds.setdefault((one.run, one.epoch), [])
        if not one.first:
            times.append(one.end - one.start)
    anywhere = [time for times in worlds.values() for time in times]
    return {key: round(statistics.median(times or anywhere)) for key, times in worlds.items() if times or anywhere}
