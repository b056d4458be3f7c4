"""The step up to which a job is protected, and the time since it is not."""

import time

import pytest

from tieredckpt.agent.agent_api import ProtectionStatus
from tieredckpt.agent.job_health import UNPROTECTED_GRACE_S, describe_protection, protection_status
from tieredckpt.checkpointer.progress_hook import SaveRestoreLog
from tieredckpt.event_log import EventLogWriter, read_event_log
from tieredckpt.event_log.event_types import Protection

NOW = 1_000_000_000.0
OLD = NOW - UNPROTECTED_GRACE_S - 1


@pytest.mark.parametrize(
    ("newer", "left_out", "since"),
    [
        ([], (0, 0.0), None),
        ([NOW - 1], (0, 0.0), None),
        ([NOW - 1, OLD], (0, 0.0), OLD),
        ([], (3, NOW - 2), NOW - 2),
        ([NOW - 5], (1, NOW - 2), NOW - 5),
    ],
    ids=["nothing newer", "on its way", "for too long", "a save was left out", "both"],
)
def test_protection_loss_has_a_start_time(newer, left_out, since):
    found = protection_status(7, newer, left_out, now=NOW)
    assert (found.step, found.unprotected_since, found.missed_saves) == (7, since, left_out[0])


def test_protection_is_described():
    assert describe_protection(protection_status(7, [], (0, 0.0), now=NOW)) == "protected up to step 7"
    said = describe_protection(protection_status(-1, [], (3, NOW), now=NOW))
    assert said == "no step is protected yet, unprotected since 2001-09-09 01:46:40Z (3 saves skipped or failed)"


def test_protection_changes_are_recorded(tmp_path):
    recorded = SaveRestoreLog(EventLogWriter(tmp_path))
    for found in (ProtectionStatus(1), ProtectionStatus(1), ProtectionStatus(1, OLD, 1), ProtectionStatus(3)):
        recorded.protection(found)
    assert [(one.step, one.since, one.left_out) for one in written(tmp_path)] == [
        (1, None, 0),
        (1, OLD, 1),
        (3, None, 0),
    ]


def test_saves_without_an_agent_count_as_missed(tmp_path):
    recorded = SaveRestoreLog(EventLogWriter(tmp_path))
    recorded.protection(None)  # no save was missed, so no event is recorded
    recorded.protection(ProtectionStatus(4))
    before = time.time()
    recorded.protection(None, missed=1)
    recorded.protection(None, missed=1)
    _, first, second = written(tmp_path)
    assert (first.step, first.left_out, second.left_out) == (4, 1, 2)
    assert before <= first.since == second.since <= time.time()


def written(directory):
    return [one for one in read_event_log(directory).events if isinstance(one, Protection)]
