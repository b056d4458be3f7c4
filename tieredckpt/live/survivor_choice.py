"""The newest step that survivors hold completely between them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
import xxhash

from tieredckpt.format.slice_boxes import Box, full_box, uncovered

Dims = tuple[int, ...]


class HeldSlice(msgspec.Struct, frozen=True):
    """A piece of a tensor that a rank has."""

    fqn: str
    dtype: str
    shape: Dims
    """Of the whole tensor."""
    offsets: Dims
    sizes: Dims


class SurvivorCoverage(msgspec.Struct, frozen=True):
    """What a rank has of a step. Replicas have the same."""

    tensors: tuple[HeldSlice, ...]
    objects: tuple[str, ...]

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(self))


class SurvivorHolding(msgspec.Struct, frozen=True):
    """That a rank has something of a step."""

    step: int
    world_epoch: int
    """The world that the step was reached in."""
    coverage_digest: str
    """Its digest."""
    complete: bool = False
    """Its names are known to be those of the whole state: every rank of that world had the same."""


class SurvivorReport(msgspec.Struct, frozen=True):
    """What a rank says of itself before a world's training begins."""

    world_epoch: int = -1
    """The last world it trained in."""
    holdings: Mapping[str, SurvivorHolding] = {}
    """By job."""
    reached_steps: Mapping[str, int] = {}
    """The last step of each job that it had completed in that world."""
    trusted_steps: Mapping[str, int] | None = None
    """The last step of each job that was complete here before this rank aborted anything; ``None`` where an aborted
    collective raises, and nobody takes what another rank's abort has left for its result."""
    off: str = ""
    """Why it noted nothing in that world."""


class ContentDigest(msgspec.Struct, frozen=True):
    """Of the parameters and moments that a rank has of a step."""

    digest: str = ""
    why: str = ""
    """They cannot be read."""


class RequiredNames(msgspec.Struct, frozen=True):
    """The names of everything, as the newest whole step has them."""

    step: int
    tensors: frozenset[str]
    objects: frozenset[str]


class SurvivorChoice(msgspec.Struct, frozen=True):
    """The step that is given, or why none is."""

    step: int = -1
    why: str = ""


def holdings_by_job(stands: Sequence[SurvivorReport]) -> dict[str, dict[int, SurvivorHolding]]:
    """Who has something, by job and rank. Where the job has trained on since, it has left that past."""
    newest = max((stand.world_epoch for stand in stands), default=-1)
    found: dict[str, dict[int, SurvivorHolding]] = {}
    for rank, stand in enumerate(stands):
        for job, holding in stand.holdings.items():
            if holding.world_epoch == newest:
                found.setdefault(job, {})[rank] = holding
    return found


def reached_steps(stands: Sequence[SurvivorReport]) -> dict[str, int]:
    """The last step of each job that any rank had completed in the last world."""
    newest = max((stand.world_epoch for stand in stands), default=-1)
    found: dict[str, int] = {}
    for stand in stands:
        if stand.world_epoch == newest:
            for job, step in stand.reached_steps.items():
                found[job] = max(step, found.get(job, -1))
    return found


def why_off(stands: Sequence[SurvivorReport]) -> str:
    """Why a rank of the last world noted nothing; empty where all did."""
    newest = max((stand.world_epoch for stand in stands), default=-1)
    return next(
        (f"rank {rank}: {one.off}" for rank, one in enumerate(stands) if one.world_epoch == newest and one.off), ""
    )


def trusted_steps(stands: Sequence[SurvivorReport]) -> dict[str, int]:
    """Up to which step of each job no survivor had aborted anything, where that could be taken for a result.

    A rank that aborts tells the others that there is something to read, and there is not: theirs ends as well. So what
    one survivor has of a step that another one did not complete may be anything. Who was killed has aborted nothing.
    """
    newest = max((stand.world_epoch for stand in stands), default=-1)
    there = [stand.trusted_steps for stand in stands if stand.world_epoch == newest and stand.trusted_steps is not None]
    jobs = set[str]().union(*there)
    return {job: min(one.get(job, -1) for one in there) for job in jobs}


def ranks_to_compare(holdings: Mapping[int, SurvivorHolding]) -> dict[int, list[int]]:
    """By the first of them, ranks that say they have the same of the same step."""
    found: dict[tuple[int, str], list[int]] = {}
    for rank in sorted(holdings):
        found.setdefault((holdings[rank].step, holdings[rank].coverage_digest), []).append(rank)
    return {ranks[0]: ranks for ranks in found.values() if len(ranks) > 1}


def diverging_replicas(
    holdings: Mapping[int, SurvivorHolding], contents: Mapping[int, ContentDigest]
) -> dict[int, str]:
    """Steps of which replicas do not hold the same, and who."""
    found: dict[int, str] = {}
    for first, ranks in ranks_to_compare(holdings).items():
        for rank in ranks:
            here, there = contents[first], contents[rank]
            if here.why or there.why:
                found.setdefault(holdings[rank].step, f"rank {rank if there.why else first}: {there.why or here.why}")
            elif here.digest != there.digest:
                found.setdefault(holdings[rank].step, f"ranks {first} and {rank} do not hold the same parameters")
    return found


def coverage_reporters(holdings: Mapping[int, SurvivorHolding]) -> dict[int, str]:
    """For each cover the first rank that has it: it says what it is."""
    found: dict[str, int] = {}
    for rank in sorted(holdings):
        found.setdefault(holdings[rank].coverage_digest, rank)
    return {rank: cover for cover, rank in found.items()}


def choose_survivor_step(
    holdings: Collection[SurvivorHolding],
    covers: Mapping[str, SurvivorCoverage],
    needed: RequiredNames | None,
    *,
    unknown: str = "",
    most: int | None = None,
    wrong: Mapping[int, str] = {},
) -> SurvivorChoice:
    """The newest step that is newer than what is saved, and of which nothing is missing.

    ``most``: no newer one is believed (:func:`trusted_steps`); ``wrong``: nor one of these, and why
    (:func:`diverging_replicas`).

    Where no step is whole (or ``unknown``: why that could not be found out) survivors count that know themselves what
    belongs to the state: nothing older is lost with theirs, for all that the last world saved it had reached before.
    """
    if not holdings:
        return SurvivorChoice(why="no rank still has the state of a step boundary")
    if needed is None:
        knowing = {holding.step for holding in holdings if holding.complete}
        if not knowing:
            why = f"what is saved is not known: {unknown}" if unknown else "no step is whole"
            return SurvivorChoice(why=f"{why}, and no survivor knows what belongs to the state")
        holdings = [holding for holding in holdings if holding.step in knowing]
        needed = RequiredNames(-1, frozenset(), frozenset())
    refused = []
    for step in sorted({holding.step for holding in holdings}, reverse=True):
        if step <= needed.step:
            refused.append(f"step {needed.step} is a complete checkpoint")
            break
        if most is not None and step > most:
            refused.append(f"of step {step} it is not known on all survivors that it was complete before the abort")
            continue
        if step in wrong:
            refused.append(f"of step {step} {wrong[step]}")
            continue
        there = {holding.coverage_digest for holding in holdings if holding.step == step}
        missing = sorted(missing_names([covers[name] for name in there if name in covers], needed))
        if not missing:
            return SurvivorChoice(step)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        refused.append(f"of step {step} no survivor has {missing[0]}{more}")
    return SurvivorChoice(why="; ".join(refused))


def missing_names(covers: Sequence[SurvivorCoverage], needed: RequiredNames) -> Iterator[str]:
    """Names of which something is missing."""
    objects = {name for cover in covers for name in cover.objects}
    boxes: dict[str, set[Box]] = {}
    kinds: dict[str, set[tuple[str, Dims]]] = {}
    for held in _all(covers):
        boxes.setdefault(held.fqn, set()).add(Box(held.offsets, held.sizes))
        kinds.setdefault(held.fqn, set()).add((held.dtype, held.shape))
    yield from needed.objects - objects - boxes.keys()
    yield from needed.tensors - boxes.keys()
    for fqn, found in boxes.items():
        ((_, shape), *others) = kinds[fqn]
        if others or uncovered(full_box(shape), sorted(found)):
            yield fqn


def _all(covers: Iterable[SurvivorCoverage]) -> Iterator[HeldSlice]:
    for cover in covers:
        yield from cover.tensors
