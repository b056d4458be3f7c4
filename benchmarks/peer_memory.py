"""P11 for the peer tier: memory of trainer and agent without slots, during copies and peer reads."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import hydrate as hydration
from benchmarks.nodes import STREAMS, a_node_each, from_all, node_settings
from benchmarks.parameters import Scene
from benchmarks.proc import Peak, watched
from benchmarks.replicate import Pair
from benchmarks.rounds import byte_row, together, use_threads
from benchmarks.sandbox import JOB, agent_pid
from benchmarks.states import blank, build, difference, raw, tensors, turn_over, wipe
from peerstore.sizes_and_durations import show_size
from tieredckpt import Checkpointer

NODES = {
    "copies": ("writing node", "receiving node"),
    "hydrates": ("serving node", "reading node"),
}
PRIVATE, SHARED = "private", "shared, without its slots"
_ALL_SLOTS = 4


def row_names(what: str) -> tuple[tuple[str, str], ...]:
    """Return the two row names of each node: private growth, and shared memory without slots."""
    return tuple((f"{node}: {PRIVATE}", f"{node}: {SHARED}") for node in NODES[what])


class Watch:
    """Memory of both nodes' trainers and agents during each run, sampled by rank 0."""

    def __init__(self, rank: int, scene: Scene, what: str) -> None:
        self._rank = rank
        self._scene = scene
        self._what = what
        self._places = [node_settings(scene, number).agent_directory for number in range(2)]
        self._private: list[list[int]] = [[], []]
        self._shared: list[list[int]] = [[], []]
        self._slots: list[int] = [0, 0]

    def run(self, before: Callable[[], object], do: Callable[[], object]) -> None:
        gc.collect()
        before()
        trainers = from_all(os.getpid())
        together()
        with contextlib.ExitStack() as undo:
            peaks: list[Peak] = []
            if self._rank == 0:
                for trainer, place in zip(trainers, self._places, strict=True):
                    peaks.append(undo.enter_context(watched([trainer, agent_pid(place)])))
            together()
            do()
            together()
        for number, peak in enumerate(peaks):
            place = self._places[number]
            self._slots[number] = slots = slot_bytes(place)
            self._private[number].append(peak.grown)
            self._shared[number].append(max(0, max(peak.shared, used_bytes(place)) - slots))

    def rows(self, *, equal: bool | None) -> list[dict[str, Any]]:
        """Return the rows of this rank; only rank 1 compares results."""
        found = []
        for number, (private, shared) in enumerate(row_names(self._what)):
            sides = (
                (private, self._private[number], "RssAnon of trainer and agent, growth"),
                (shared, self._shared[number], f"RssShmem, or files; slots: {show_size(self._slots[number])}"),
            )
            for name, values, note in sides:
                row = byte_row(name, "ours", values[1:], note)
                row |= {"first": float(values[0]) if values else None, "compared": equal is not None, "equal": equal}
                found.append(row)
        return found


def slot_bytes(place: Path) -> int:
    return sum(path.stat().st_size for path in (place / "slots").glob("*"))


def used_bytes(place: Path) -> int:
    """Return the tmpfs bytes of the node's directory, including records, blobs and the log."""
    return sum(path.stat().st_blocks * 512 for path in place.rglob("*") if path.is_file())


def replicate(rank: int, scene: Scene) -> list[dict[str, Any]]:
    """Measure a save on one node until the other node has verified its copy."""
    use_threads(scene.threads)
    state = build(scene.state, scene.size_bytes, rank=0, world=1)
    settings = node_settings(scene, rank, discovery="world", copies=2, streams=STREAMS)
    watch = Watch(rank, scene, "copies")
    with contextlib.ExitStack() as undo:
        undo.enter_context(a_node_each())
        checkpointer = undo.enter_context(Checkpointer(JOB, settings=settings, on_sigterm="ignore"))
        pair = Pair(rank, checkpointer, state)
        checkpointer.restore(pair.mine)
        for _ in range(_ALL_SLOTS):
            pair.save()
            pair.settle()
        for _ in range(1 + scene.rounds):
            watch.run(lambda: turn_over(state), pair.save)
            pair.settle()
        equal = None if rank == 0 else not difference(state, _spoilt(pair.found(), scene, "copies"), objects=False)
    return watch.rows(equal=equal)


def hydrate(rank: int, scene: Scene) -> list[dict[str, Any]]:
    """Measure a load by a fresh rank on a node that is new each time."""
    use_threads(scene.threads)
    state = build(scene.state, scene.size_bytes, rank=0, world=1)
    target = blank(state)
    node = hydration.FreshNode(rank, scene)
    watch = Watch(rank, scene, "hydrates")
    same = True
    for _ in range(1 + scene.rounds):
        wipe(target)
        watch.run(node.replace, lambda: node.load(target))
        if rank == 1:
            same = not difference(state, _spoilt(target, scene, "hydrates")) and same
    return watch.rows(equal=same if rank else None)


def _spoilt(found: Any, scene: Scene, what: str) -> Any:
    if any(name in scene.spoil for names in row_names(what) for name in names):
        raw(next(iter(tensors(found).values())))[0] ^= 1
    return found
