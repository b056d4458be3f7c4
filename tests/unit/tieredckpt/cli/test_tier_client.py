"""Views of a job without another store, and ages and points in time as text."""

import pytest

from peerstore.shard_records import VersionId
from tieredckpt.cli.command_output import format_age, iso_time
from tieredckpt.cli.tier_client import without_durable_tier
from tieredckpt.resolve_step import Tier
from tieredckpt.step_inventory import StepInventory, StepStatus

ONE, TWO = VersionId(1, 1, 0, "a"), VersionId(1, 2, 0, "a")


def test_another_stores_steps_do_not_count():
    here = StepStatus(ONE, 8, {0: (Tier.MEMORY,)}, durable=True)
    seen = without_durable_tier(
        StepInventory((here, StepStatus(TWO, 0, {}, durable=True)), {Tier.DURABLE: "away"}, (5,))
    )
    assert [(view.version_id, view.durable) for view in seen.views] == [(ONE, False)]
    assert seen.unreachable == {}
    assert seen.plain == ()


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
