"""P11: peak memory of trainers and agent in each stage, without the state and the slots."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.clients import ENVIRONMENT, durable_settings
from benchmarks.drain import from_store
from benchmarks.opponents import AsyncFiles, DcpFiles
from benchmarks.parameters import Scene
from benchmarks.proc import watched
from benchmarks.rounds import no_dist, together, use_threads
from benchmarks.sandbox import JOB, agent_pid, settings_for
from benchmarks.states import State, advance, blank, build, difference, raw, tensors, wipe
from tieredckpt import Checkpointer, TieredReader, TieredWriter

STAGES = ("Checkpointer.save", "dcp.save(TieredWriter)", "dcp.load(TieredReader)", "Checkpointer.restore", "drain")


class Watch:
    """Rank 0 watches all ranks and the agent; the others only take part."""

    def __init__(self, rank: int, scene: Scene, place: Path) -> None:
        self._rank, self._scene, self._place = rank, scene, place
        self.rows: list[dict[str, Any]] = []

    def stage(self, name: str, kind: str, do: Callable[[], object], equal: Callable[[], bool], note: str = "") -> None:
        """Record the peak growth during ``rounds`` runs of ``do``, and compare after every run."""
        grown: list[int] = []
        same = True
        for _ in range(1 + self._scene.rounds):  # the first run allocates plans, buffers and modules that stay
            gc.collect()
            pids = self._pids()
            together()
            with contextlib.ExitStack() as undo:
                peak = undo.enter_context(watched(pids)) if self._rank == 0 else None
                together()
                do()
                together()
            if peak is not None:
                grown.append(peak.grown)
            same = equal() and same
        row = {"name": name, "kind": kind, "unit": "B", "first": None, "samples": grown[1:], "equal": same}
        row["first"] = grown[0] if grown else None
        self.rows.append({**row, "compared": True, "note": note})

    def _pids(self) -> list[int]:
        agent = agent_pid(self._place)
        mine = os.getpid()
        pids = [mine]
        if dist.is_initialized():
            pids = [0] * dist.get_world_size()
            dist.all_gather_object(pids, mine)
        return [*pids, agent] if agent else pids


def run(rank: int, scene: Scene) -> list[dict[str, Any]]:
    use_threads(scene.threads)
    os.environ.update(ENVIRONMENT)
    state = build(scene.state, scene.size_bytes, rank=rank, world=scene.ranks)
    target = blank(state)
    settings = settings_for(scene)
    watch = Watch(rank, scene, settings.agent_directory)
    turns = iter(range(1, 1 << 20))

    def same(load: Callable[[], object], name: str) -> Callable[[], bool]:
        def check() -> bool:
            wipe(target)
            load()
            if name in scene.spoil:
                raw(next(iter(tensors(target).values())))[0] ^= 1
            return not difference(state, target)

        return check

    def load() -> None:
        dcp.load(target, storage_reader=TieredReader(JOB, settings=settings), no_dist=no_dist())

    with Checkpointer(JOB, settings=settings, on_sigterm="ignore") as checkpointer:

        def save() -> None:
            step = next(turns)
            advance(state, step)
            checkpointer.save(state, step).wait()

        def save_by_dcp() -> None:
            step = next(turns)
            advance(state, step)
            dcp.save(state, storage_writer=TieredWriter(JOB, step, settings=settings), no_dist=no_dist())

        for name, do in zip(STAGES, (save, save_by_dcp, load, lambda: checkpointer.restore(target)), strict=False):
            watch.stage(name, "ours", do, same(load, name))
    _drain(watch, scene, state, turns)
    _opponents(watch, rank, scene, state, target, same)
    return watch.rows


def _drain(watch: Watch, scene: Scene, state: State, turns: Any) -> None:
    settings = settings_for(scene, **vars(durable_settings(scene, scene.rclone)))
    stored: dict[str, bool] = {}

    def equal() -> bool:
        return stored.setdefault("same", True)

    with Checkpointer(JOB, settings=settings, on_sigterm="ignore") as checkpointer:

        def drain() -> None:
            step = next(turns)
            advance(state, step)
            checkpointer.save(state, step).wait("durable")

        watch.stage(STAGES[4], "ours", drain, equal, "save, upload and manifest")
        found = from_store(state, scene)
        if STAGES[4] in scene.spoil:
            raw(next(iter(tensors(found).values())))[0] ^= 1
        watch.rows[-1]["equal"] = not difference(state, found)


def _opponents(
    watch: Watch, rank: int, scene: Scene, state: State, target: State, same: Callable[..., Callable[[], bool]]
) -> None:
    files, later = DcpFiles(scene.folder, rank, state), AsyncFiles(scene.folder, rank, state)

    def again(save: Callable[[], object], folder: Path) -> Callable[[], None]:
        def do() -> None:
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            together()
            save()

        return do

    def save_later() -> None:
        later.start()
        later.finish()

    for name, opponent, do in (
        ("dcp.save(FileSystemWriter)", files, files.save),
        ("dcp.async_save, DefaultStager kept", later, save_later),
    ):
        read = opponent.load
        watch.stage(name, "opponent", again(do, opponent.folder), same(lambda read=read: read(target), name))
    later.close()
    files.clear()
    together()
    files.save()
    name = "dcp.load(FileSystemReader)"
    watch.stage(name, "opponent", lambda: files.load(target), same(lambda: files.load(target), name))
