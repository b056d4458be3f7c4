"""Which shards are not kept any more. Pure: values in, values out.

The rule, in `decision 15 <docs/decisions/0015-a-whole-step-is-not-counted-out.md>`_'s words: a rank keeps its newest
``steps_retained`` steps, and besides, however many came after them, the newest step that is whole and the one that was
put last. So failed saves count out each other, and never what can be loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from peerstore.records import ShardKey
from tieredckpt.agent.memory_service.registry import Registry
from tieredckpt.agent.memory_service.views import Steps, View, whole_steps


def counted_out(steps: Collection[int], *, retained: int, newest_whole: int | None, last_put: int) -> list[int]:
    """Which of one rank's steps go: as many of the lowest as there are too many."""
    others = sorted(step for step in steps if step not in (newest_whole, last_put))
    return others[: max(0, len(steps) - retained)]


def superfluous(view: View, registry: Registry, *, sure: bool) -> list[ShardKey]:
    """All shards that go.

    Unless it is ``sure`` that nobody holds anything that is not in view, a step that seems to lack something may be the
    newest whole one: then only what is older than a whole one goes.
    """
    found = list(view.outdated)
    for name, namespace in registry.all_living.items():
        steps = view.of(name)
        newest = next(iter(whole_steps(steps, namespace.num_ranks)), None)
        for rank, of in _by_rank(steps).items():
            last_put = max(of, key=lambda step: of[step].attempt)
            gone = counted_out(of, retained=namespace.steps_retained, newest_whole=newest, last_put=last_put)
            found += [steps[step][rank].key for step in gone if sure or (newest is not None and step < newest)]
    return found


def _by_rank(steps: Steps) -> Mapping[int, dict[int, ShardKey]]:
    found: dict[int, dict[int, ShardKey]] = defaultdict(dict)
    for step, ranks in steps.items():
        for rank, shard in ranks.items():
            found[rank][step] = shard.key
    return found
