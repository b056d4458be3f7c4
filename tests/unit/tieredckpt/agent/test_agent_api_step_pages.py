"""A step described in pages: a page without new entries ends the requests."""

import pytest

from tests.support.stores import shard_key
from tieredckpt.agent.agent_api import LayoutsPage, ShardLocation, ShardLocations, StepSummary, describe_step
from tieredckpt.errors import CheckpointNotFoundError
from tieredckpt.format.manifest import ShardIndex, ShardMeta

GROUP = shard_key(1).version_id


class Forgets:
    """An agent that describes a step and then has lost it."""

    def __init__(self, *, parts: bool) -> None:
        self._parts = parts

    def summary(self, job, group):
        return StepSummary((0,), 1, "test", ("layout",), ())

    def parts(self, job, group, parts, *, item_sizes=False):
        index = ShardIndex(shard_key(1), 1, 0, 1, b"", ShardMeta("layout", ()))
        return ShardLocations([ShardLocation(index, 0, ("memory",), ())] if self._parts else [], [])

    def layouts(self, job, group, layouts, tables):
        return LayoutsPage({}, {}, more=False)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("parts", "what"), [(False, "none of parts"), (True, r"layouts \['layout'\]")])
def test_page_without_new_entries_ends_the_loop(parts, what):
    with pytest.raises(CheckpointNotFoundError, match=what):
        describe_step(Forgets(parts=parts), "job", GROUP)
