"""Reports of saves and restores: to the launcher's progress hook, and to the run's event log.

The hook is called after each seal and restore (:meth:`ProgressHook.on_sealed`). Before a restore it returns the newest
step that it knows (:meth:`ProgressHook.expected_step`). The tiers decide: a restore takes the newest complete step,
even if the hook does not know it. A hook can require a step. It also prevents a job with progress from starting from
nothing because its steps cannot be found.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from peerstore.message_codec import from_json
from peerstore.sizes_and_durations import show_count
from tieredckpt.agent.agent_api import ProtectionStatus
from tieredckpt.checkpointer.save_handle import SaveHandle, SaveState
from tieredckpt.dcp.restore_report import RestoreReport
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointLostError,
    CheckpointNotFoundError,
    TierUnavailableError,
)
from tieredckpt.event_log import EventLog, event_log_from_environ
from tieredckpt.event_log.event_types import (
    STAGE_HYDRATE,
    STAGE_LOADER,
    Protection,
    RestoreEvent,
    SaveEvent,
    StageEvent,
)
from tieredckpt.session.session import Session

log = logging.getLogger(__name__)


class ExpectedStep(msgspec.Struct, frozen=True):
    """Newest complete step of a job, as known to a progress hook."""

    step: int | None
    """Step number; ``None`` if the job made progress but the step is not known."""
    source: str
    """Source of this knowledge, as a clause for messages."""
    is_required: bool = False
    """Whether the job must resume from exactly this step."""
    epoch: int | None = None
    """Epoch of the incarnation that saved it; ``None`` for any."""


class ProgressHook(Protocol):
    """Interface of a launcher's hook, called by every rank at the same points."""

    def expected_step(self, job: str) -> ExpectedStep | None:
        """Return the newest step known to this process, or ``None``; the newest of all ranks counts."""

    def on_sealed(self, session: Session) -> None:
        """Record that this process has sealed or restored a step. Any thread calls this; it must not block."""


_hooks: list[ProgressHook] = []


@contextmanager
def use_progress_hook(hook: ProgressHook) -> Iterator[None]:
    """Use ``hook`` while the block runs; the hook of the innermost block is used."""
    _hooks.append(hook)
    try:
        yield
    finally:
        _hooks.remove(hook)


ANY_JOB = ""
"""Job name for :func:`require_step` that matches the job of the first restore."""
_required: dict[str, ExpectedStep] = {}


@contextmanager
def require_step(job: str, step: int, epoch: int | None, source: str) -> Iterator[None]:
    """Make the first restore without a step in the block restore this one or raise; all ranks must agree."""
    _required[job] = ExpectedStep(step, source, is_required=True, epoch=epoch)
    try:
        yield
    finally:
        _required.pop(job, None)


def waive_required_step() -> None:
    """Allow the first restore to take the newest step, which this world saved after the required one."""
    _required.clear()


_reached: dict[str, int] = {}


@contextmanager
def expect_reached_step(job: str, step: int) -> Iterator[None]:
    """In the block, make the first restore of ``job`` without a step report an older step than this one."""
    _reached[job] = step
    try:
        yield
    finally:
        _reached.pop(job, None)


def take_reached_step(job: str) -> int:
    """Return the newest step that a rank of an earlier world has sealed; -1 if unknown or returned before."""
    return _reached.pop(job, -1)


def notify_progress_hook(session: Session) -> None:
    """Call the progress hook, if any, because a step was sealed or restored."""
    for hook in _hooks[-1:]:
        hook.on_sealed(session)


def gather_expected_step(job: str, from_all: Callable[[str], Sequence[str]]) -> ExpectedStep | None:
    """Return the step that all ranks expect; with a hook, they exchange theirs with ``from_all``."""
    if required := _required.get(job) or _required.get(ANY_JOB):
        return required
    for hook in _hooks[-1:]:
        mine = msgspec.json.encode(hook.expected_step(job)).decode()
        return newest_expected_step([from_json(one, ExpectedStep | None) for one in from_all(mine)])
    return None


def newest_expected_step(steps: Sequence[ExpectedStep | None]) -> ExpectedStep | None:
    """Return the newest of the ranks' expected steps; a known step precedes an unknown one."""
    found = [one for one in steps if one is not None]
    return max(found, key=lambda one: (-1 if one.step is None else one.step, one.is_required, one.source), default=None)


@contextmanager
def explain_expected(expected: ExpectedStep | None) -> Iterator[None]:
    """Add to an error in the block the reason why exactly this step was required."""
    try:
        yield
    except (CheckpointNotFoundError, CheckpointLostError, CheckpointDamagedError) as error:
        if expected is None or not expected.is_required:
            raise
        raise type(error)(f"{expected.source}: {error}") from error


def check_restored_step(job: str, expected: ExpectedStep | None, restored: int) -> None:
    """Log how the restored step differs from the expected one; raise if none (-1) was restored."""
    if expected is None:
        return
    for name in (job, ANY_JOB):
        if expected == _required.get(name):
            del _required[name]
    if restored == expected.step:
        return
    if expected.step is None:
        if restored < 0:
            raise TierUnavailableError(
                f"{job}: {expected.source}, and no tier has a complete step: the job's progress is unknown"
            )
        log.warning("%s: %s; resuming from step %d, the newest complete one", job, expected.source, restored)
    elif restored < 0:
        raise CheckpointNotFoundError(
            f"{job}: {expected.source}, and no tier has a complete step. A start from nothing would lose "
            f"{expected.step + 1} steps. Make a tier with a step available, or start under another job name"
        )
    elif restored > expected.step:
        log.info("%s: %s; resuming from step %d, which is newer and complete", job, expected.source, restored)
    else:
        log.warning(
            "%s: %s, which was not restored; resuming from step %d, %s repeated",
            *(job, expected.source, restored, show_count(expected.step - restored, "step is", "steps are")),
        )


def newest_complete_step(session: Session, *, ask: bool, fresh: bool = False) -> int:
    """Return the newest complete step of a session's job that this process knows, or -1.

    ``ask``: request it from the agent if this process has sealed a newer step. ``fresh`` with ``ask``: request it in
    any case. The agent knows a step once the commit leader has counted its parts.
    """
    known = session.commits.newest_complete_step()
    if not ask or (known >= session.sealed_step and not fresh):
        return known
    return max(known, session.choose_step(session.list_steps(fresh=fresh)).step)


@dataclass
class RestoreOutcome:
    """Result of a restore, filled in while it runs."""

    step: int | None = None
    """Restored step; ``None`` if the restore failed."""
    report: RestoreReport | None = None
    """Report of the newest restore, possibly an earlier one."""


class SaveRestoreLog:
    """Event log entries of this process's saves and restores.

    The rank comes from the event log's position, or from ``RANK`` if no train loop has set it.
    """

    def __init__(self, event_log: EventLog | None = None) -> None:
        self._event_log = event_log or event_log_from_environ()
        self._protected: ProtectionStatus | None = None

    @property
    def _rank(self) -> int:
        known, value = self._event_log.position.rank, os.environ.get("RANK", "")
        return known if known >= 0 or not value.isdecimal() else int(value)

    def record_save(self, saved: SaveHandle, blocked_s: float) -> None:
        """Record a call of ``save`` that was due."""
        if saved.state is not SaveState.NOT_DUE:
            began = time.time() - blocked_s
            epoch = self._event_log.position.epoch
            self._event_log.write(SaveEvent(self._rank, saved.step, saved.state.value, began, blocked_s, epoch))

    def protection(self, found: ProtectionStatus | None, *, missed: int = 0) -> None:
        """Record a changed protection status; without one, ``missed`` saves are added to the last status."""
        if found is None:
            if not missed:
                return
            known = self._protected or ProtectionStatus(-1)
            found = ProtectionStatus(known.step, known.unprotected_since or time.time(), known.missed_saves + missed)
        found = msgspec.structs.replace(found, upload_problem="")
        if found != self._protected:
            self._protected = found
            self._event_log.write(Protection(time.time(), found.step, found.unprotected_since, found.missed_saves))

    @contextmanager
    def record_restore(self) -> Iterator[RestoreOutcome]:
        """Record a restore; while this process enters a world, also its time as a stage, even if it fails."""
        outcome, position, began = RestoreOutcome(), self._event_log.position, time.time()
        entering = position.stage_began_at is not None
        if position.stage_began_at is not None:
            self._record_stage(STAGE_LOADER, position.stage_began_at, began)
            position.stage_began_at = None
        try:
            yield outcome
        finally:
            ended = time.time()
            if entering:
                self._record_stage(STAGE_HYDRATE, began, ended)
                position.stage_began_at = ended
            if outcome.step is not None:
                self._record_restored(outcome, began, ended)

    def _record_restored(self, outcome: RestoreOutcome, began: float, ended: float) -> None:
        position, step = self._event_log.position, outcome.step if outcome.step is not None else -1
        report = outcome.report if outcome.report is not None and outcome.report.step == step else None
        lost = None if report is None else report.steps_redone
        if lost is None:
            lost = position.newest_ended_step - step if position.newest_ended_step >= step else -1
        self._event_log.write(
            RestoreEvent(
                rank=self._rank,
                step=step,
                mode=report.mode if report is not None else "nothing" if step < 0 else "snapshot",
                began=began,
                seconds=max(0.0, ended - began),
                bytes_by_tier={} if report is None else dict(report.bytes_by_tier),
                steps_redone=lost,
                epoch=position.epoch,
            )
        )
        position.next_step = step + 1

    def _record_stage(self, name: str, began: float, ended: float) -> None:
        position = self._event_log.position
        self._event_log.write(StageEvent(position.epoch, self._rank, name, began, max(0.0, ended - began)))
