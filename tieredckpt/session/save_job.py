"""SaveJob: one rank's part of one save, from the lease of a slot to the seal.

``Checkpointer.save``, ``dcp.save`` and ``dcp.async_save`` all run it, so a save that fails follows one set of rules:

- The slot is released.
- The agent gives up the step once the part has a key, because the other ranks' parts can never form a complete step.
- An error that is not one of this package's becomes a :class:`SaveFailedError` that names the step.
- Whoever reports the failure to the user also counts it in the agent's metrics. For a seal in the background that is
  the job itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass

from peerstore.shard_records import ShardKey, ShardRecord
from tieredckpt.errors import SaveFailedError, TieredCheckpointError
from tieredckpt.format.manifest import StateTable
from tieredckpt.format.shard_layout import Layout
from tieredckpt.live import abort_fence
from tieredckpt.session.session import Session, StagedShard

log = logging.getLogger(__name__)

ReportMetrics = Callable[..., object]
"""Adds its keyword arguments to the agent's metrics of the job."""


@dataclass(frozen=True)
class SaveOptions:
    """What the caller of a save wants of the step."""

    durable: bool = False
    """The step is to become durable, by policy or on request."""
    required: bool = False
    """The step is to become durable whatever policy says, and is not left out for newer ones."""
    keep: bool = False
    """The step is not given up for newer ones."""
    finite: bool = False
    """A tensor that has become NaN or infinite is an error."""


class SaveJob:
    """One rank's part of one save: lease, copy, fence, seal, metrics, and what a failure leaves."""

    def __init__(
        self, session: Session, key: ShardKey, options: SaveOptions, report: ReportMetrics | None = None
    ) -> None:
        self.session = session
        self.key = key
        self.options = options
        self.staged: StagedShard | None = None
        """The slot, until it is sealed or released."""
        self.copied: Future[float] | None = None
        """The copy that continues after :meth:`stage`: seconds that the training waited for it."""
        self.sealed: Future[ShardRecord] | None = None
        """The seal, once :meth:`seal` or :meth:`start_seal` was called."""
        self._report = report or session.add_metrics
        self._items: Sequence[bytes | memoryview] = ()
        self._table: StateTable | None = None
        self._copy_s = 0.0
        self._is_aborted = False

    def stage(
        self,
        layout: Layout,
        parts: int,
        item_bytes: int,
        fill: Callable[[StagedShard], Future[float] | None],
        *,
        wait_s: float,
    ) -> StagedShard:
        """Lease a slot and have ``fill`` copy into it; ``fill`` returns the copy that continues in the background."""
        staged = self.session.lease_slot(self.key, parts, layout, item_bytes, wait_s=wait_s)
        began = time.perf_counter()
        try:
            self.copied = fill(staged)
            abort_fence.raise_if_aborted()  # again: the staged state must have been computed before any abort
        except BaseException:
            if self.copied is not None:
                wait([self.copied])
            self.session.release_slot(staged)
            raise
        self._copy_s = time.perf_counter() - began
        self.staged = staged
        return staged

    def use_staged(self, staged: StagedShard) -> None:
        """Seal a slot that was filled before the save had a key."""
        self.staged = staged

    def describe(self, items: Sequence[bytes | memoryview], table: StateTable | None) -> None:
        """Set what the seal writes beside the tensors."""
        self._items, self._table = items, table

    def seal(self) -> ShardRecord:
        """Seal the slot now."""
        record = self._seal_or_abort()
        self.sealed = Future()
        self.sealed.set_result(record)
        return record

    def start_seal(self, executor: Executor, on_sealed: Callable[[ShardRecord], object]) -> Future[ShardRecord]:
        """Seal in the background once everything is copied; ``on_sealed`` runs before waiters see the seal."""

        def run() -> ShardRecord:
            try:
                record = self._seal_or_abort()
            except Exception as error:
                log.error("step %d of %s was not sealed: %s", self.key.version, self.session.job, error)
                self._report(failed=1)
                raise
            on_sealed(record)
            return record

        self.sealed = executor.submit(run)
        return self.sealed

    def abort(self) -> None:
        """Release the slot and report, once, that the step has no part of this rank."""
        if self._is_aborted:
            return
        self._is_aborted = True
        staged, self.staged = self.staged, None
        self._items, self._table = (), None
        if staged is not None:
            self.session.release_slot(staged)
        self.session.report_part_aborted(self.key)

    def _seal_or_abort(self) -> ShardRecord:
        try:
            return self._seal()
        except BaseException as problem:
            self.abort()
            if isinstance(problem, TieredCheckpointError) or not isinstance(problem, Exception):
                raise
            raise SaveFailedError(
                f"step {self.key.version} of {self.session.job} was not sealed: {problem!r}"
            ) from problem

    def _seal(self) -> ShardRecord:
        staged = self.staged
        if staged is None:
            raise SaveFailedError(f"step {self.key.version} of {self.session.job} has no slot to seal")
        waited_s = 0.0 if self.copied is None else self.copied.result()
        began = time.perf_counter()
        options = self.options
        record = self.session.seal(
            *(staged, self.key, self._items),
            durable=options.durable,
            table=self._table,
            required=options.required,
            keep=options.keep,
            finite=options.finite,
        )
        self.staged, self._items, self._table = None, (), None
        self._report(
            saves=1,
            saved_bytes=record.size_bytes,
            copy_seconds=self._copy_s,
            seal_seconds=time.perf_counter() - began,
            blocked_seconds=waited_s,
        )
        return record
