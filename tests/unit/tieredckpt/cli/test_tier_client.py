"""Memory and durable views of a job merged into one, and messages for absent steps."""

import pytest

from peerstore.shard_records import VersionId
from tieredckpt.agent.agent_api import StepInventory, StepStatus
from tieredckpt.agent.local_agents import merge_surveys
from tieredckpt.cli.command_output import format_age, iso_time
from tieredckpt.cli.tier_client import step_not_found_error, without_durable_tier
from tieredckpt.errors import CheckpointNotFoundError, TierUnavailableError
from tieredckpt.location import parse_location
from tieredckpt.resolve_step import Tier

ONE, TWO = VersionId(1, 1, 0, "a"), VersionId(1, 2, 0, "a")
NEAR = StepStatus(ONE, 8, {0: (Tier.MEMORY,), 7: (Tier.MEMORY,)})


def test_memory_and_durable_views_of_a_step_are_merged():
    far = StepStatus(ONE, 0, {}, durable=True, quarantined="bad")
    seen = merge_surveys(
        StepInventory((NEAR,)),
        StepInventory((far, StepStatus(TWO, 0, {}, durable=True)), {Tier.MEMORY: "no agent"}, (5,)),
    )
    assert [view.version_id for view in seen.views] == [ONE, TWO]
    assert seen.views[0].found == NEAR.found
    assert seen.views[0].durable
    assert seen.views[0].quarantined == "bad"
    assert seen.plain == (5,)
    assert seen.unreachable == {Tier.MEMORY: "no agent"}


def test_another_stores_steps_do_not_count():
    here = StepStatus(ONE, 8, {0: (Tier.MEMORY,)}, durable=True)
    seen = without_durable_tier(
        StepInventory((here, StepStatus(TWO, 0, {}, durable=True)), {Tier.DURABLE: "away"}, (5,))
    )
    assert [(view.version_id, view.durable) for view in seen.views] == [(ONE, False)]
    assert seen.unreachable == {}
    assert seen.plain == ()


@pytest.mark.parametrize(
    ("unreachable", "kind"),
    [
        ({}, CheckpointNotFoundError),
        ({Tier.MEMORY: "no agent"}, CheckpointNotFoundError),
        ({Tier.DURABLE: "away"}, TierUnavailableError),
        ({Tier.PEER: "n2: no answer"}, TierUnavailableError),
        ({Tier.MEMORY: "no agent", Tier.DURABLE: "away"}, TierUnavailableError),
    ],
)
def test_absent_only_where_the_store_answered(unreachable, kind):
    error = step_not_found_error(parse_location("job/step-3"), StepInventory((), unreachable))
    assert type(error) is kind
    assert "tiered://job/step-3" in str(error)
    assert all(text in str(error) for text in unreachable.values())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (0.4, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (5400, "1 h 30 min"),
        (86400, "24 h"),
        (200000, "2 d"),
    ],
)
def test_ages(seconds, text):
    assert format_age(seconds) == text


def test_points_in_time():
    assert iso_time(0) is None
    assert iso_time(1_700_000_000_123_000_000) == "2023-11-14T22:13:20.123+00:00"
