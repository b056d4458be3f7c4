"""Whoever runs the job may keep account of how far it is, and say so to the processes that it starts.

It hears of whole steps (:meth:`Overseer.sealed`), and before a restore it is asked what it knows of
(:meth:`Overseer.expected`). What the tiers hold decides: the newest whole step wins, whether the overseer knows of it
or not. What an overseer can do is to insist on a step, and to make sure that a job which was somewhere never begins
from nothing because its steps cannot be found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec

from peerstore.decode import from_json
from tieredckpt.errors import CheckpointNotFoundError, TierUnavailableError
from tieredckpt.resolve import Tier, resolve
from tieredckpt.session import Session

log = logging.getLogger(__name__)


class Expected(msgspec.Struct, frozen=True):
    """What an overseer believes to be the newest whole step of a job."""

    step: int | None
    """``None``: it knows of something, but not of what."""
    said: str
    """For people: who says so, and how."""
    exactly: bool = False
    """Go on from this step, or not at all."""


class Overseer(Protocol):
    """Called by every rank, at the same points."""

    def expected(self, job: str) -> Expected | None:
        """Before a restore; ``None``: this process was told nothing. The newest that any rank was told counts."""

    def sealed(self, session: Session) -> None:
        """This process has sealed or restored a step of the session's job. Any thread; does not wait for anybody."""


_overseers: list[Overseer] = []


@contextmanager
def overseen_by(overseer: Overseer) -> Iterator[None]:
    """While the block runs; of several, the one that came last."""
    _overseers.append(overseer)
    try:
        yield
    finally:
        _overseers.remove(overseer)


def account(session: Session) -> None:
    """Who keeps account may have something to write down."""
    for overseer in _overseers[-1:]:
        overseer.sealed(session)


def expectation(job: str, from_all: Callable[[str], Sequence[str]]) -> Expected | None:
    """One answer for all ranks, which tell each other by ``from_all`` where there is an overseer."""
    for overseer in _overseers[-1:]:
        mine = msgspec.json.encode(overseer.expected(job)).decode()
        return agreed([from_json(one, Expected | None) for one in from_all(mine)])
    return None


def agreed(told: Sequence[Expected | None]) -> Expected | None:
    """Of what each rank was told: the newest step, and before that what is not known."""
    found = [one for one in told if one is not None]
    return max(found, key=lambda one: (-1 if one.step is None else one.step, one.exactly, one.said), default=None)


def compare(job: str, expected: Expected | None, restored: int) -> None:
    """Having restored a step, or found none (-1): say where that differs, and refuse to begin from nothing."""
    if expected is None or restored == expected.step:
        return
    if expected.step is None:
        if restored < 0:
            raise TierUnavailableError(f"{job}: {expected.said}, and no tier has a whole step: unknown what there was")
        log.warning("%s: %s; going on from step %d, the newest whole one", job, expected.said, restored)
    elif restored < 0:
        raise CheckpointNotFoundError(
            f"{job}: {expected.said}, and no tier has a whole step. Beginning from nothing would throw away "
            f"{expected.step + 1} steps: bring them back, or begin on purpose, as another job"
        )
    elif restored > expected.step:
        log.info("%s: %s; step %d is newer and whole, and is gone on from", job, expected.said, restored)
    else:
        log.warning(
            "%s: %s, which is not there; going on from step %d, %d steps are done again",
            *(job, expected.said, restored, expected.step - restored),
        )


def newest_whole(session: Session, *, ask: bool, fresh: bool = False) -> int:
    """The newest whole step of a session's job that its process knows of, or (``ask``) its node; -1 for none.

    A node knows it as soon as its agent has counted, or heard from the one that counts.
    """
    known = session.newest_whole()
    if not ask or (known >= session.sealed_step and not fresh):
        return known
    survey = session.node.survey(session.job, fresh=fresh)
    spoilt = [view.group for view in survey.views if view.quarantined]
    unreachable = tuple(tier for tier in Tier if tier in survey.unreachable)
    chosen = resolve([view.candidate for view in survey.views], quarantined=spoilt, unreachable=unreachable).chosen
    return known if chosen is None else max(known, chosen.group.version)
