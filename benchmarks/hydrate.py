"""P5: a fresh rank, on a node with empty memory, loads its state from another node's memory.

Rank 0 is healthy: its node's agent holds the step, and the other contenders send its state.
Rank 1 is fresh: before every load of ours, a new node with a new agent replaces its node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint as dcp

from benchmarks.fetchers import opponents
from benchmarks.limits import WarmMapping
from benchmarks.nodes import (
    STREAMS,
    address_of,
    from_all,
    introduce,
    lose_node,
    node_settings,
    open_node,
    start_nodes,
)
from benchmarks.parameters import Scene
from benchmarks.rounds import COPY, Contender, built, measure, those_of, use_threads
from benchmarks.sandbox import JOB
from benchmarks.states import State, blank, raw, tensors, wipe
from benchmarks.wires import Wire, raw_name
from tieredckpt import TieredReader, TieredWriter
from tieredckpt.session.session import close_sessions

OURS = "dcp.load(TieredReader)"
VERIFY = "xxh3 of the bytes, 1 thread"
RAW = tuple(raw_name(streams) for streams in sorted({1, STREAMS}))


def save(rank: int, scene: Scene) -> None:
    """Write a step on the node of a job with one rank."""
    use_threads(scene.threads)
    start_nodes(scene, 1)
    state = built(scene, rank=0, world=1)
    dcp.save(state, storage_writer=TieredWriter(JOB, 1, settings=node_settings(scene, 0)), no_dist=True)


class FreshNode:
    """The second node, which is lost and replaced before every load."""

    def __init__(self, rank: int, scene: Scene) -> None:
        self._rank = rank
        self._scene = scene
        self._version = 1

    def replace(self) -> None:
        self._version += 1
        if self._rank == 1:
            close_sessions()
            lose_node(node_settings(self._scene, 1).agent_directory)
        session = open_node(self._scene, self._rank)
        introduce([session], from_all(address_of(session)), self._version)

    def load(self, target: State) -> None:
        """Load on the fresh rank; the other rank only keeps its node running."""
        if self._rank == 0:
            return
        reader = TieredReader(JOB, settings=node_settings(self._scene, 1))
        dcp.load(target, storage_reader=reader, no_dist=True)
        if reader.report is None or set(reader.report.bytes_by_tier) != {"peer"}:
            raise RuntimeError(f"the load must read from the other node only, not: {reader.report}")


def run(rank: int, scene: Scene) -> list[dict[str, Any]]:
    use_threads(scene.threads)
    state = built(scene, rank=0, world=1)  # on both ranks: rank 1 compares
    target = blank(state)
    mapping = WarmMapping(scene.folder / f"warm-{rank}", state, align=1)
    mapping.copy_in()
    copy_out = mapping.copier_out(target)
    views = [memoryview(raw(tensor).numpy()) for tensor in tensors(target).values() if not scene.device]
    node = FreshNode(rank, scene)

    found = (lambda: target) if rank else None
    with contextlib.ExitStack() as undo:
        wires = {streams: Wire(rank, streams) for streams in sorted({1, STREAMS})}
        for wire in wires.values():
            undo.callback(wire.close)

        def by_wire(streams: int) -> Contender:
            def run(_turn: int) -> None:
                if rank == 0:
                    wires[streams].send(mapping.path, mapping.size_bytes)
                else:
                    wires[streams].receive(views)

            note = "sendfile to recv_into the tensors, acknowledged, not verified"
            return Contender(raw_name(streams), "limit", run, found, objects=False, note=note)

        def alone(do: Callable[[], object]) -> Callable[[int], object]:
            return lambda _turn: do() if rank else None

        contenders = [
            Contender(COPY, "limit", alone(copy_out), found, objects=False, note="out of a mapping of its own"),
            Contender(VERIFY, "limit", alone(mapping.checksum), None, note="verification's read"),
            *(by_wire(streams) for streams in wires),
            Contender(
                OURS,
                "ours",
                lambda _turn: node.load(target),
                found,
                before=node.replace,
                note=f"verified, planned by DCP, {STREAMS} streams; new agent and empty memory each time",
            ),
        ]
        theirs, absent = opponents(rank, scene, state, target, undo) if not scene.device else ([], [])
        rows = measure(
            those_of(scene, [*contenders, *theirs]),
            scene.rounds,
            expected=state,
            prepare=lambda _turn: wipe(target) if rank else None,
            every_round=True,
            spoil=scene.spoil,
        )
    return [*rows, *absent]
