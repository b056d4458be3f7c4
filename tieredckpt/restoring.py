"""How a checkpointer restores: all ranks the same step, the newest that can be loaded whole."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from peerstore.errors import PeerStoreError
from tieredckpt.dcp_errors import typed_error
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointDeletedError,
    CheckpointNotFoundError,
    PeersLostError,
    TieredCheckpointError,
    TierUnavailableError,
)
from tieredckpt.live.keeping import Hydration, keeper
from tieredckpt.moments import make_moments
from tieredckpt.plain import plain_reader, plain_steps
from tieredckpt.reader import RestoreReport, TieredReader
from tieredckpt.settings import Settings
from tieredckpt.together import Together

log = logging.getLogger(__name__)

_MAX_FALLBACKS = 8
State = dict[str, Any]


class Restoring:
    """Of one job, by all ranks together."""

    def __init__(self, job: str, settings: Settings, together: Together) -> None:
        self._job = job
        self._settings = settings
        self._together = together

    def restore(self, state: State, step: int | None) -> tuple[int, RestoreReport | None]:
        """Fill ``state``: with which step, or -1 where every tier was asked and there is nothing; and what was read.

        Of a plain checkpoint nothing is known but its step.
        """
        held = keeper()
        given = None if held is None else held.hydrations.get(self._job)
        fresh = given is not None  # what was given was not there a moment ago
        error: BaseException | None = None
        for _ in range(_MAX_FALLBACKS):
            reader = TieredReader(self._job, step, settings=self._settings)
            reader.fresh = fresh
            if not self._anything(reader, step):
                return -1, None
            _make_moments(state, reader)
            _tell_saved(state, reader)
            try:
                self._together.dcp(dcp.load, state, storage_reader=reader)
            except CheckpointException as failure:
                error = typed_error(failure)
                # What is left may be whole all the same, or another step is.
                if isinstance(error, PeersLostError) or (step is None and isinstance(error, CheckpointDeletedError)):
                    log.error("restore of %s: %s; looking again what there is", self._job, error)
                    fresh = True
                    continue
                if step is not None or not isinstance(error, CheckpointDamagedError):
                    raise error from failure
                log.error("restore of %s: %s; trying the next older step", self._job, error)
                continue
            self._hydrated(reader.report, given)
            if reader.unused:
                log.warning(
                    "%s step %d: %d entries were saved but are not in the state to be restored, so left out: %s",
                    *(self._job, reader.restored_step, len(reader.unused), _some(reader.unused)),
                )
            return reader.restored_step, reader.report
        if isinstance(error, PeersLostError | CheckpointDeletedError):  # unknown, not damaged
            raise error
        raise CheckpointDamagedError(f"{self._job}: {_MAX_FALLBACKS} steps were tried and none could be loaded")

    def _hydrated(self, report: RestoreReport | None, found: Hydration | None) -> None:
        """Say what the fault before this world has cost, where there was one."""
        if report is None or found is None:
            return
        report.mode = "live" if found.mode == "live" and found.step == report.step else "snapshot"
        report.lost = max(0, found.reached - report.step)
        tiers = ", ".join(f"{size >> 10} KiB from {tier}" for tier, size in sorted(report.bytes_by_tier.items()))
        log.info("%s: step %d (%s), %d lost: %s", self._job, report.step, report.mode, report.lost, tiers)

    def _anything(self, reader: TieredReader, step: int | None) -> bool:
        """Whether there is something to load: one answer for all ranks, absent and unknown kept apart."""
        try:
            found: str = reader.check()
        except CheckpointNotFoundError as error:
            found = f"absent {error}"
        except CheckpointDamagedError as error:
            found = f"damaged {error}"
        except (TieredCheckpointError, PeerStoreError) as error:
            found = f"unknown {error}"
        answers = self._together.from_all(found)
        unknown = [answer for answer in answers if answer.startswith("unknown ")]
        damaged = [answer for answer in answers if answer.startswith("damaged ")]
        absent = [answer for answer in answers if answer.startswith("absent ")]
        if unknown:
            raise TierUnavailableError(unknown[0].removeprefix("unknown "))
        if damaged:
            raise CheckpointDamagedError(damaged[0].removeprefix("damaged "))
        if absent and len(absent) < len(answers):
            raise TierUnavailableError(
                f"{self._job}: {len(answers) - len(absent)} of {len(answers)} ranks reach a checkpoint, the "
                f"others cannot: {absent[0].removeprefix('absent ')}"
            )
        if absent and step is not None:
            raise CheckpointNotFoundError(absent[0].removeprefix("absent "))
        return not absent

    def restore_plain(self, state: State, step: int | None) -> int:
        durable, job = self._settings.durable, self._job
        steps = [found for found in plain_steps(durable, job) if step in (None, found)]
        if not steps:
            if step is not None:
                raise CheckpointNotFoundError(f"{durable.url} has no plain checkpoint of {job} step {step}")
            return -1
        reader = plain_reader(durable, job, steps[-1])
        self._together.dcp(dcp.load, state, storage_reader=reader)
        return steps[-1]


def _make_moments(state: State, reader: TieredReader) -> None:
    """An optimizer that never stepped has no moments to be filled: make them, where the checkpoint has some."""
    empty = [name for name, value in state.items() if isinstance(value, torch.optim.Optimizer) and not value.state]
    if not empty:
        return
    try:
        saved = reader.read_metadata().state_dict_metadata
    except TieredCheckpointError:
        return  # the load that follows says so to all ranks
    for name in empty:
        if any(key.startswith(f"{name}.state.") for key in saved):
            make_moments(state[name])


def _tell_saved(state: State, reader: TieredReader) -> None:
    """A ``Stateful`` whose names depend on the ranks hears which of them the checkpoint has."""
    asking = {name: value for name, value in state.items() if hasattr(value, "before_restore")}
    if not asking:
        return
    try:
        saved = reader.read_metadata().state_dict_metadata
    except TieredCheckpointError:
        return  # the load that follows says so to all ranks
    for name, value in asking.items():
        value.before_restore([key.removeprefix(f"{name}.") for key in saved if key.startswith(f"{name}.")])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
