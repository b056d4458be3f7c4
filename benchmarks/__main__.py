"""Measure all subjects, or write docs/benchmarks.md from stored results with ``table RAW.json``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import (
    agent_start,
    blocked,
    drain,
    fixed_tree,
    hydrate,
    load,
    meeting,
    memory,
    peer_memory,
    planning,
    recovery,
    recovery_jobs,
    replicate,
    reshard,
    resize,
    save,
)
from benchmarks.clients import ENVIRONMENT
from benchmarks.goals import failed, unchecked
from benchmarks.machine import facts
from benchmarks.null_server import null_server
from benchmarks.page import markdown, read_reasons
from benchmarks.parameters import ON_DEVICES, STATES, SUBJECTS, WORLDS, Parameters, Scene, thread_counts
from benchmarks.ranks import Ranks, rank_processes
from benchmarks.rounds import merge
from benchmarks.sandbox import sandbox
from benchmarks.summary import put_into, readme_table
from benchmarks.table import print_group, print_verdicts
from peerstore.sizes_and_durations import parse_size, show_size
from tests.support.s3 import moto_server, rclone_server

_ROOT = Path(__file__).parent.parent
Run = Callable[[int, Scene], list[dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """Scenes of one subject: its states, ranks, threads and servers."""

    name: str
    run: Run
    title: str = ""
    states: tuple[str, ...] = ("",)
    each_rank_count: bool = False
    all_threads: bool = False
    servers: tuple[str, ...] = ()
    share: int = 1
    """Divisor of ``--size``."""
    prepare: Run | None = None
    """Untimed run on ``writers`` ranks that saves the state to load."""
    worlds: tuple[tuple[int, int], ...] = ()
    """Pairs of ranks that prepare and ranks that run; empty for ``--ranks``."""
    resharded: bool = False
    """Whether ``--worlds`` sets the ranks."""
    starts_ranks: bool = False
    """Whether the subject starts its own jobs, whose ranks are in ``worlds``, instead of running on ranks."""
    device: str = "cpu"
    """Device kind of these jobs."""


_ABC = ("A", "B", "C")
_MEETINGS = tuple((0, ranks) for ranks in (2, 4, 8, 16, 32, 64))
_RESIZED = ((2, 4), (4, 2))
_SCENES = (
    Subject("P1", blocked.run, states=_ABC, each_rank_count=True, all_threads=True),
    Subject("P2", save.run, states=_ABC, each_rank_count=True, all_threads=True),
    Subject("P3", load.run, states=_ABC, each_rank_count=True, all_threads=True),
    Subject("P4", replicate.run, "from one node to another", states=_ABC, worlds=((0, 2),)),
    Subject("P5", hydrate.run, "from one node to another", states=_ABC, worlds=((1, 2),), prepare=hydrate.save),
    Subject("P6", reshard.run, states=("A", "B", "U"), share=4, prepare=reshard.save, resharded=True),
    Subject("P7", drain.run_null, "to a server that drops everything", servers=("rclone", "moto", "null")),
    Subject("P7", drain.run_real, "to rclone's S3 server", servers=("rclone",), share=4),
    Subject(
        "P7", drain.run_steps, "a training loop during a drain to rclone's S3 server", servers=("rclone",), share=4
    ),
    Subject("P8", planning.run, each_rank_count=True),
    *(
        Subject(
            "P9",
            partial(recovery.run, fault=fault, model=model, device=device),
            f"{model}, {fault}" + (", CUDA and NCCL" if device == "cuda" else ""),
            share=share,
            worlds=((0, recovery_jobs.RANKS),),
            starts_ranks=True,
            device=device,
        )
        for fault, model, share, device in recovery.SCENES
    ),
    Subject("P10", agent_start.run),
    Subject("P11", memory.run, states=("C",), each_rank_count=True, servers=("rclone",)),
    Subject("P11", peer_memory.replicate, "copies on another node", states=("C",), worlds=((0, 2),)),
    Subject(
        "P11",
        peer_memory.hydrate,
        "a fresh rank reads from another node",
        states=("C",),
        worlds=((1, 2),),
        prepare=hydrate.save,
    ),
    Subject("P12", fixed_tree.run, share=16, worlds=((0, 2), (0, 4))),
    Subject("P13", resize.run, share=16, worlds=_RESIZED, starts_ranks=True),
    Subject("P13", resize.run, share=2, worlds=_RESIZED, starts_ranks=True),
    Subject("P14", meeting.run, worlds=_MEETINGS, starts_ranks=True),
)


@contextlib.contextmanager
def _endpoint(server: Callable[[Path], Any], folder: Path) -> Iterator[str]:
    with server(folder) as running:
        yield running.endpoint


_SERVERS: dict[str, Callable[[Path], Any]] = {
    "rclone": lambda folder: _endpoint(rclone_server, folder),
    "moto": lambda folder: _endpoint(moto_server, folder),
    "null": lambda _: null_server(),
}


def scenes(parameters: Parameters, folder: Path) -> Iterator[tuple[Subject, Scene]]:
    """Yield all scenes of a run, in order."""
    for subject in _SCENES:
        if subject.name not in parameters.subjects or not _is_there(subject, parameters.device):
            continue
        size = parameters.size_bytes // subject.share
        for writers, ranks in _worlds(subject, parameters):
            for threads in (parameters.threads or thread_counts(ranks)) if subject.all_threads else (1,):
                for state in subject.states:
                    if state in parameters.states or len(subject.states) == 1:
                        scene = Scene(subject.name, state, ranks, threads, size, parameters.rounds, folder)
                        yield (
                            subject,
                            dataclasses.replace(
                                scene, spoil=parameters.spoil, writers=writers, device=parameters.device
                            ),
                        )


def _is_there(subject: Subject, device: str) -> bool:
    """Return whether a run with ``--device`` includes the subject.

    Of P9 it includes only a lost rank; on the CPU only the smaller model.
    """
    if not device or not subject.starts_ranks:
        return True
    return subject.device == device and recovery_jobs.RANK in subject.title and (device != "cpu" or subject.share > 2)


def _worlds(subject: Subject, parameters: Parameters) -> tuple[tuple[int, int], ...]:
    """Return the pairs of ranks that save beforehand and ranks that run."""
    if subject.resharded:
        return parameters.worlds
    return subject.worlds or tuple((0, ranks) for ranks in (parameters.ranks if subject.each_rank_count else (1,)))


def measure(ranks: Ranks, subject: Subject, scene: Scene) -> dict[str, Any]:
    """Measure one scene in its own sandbox."""
    with contextlib.ExitStack() as undo:
        folder = undo.enter_context(sandbox())
        scene = dataclasses.replace(scene, folder=folder)
        endpoints = {name: undo.enter_context(_SERVERS[name](folder)) for name in subject.servers}
        scene = dataclasses.replace(scene, **endpoints)
        if subject.prepare is not None:
            ranks.run(scene.writers, subject.prepare, scene)
        # Jobs start from this process, not from a rank, so that SIGTERM ends them first.
        rows = merge([subject.run(0, scene)] if subject.starts_ranks else ranks.run(scene.ranks, subject.run, scene))
    return {
        "subject": subject.name,
        "title": _title(subject, scene),
        "state": scene.state,
        "ranks": scene.ranks,
        "writers": scene.writers,
        "threads": scene.threads,
        "size_bytes": scene.size_bytes,
        "part_bytes": scene.part_bytes,
        "device": scene.device or subject.device,
        "rows": rows,
    }


def _title(subject: Subject, scene: Scene) -> str:
    if subject.starts_ranks and subject.worlds == _MEETINGS:
        return f"{scene.ranks} ranks on {meeting.nodes_of(scene.ranks)} nodes"
    if subject.starts_ranks:
        what = subject.title or f"{scene.writers} ranks become {scene.ranks}"
        return f"{show_size(scene.size_bytes)}, {what}"
    return f"saved by {scene.writers}, loaded by {scene.ranks}" if subject.resharded else subject.title


def run(parameters: Parameters, out: Path) -> dict[str, Any]:
    """Measure all scenes and write the results to ``out`` after each of them.

    Each subject has its own processes, because opponents of another subject leave memory allocated in theirs.
    """
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS="")  # each scene sets torch's threads
    os.environ.pop("OMP_NUM_THREADS")
    raw: dict[str, Any] = {"machine": facts(), "parameters": dataclasses.asdict(parameters), "groups": []}
    todo = list(scenes(parameters, Path()))
    out.parent.mkdir(parents=True, exist_ok=True)
    numbers = itertools.count(1)
    for _, same in itertools.groupby(todo, key=lambda one: one[0]):
        with rank_processes() as ranks:
            for subject, scene in same:
                what = f"{scene.subject} {subject.title} {scene.state}".replace("  ", " ").strip()
                _say(f"[{next(numbers)}/{len(todo)}] {what}, {scene.ranks} rank(s), {scene.threads} thread(s) ...")
                began = time.monotonic()
                raw["groups"].append(measure(ranks, subject, scene))
                out.write_text(json.dumps(raw, indent=1) + "\n")
                _say(f"    {time.monotonic() - began:.1f} s")
    return raw


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def wrong(raw: dict[str, Any]) -> bool:
    """Return whether a result differs from the expected state or was not compared."""
    return any(failed(group) or unchecked(group) for group in raw["groups"])


def read_raw(sources: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return runs by file name, relative to the repository as the documentation quotes it."""
    resolved = [source.resolve() for source in sources]
    names = [str(path.relative_to(_ROOT)) if path.is_relative_to(_ROOT) else path.name for path in resolved]
    return {name: json.loads(path.read_text()) for name, path in zip(names, resolved, strict=True)}


def _listed(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        named = tuple(part.strip().upper() for part in text.split(",") if part.strip())
        strange = [name for name in named if name not in known]
        if strange:
            raise argparse.ArgumentTypeError(f"{', '.join(strange)}: known are {', '.join(known)}")
        return named

    return parse


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    worlds = [part.split("-") for part in text.split(",")]
    return tuple((int(writers), int(ranks)) for writers, ranks in worlds)


def _default_out() -> Path:
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return _ROOT / "benchmarks" / "results" / f"{today}-{platform.node() or 'machine'}.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        type=_listed(SUBJECTS),
        default=SUBJECTS,
        metavar="SUBJECTS",
        help="subjects to measure: P1,P2,... (default: all)",
    )
    parser.add_argument(
        "--size", type=parse_size, default=1 << 30, metavar="SIZE", help="bytes of each state (default: 1GiB)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of each table (default: 5)")
    parser.add_argument(
        "--ranks", type=_counts, default=(1, 2), metavar="N,...", help="numbers of ranks (default: 1,2)"
    )
    parser.add_argument(
        "--worlds",
        type=_pairs,
        default=WORLDS,
        metavar="N-M,...",
        help="P6: pairs of saving and loading ranks (default: 2-3,4-3,8-6,6-8)",
    )
    parser.add_argument(
        "--threads",
        type=_counts,
        default=(),
        metavar="N,...",
        help="numbers of threads in each rank (default: 1, and an equal share of the cores)",
    )
    parser.add_argument(
        "--states", type=_listed(STATES), default=STATES, metavar="STATES", help="states to measure (default: A,B,C,U)"
    )
    parser.add_argument("--device", default="", metavar="KIND", help="device of states and jobs, for P1, P3, P5 and P9")
    parser.add_argument("--out", type=Path, help="file of the results (default: benchmarks/results/DATE-HOST.json)")
    parser.add_argument(
        "--spoil",
        action="append",
        default=[],
        metavar="ROW",
        help="flip a byte of this row's result before it is compared",
    )
    return parser


def _table_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks table", description="Write docs/benchmarks.md.")
    parser.add_argument("raw", type=Path, nargs="+", help="result files; the last file with a scene provides it")
    parser.add_argument(
        "--to", type=Path, default=_ROOT / "docs" / "benchmarks.md", help="page to write (default: docs/benchmarks.md)"
    )
    parser.add_argument(
        "--readme",
        type=Path,
        metavar="GPU_JSON",
        help="write the table of README.md too, with a GPU's results in GPU_JSON",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["table"]:
        asked = _table_parser().parse_args(arguments[1:])
        raws = read_raw(asked.raw)
        asked.to.write_text(markdown(raws, reasons=read_reasons()))
        if asked.readme:
            put_into(_ROOT / "README.md", readme_table({**read_raw([asked.readme]), **raws}))
        return 0
    asked = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends servers and agents and removes files
    if asked.device:
        asked.only = tuple(name for name in asked.only if name in ON_DEVICES)
    parameters = Parameters(
        asked.only,
        asked.states,
        asked.ranks,
        asked.worlds,
        asked.size,
        asked.rounds,
        asked.threads,
        tuple(asked.spoil),
        asked.device,
    )
    out = asked.out or _default_out()
    raw = run(parameters, out)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for group in raw["groups"]:
        print_group(console, group)
    if not parameters.device:  # targets hold for states in memory and compare with opponents
        print_verdicts(console, raw["groups"])
    _say(f"every sample: {out}")
    return 1 if wrong(raw) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
