"""``restore`` and ``report`` of a train function, with pointers to steps in Ray's storage."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

import msgspec
import ray.train
from ray.train import Checkpoint
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2.api.preemption import PreemptionInfo

from integration.ray_train.checkpoint_pointer import CheckpointPointer, is_deleted, pointer_directory, read_pointer
from peerstore.errors import PeerStoreError
from peerstore.message_codec import from_json
from tieredckpt.checkpointer.checkpointer import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveHandle, SaveState
from tieredckpt.dcp.rank_group import RankGroup
from tieredckpt.errors import CheckpointLostError, TieredCheckpointError, UsageError

log = logging.getLogger(__name__)

_SEAL_TIMEOUT_S = 600.0
_UNKNOWN_GRACE_S = 25.0
"""Seconds that a save may take before a preemption whose deadline Ray does not know."""


class _Run:
    """The Checkpointer of this worker's run, and the steps that are retained for Ray's checkpoints."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        target = options.pop("job", name)
        # A train function runs in a thread, which cannot handle signals.
        self.ckpt = Checkpointer(target, on_sigterm="ignore", **options)
        self.ranks = RankGroup(options.get("process_group"))
        self.kept: dict[int, Checkpoint] = {}
        """Ray's checkpoint of each retained step. Only rank 0 has them."""
        self.announced: PreemptionInfo | None = None
        """Preemption for which this run has saved."""
        self.has_retention = _num_to_keep() is not None

    @property
    def is_first(self) -> bool:
        return self.ranks.rank == 0


_runs: dict[str, _Run] = {}
"""Run of this worker process, by its name."""


def open_checkpointer(**options: Any) -> Checkpointer:
    """Return the :class:`~tieredckpt.Checkpointer` of this run; all workers call it at the same point.

    The first call creates it with ``options``, such as ``durable="s3://bucket/prefix"``. Its job has the run's name
    unless ``job`` names another. :func:`restore` and :func:`report` create it without options.
    """
    name = ray.train.get_context().get_experiment_name()
    if name in _runs and options:
        raise UsageError(f"the Checkpointer of run {name!r} is open: pass its options before restore() and report()")
    return _open_run(name, options).ckpt


def _open_run(name: str = "", options: dict[str, Any] | None = None) -> _Run:
    name = name or ray.train.get_context().get_experiment_name()
    if name not in _runs:
        _runs[name] = _Run(name, dict(options or {}))
    return _runs[name]


def restore(state: dict[str, Any], *, on_lost: Literal["raise", "start_fresh"] = "raise") -> int:
    """Fill ``state`` from the newest complete step of this run, and return the step, or -1 in a new run.

    A step that was saved and not yet reported counts too. The errors are those of
    :meth:`Checkpointer.restore <tieredckpt.Checkpointer.restore>`. :class:`~tieredckpt.errors.CheckpointLostError` is
    also raised if Ray has a checkpoint of this run and no tier has a step.
    """
    run = _open_run()
    reported = _newest_pointer(run)
    restored = run.ckpt.restore(state, on_lost=on_lost)
    if reported is not None and restored < 0:
        message = f"run {run.name!r} has reported step {reported.step}, and no tier has a step of job {run.ckpt.job!r}"
        if on_lost == "raise":
            raise CheckpointLostError(f"{message}. To train from the start, pass on_lost='start_fresh' or a new name")
        log.warning("%s: it starts from the beginning", message)
    elif reported is not None and restored < reported.step and run.is_first:
        log.warning("run %r resumes at step %d, older than the reported %d", run.name, restored, reported.step)
    elif reported is None and restored >= 0 and run.is_first:
        log.warning(
            "run %r has no checkpoint in Ray's storage, and job %r has step %d: the run resumes from it. Use another "
            "name for a new run",
            *(run.name, run.ckpt.job, restored),
        )
    return restored


def report(
    metrics: dict[str, Any], state: dict[str, Any], step: int, *, keep: bool | None = None, durable: bool = False
) -> SaveHandle:
    """Save ``state`` as ``step``, and report ``metrics`` with a pointer to the step to Ray.

    All workers call this. It returns when the step is sealed in memory on all of them. If a save failed on any worker,
    or the step is not due, Ray receives the metrics without a checkpoint.

    ``keep``: retain the step until Ray deletes its checkpoint; by default if ``CheckpointConfig.num_to_keep`` is set.
    ``durable``: upload the step regardless of ``durable.every``. Before a preemption any step is due. Then
    ``report`` waits until the deadline for the upload, or without a durable tier for a copy on another node.
    """
    run = _open_run()
    preemption = ray.train.get_preemption_info()
    is_urgent = preemption is not None and preemption != run.announced
    run.announced = preemption
    has_durable = bool(run.ckpt.settings.durable.url)
    if keep is None:
        every = run.ckpt.settings.memory.every
        keep = run.has_retention and isinstance(every, int) and step % every == 0
    upload = durable or (is_urgent and has_durable)
    saved = run.ckpt.save(state, step, force=is_urgent, keep=keep, durable=upload)
    problems = [text for text in run.ranks.all_gather(_wait_for_seal(saved)) if text]
    if preemption is not None and is_urgent and not problems:
        _wait_before_preemption(run, saved, preemption)
    if problems or saved.state is SaveState.NOT_DUE:
        if problems and run.is_first:
            log.error("run %r: step %d has no checkpoint: %s", run.name, step, "; ".join(problems))
        ray.train.report(metrics)
    elif not run.is_first:
        ray.train.report(metrics)
    else:
        _report_pointer(run, metrics, step, keep=keep)
    return saved


def load_checkpoint(checkpoint: Checkpoint, state: dict[str, Any], **options: Any) -> int:
    """Fill ``state`` from one of Ray's checkpoints, such as ``Result.checkpoint``, and return its step.

    It needs no train function. ``options`` are those of a :class:`~tieredckpt.Checkpointer`. The errors are those of
    :meth:`Checkpointer.restore <tieredckpt.Checkpointer.restore>` and of reading the pointer.
    """
    pointer = read_pointer(checkpoint)
    for run in _runs.values():
        if run.ckpt.job == pointer.job and not options:
            return run.ckpt.restore(state, pointer.step)
    options = {"durable": pointer.durable_url or None, "on_sigterm": "ignore", **options}
    with Checkpointer(pointer.job, **options) as ckpt:
        return ckpt.restore(state, pointer.step)


def _newest_pointer(run: _Run) -> CheckpointPointer | None:
    """Return the pointer of Ray's newest checkpoint on all ranks, after rank 0 has read it."""
    text = ""
    error: TieredCheckpointError | None = None
    checkpoint = ray.train.get_checkpoint() if run.is_first else None
    if checkpoint is not None:
        try:
            pointer = read_pointer(checkpoint)
        except TieredCheckpointError as problem:
            error = problem
        else:
            text = msgspec.json.encode(pointer).decode()
            run.kept = {int(step): Checkpoint(path, checkpoint.filesystem) for step, path in pointer.kept.items()}
            run.kept[pointer.step] = checkpoint
    texts = run.ranks.all_gather(f"error: {error}" if error is not None else text)
    if error is not None:
        raise error
    if texts[0].startswith("error: "):
        raise TieredCheckpointError(f"rank 0: {texts[0].removeprefix('error: ')}")
    return from_json(texts[0].encode(), CheckpointPointer) if texts[0] else None


def _wait_for_seal(saved: SaveHandle) -> str:
    """Wait until this rank's part is sealed; return its problem, or an empty text."""
    try:
        state = saved.wait("memory", timeout_s=_SEAL_TIMEOUT_S)
    except (TieredCheckpointError, PeerStoreError) as error:
        return f"{type(error).__name__}: {error}"
    return "the save was skipped" if state in (SaveState.SKIPPED, SaveState.FAILED) else ""


def _wait_before_preemption(run: _Run, saved: SaveHandle, preemption: PreemptionInfo) -> None:
    """Wait until the step survives the loss of the preempted nodes, at most until the deadline."""
    left_s = _UNKNOWN_GRACE_S
    if preemption.deadline_ms is not None:
        left_s = max(0.0, preemption.deadline_ms / 1000 - time.time())
    nodes = ", ".join(preemption.preempted_node_ids)
    try:
        if run.ckpt.settings.durable.url:
            saved.wait("durable", timeout_s=left_s)
        else:
            saved.wait(copies=2, timeout_s=left_s)
    except (TieredCheckpointError, PeerStoreError) as error:
        log.warning("step %d may be lost with the preempted nodes %s: %s", saved.step, nodes, error)
    else:
        log.warning("step %d is %s before the preemption of %s", saved.step, saved.state.value, nodes)


def _report_pointer(run: _Run, metrics: dict[str, Any], step: int, *, keep: bool) -> None:
    """Report the pointer to a sealed step, and drop the steps whose checkpoints Ray has deleted."""
    kept = {str(older): checkpoint.path for older, checkpoint in run.kept.items()}
    pointer = CheckpointPointer(run.ckpt.job, step, run.ckpt.settings.durable.url, kept)
    with pointer_directory(pointer) as local:
        ray.train.report(metrics, checkpoint=local)
    stored = ray.train.get_checkpoint()
    for older, checkpoint in list(run.kept.items()):
        if older != step:
            _drop_if_deleted(run, older, checkpoint)
    if keep and stored is not None:
        run.kept[step] = stored


def _drop_if_deleted(run: _Run, step: int, checkpoint: Checkpoint) -> None:
    """Drop a retained step after Ray's retention; a failure is logged, and the next report tries again."""
    try:
        if is_deleted(checkpoint):
            run.ckpt.drop(step)
            del run.kept[step]
    except (OSError, PeerStoreError, TieredCheckpointError) as error:
        log.warning("step %d of run %r still uses memory, although Ray deleted it: %s", step, run.name, error)


def _num_to_keep() -> int | None:
    """Return ``CheckpointConfig.num_to_keep`` of this run: workers have no public access to it."""
    try:
        config = get_train_context().train_run_context.run_config.checkpoint_config
    except RuntimeError:  # without workers the train function runs in the driver
        return None
    return None if config is None else config.num_to_keep
