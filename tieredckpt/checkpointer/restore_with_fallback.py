"""Checkpointer.restore: all ranks load the same step and fall back to older ones together."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import set_element  # the inverse of DCP's own flattening
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

from peerstore import deadlines
from peerstore.errors import PeerStoreError
from peerstore.message_codec import from_json
from peerstore.shard_records import VersionId
from peerstore.sizes_and_durations import show_count, show_seconds, show_size
from tieredckpt.checkpointer.progress_hook import take_reached_step
from tieredckpt.dcp.load_vote import LoadOutlook, common_error
from tieredckpt.dcp.plain_checkpoints import plain_reader, plain_steps
from tieredckpt.dcp.rank_group import RankGroup, unwrap_load_error
from tieredckpt.dcp.restore_report import RestoreReport, abbreviate, describe_mismatches, explain_mismatch
from tieredckpt.dcp.tiered_reader import TieredReader
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointDeletedError,
    CheckpointLostError,
    CheckpointNotFoundError,
    CheckpointTornError,
    FormatVersionError,
    MismatchError,
    PeersLostError,
    RestoreProofError,
    TieredCheckpointError,
    TierUnavailableError,
)
from tieredckpt.gc_pause import gc_paused
from tieredckpt.live.survivor_state import Hydration, current_survivor_state, names_digest
from tieredckpt.rank_error import RankError
from tieredckpt.resolve_step import Candidate
from tieredckpt.restore.filled_tensors import takes_over_in_place
from tieredckpt.restore.live_state import RestoredState, top_level_name
from tieredckpt.restore.load_planner import LazyStateMetadata, RestorePlanner
from tieredckpt.restore.proof import RestoreProof
from tieredckpt.settings import Settings, override_settings
from tieredckpt.tensors.optimizer_placeholders import init_optimizer_state
from tieredckpt.tensors.state_dict import StateDict, flatten_state, is_stateful, resolve_stateful

log = logging.getLogger(__name__)

_MAX_LOADS = 8
"""Maximum attempts of a load whose nodes or steps disappear during it."""
_POLL_S = 1.0
OnLost = Literal["raise", "start_fresh"]


class CheckpointRestorer:
    """Restores of one job by all ranks together."""

    def __init__(self, job: str, settings: Settings, together: RankGroup) -> None:
        self._job = job
        self._settings = settings
        self._ranks = together

    def restore(
        self,
        state: StateDict,
        step: int | None,
        epoch: int | None = None,
        *,
        strict: bool = True,
        on_lost: OnLost = "raise",
        exclude_from_proof: Collection[str] = (),
    ) -> tuple[int, RestoreReport | None]:
        """Fill ``state``, and return the restored step and the report of the read.

        The step is -1 if every tier answered and no step was ever complete. Then a report is returned only if
        something had been saved. ``epoch``: the epoch of the incarnation that saved ``step``; ``None`` for the newest.
        ``strict``: raise :class:`MismatchError` before any read if ``state`` and the saved entries do not match.
        """
        reached = take_reached_step(self._job) if step is None else -1
        survivor = current_survivor_state()
        hydration = None if survivor is None else survivor.hydrations.get(self._job)
        failed: dict[VersionId | int, str] = {}
        losses = 0
        while True:
            began = time.perf_counter()
            known = set(failed)
            reader = TieredReader(self._job, step, settings=self._settings)
            reader.strict, reader.defers_proof, reader.epoch = strict, True, epoch
            reader.failed, reader.tries_one_kind = failed, True
            reader.selective_prefixes = tuple(f"{name}." for name, value in state.items() if _is_selective(value))
            try:
                self._wait_for_choice(reader)
            except (CheckpointNotFoundError, CheckpointDamagedError, CheckpointLostError) as problem:
                absent = isinstance(problem, CheckpointNotFoundError)
                if step is not None or (on_lost == "raise" and not absent):
                    raise
                return -1, self._report_empty_start(problem, reached)
            _create_moments(state, reader)
            _send_saved_names(state, reader)
            in_place = {name for name, value in state.items() if takes_over_in_place(value)}
            reader.in_place = functools.partial(_is_part_of, in_place, state)
            reader.verifies_while_reading = strict
            target = _with_placeholders(state, reader)
            target |= {
                name: _OrdinaryModule(value)
                for name, value in state.items()
                if name in in_place and isinstance(value, torch.nn.Module)
            }
            planner = RestorePlanner(allow_partial_load=not strict)
            try:
                with contextlib.closing(reader):
                    self._ranks.load(target, reader, planner)
            except CheckpointException as failure:
                error = unwrap_load_error(failure)
                # The remaining shards may still form this step, or another one.
                if isinstance(error, PeersLostError) or (step is None and isinstance(error, CheckpointDeletedError)):
                    losses += 1
                    if losses == _MAX_LOADS:
                        raise type(error)(
                            f"{self._job} was not restored in {losses} attempts: shards disappeared during each. "
                            f"The last error: {error}"
                        ) from failure
                    log.error("restore of %s: %s; listing the steps again", self._job, error)
                    continue
                if isinstance(error, MismatchError):
                    metadata = reader.read_metadata()
                    raise explain_mismatch(error, target, metadata, self._job, reader.chosen_step) from failure
                if step is not None or not isinstance(error, CheckpointDamagedError):
                    raise error from failure
                if not self._share_failed(reader, error, known):
                    raise error from failure
                log.error("restore of %s: trying the next older step", self._job)
                continue
            state.update(
                {
                    name: value
                    for name, value in target.items()
                    if not isinstance(value, _StatefulWithPlaceholders | _OrdinaryModule)
                }
            )
            self._prove(state, reader, exclude_from_proof, began)
            self._report_repeated_steps(reader.report, hydration, reached)
            if survivor is not None:
                survivor.mark_names_complete(self._job, names_digest(reader.restored_names))
            self._log_restored(state, reader, strict=strict)
            return reader.restored_step, reader.report

    def loadable_versions(self) -> tuple[Candidate, ...]:
        """Return the versions that this rank could load, best first; raise as :meth:`restore` without one."""
        reader = TieredReader(self._job, settings=self._settings)
        self._wait_for_choice(reader)
        return self._ranks.call_on_all(lambda: reader.check_choice().loadable)

    def _share_failed(self, reader: TieredReader, error: Exception, known: set[VersionId | int]) -> bool:
        """Mark steps that failed on any rank as failed on all; return whether any of them is not in ``known``."""
        steps = [[step, str(error)] for step in reader.tried] + [[*item] for item in reader.failed.items()]
        gathered = self._ranks.all_gather(msgspec.json.encode(steps).decode())
        new = False
        for text in gathered:
            for step, why in from_json(text, list[tuple[VersionId | int, str]]):
                new = new or step not in known
                reader.mark_failed(step, why.removeprefix(f"step {step}: "))
        return new

    def _prove(self, state: StateDict, reader: TieredReader, exclude_from_proof: Collection[str], began: float) -> None:
        """Compare the live state with the saved one; raise on all ranks if they differ on any rank."""
        evidence, reader.evidence = reader.evidence, None
        if evidence is None or reader.report is None:
            return
        proving = time.perf_counter()
        live = RestoredState(state, evidence, reader.session.agent.store, exclude_from_proof, _is_selective)
        try:
            with gc_paused():
                live.prove()
        except Exception as error:
            log.exception("%s: the comparison of the live state with the saved state failed", self._job)
            live.mark_unproven(f"{type(error).__name__}: {error}")
        # A state_dict() may have collectives: either all ranks call it a second time, or none does.
        mismatched = self._ranks.all_gather("\n".join(live.mismatched_names))
        again = sorted({name for doubtful in mismatched for name in doubtful.split("\n") if name})
        if again:
            live.recheck(again)
            wrong = describe_mismatches(self._job, reader.report.step, self._ranks.rank, live.proof)
            problems = [text for text in self._ranks.all_gather(wrong) if text]
            if problems:
                raise RestoreProofError(wrong or problems[0])
        proof = live.proof
        proof.seconds = time.perf_counter() - proving
        proof.share = proof.seconds / max(1e-9, time.perf_counter() - began)
        reader.report.proof = proof

    def _report_repeated_steps(self, report: RestoreReport | None, hydration: Hydration | None, reached: int) -> None:
        """Report and log the cost of the fault before this world, if there was a fault.

        ``reached``: newest step that a rank of an earlier world has sealed, or -1.
        """
        if report is None:
            return
        redone = max(0, reached - report.step, -1 if hydration is None else hydration.reached - report.step)
        steps = show_count(redone, "step is", "steps are")
        if redone or hydration is not None:
            report.steps_redone = redone
        if hydration is not None:
            report.mode = "live" if hydration.mode == "live" and hydration.step == report.step else "snapshot"
            tiers = ", ".join(f"{show_size(size)} from {tier}" for tier, size in sorted(report.bytes_by_tier.items()))
            source = "state of the surviving ranks" if report.mode == "live" else "checkpoint"
            cost = f"{steps} done again" if redone else "nothing is lost"
            log.info("%s: resumed from step %d (%s: %s); %s", self._job, report.step, source, tiers, cost)
        if reached > report.step and self._ranks.rank == 0:
            log.warning(
                "%s: resumed from step %d because no newer one is complete; %s done again (a rank had sealed step %d)",
                *(self._job, report.step, steps, reached),
            )

    def _log_restored(self, state: StateDict, reader: TieredReader, *, strict: bool) -> None:
        """Log the restored step, its tiers, bytes and time, and the entries that a non-strict restore skipped."""
        report, step = reader.report, reader.restored_step
        if report is not None:
            tiers = ", ".join(f"{show_size(n)} from {tier}" for tier, n in sorted(report.bytes_by_tier.items()))
            log.info(
                "%s: rank %d restored step %d: %s in %.2f s%s",
                *(self._job, self._ranks.rank, step, tiers or "0 bytes", report.seconds, _show(report.proof)),
            )
            if report.proof is not None and report.proof.not_compared:
                left_out = [f"{name} ({why})" for name, why in report.proof.not_compared.items()]
                log.info(
                    "%s step %d: %d entries were not compared: %s", self._job, step, len(left_out), abbreviate(left_out)
                )
            if self._ranks.rank == 0 and (newer := reader.describe_newer_steps()):
                log.warning("%s", newer)
        if strict:
            return
        missing = sorted(flatten_state(resolve_stateful(state)).keys() - set(reader.saved_names))
        for description, names in (
            ("saved and not restored", reader.unused),
            ("not in the checkpoint, left as is", missing),
        ):
            if names:
                log.warning(
                    "%s step %d: %d entries %s: %s", self._job, step, len(names), description, abbreviate(names)
                )

    def _report_empty_start(self, error: TieredCheckpointError, reached: int) -> RestoreReport | None:
        """Log and report why the job starts from nothing; return ``None`` if nothing was ever saved.

        ``reached``: newest step that a rank of an earlier world has sealed, or -1.
        """
        report = RestoreReport(-1, None, {}, refused=(str(error),))
        if isinstance(error, CheckpointTornError):
            log.warning("%s starts from nothing, and no complete step is lost: %s", self._job, error)
            report.mode = "torn"
        elif isinstance(error, CheckpointNotFoundError):
            if reached >= 0 and self._ranks.rank == 0:
                log.error("%s starts from nothing, although a rank had sealed step %d: %s", self._job, reached, error)
            return None
        else:
            log.error("%s starts from nothing, because of on_lost='start_fresh': %s", self._job, error)
            report.mode = "lost" if isinstance(error, CheckpointLostError) else "damaged"
        return report

    def _wait_for_choice(self, reader: TieredReader) -> None:
        """Return if a step can be loaded, otherwise raise the same error on all ranks.

        The wait for nodes that do not answer is no longer than the work that is repeated without their steps.
        """
        began = time.monotonic()
        for tries in itertools.count(1):
            outlooks = self._gather_outlooks(reader, time.monotonic() - began)
            error = common_error(self._job, [one.error.error() if one.error.message else None for one in outlooks])
            if error is not None and not isinstance(error, TierUnavailableError):
                raise error
            if reader.settings.memory.proof and not all(one.proves for one in outlooks):
                # The comparison has collectives, so all ranks take part in it or none.
                log.warning("%s: some ranks have memory.proof=False, so no rank compares the restored state", self._job)
                reader.settings = override_settings(reader.settings, memory={"proof": False})
            awaited_s = max(one.awaited_s for one in outlooks)
            if awaited_s <= 0 or any(one.is_late for one in outlooks):
                break
            if tries == 1:
                log.warning(
                    "%s: nodes that may have newer steps do not answer; waiting up to %s for them "
                    "(at most peer.unreachable_timeout_s)",
                    *(self._job, show_seconds(awaited_s)),
                )
            time.sleep(deadlines.remaining_s(min(awaited_s, _POLL_S)))
        if error is not None:
            raise error

    def _gather_outlooks(self, reader: TieredReader, waited_s: float) -> list[LoadOutlook]:
        """Return what each rank could load, after a wait of ``waited_s``."""
        problem = RankError()
        try:
            reader.check_choice()
        except (
            CheckpointDamagedError,
            CheckpointLostError,
            CheckpointNotFoundError,
            FormatVersionError,
            TierUnavailableError,
        ) as error:
            problem = RankError.of(error)
        except (TieredCheckpointError, PeerStoreError) as error:
            problem = RankError.of(TierUnavailableError(str(error)))
        awaited_s = max(0.0, min(reader.awaited_s, self._settings.peer.unreachable_timeout_s) - waited_s)
        mine = LoadOutlook(problem, deadlines.expired(), awaited_s, self._settings.memory.proof)
        answers = self._ranks.all_gather(msgspec.json.encode(mine).decode())
        return [from_json(answer, LoadOutlook) for answer in answers]

    def restore_plain(self, state: StateDict, step: int | None) -> int:
        durable, job = self._settings.durable, self._job
        steps = [found for found in plain_steps(durable, job) if step in (None, found)]
        if not steps:
            if step is not None:
                raise CheckpointNotFoundError(f"{durable.url} has no plain checkpoint of {job} step {step}")
            return -1
        failed: list[str] = []
        for found in reversed(steps):
            reader = plain_reader(durable, job, found, trust_objects=self._settings.memory.trust_objects)
            _send_saved_names(state, reader)
            try:
                self._ranks.call_dcp(dcp.load, state, storage_reader=reader, planner=RestorePlanner())
            except CheckpointException as failure:
                error = unwrap_load_error(failure)
                if step is not None or not isinstance(error, CheckpointDamagedError):
                    raise error from failure
                log.error("restore of %s: %s; trying the next older step", job, error)
                failed.append(f"step {found}: {error}")
            else:
                return found
        raise CheckpointDamagedError(f"no plain checkpoint of {job} can be used: {'; '.join(failed)}")


def _show(proof: RestoreProof | None) -> str:
    if proof is None:
        return ""
    left_out = f", {len(proof.not_compared)} entries not compared" if proof.not_compared else ""
    return (
        f"; {show_size(proof.size_bytes)} and {proof.objects} objects of the live state are what was saved{left_out} "
        f"({proof.seconds:.2f} s, {proof.share:.0%} of the restore)"
    )


def _create_moments(state: StateDict, reader: TieredReader) -> None:
    """Create the moments of optimizers without a step, if the checkpoint has moments for them."""
    empty = [name for name, value in state.items() if isinstance(value, torch.optim.Optimizer) and not value.state]
    if not empty:
        return
    try:
        saved = reader.read_metadata().state_dict_metadata
    except TieredCheckpointError:
        return  # the next load reports this to all ranks
    for name in empty:
        if any(key.startswith(f"{name}.state.") for key in saved):
            init_optimizer_state(state[name])


def _send_saved_names(state: StateDict, reader: StorageReader) -> None:
    """Pass the saved entries, by name, to each part of the state that selects its entries."""
    selective = {name: value for name, value in state.items() if _is_selective(value)}
    if not selective:
        return
    try:
        saved = reader.read_metadata().state_dict_metadata
    except TieredCheckpointError:
        return  # the next load reports this to all ranks
    for name, value in selective.items():
        prefix = f"{name}."
        value.before_restore({key.removeprefix(prefix): saved[key] for key in saved if key.startswith(prefix)})


def _is_selective(value: object) -> bool:
    """Return whether this part of the state selects the saved entries that it restores."""
    return hasattr(value, "before_restore")


class _StatefulWithPlaceholders:
    """Wrapper of a ``Stateful`` that adds a placeholder for every saved entry that its state lacks.

    Best scores and histories are empty in a fresh process, and DCP fills only entries that exist.
    """

    def __init__(self, own: Stateful, missing: Mapping[tuple[str | int, ...], object]) -> None:
        self._own = own
        self._missing = missing

    def state_dict(self) -> StateDict:
        state: StateDict = _copy_containers(self._own.state_dict())
        for path, placeholder in self._missing.items():
            set_element(state, path, placeholder)
        return state

    def load_state_dict(self, state: StateDict) -> None:
        self._own.load_state_dict(state)


def _is_part_of(names: Collection[str], state: StateDict, fqn: str) -> bool:
    return top_level_name(state, fqn) in names


class _OrdinaryModule:
    """Wrapper of a module that is filled in place: it does not copy its tensors onto themselves."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._state: StateDict = {}

    def state_dict(self) -> StateDict:
        state: StateDict = self._module.state_dict()
        self._state = dict(state)
        return state

    def load_state_dict(self, state: StateDict) -> None:
        same = state.keys() == self._state.keys()
        if not same or not all(state[name] is value and _is_view(value) for name, value in self._state.items()):
            self._module.load_state_dict(state)


def _is_view(value: object) -> bool:
    """Return whether an entry of a module's state dict is its parameter's memory; a sparse entry is not."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided  # type: ignore[attr-defined]


def _copy_containers(value: Any) -> Any:
    """Copy the containers of a state: a failed restore must not change the object's own containers."""
    if isinstance(value, Mapping):
        return {key: _copy_containers(inner) for key, inner in value.items()}
    return [_copy_containers(inner) for inner in value] if isinstance(value, list) else value


def _with_placeholders(state: StateDict, reader: TieredReader) -> StateDict:
    """Return ``state`` with placeholders for entries that a user's ``Stateful`` saved and now lacks.

    Modules and optimizers have no placeholders: a saved entry that they lack is an error.
    """
    own = (torch.nn.Module, torch.optim.Optimizer)
    stateful = {
        name: value
        for name, value in state.items()
        if is_stateful(value) and not isinstance(value, own) and not _is_selective(value)
    }
    if not stateful:
        return dict(state)
    try:
        metadata = reader.read_metadata()
    except TieredCheckpointError:
        return dict(state)  # the next load reports this to all ranks
    filled = dict(state)
    for name, value in stateful.items():
        missing = _placeholders(name, flatten_state({name: value.state_dict()}).keys(), metadata)
        if missing:
            filled[name] = _StatefulWithPlaceholders(value, missing)
    return filled


def _placeholders(name: str, present: Collection[str], metadata: Metadata) -> dict[tuple[str | int, ...], object]:
    """Return placeholders, by path, for the saved entries below ``name`` that are not in ``present``.

    Sharded tensors have none, because each rank would hold the whole tensor.
    """
    paths = metadata.planner_data or {}
    found: dict[tuple[str | int, ...], object] = {}
    entries = metadata.state_dict_metadata
    for entry, kind in sorted(entries.items()):
        if not entry.startswith(f"{name}.") or entry in present:
            continue
        path = paths.get(entry, tuple(entry.split(".")))[1:]
        if not isinstance(kind, TensorStorageMetadata):
            found[path] = None
        elif isinstance(entries, LazyStateMetadata) and entries.in_pieces(entry):
            continue
        elif [chunk.sizes for chunk in kind.chunks] == [kind.size]:
            found[path] = torch.empty(kind.size, dtype=kind.properties.dtype)
    return found
