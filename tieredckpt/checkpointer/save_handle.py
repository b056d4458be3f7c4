"""The handle that save returns: wait until sealed, replicated or durable. And the list of steps."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Literal

from peerstore.errors import PeerStoreError
from peerstore.shard_records import ShardKey, ShardRecord, VersionId
from tieredckpt.agent.agent_api import ShardReplication, StepInventory
from tieredckpt.errors import StoreBusyError, TierUnavailableError


class SaveState(str, enum.Enum):
    """How far a save has come. Each state includes the ones before it."""

    NOT_DUE = "not due"
    SKIPPED = "skipped"
    FAILED = "failed"
    STAGED = "staged"
    SEALED = "sealed"
    COPIED = "copied"
    DURABLE = "durable"


class SaveHandle:
    """One save: done with its part in the training loop, still on its way through the tiers."""

    def __init__(self, step: int, state: SaveState, error: BaseException | None = None) -> None:
        self.step = step
        self._state = state
        self._error = error
        self._staging: Future[float] | None = None
        self._sealing: Future[ShardRecord] | None = None
        self._until_durable: Callable[[VersionId, float], bool] | None = None
        self._durable_state: Callable[[VersionId], str] | None = None
        self._until_copied: Callable[[ShardKey, int, int, float], ShardReplication] | None = None

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

    def wait(
        self,
        tier: Literal["staged", "memory", "durable"] = "memory",
        *,
        copies: int = 1,
        domains: int = 1,
        timeout_s: float = 600.0,
    ) -> SaveState:
        """Until this rank's part has reached ``tier`` (for durable: the whole step has), or raise why it did not.

        ``staged``: until all of the state is copied, so that anything may change it.
        ``copies=2, domains=2``: also until so many nodes hold this rank's part, in so many failure domains.
        """
        deadline = time.monotonic() + timeout_s
        if self._error is not None:
            raise self._error
        if self._staging is not None and tier == "staged":
            try:
                self._staging.result(timeout_s)
            except FutureTimeoutError:
                raise StoreBusyError(f"step {self.step} was not copied within {timeout_s:.0f} s") from None
        if self._sealing is None or tier == "staged":
            return self._state
        try:
            record = self._sealing.result(timeout_s)
        except FutureTimeoutError:
            raise StoreBusyError(
                f"step {self.step} was not sealed within {timeout_s:.0f} s: this node's agent has not said that it is"
            ) from None
        if copies > 1 or domains > 1:
            self._wait_copied(record.key, copies, domains, max(0.0, deadline - time.monotonic()))
        if self._state is SaveState.DURABLE:
            return self._state
        left_s = max(0.0, deadline - time.monotonic())
        if tier == "durable" and self._until_durable is not None and self._until_durable(record.key.version_id, left_s):
            self._state = SaveState.DURABLE
        return self._state

    def _wait_copied(self, key: ShardKey, copies: int, domains: int, timeout_s: float) -> None:
        if self._until_copied is None:
            raise TierUnavailableError(f"step {self.step} has one copy: no other node keeps copies for this job")
        wanted = f"{copies} copies in {domains} domain{'' if domains == 1 else 's'}"
        try:
            found = self._until_copied(key, copies, domains, timeout_s)
        except PeerStoreError as error:
            raise TierUnavailableError(
                f"whether step {self.step} has {wanted} is not known after {timeout_s:.1f} s: {error}"
            ) from error
        if found.copies < copies or found.domains < domains:
            raise TierUnavailableError(
                f"step {self.step} has {describe_replication(found)} after {timeout_s:.1f} s, {wanted} were asked for"
                f"{f': {found.problem}' if found.problem else ''}"
            )
        if self._state is SaveState.SEALED:
            self._state = SaveState.COPIED

    @property
    def durability(self) -> str:
        """How well this rank's part is kept by now: "2 copies in 2 racks, durable pending"."""
        if self._sealing is None or not self._sealing.done() or self._sealing.exception() is not None:
            return f"{self._state.value}{f' ({self._error})' if self._error else ''}"
        key = self._sealing.result().key
        memory = "1 copy" if self._until_copied is None else describe_replication(self._until_copied(key, 0, 0, 0.0))
        return memory if self._durable_state is None else f"{memory}, {self._durable_state(key.version_id)}"

    def __repr__(self) -> str:
        return f"Saved(step={self.step}, {self._state.value}{f', {self._error}' if self._error else ''})"


def describe_replication(found: ShardReplication) -> str:
    """``2 copies in 2 racks``, or ``parity over 4 nodes``."""
    if found.parity_nodes:
        coming = ", parity on the way" if found.missing_copies else ", no parity"
        return f"parity over {found.parity_nodes} nodes" if found.copies > 1 else f"1 copy{coming}"
    copies = f"{found.copies} cop{'y' if found.copies == 1 else 'ies'}"
    where = f" in {found.domains} {found.level}{'' if found.domains == 1 else 's'}" if found.copies > 1 else ""
    coming = f", {found.missing_copies} on the way" if found.missing_copies else ""
    return copies + where + coming


@dataclass(frozen=True)
class StepInfo:
    """One step as :meth:`Checkpointer.steps` lists it."""

    step: int
    tiers: tuple[str, ...]
    is_complete: bool
    quarantined: str = ""


def step_infos(survey: StepInventory) -> list[StepInfo]:
    """A survey, a line per step."""
    lines = []
    for view in survey.views:
        tiers = {tier.value for where in view.found.values() for tier in where}
        if view.durable:
            tiers.add("durable")
        lines.append(
            StepInfo(view.version_id.version, tuple(sorted(tiers)), view.candidate.is_complete, view.quarantined)
        )
    return sorted(lines, key=lambda line: line.step)
