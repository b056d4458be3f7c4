"""Interleaved rounds of everybody who does the same thing, and a comparison of what came out, bit for bit."""

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
    """What a run says that took part of its time only; 0 for a rank that merely helps."""

    seconds: float


@dataclass
class Contender:
    """One way to do what a row is about."""

    name: str
    kind: Kind
    run: Callable[[int], object]
    """The timed part; its argument counts all runs of the scene. What it did before the part that counts is left out
    when it returns how long that took (:class:`Took`)."""
    found: Callable[[], Mapping[str, Any]] | None
    """What it left behind, to be compared; ``None`` for limits that move no bytes, and on ranks that only help."""
    after: Callable[[], object] = lambda: None
    """Waits for what goes on in the background; not timed."""
    before: Callable[[], object] = lambda: None
    warm_runs: int = 1
    objects: bool = True
    """Whether it keeps Python objects too."""
    note: str = ""
    samples: list[float] = field(default_factory=list)
    first: float | None = None
    equal: bool | None = None
    differs: str = ""


def built(scene: Scene, *, rank: int, world: int) -> State:
    """The scene's state, where it is to be."""
    state = build(scene.state, scene.size_bytes, rank=rank, world=world)
    return moved(state, scene.device) if scene.device else state


def those_of(scene: Scene, contenders: Sequence[Contender]) -> list[Contender]:
    """All of them; where the state is on a device, ours beside a plain copy by the device."""
    return [one for one in contenders if not scene.device or one.kind == "ours" or one.name == COPY]


def missing(name: str, reason: str) -> dict[str, Any]:
    """The row of an opponent that cannot take part."""
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
    """Run all contenders in turn, ``rounds`` times; everybody goes first in some round.

    ``prepare`` comes before each run. Results are compared after every run, or (where reading them back takes long)
    after each contender's last.
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
    """What was counted, not timed."""
    return {
        "name": name, "kind": kind, "unit": "B", "first": None, "samples": list(samples), "equal": None,
        "compared": False, "note": note,
    }  # fmt: skip


def merge(by_rank: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All ranks' rows as one: a run takes as long as its slowest rank, and is right when it is right everywhere."""
    rows = []
    for same in zip(*by_rank, strict=True):
        row = dict(same[0])
        by_rank_samples = [one["samples"] for one in same if one["samples"]]  # some things only rank 0 measures
        row["samples"] = [max(values) for values in zip(*by_rank_samples, strict=True)]
        row["samples_by_rank"] = by_rank_samples
        firsts = [one["first"] for one in same if one["first"] is not None]
        row["first"] = max(firsts) if firsts else None
        equals = [one["equal"] for one in same if one.get("compared")]  # a rank that helps has nothing to compare
        row["compared"] = bool(equals)
        row["equal"] = None if None in equals or not equals else all(equals)
        row["note"] = next((one["note"] for one in same if one["note"]), "")
        rows.append(row)
    return rows


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


def no_dist() -> bool:
    """What DCP's calls are told."""
    return not dist.is_initialized()


def use_threads(count: int) -> None:
    torch.set_num_threads(count)
