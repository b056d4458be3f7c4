"""Rates from counters, even across a restart of the agent."""

import pytest

from tests.support.cluster_views import version_id
from tieredckpt.cli.top import TrafficCounters, TrafficRates, traffic_rates


def moment(at, sealed=0, sent=0, received=0, **drained):
    return TrafficCounters(
        at, sealed, sent, received, {version_id(int(step[1:])): done for step, done in drained.items()}
    )


def test_single_sample_has_no_rate():
    assert traffic_rates([], moment(5.0, 100)) is None
    assert traffic_rates([moment(5.0)], moment(5.0, 100)) is None


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ([moment(0)], moment(2, 10, 20, 30, s7=40), TrafficRates(5, 10, 15, 20)),
        ([moment(0, 10), moment(1, 10)], moment(2, 40), TrafficRates(15, 0, 0, 0)),
        (
            [moment(0, 1000, s7=50)],
            moment(1, 10, s7=60, s8=5),
            TrafficRates(10, 0, 0, 15),
        ),  # another agent counts from 0
        ([moment(0, s7=50)], moment(1), TrafficRates(0, 0, 0, 0)),
    ],
)
def test_rates(before, now, expected):
    assert traffic_rates(before, now) == expected
