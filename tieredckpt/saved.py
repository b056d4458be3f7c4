"""What came of a save, and which steps there are."""

from __future__ import annotations

import enum
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Literal

from peerstore.records import Group, ShardRecord
from tieredckpt.errors import StoreBusyError
from tieredckpt.node import Survey


class SaveState(str, enum.Enum):
    """How far a save has come. Each state includes the ones before it."""

    NOT_DUE = "not due"
    SKIPPED = "skipped"
    FAILED = "failed"
    STAGED = "staged"
    SEALED = "sealed"
    DURABLE = "durable"


class Saved:
    """One save: done with its part in the training loop, still on its way through the tiers."""

    def __init__(self, step: int, state: SaveState, error: BaseException | None = None) -> None:
        self.step = step
        self._state = state
        self._error = error
        self._sealing: Future[ShardRecord] | None = None
        self._until_durable: Callable[[Group, float], bool] | None = None

    @property
    def error(self) -> BaseException | None:
        """Why it failed or was skipped."""
        return self._error

    @property
    def state(self) -> SaveState:
        return self._state

    @property
    def ok(self) -> bool:
        """Whether the step is (or will be, unless :meth:`wait` says otherwise) saved."""
        return self._state not in (SaveState.SKIPPED, SaveState.FAILED, SaveState.NOT_DUE)

    def wait(self, tier: Literal["memory", "durable"] = "memory", *, timeout_s: float = 600.0) -> SaveState:
        """Until this rank's part has reached ``tier`` (for durable: the whole step has), or raise why it did not."""
        if self._error is not None:
            raise self._error
        if self._sealing is None:
            return self._state
        try:
            record = self._sealing.result(timeout_s)
        except FutureTimeoutError:
            raise StoreBusyError(f"step {self.step} was not sealed within {timeout_s:.0f} s") from None
        if tier == "durable" and self._until_durable is not None and self._until_durable(record.key.group, timeout_s):
            self._state = SaveState.DURABLE
        return self._state

    def __repr__(self) -> str:
        return f"Saved(step={self.step}, {self._state.value}{f', {self._error}' if self._error else ''})"


@dataclass(frozen=True)
class StepInfo:
    """One step as :meth:`Checkpointer.steps` lists it."""

    step: int
    tiers: tuple[str, ...]
    whole: bool
    quarantined: str = ""


def step_infos(survey: Survey) -> list[StepInfo]:
    """A survey, a line per step."""
    lines = []
    for view in survey.views:
        tiers = {tier.value for where in view.found.values() for tier in where}
        if view.durable:
            tiers.add("durable")
        lines.append(StepInfo(view.group.version, tuple(sorted(tiers)), view.candidate.whole, view.quarantined))
    return sorted(lines, key=lambda line: line.step)
