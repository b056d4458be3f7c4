"""SaveHandle, which waits until a save is sealed, replicated or durable, and the list of steps."""

from __future__ import annotations

import enum
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Literal

from peerstore.errors import PeerStoreError
from peerstore.shard_records import ShardKey, VersionId
from tieredckpt.agent.agent_api import ShardReplication
from tieredckpt.errors import SaveFailedError, StoreBusyError, TierUnavailableError, UsageError
from tieredckpt.session.save_job import SaveJob
from tieredckpt.session.session import Session
from tieredckpt.step_inventory import StepInventory

_POLL_S = 1.0
"""Seconds between queries. A node chosen for a replica may leave, and then the wait must end."""


class SaveState(str, enum.Enum):
    """Progress of a save. ``STAGED`` and each later state include the ones before it."""

    NOT_DUE = "not due"
    SKIPPED = "skipped"
    FAILED = "failed"
    STAGED = "staged"
    SEALED = "sealed"
    COPIED = "copied"
    DURABLE = "durable"


class SaveHandle:
    """One save, which continues through the tiers after it has returned to the training loop."""

    def __init__(
        self,
        step: int,
        state: SaveState,
        error: BaseException | None = None,
        *,
        job: SaveJob | None = None,
        has_replicas: bool = False,
    ) -> None:
        self.step = step
        self.job = job
        """This rank's part, if the save got a slot."""
        self._state = state
        self._error = error
        self._has_replicas = has_replicas

    @property
    def error(self) -> BaseException | None:
        """Error that made the save fail or skip, or ``None``."""
        self._update_from_seal()
        return self._error

    @property
    def state(self) -> SaveState:
        self._update_from_seal()
        return self._state

    @property
    def ok(self) -> bool:
        """Whether the save has neither failed nor been skipped; :meth:`wait` raises if it fails later."""
        return self.state not in (SaveState.SKIPPED, SaveState.FAILED, SaveState.NOT_DUE)

    @property
    def becomes_durable(self) -> bool:
        """Whether the step's upload to the durable tier was requested."""
        return self.job is not None and self.job.options.durable

    def wait(
        self,
        tier: Literal["staged", "memory", "durable"] = "memory",
        *,
        copies: int = 1,
        domains: int = 1,
        timeout_s: float = 600.0,
    ) -> SaveState:
        """Wait until this rank's part has reached ``tier`` (for durable: the complete step), or raise.

        ``staged``: until the complete state is copied, and any code may change it.
        ``copies=2, domains=2``: also until 2 nodes in 2 failure domains hold this rank's part.
        """
        deadline = time.monotonic() + timeout_s
        job, error = self.job, self.error
        if error is not None:
            raise error
        if job is None or job.sealed is None:
            return self._state
        if tier == "staged":
            if job.copied is not None:
                try:
                    job.copied.result(timeout_s)
                except FutureTimeoutError:
                    raise StoreBusyError(f"step {self.step} was not copied within {timeout_s:.0f} s") from None
            return self.state
        try:
            record = job.sealed.result(timeout_s)
        except FutureTimeoutError:
            raise StoreBusyError(
                f"step {self.step} was not sealed within {timeout_s:.0f} s: this node's agent has not reported the seal"
            ) from None
        if job.session.is_closed and (copies > 1 or domains > 1 or tier == "durable"):
            raise UsageError(
                f"step {self.step} of {job.session.job} is sealed, but its Checkpointer is closed, so its copies are "
                "unknown here. `tieredckpt ls` shows them"
            )
        if copies > 1 or domains > 1:
            self._wait_for_copies(job.session, record.key, copies, domains, max(0.0, deadline - time.monotonic()))
        if tier == "durable" and self.state is not SaveState.DURABLE:
            left_s = max(0.0, deadline - time.monotonic())
            if _wait_until_durable(job.session, record.key.version_id, left_s):
                self._state = SaveState.DURABLE
        return self.state

    def _update_from_seal(self) -> None:
        """Update the state from the seal, which runs in the background."""
        sealed = None if self.job is None else self.job.sealed
        if self._state is SaveState.STAGED and sealed is not None and sealed.done():
            self._error = sealed.exception()
            self._state = SaveState.SEALED if self._error is None else SaveState.FAILED

    def _wait_for_copies(self, session: Session, key: ShardKey, copies: int, domains: int, timeout_s: float) -> None:
        if not self._has_replicas:
            raise TierUnavailableError(f"step {self.step} has one copy: no other node keeps copies for this job")
        wanted = f"{copies} copies in {domains} domain{'' if domains == 1 else 's'}"
        try:
            found = session.agent.replication_status(key, copies=copies, domains=domains, timeout_s=timeout_s)
        except PeerStoreError as error:
            raise TierUnavailableError(
                f"whether step {self.step} has {wanted} is not known after {timeout_s:.1f} s: {error}"
            ) from error
        if found.copies < copies or found.domains < domains:
            raise TierUnavailableError(
                f"step {self.step} has {describe_replication(found)} after {timeout_s:.1f} s, "
                f"and {wanted} were requested"
                f"{f': {found.problem}' if found.problem else ''}"
            )
        if self.state is SaveState.SEALED:
            self._state = SaveState.COPIED

    @property
    def durability(self) -> str:
        """Redundancy of this rank's part, for example "2 copies in 2 racks, durable pending"."""
        job, error = self.job, self.error
        if job is None or job.sealed is None or not job.sealed.done() or error is not None or job.session.is_closed:
            return f"{self._state.value}{f' ({error})' if error else ''}"
        key, agent = job.sealed.result().key, job.session.agent
        memory = "1 copy"
        if self._has_replicas:
            memory = describe_replication(agent.replication_status(key, copies=0, domains=0, timeout_s=0.0))
        return f"{memory}, {_durable_state(job.session, key.version_id)}" if self.becomes_durable else memory

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, {self.state.value}{f', {self._error}' if self._error else ''})"


def await_copies(session: Session, key: ShardKey, timeout_s: float) -> ShardReplication:
    """Wait for the possible replicas: at most one per node, so possibly fewer than requested."""
    deadline = time.monotonic() + timeout_s
    found = session.agent.replication_status(key, copies=0, domains=0, timeout_s=0.0)
    while found.missing_copies and (left := deadline - time.monotonic()) > 0:
        wanted = found.copies + found.missing_copies
        found = session.agent.replication_status(key, copies=wanted, domains=1, timeout_s=min(left, _POLL_S))
    return found


def _wait_until_durable(session: Session, group: VersionId, timeout_s: float) -> bool:
    try:
        view = session.agent.wait_durable(session.job, group, timeout_s)
    except PeerStoreError as error:
        raise TierUnavailableError(
            f"whether step {group.version} is durable is not known after {timeout_s:.1f} s: {error}"
        ) from error
    if view is None or view.state == "skipped":
        return False
    if view.state == "failed":
        raise SaveFailedError(f"step {group.version} did not become durable: {view.error}")
    if view.state != "done":
        raise TierUnavailableError(
            f"step {group.version} is not durable after {timeout_s:.1f} s: {view.error or view.state}"
        )
    return True


def _durable_state(session: Session, group: VersionId) -> str:
    view = next((view for view in session.agent.drain_status(session.job) if view.version_id == group), None)
    if view is None or view.state in ("waiting", "running"):
        return "durable pending"
    return "durable" if view.state == "done" else f"not durable ({view.error or view.state})"


def describe_replication(found: ShardReplication) -> str:
    """Describe replication: ``2 copies in 2 racks``, or ``parity over 4 nodes``."""
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


def step_infos(inventory: StepInventory) -> list[StepInfo]:
    """Return the steps of an inventory, oldest first."""
    lines = [StepInfo(step, ("durable",), is_complete=True) for step in inventory.plain]
    for view in inventory.views:
        tiers = {tier.value for where in view.found.values() for tier in where}
        if view.durable:
            tiers.add("durable")
        lines.append(
            StepInfo(view.version_id.version, tuple(sorted(tiers)), view.candidate.is_complete, view.quarantined)
        )
    return sorted(lines, key=lambda line: line.step)
