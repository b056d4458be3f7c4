"""P8: cost of a save without moving bytes: as many tensors as state B, but tiny ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

from benchmarks.blocked import Ours
from benchmarks.limits import NullWriter
from benchmarks.parameters import Scene
from benchmarks.rounds import Contender, measure, no_dist, use_threads
from benchmarks.sandbox import JOB, settings_for
from benchmarks.states import advance, blank, tiny
from tieredckpt import Checkpointer

OURS = "Checkpointer.save, all of it"


class Counted:
    """A call that counts its collectives on all groups, by the groups' own sequence numbers."""

    def __init__(self, call: Callable[[int], object]) -> None:
        self._call = call
        self.counts: list[int] = []

    def __call__(self, turn: int) -> None:
        before = _collectives()
        self._call(turn)
        self.counts.append(_collectives() - before)


def _collectives() -> int:
    if not dist.is_initialized():
        return 0
    # No public interface lists all groups; private ones of the checkpointer would be missed.
    groups: Iterable[Any] = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def _forget_plans() -> None:
    """Clear DCP's plan cache, which is per class: some ranks would reuse another scene's plans."""
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{name}").clear()


def run(rank: int, scene: Scene) -> list[dict[str, Any]]:
    use_threads(scene.threads)
    _forget_plans()
    state = tiny(max(1, scene.size_bytes // (256 << 10)), rank=rank, world=scene.ranks)
    target = blank(state)
    with contextlib.ExitStack() as undo:
        checkpointer = undo.enter_context(Checkpointer(JOB, settings=settings_for(scene), on_sigterm="ignore"))
        ours = Ours(checkpointer, target)

        def plan(*, cached: bool) -> Callable[[int], object]:
            def save(_: int) -> None:
                planner = DefaultSavePlanner(enable_plan_caching=cached)
                dcp.save(state, storage_writer=NullWriter(), planner=planner, no_dist=no_dist())

            return save

        start = Counted(lambda turn: ours.start(state, turn))
        uncached, cached = Counted(plan(cached=False)), Counted(plan(cached=True))
        contenders = [
            Contender(
                OURS,
                "ours",
                start,
                ours.found,
                after=ours.finish,
                warm_runs=4,
                note="planning, lease and the copy of some KiB",
            ),
            Contender("dcp.save(null writer)", "opponent", uncached, None, note="no bytes"),
            Contender(
                "dcp.save(null writer), plan cache",
                "opponent",
                cached,
                None,
                warm_runs=2,
                note="no bytes",
            ),
        ]
        rows = measure(
            contenders,
            scene.rounds,
            expected=state,
            prepare=lambda turn: advance(state, turn),
            every_round=False,
            spoil=scene.spoil,
        )
        for counted, row in zip((start, uncached, cached), rows, strict=True):
            row["collectives"] = counted.counts[-scene.rounds :]
            row["tensors"] = len(state)
        return rows
