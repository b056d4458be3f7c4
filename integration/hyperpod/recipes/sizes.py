"""How large a recipe's job may be: ``elastic_policy`` and the sizes of ``scale_config``, as one scaling policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from elastic.batch.recipes import ScaleConfig, Size
from elastic.errors import PolicyError
from elastic.world import foreign
from elastic.world.policy import ScalingPolicy
from integration.hyperpod.recipes.document import Document

SWITCHES = ("is_elastic", "use_graceful_shutdown")


class Scaling(NamedTuple):
    policy: ScalingPolicy
    elastic: bool
    notes: tuple[str, ...]


def scaling_of(doc: Document, scale: ScaleConfig) -> Scaling:
    """Sizes are those that the recipe states a batch for, or the steps it names; within its own limits."""
    stated = doc.section("elastic_policy")
    known = {key: value for key, value in stated.items() if key in foreign.RECIPE or key in SWITCHES}
    doc.claim(*(f"elastic_policy.{key}" for key in known))
    notes = [f"elastic_policy.{key} is unknown and has no effect" for key in stated if key not in known]
    sizes = [size.nodes for size in scale.sizes.values()]
    elastic = doc.flag("elastic_policy.is_elastic") or False
    if not known:
        return Scaling(_policy(doc, {"min_nodes": min(sizes), "max_nodes": max(sizes)}, sizes), elastic, tuple(notes))
    least = doc.whole("elastic_policy.min_nodes") or min(sizes)
    most = doc.whole("elastic_policy.max_nodes") or max(sizes)
    if known.get("replica_increment_step") is not None:
        sizes = []
    elif beyond := [size for size in sizes if not least <= size <= most]:
        sizes = [size for size in sizes if least <= size <= most]
        if not sizes and least <= most:
            raise doc.wrong(
                "elastic_policy",
                f"allows {least} to {most} nodes (min_nodes, max_nodes), but scale_config is for {_list(beyond)} only",
            )
        notes.append(f"scale_config.{_list(beyond)} is beyond min_nodes {least} and max_nodes {most}: never used")
    if least < min(scale.sizes):
        raise doc.wrong(
            "elastic_policy.min_nodes",
            f"is {least}, but scale_config begins with {min(scale.sizes)}: nobody says what holds below",
        )
    ends = {"min_nodes": least, "max_nodes": most}
    return Scaling(_policy(doc, {**known, **ends}, sizes), elastic, tuple(notes))


def within(policy: ScalingPolicy, least: int, most: int, *, where: str) -> ScalingPolicy:
    """The same, kept to so many nodes; or what makes that impossible."""
    import msgspec

    sizes = [size for size in policy.sizes if least <= size <= most]
    if not sizes:
        raise PolicyError(f"{where}: of {least} to {most} nodes none is a size; there are {_list(policy.sizes)}")
    return msgspec.structs.replace(
        policy,
        min_replicas=min(sizes),
        max_replicas=max(sizes),
        replica_increment_step=None,
        replica_discrete_values=tuple(sizes) if len(sizes) > 1 else (),
        replicas=None,
    )


def one_size(nodes: int, batch: int, microbatch: int | None, rate: float | None) -> Size:
    return Size(nodes, nodes, batch, microbatch, rate, None)


def _policy(doc: Document, stated: Mapping[Any, Any], sizes: list[int]) -> ScalingPolicy:
    others: dict[str, Any] = {"replica_discrete_values": tuple(sizes)} if len(sizes) > 1 else {}
    try:
        return ScalingPolicy.from_elastic_policy(stated, **others)
    except PolicyError as error:
        raise PolicyError(f"{doc.name}: elastic_policy: {error}") from error


def _list(numbers: Any) -> str:
    return ", ".join(str(number) for number in sorted(numbers))
