"""Choice of the newest step that the survivors together hold completely. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
import xxhash

from tieredckpt.format.slice_boxes import Box, full_box, uncovered

Dims = tuple[int, ...]


class HeldSlice(msgspec.Struct, frozen=True):
    """A piece of a tensor that a rank holds."""

    fqn: str
    dtype: str
    shape: Dims
    """Shape of the whole tensor."""
    offsets: Dims
    sizes: Dims


class SurvivorCoverage(msgspec.Struct, frozen=True):
    """The pieces and objects of a step that a rank holds. Replicas have equal coverage."""

    tensors: tuple[HeldSlice, ...]
    objects: tuple[str, ...]

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(self))


class SurvivorHolding(msgspec.Struct, frozen=True):
    """Statement that a rank holds a part of a step."""

    step: int
    world_epoch: int
    """Epoch of the world that reached the step."""
    coverage_digest: str
    """Digest of the rank's :class:`SurvivorCoverage`."""
    complete: bool = False
    """Whether its names are known to be all names: every rank of that world had the same."""


class SurvivorReport(msgspec.Struct, frozen=True):
    """A rank's report before the training of a world begins."""

    world_epoch: int = -1
    """Epoch of the last world that the rank trained in. -1: none."""
    holdings: Mapping[str, SurvivorHolding] = {}
    """Retained state by job."""
    reached_steps: Mapping[str, int] = {}
    """Last step of each job that the rank recorded in that world."""
    trusted_steps: Mapping[str, int] | None = None
    """Last step of each job with completed device work before this rank aborted its groups.
    ``None``: aborted collectives raise, so no rank can mistake their outputs for results."""
    off: str = ""
    """Reason why the rank recorded no boundaries in that world. Empty: it did record them."""


class ContentDigest(msgspec.Struct, frozen=True):
    """Digest of the parameters and moments of a step on one rank."""

    digest: str = ""
    why: str = ""
    """Reason why they cannot be read. Empty: they were read."""


class RequiredNames(msgspec.Struct, frozen=True):
    """Names of all tensors and objects of the newest complete step."""

    step: int
    tensors: frozenset[str]
    objects: frozenset[str]


class SurvivorChoice(msgspec.Struct, frozen=True):
    """The chosen step, or the reason why none was chosen."""

    step: int = -1
    why: str = ""


def holdings_by_job(stands: Sequence[SurvivorReport]) -> dict[str, dict[int, SurvivorHolding]]:
    """Return the holdings by job and rank. Holdings of worlds older than the last one are ignored."""
    newest = max((stand.world_epoch for stand in stands), default=-1)
    found: dict[str, dict[int, SurvivorHolding]] = {}
    for rank, stand in enumerate(stands):
        for job, holding in stand.holdings.items():
            if holding.world_epoch == newest:
                found.setdefault(job, {})[rank] = holding
    return found


def reached_steps(stands: Sequence[SurvivorReport]) -> dict[str, int]:
    """Return the last step of each job that any rank reached in the last world."""
    newest = max((stand.world_epoch for stand in stands), default=-1)
    found: dict[str, int] = {}
    for stand in stands:
        if stand.world_epoch == newest:
            for job, step in stand.reached_steps.items():
                found[job] = max(step, found.get(job, -1))
    return found


def why_off(stands: Sequence[SurvivorReport]) -> str:
    """Return why a rank of the last world recorded no boundaries. Empty: all ranks did."""
    newest = max((stand.world_epoch for stand in stands), default=-1)
    return next(
        (f"rank {rank}: {one.off}" for rank, one in enumerate(stands) if one.world_epoch == newest and one.off), ""
    )


def trusted_steps(stands: Sequence[SurvivorReport]) -> dict[str, int]:
    """Return the last step of each job that all survivors completed before any of them aborted its groups.

    A rank's abort also ends the collectives of the other ranks, with undefined outputs. So a survivor's state of a step
    that another survivor did not complete cannot be trusted. A killed rank has aborted nothing. Ranks whose aborted
    collectives raise do not restrict the result.
    """
    newest = max((stand.world_epoch for stand in stands), default=-1)
    there = [stand.trusted_steps for stand in stands if stand.world_epoch == newest and stand.trusted_steps is not None]
    jobs = set[str]().union(*there)
    return {job: min(one.get(job, -1) for one in there) for job in jobs}


def ranks_to_compare(holdings: Mapping[int, SurvivorHolding]) -> dict[int, list[int]]:
    """Return groups of ranks with equal coverage of the same step, by the first rank of each group."""
    found: dict[tuple[int, str], list[int]] = {}
    for rank in sorted(holdings):
        found.setdefault((holdings[rank].step, holdings[rank].coverage_digest), []).append(rank)
    return {ranks[0]: ranks for ranks in found.values() if len(ranks) > 1}


def diverging_replicas(
    holdings: Mapping[int, SurvivorHolding], contents: Mapping[int, ContentDigest]
) -> dict[int, str]:
    """Return the steps whose replicas differ or cannot be read, each with a description of the ranks."""
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
    """Return the coverage digests by the first rank of each: that rank sends its coverage."""
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
    """Choose the newest step after the newest checkpoint that survivors completely hold.

    ``needed``: names of that checkpoint. ``None``: no step is complete, or the lookup failed (``unknown`` is the
    reason). Then only steps count of which a survivor knows the names of the whole state. This cannot lose an older
    step: the last world had reached all steps that it saved.
    ``most``: newer steps are not trusted (:func:`trusted_steps`).
    ``wrong``: steps to exclude, with the reason (:func:`diverging_replicas`).
    """
    if not holdings:
        return SurvivorChoice(why="no rank still has the state of a step boundary")
    if needed is None:
        knowing = {holding.step for holding in holdings if holding.complete}
        if not knowing:
            why = f"the saved steps are unknown: {unknown}" if unknown else "no step is complete"
            return SurvivorChoice(why=f"{why}, and no survivor knows the names of the whole state")
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
    """Yield the names that are incomplete: missing, of different shapes or dtypes, or not fully covered."""
    objects = {name for cover in covers for name in cover.objects}
    boxes: dict[str, set[Box]] = {}
    kinds: dict[str, set[tuple[str, Dims]]] = {}
    for held in _held_slices(covers):
        boxes.setdefault(held.fqn, set()).add(Box(held.offsets, held.sizes))
        kinds.setdefault(held.fqn, set()).add((held.dtype, held.shape))
    yield from needed.objects - objects - boxes.keys()
    yield from needed.tensors - boxes.keys()
    for fqn, found in boxes.items():
        ((_, shape), *others) = kinds[fqn]
        if others or uncovered(full_box(shape), sorted(found)):
            yield fqn


def _held_slices(covers: Iterable[SurvivorCoverage]) -> Iterator[HeldSlice]:
    for cover in covers:
        yield from cover.tensors
