"""Saves on all ranks.

The first one uses DCP's planning and collectives. Later ones use its plan, on each rank alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import msgspec
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from peerstore.errors import PeerStoreError
from peerstore.message_codec import from_json
from peerstore.shard_records import ShardKey
from tieredckpt.checkpointer.save_handle import SaveHandle, SaveState, await_copies, describe_replication
from tieredckpt.checkpointer.save_queue import SaveQueue
from tieredckpt.dcp.plain_checkpoints import plain_writer
from tieredckpt.dcp.rank_group import RankGroup, unwrap_save_error
from tieredckpt.dcp.tiered_writer import TieredWriter, WriterOptions
from tieredckpt.errors import SaveFailedError, StoreBusyError, TieredCheckpointError
from tieredckpt.live.boundary_recorder import BoundaryRecorder
from tieredckpt.session.agent_discovery import join_peer_agents, join_standby_nodes, record_joined_agents
from tieredckpt.session.save_job import SaveJob, SaveOptions
from tieredckpt.session.session import Session
from tieredckpt.settings import Settings
from tieredckpt.tensors.state_dict import StateDict

log = logging.getLogger(__name__)
_SEALING_S = 2.0
"""Seconds that a skippable save waits for the previous seal. Only an overloaded node needs longer."""


class _SealVote(msgspec.Struct, frozen=True):
    """Vote of one rank on whether its last save can serve as the sealed step."""

    good: bool
    """Whether its last save wrote that step and is sealed."""
    attempts: int
    """Number of times that it has tried to write the step."""


class CheckpointSaver:
    """Saves of one :class:`~tieredckpt.checkpointer.checkpointer.Checkpointer`."""

    def __init__(
        self,
        job: str,
        settings: Settings,
        ranks: RankGroup,
        *,
        queue: SaveQueue,
        boundaries: BoundaryRecorder,
        session: Callable[[], Session],
    ) -> None:
        self._job, self._settings, self._ranks = job, settings, ranks
        self._queue, self._boundaries, self._session = queue, boundaries, session
        self._planned_before = False
        self._joined = False
        """Whether the agents of all ranks know each other, so that they replicate shards."""
        self._joined_for: set[bool] = set()
        """Whether the agents joined for a restore (``True``), for a save (``False``), or both."""
        self._last_part = 0
        """Number of the part that this rank wrote last."""

    @property
    def _wants_finite(self) -> bool:
        return self._settings.memory.nonfinite == "refuse"

    def join(self, *, restoring: bool = False) -> None:
        """Exchange the agents' addresses, once before the first restore and once before the first save."""
        if restoring in self._joined_for:
            return
        self._ranks.call_on_all(self._session)  # a rank without an agent would block the others in the store
        self._joined = self._ranks.call_on_all(lambda: join_peer_agents(self._session(), restoring=restoring))
        record_joined_agents(self._job, restoring=restoring)
        self._joined_for.add(restoring)

    def save(
        self, state: StateDict, step: int, *, durable: bool, keep: bool = False, wait_s: float | None = None
    ) -> SaveHandle:
        if wait_s is None:
            wait_s = self._settings.memory.wait_s if self._settings.memory.on_busy == "wait" else 0.0
        if not self._planned_before:
            return self._save_first(state, step, durable=durable, keep=keep)
        session = self._session()
        self._joined = join_standby_nodes(session) or self._joined
        if session.registration.agents_are_isolated:
            return self._save_first(state, step, durable=durable, keep=keep, wait_s=wait_s)
        agreed = session.incarnation.agreed_rank_count
        if agreed is not None and agreed < self._ranks.size:
            raise SaveFailedError(
                f"Only {agreed} of the {self._ranks.size} ranks of this checkpointer took part in the last load or "
                f"save of {self._job}. Restore on all ranks. To read an old step, use a separate process. To "
                "save a part of the state, use another job name"
            )
        required = durable and bool(self._settings.durable.url)
        wanted = required or session.durable.wants(step)
        key: ShardKey | None = None
        try:
            found = self._queue.planned(session, state)
            if found is not None:
                key = session.incarnation.next_key(step, found.planned.part)
                self._queue.finish_last(wait_s=max(wait_s, _SEALING_S))
                session.check_step_order(step)  # only now is the last sealed step known
                if self._joined:
                    self._queue.require_copies(session)
                if wanted and self._settings.durable.on_busy == "wait":
                    session.durable.wait_for_drain(step, self._settings.durable.retry_s)
                options = SaveOptions(wanted, required=required, keep=keep, finite=self._wants_finite)
                job = self._queue.stage(session, found, key, options, wait_s=wait_s)
        except BaseException:
            self._report_part_aborted(session, key, step)
            raise
        if found is None:
            return self._save_first(state, step, durable=durable, keep=keep)
        return self._seal_later(job)

    def _save_first(
        self, state: StateDict, step: int, *, durable: bool, keep: bool, wait_s: float | None = None
    ) -> SaveHandle:
        """Save with DCP's planning and collectives.

        This is for a state without a plan, or for any state if the agents do not know each other. Then only the ranks
        can report to the agents that a step is complete.
        """
        self._require_all_ready(self._boundaries.names, step)
        self.join()
        options = WriterOptions(
            # Agents that do not know each other learn through DCP that all ranks have sealed.
            seals=self._session().registration.agents_are_isolated,
            required=durable and bool(self._settings.durable.url),
            keep=keep,
            wait_s=wait_s,
            report=partial(self._queue.report, self._session()),
        )
        writer = TieredWriter(self._job, step, finite=self._wants_finite, settings=self._settings, options=options)
        try:
            self._ranks.call_dcp(dcp.save, state, storage_writer=writer)
        except CheckpointException as failure:
            writer.discard_written()
            error = unwrap_save_error(failure)
            raise error if wait_s is not None and isinstance(error, StoreBusyError) else failure from None
        except BaseException:
            writer.discard_written()
            raise
        job = writer.job
        if job is None:
            raise writer.error or SaveFailedError(f"step {step} of {self._job} left no shard")
        self._planned_before = True
        self._last_part = job.key.part
        if writer.record is None:
            return self._seal_later(job)
        self._queue.add_sealed(job, writer.record)
        return SaveHandle(step, SaveState.SEALED, job=job, has_replicas=self._joined)

    def _seal_later(self, job: SaveJob) -> SaveHandle:
        self._queue.start_seal(job)
        return SaveHandle(job.key.version, SaveState.STAGED, job=job, has_replicas=self._joined)

    def _report_part_aborted(self, session: Session, key: ShardKey | None, step: int) -> None:
        """Report in the background that this rank writes no part of the step, so it can never be complete."""
        if session.incarnation.part_count < 2 or session.incarnation.current is None or not self._planned_before:
            return
        # Without a key this uses up the next one, so that this rank and the others count the same attempts.
        self._queue.submit(session.commits.abort_part, key or session.incarnation.next_key(step, self._last_part))

    def sealed_by_all(
        self, saved: SaveHandle | None, step: int, timeout_s: float, *, durable: bool
    ) -> SaveHandle | None:
        """Return the last save if it sealed ``step`` on every rank.

        Otherwise align the ranks' attempts. ``saved``: the last save of this rank.
        """
        good = saved is not None and saved.step == step and not (durable and not saved.becomes_durable)
        if good and saved is not None:
            try:
                good = saved.wait(timeout_s=timeout_s) in (SaveState.SEALED, SaveState.COPIED, SaveState.DURABLE)
            except (TieredCheckpointError, PeerStoreError):  # the caller saves the step again
                good = False
        session = self._session()
        mine = _SealVote(bool(good), session.incarnation.attempts_at(step))
        answers = [
            from_json(answer, _SealVote) for answer in self._ranks.all_gather(msgspec.json.encode(mine).decode())
        ]
        if all(answer.good for answer in answers):
            return saved
        # Ranks may have made different numbers of attempts, and parts of different attempts do not form a step.
        session.align_attempts(step, max(answer.attempts for answer in answers), self._ranks.rank)
        return None

    def wait_for_copies(self, saved: SaveHandle, timeout_s: float) -> None:
        """Wait for the replicas of the last sealed part, and log a warning if some are missing."""
        last = self._queue.last_sealed
        if last is None or not self._joined:
            return
        found = await_copies(self._session(), last, timeout_s)
        if found.missing_copies:
            replication = describe_replication(found)
            log.warning("step %d of %s has %s after %.0f s", saved.step, self._job, replication, timeout_s)

    def _require_all_ready(self, names: str, step: int) -> None:
        """Raise on all ranks before a collective if any rank cannot take part, so that none waits for it.

        ``names``: a digest of the names in this rank's state. If it is the same on all ranks, each rank knows all
        names of the state.
        """
        problem = ""
        try:
            self._queue.finish_last(wait_s=self._settings.memory.wait_s)
            if self._joined:
                self._queue.require_copies(self._session())
            self._session().newest_known_epoch()
            self._session().check_step_order(step)
        except (TieredCheckpointError, PeerStoreError) as error:
            problem = f"rank {self._ranks.rank}: {error}"
        answers = [text.partition(" ") for text in self._ranks.all_gather(f"{names} {problem}")]
        if names and all(named == names for named, _, _ in answers):
            self._boundaries.mark_names_complete()
        problems = [text for _, _, text in answers if text]
        if problems:
            raise SaveFailedError("; ".join(problems))

    def save_plain(self, state: StateDict, step: int, *, durable: bool) -> SaveHandle:
        if step % self._settings.durable.every and not durable:
            return SaveHandle(step, SaveState.NOT_DUE)
        writer = plain_writer(self._settings.durable, self._job, step)
        self._ranks.call_dcp(dcp.save, state, storage_writer=writer)
        return SaveHandle(step, SaveState.DURABLE)
