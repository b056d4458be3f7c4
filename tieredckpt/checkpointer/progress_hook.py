"""Reports of saves and restores: to the launcher's progress hook, and to the run's event log.

It hears of whole steps (:meth:`ProgressHook.on_sealed`), and before a restore it is asked what it knows of
(:meth:`ProgressHook.expected_step`). What the tiers hold decides: the newest whole step wins, whether the overseer
knows of it or not. What an overseer can do is to insist on a step, and to make sure that a job which was somewhere
never begins
from nothing because its steps cannot be found.
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
from tieredckpt.agent.agent_api import ProtectionStatus
from tieredckpt.checkpointer.save_handle import SaveHandle, SaveState
from tieredckpt.dcp.tiered_reader import RestoreReport
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
from tieredckpt.resolve_step import Tier, resolve_step
from tieredckpt.session.session import Session

log = logging.getLogger(__name__)


class ExpectedStep(msgspec.Struct, frozen=True):
    """What an overseer believes to be the newest whole step of a job."""

    step: int | None
    """``None``: it knows of something, but not of what."""
    source: str
    """For people: who says so, and how."""
    is_required: bool = False
    """Go on from this step, or not at all."""
    epoch: int | None = None
    """Of the incarnation that saved it; ``None``: any."""


class ProgressHook(Protocol):
    """Called by every rank, at the same points."""

    def expected_step(self, job: str) -> ExpectedStep | None:
        """Before a restore; ``None``: this process was told nothing. The newest that any rank was told counts."""

    def on_sealed(self, session: Session) -> None:
        """This process has sealed or restored a step of the session's job. Any thread; does not wait for anybody."""


_overseers: list[ProgressHook] = []


@contextmanager
def use_progress_hook(overseer: ProgressHook) -> Iterator[None]:
    """While the block runs; of several, the one that came last."""
    _overseers.append(overseer)
    try:
        yield
    finally:
        _overseers.remove(overseer)


ANY_JOB = ""
"""For :func:`require_step`: whichever job the first restore is of."""
_required: dict[str, ExpectedStep] = {}


@contextmanager
def require_step(job: str, step: int, epoch: int | None, source: str) -> Iterator[None]:
    """Have the first restore in the block that names no step restore this one, or raise. All ranks require the same."""
    _required[job] = ExpectedStep(step, source, is_required=True, epoch=epoch)
    try:
        yield
    finally:
        _required.pop(job, None)


def waive_required_step() -> None:
    """Let the first restore take the newest step: this world has saved one that continues from the required step."""
    _required.clear()


def notify_progress_hook(session: Session) -> None:
    """Who keeps account may have something to write down."""
    for overseer in _overseers[-1:]:
        overseer.on_sealed(session)


def gather_expected_step(job: str, from_all: Callable[[str], Sequence[str]]) -> ExpectedStep | None:
    """One answer for all ranks, which tell each other by ``from_all`` where there is an overseer."""
    if required := _required.get(job) or _required.get(ANY_JOB):
        return required
    for overseer in _overseers[-1:]:
        mine = msgspec.json.encode(overseer.expected_step(job)).decode()
        return newest_expected_step([from_json(one, ExpectedStep | None) for one in from_all(mine)])
    return None


def newest_expected_step(told: Sequence[ExpectedStep | None]) -> ExpectedStep | None:
    """Of what each rank was told: the newest step, and before that what is not known."""
    found = [one for one in told if one is not None]
    return max(found, key=lambda one: (-1 if one.step is None else one.step, one.is_required, one.source), default=None)


@contextmanager
def explain_expected(expected: ExpectedStep | None) -> Iterator[None]:
    """Say in an error of the block why this step, and no other, was to be restored."""
    try:
        yield
    except (CheckpointNotFoundError, CheckpointLostError, CheckpointDamagedError) as error:
        if expected is None or not expected.is_required:
            raise
        raise type(error)(f"{expected.source}: {error}") from error


def check_restored_step(job: str, expected: ExpectedStep | None, restored: int) -> None:
    """Having restored a step, or found none (-1): say where that differs, and refuse to begin from nothing."""
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
                f"{job}: {expected.source}, and no tier has a whole step: unknown what there was"
            )
        log.warning("%s: %s; going on from step %d, the newest whole one", job, expected.source, restored)
    elif restored < 0:
        raise CheckpointNotFoundError(
            f"{job}: {expected.source}, and no tier has a whole step. Beginning from nothing would throw away "
            f"{expected.step + 1} steps: bring them back, or begin on purpose, as another job"
        )
    elif restored > expected.step:
        log.info("%s: %s; step %d is newer and whole, and is gone on from", job, expected.source, restored)
    else:
        log.warning(
            "%s: %s, which is not there; going on from step %d, %d steps are done again",
            *(job, expected.source, restored, expected.step - restored),
        )


def newest_complete_step(session: Session, *, ask: bool, fresh: bool = False) -> int:
    """The newest whole step of a session's job that its process knows of, or (``ask``) its node; -1 for none.

    A node knows it as soon as its agent has counted, or heard from the one that counts.
    """
    known = session.newest_complete_step()
    if not ask or (known >= session.sealed_step and not fresh):
        return known
    survey = session.agent.list_steps(session.job, fresh=fresh)
    spoilt = [view.version_id for view in survey.views if view.quarantined]
    unreachable = tuple(tier for tier in Tier if tier in survey.unreachable)
    chosen = resolve_step([view.candidate for view in survey.views], quarantined=spoilt, unreachable=unreachable).chosen
    return known if chosen is None else max(known, chosen.version_id.version)


@dataclass
class RestoreOutcome:
    """What a restore came to, filled in while it runs."""

    step: int | None = None
    """``None``: it failed."""
    report: RestoreReport | None = None
    """Of the newest restore, which may be another one."""


class SaveRestoreLog:
    """Where this process is, the event log knows from who has it enter worlds; else its environment may."""

    def __init__(self, event_log: EventLog | None = None) -> None:
        self._event_log = event_log or event_log_from_environ()
        self._protected: ProtectionStatus | None = None

    @property
    def _rank(self) -> int:
        known, told = self._event_log.position.rank, os.environ.get("RANK", "")
        return known if known >= 0 or not told.isdecimal() else int(told)

    def record_save(self, saved: SaveHandle, blocked_s: float) -> None:
        """A call of ``save`` that was due."""
        if saved.state is not SaveState.NOT_DUE:
            began = time.time() - blocked_s
            epoch = self._event_log.position.epoch
            self._event_log.write(SaveEvent(self._rank, saved.step, saved.state.value, began, blocked_s, epoch))

    def protection(self, found: ProtectionStatus | None, *, missed: int = 0) -> None:
        """What the agent says, where it has changed. One that says nothing has not heard of the ``missed`` saves."""
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
        """However it ends, its time is written down as a stage, where this process is on its way into a world."""
        told, where, began = RestoreOutcome(), self._event_log.position, time.time()
        entering = where.stage_began_at is not None
        if where.stage_began_at is not None:
            self._stage(STAGE_LOADER, where.stage_began_at, began)
            where.stage_began_at = None
        try:
            yield told
        finally:
            ended = time.time()
            if entering:
                self._stage(STAGE_HYDRATE, began, ended)
                where.stage_began_at = ended
            if told.step is not None:
                self._restored(told, began, ended)

    def _restored(self, told: RestoreOutcome, began: float, ended: float) -> None:
        where, step = self._event_log.position, told.step if told.step is not None else -1
        report = told.report if told.report is not None and told.report.step == step else None
        lost = None if report is None else report.steps_redone
        if lost is None:
            lost = where.newest_begun_step - step if where.newest_begun_step >= step else -1
        self._event_log.write(
            RestoreEvent(
                rank=self._rank,
                step=step,
                mode=report.mode if report is not None else "nothing" if step < 0 else "snapshot",
                began=began,
                seconds=max(0.0, ended - began),
                bytes_by_tier={} if report is None else dict(report.bytes_by_tier),
                steps_redone=lost,
                epoch=where.epoch,
            )
        )
        where.next_step = step + 1

    def _stage(self, name: str, began: float, ended: float) -> None:
        where = self._event_log.position
        self._event_log.write(StageEvent(where.epoch, self._rank, name, began, max(0.0, ended - began)))
