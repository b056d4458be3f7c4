"""Time and memory a rank needs to find its pieces in a job with a million pieces.

    python -m benchmarks.pieces

One process seals all parts in a real agent, one rank after the other. The result does not depend on the process that
wrote a part. Each query then runs in a new process. Measured are the seconds from the first request to the byte ranges
to read, and the peak growth of resident memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.proc import resident_bytes
from benchmarks.sandbox import agent_pid, end_agent
from peerstore.shard_records import ShardKey, VersionId
from tieredckpt.format.manifest import StateTable, TableTensor
from tieredckpt.format.shard_layout import TensorEntry, build_layout
from tieredckpt.format.slice_boxes import Box
from tieredckpt.restore.step_index import RankReadPlan
from tieredckpt.session.session import close_sessions, open_session
from tieredckpt.settings import Settings, settings_from_mapping

JOB, STEP = "pieces", 1
WIDTH = 4
GROUP = VersionId(1, STEP, 0, "bench")


def name_of(number: int) -> str:
    return f"model.layers.{number // 12}.attention.projection{number % 12}.weight"


def sharded(ranks: int, pieces: int) -> Iterator[tuple[list[TensorEntry], StateTable]]:
    """Yield the entries and table of each rank, with one row of every tensor per rank."""
    table = StateTable(
        tuple(TableTensor(name_of(n), "float32", (ranks, WIDTH)) for n in range(pieces)), (), described=True, split=True
    )
    for rank in range(ranks):
        yield [piece(name_of(n), (ranks, WIDTH), rank, 1) for n in range(pieces)], table


def apart(ranks: int, pieces: int) -> Iterator[tuple[list[TensorEntry], StateTable]]:
    """Yield the entries and table of each rank, with separate tensors per rank."""
    names = [[f"rank{rank}.{name_of(n)}" for n in range(pieces)] for rank in range(ranks)]
    table = StateTable(
        tuple(TableTensor(name, "float32", (1, WIDTH), part=rank) for rank in range(ranks) for name in names[rank]),
        (),
        described=True,
        split=True,
    )
    for rank in range(ranks):
        yield [piece(name, (1, WIDTH), 0, 1) for name in names[rank]], table


def piece(name: str, shape: tuple[int, ...], first: int, rows: int) -> TensorEntry:
    return TensorEntry(name, "float32", shape, Box((first, 0), (rows, WIDTH)), 4)


def settings_at(directory: str) -> Settings:
    return settings_from_mapping({"agent": {"directory": directory, "budget": "8GiB"}})


def save(directory: str, kind: str, ranks: int, pieces: int) -> dict[str, float]:
    session = open_session(JOB, settings_at(directory))
    laid = sealed = 0.0
    for part, (entries, table) in enumerate({"sharded": sharded, "apart": apart}[kind](ranks, pieces)):
        began = time.perf_counter()
        layout = build_layout(entries, (), {entry.fqn: tuple(entry.fqn.split(".")) for entry in entries})
        assert layout.header_bytes
        laid += time.perf_counter() - began
        began = time.perf_counter()
        key = ShardKey(JOB, STEP, GROUP.epoch, GROUP.incarnation, GROUP.attempt, part)
        staged = session.slots.lease(key, ranks, layout, 0, wait_s=60.0)
        session.seal(staged, key, (), durable=False, table=table if part == 0 else None)
        sealed += time.perf_counter() - began
    return {"lay out, s a rank": laid / ranks, "seal, s a rank": sealed / ranks}


def find(directory: str, rank: int, wanted: list[tuple[str, Box]]) -> dict[str, float]:
    session = open_session(JOB, settings_at(directory))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    step = RankReadPlan(session.agent, JOB, GROUP)
    described = time.perf_counter()
    ranges = step.plan(rank, wanted, ())
    done = time.perf_counter()
    assert sum(last - first for found in ranges.values() for first, last in found) == 16 * sum(
        box.volume // WIDTH for _, box in wanted
    )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "pieces": sum(map(len, step.pieces.values())),
        "names, s": described - began,
        "plan, s": done - described,
        "describe + plan, s": done - began,
        "grown, MiB": grown / 1024,
    }


def own(kind: str, ranks: int, pieces: int, rank: int) -> list[tuple[str, Box]]:
    if kind == "apart":
        return [(f"rank{rank}.{name_of(n)}", Box((0, 0), (1, WIDTH))) for n in range(pieces)]
    return [(name_of(n), Box((rank, 0), (1, WIDTH))) for n in range(pieces)]


def resharded(kind: str, ranks: int, pieces: int) -> list[tuple[str, Box]]:
    """Return the boxes of a middle rank in a world of half the size.

    These are two rows of each tensor, or ``pieces`` whole tensors spread over all ranks.
    """
    if kind == "apart":
        return [(f"rank{(n % ranks)}.{name_of(n)}", Box((0, 0), (1, WIDTH))) for n in range(pieces)]
    return [(name_of(n), Box((ranks // 2, 0), (2, WIDTH))) for n in range(pieces)]


def measure(kind: str, ranks: int, pieces: int) -> dict[str, object]:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tieredckpt-bench-") as directory:
        place = Path(directory)

        def alone(function, *args):
            with context.Pool(1) as pool:
                return pool.apply(function, (directory, *args))

        try:
            rows: dict[str, object] = {"save": alone(save, kind, ranks, pieces)}
            agent = agent_pid(place)
            rows["agent after saving, MiB"] = resident_bytes(agent) >> 20
            for what, rank, wanted in (
                ("restore, first to ask", 0, own(kind, ranks, pieces, 0)),
                ("restore, next", ranks - 1, own(kind, ranks, pieces, ranks - 1)),
                ("reshard, first to ask", ranks + 1, resharded(kind, ranks, pieces)),
                ("reshard, next", ranks + 2, resharded(kind, ranks, pieces)),
            ):
                rows[what] = alone(find, rank, wanted)
                rows[f"agent after {what}, MiB"] = resident_bytes(agent) >> 20
            return rows
        finally:
            close_sessions()
            end_agent(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("sharded", "apart"), default="sharded")
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--pieces", type=int, default=1000, help="pieces of each rank (default: 1000)")
    args = parser.parse_args()
    print(json.dumps(measure(args.kind, args.ranks, args.pieces), indent=1))


if __name__ == "__main__":
    main()
