"""SaveJob: one rank's part of one save, from the lease of a slot to the seal.

``Checkpointer.save``, ``dcp.save`` and ``dcp.async_save`` all run it, so all failed saves follow the same rules:

- The slot is released.
- If the part has a key, the agent aborts the step: the other ranks' parts can never form a complete step.
- An error that is not a :class:`TieredCheckpointError` becomes a :class:`SaveFailedError` that names the step.
- The code that reports the failure to the user also counts it in the agent's metrics. For a seal in the background
  that is :class:`SaveJob`.
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
from tieredckpt.session.session import Session
from tieredckpt.session.slot_pool import StagedShard

log = logging.getLogger(__name__)

ReportMetrics = Callable[..., object]
"""Function that adds its keyword arguments to the agent's metrics of the job."""


@dataclass(frozen=True)
class SaveOptions:
    """Options of one save."""

    durable: bool = False
    """Upload the step to the durable tier, by policy or on request."""
    required: bool = False
    """Upload the step regardless of policy, and do not skip it for newer steps."""
    keep: bool = False
    """Do not evict the step for newer steps."""
    finite: bool = False
    """Raise if a tensor has become NaN or infinite."""


class SaveJob:
    """One rank's part of one save: lease, copy, fence, seal, metrics, and cleanup after a failure."""

    def __init__(
        self, session: Session, key: ShardKey, options: SaveOptions, report: ReportMetrics | None = None
    ) -> None:
        self.session = session
        self.key = key
        self.options = options
        self.staged: StagedShard | None = None
        """The slot, until it is sealed or released."""
        self.copied: Future[float] | None = None
        """The copy that continues after :meth:`stage`; its result is the seconds that the training waited."""
        self.sealed: Future[ShardRecord] | None = None
        """The seal, after a call of :meth:`seal` or :meth:`start_seal`."""
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
        """Lease a slot and copy into it with ``fill``, which returns the copy in the background, if any."""
        staged = self.session.slots.lease(self.key, parts, layout, item_bytes, wait_s=wait_s)
        began = time.perf_counter()
        try:
            self.copied = fill(staged)
            abort_fence.raise_if_aborted()  # again: the staged state must have been computed before any abort
        except BaseException:
            if self.copied is not None:
                wait([self.copied])
            self.session.slots.release(staged)
            raise
        self._copy_s = time.perf_counter() - began
        self.staged = staged
        return staged

    def use_staged(self, staged: StagedShard) -> None:
        """Seal a slot that was filled before the save had a key."""
        self.staged = staged

    def describe(self, items: Sequence[bytes | memoryview], table: StateTable | None) -> None:
        """Set the objects and the state table that the seal writes."""
        self._items, self._table = items, table

    def seal(self) -> ShardRecord:
        """Seal the slot now."""
        record = self._seal_or_abort()
        self.sealed = Future()
        self.sealed.set_result(record)
        return record

    def start_seal(self, executor: Executor, on_sealed: Callable[[ShardRecord], object]) -> Future[ShardRecord]:
        """Seal in the background after the copy; ``on_sealed`` runs before :attr:`sealed` has a result."""

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
        """Release the slot and report once that this rank's part is aborted."""
        if self._is_aborted:
            return
        self._is_aborted = True
        staged, self.staged = self.staged, None
        self._items, self._table = (), None
        if staged is not None:
            self.session.slots.release(staged)
        self.session.commits.abort_part(self.key)

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
