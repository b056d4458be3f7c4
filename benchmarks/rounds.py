"""Interleaved rounds of contenders, and bit-for-bit comparison of their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.parameters import Scene
from benchmarks.states import State, build, difference, moved, raw, tensors

Kind = Literal["ours", "opponent", "limit"]
COPY = "copy (R)"


class Took(NamedTuple):
    """Counted seconds of a run of which only a part counts; 0 on a rank that only helps."""

    seconds: float


@dataclass
class Contender:
    """One way to do the task of a table."""

    name: str
    kind: Kind
    run: Callable[[int], object]
    """Timed part; its argument counts all runs of the scene.

    If only its last part counts, it returns the seconds of that part as :class:`Took`.
    """
    found: Callable[[], Mapping[str, Any]] | None
    """Result to compare; ``None`` for limits that move no bytes, and on ranks that only help."""
    after: Callable[[], object] = lambda: None
    """Wait for background work; not timed."""
    before: Callable[[], object] = lambda: None
    warm_runs: int = 1
    objects: bool = True
    """Whether it stores Python objects too."""
    note: str = ""
    samples: list[float] = field(default_factory=list)
    first: float | None = None
    equal: bool | None = None
    differs: str = ""


def built(scene: Scene, *, rank: int, world: int) -> State:
    """Build the scene's state on its device."""
    state = build(scene.state, scene.size_bytes, rank=rank, world=world)
    return moved(state, scene.device) if scene.device else state


def those_of(scene: Scene, contenders: Sequence[Contender]) -> list[Contender]:
    """Return all contenders, or for a state on a device only ours and the device's plain copy."""
    return [one for one in contenders if not scene.device or one.kind == "ours" or one.name == COPY]


def missing(name: str, reason: str) -> dict[str, Any]:
    """Return the row of an opponent that cannot run."""
    return {"name": name, "kind": "opponent", "unit": "s", "first": None, "samples": [], "equal": None, "note": reason}


def measure(
    contenders: Sequence[Contender],
    rounds: int,
    *,
    expected: State,
    prepare: Callable[[int], object],
    every_round: bool,
    spoil: tuple[str, ...],
) -> list[dict[str, Any]]:
    """Run all contenders in turn, ``rounds`` times, each round with another contender first.

    ``prepare`` runs before each run. Results are compared after every run with ``every_round``, otherwise after each
    contender's last run.
    """
    turn = 0
    for contender in contenders:
        for number in range(contender.warm_runs):
            turn += 1
            took = _once(contender, turn, prepare)
            contender.first = took if number == 0 else contender.first
    for number in range(rounds):
        shift = number % len(contenders)
        for contender in [*contenders[shift:], *contenders[:shift]]:
            turn += 1
            contender.samples.append(_once(contender, turn, prepare))
            if every_round or number == rounds - 1:
                _compare(contender, expected, spoil)
    return [as_row(contender) for contender in contenders]


def _once(contender: Contender, turn: int, prepare: Callable[[int], object]) -> float:
    prepare(turn)
    contender.before()
    together()
    began = time.perf_counter()
    said = contender.run(turn)
    took = said.seconds if isinstance(said, Took) else time.perf_counter() - began
    contender.after()
    together()
    return took


def _compare(contender: Contender, expected: State, spoil: tuple[str, ...]) -> None:
    if contender.found is None:
        return
    found = contender.found()
    if contender.name in spoil:
        raw(next(iter(tensors(found).values())))[0] ^= 1
    differs = difference(expected, found, objects=contender.objects)
    contender.equal = not differs and contender.equal is not False
    contender.differs = contender.differs or differs


def as_row(contender: Contender) -> dict[str, Any]:
    note = f"{contender.differs} differs" if contender.differs else contender.note
    return {
        "name": contender.name,
        "kind": contender.kind,
        "unit": "s",
        "first": contender.first,
        "samples": contender.samples,
        "equal": contender.equal,
        "compared": contender.found is not None,
        "note": note,
    }


def byte_row(name: str, kind: Kind, samples: Sequence[float], note: str) -> dict[str, Any]:
    """Return a row of bytes instead of seconds."""
    return {
        "name": name, "kind": kind, "unit": "B", "first": None, "samples": list(samples), "equal": None,
        "compared": False, "note": note,
    }  # fmt: skip


def merge(by_rank: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge all ranks' rows: the slowest rank's time, and equal only if all ranks are equal."""
    rows = []
    for same in zip(*by_rank, strict=True):
        row = dict(same[0])
        by_rank_samples = [one["samples"] for one in same if one["samples"]]  # some rows have samples on rank 0 only
        row["samples"] = [max(values) for values in zip(*by_rank_samples, strict=True)]
        row["samples_by_rank"] = by_rank_samples
        firsts = [one["first"] for one in same if one["first"] is not None]
        row["first"] = max(firsts) if firsts else None
        equals = [one["equal"] for one in same if one.get("compared")]  # a rank that only helps has no result
        row["compared"] = bool(equals)
        row["equal"] = None if None in equals or not equals else all(equals)
        row["note"] = next((one["note"] for one in same if one["note"]), "")
        rows.append(row)
    return rows


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


def no_dist() -> bool:
    """Return the ``no_dist`` argument of DCP's calls."""
    return not dist.is_initialized()


def use_threads(count: int) -> None:
    torch.set_num_threads(count)
