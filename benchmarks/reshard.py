"""P6: a load from the nodes' memory on a different number of ranks than the save.

Every rank has its own node. The rows compare the bytes moved, from memory and from other nodes, with the bytes that the
new ranks need. States A and B are as in the other subjects. U has rows that do not divide evenly among the ranks,
tensors with fewer rows than ranks, and one tensor that every rank has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.nodes import from_all, node_settings, start_nodes
from benchmarks.opponents import DcpFiles
from benchmarks.parameters import Scene
from benchmarks.rounds import Contender, byte_row, measure, together, use_threads
from benchmarks.sandbox import JOB
from benchmarks.states import TOP_OF_EXPONENT, State, blank, size_of, wipe
from tieredckpt import Checkpointer, TieredReader
from tieredckpt.dcp.restore_report import RestoreReport

OURS, FILES = "dcp.load(TieredReader)", "dcp.load(FileSystemReader)"
NEEDED, MOVED, READ = "bytes the new ranks need", "bytes moved by TieredReader", "bytes read by FileSystemReader"
_COLUMNS = 64
_UNEVEN = (1009, 127, 31, 7, 5, 3, 1)
_EACH = 6


def shapes(kind: str, size_bytes: int) -> dict[str, tuple[int, int]]:
    if kind == "U":
        columns = max(1, size_bytes // 4 // sum(_UNEVEN) // _EACH)
        return {f"rows{rows}.{number}": (rows, columns + number) for rows in _UNEVEN for number in range(_EACH)}
    count = 64 if kind == "A" else max(1, size_bytes // (256 << 10))
    rows = max(24, size_bytes // count // 4 // _COLUMNS // 24 * 24)  # which 2, 3, 4, 6 and 8 ranks divide
    return {f"layers.{number:04}.weight": (rows, _COLUMNS) for number in range(count)}


def slice_of(kind: str, size_bytes: int) -> State:
    """Return this rank's rows of a state whose bits depend only on their position."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    state: State = {}
    for seed, (name, shape) in enumerate(shapes(kind, size_bytes).items()):
        rows, columns = shape
        most = -(-rows // world)
        first, last = (min(most * edge, rows) for edge in (rank, rank + 1))
        local = _bits(seed, first * columns, last * columns).view(last - first, columns)
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(columns, 1))
    if kind == "U":
        state["everywhere"] = _bits(len(state), 0, 1 << 14)
    return state


def _bits(seed: int, first: int, last: int) -> torch.Tensor:
    """Return finite numbers: a Checkpointer refuses a state with NaN."""
    places = np.arange(first, last, dtype=np.uint32)
    bits = (places + np.uint32(seed * 7919)) * np.uint32(2654435761) & np.uint32(~TOP_OF_EXPONENT & 0xFFFFFFFF)
    return torch.from_numpy(bits).view(torch.float32)


def save(rank: int, scene: Scene) -> None:
    """Save on the old ranks: one part per node's memory, and DCP's files on tmpfs."""
    use_threads(scene.threads)
    if rank == 0:
        start_nodes(scene, max(scene.writers, scene.ranks))
    together()
    state = slice_of(scene.state, scene.size_bytes)
    with Checkpointer(JOB, settings=node_settings(scene, rank), on_sigterm="ignore") as checkpointer:
        checkpointer.save(state, 1).wait()
        DcpFiles(scene.folder, rank, state).save()
        together()


def run(rank: int, scene: Scene) -> list[dict[str, Any]]:
    """Load on the new ranks."""
    use_threads(scene.threads)
    state = slice_of(scene.state, scene.size_bytes)
    target = blank(state)
    files = DcpFiles(scene.folder, rank, state)
    settings = node_settings(scene, rank)
    reports: list[RestoreReport] = []
    read: list[int] = []

    def ours(_turn: int) -> None:
        reader = TieredReader(JOB, settings=settings)
        dcp.load(target, storage_reader=reader)
        if reader.report is not None:
            reports.append(reader.report)

    def theirs(_turn: int) -> None:
        before = _read_so_far()
        files.load(target)
        read.append(_read_so_far() - before)

    contenders = [
        Contender(OURS, "ours", ours, lambda: target, note="verified"),
        Contender(FILES, "opponent", theirs, lambda: target, note="from one tmpfs that all ranks share, not verified"),
    ]
    rows = measure(
        contenders,
        scene.rounds,
        expected=state,
        prepare=lambda _turn: wipe(target),
        every_round=True,
        spoil=scene.spoil,
    )
    rounds = range(-scene.rounds, 0)
    moved = from_all([sum(reports[turn].bytes_by_tier.values()) for turn in rounds])
    from_peers = from_all(sum(reports[-1].bytes_by_node.values()))
    sources = from_all(len(reports[-1].bytes_by_node))
    opened = from_all([read[turn] for turn in rounds])
    needed = sum(from_all(size_of(state)))
    note = f"{sum(from_peers) / needed:.0%} from other nodes, {min(sources)} to {max(sources)} of them per rank"
    counted = (
        (NEEDED, "limit", [needed] * scene.rounds, "all ranks together"),
        (MOVED, "ours", [sum(one) for one in zip(*moved, strict=True)], note),
        (READ, "opponent", [sum(one) for one in zip(*opened, strict=True)], "as the kernel counts them"),
    )
    return [*rows, *(byte_row(name, kind, [] if rank else each, said) for name, kind, each, said in counted)]


def _read_so_far() -> int:
    lines: Iterator[str] = iter(Path("/proc/self/io").read_text().splitlines())
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))
