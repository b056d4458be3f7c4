"""Whether a succeeded job still needs the steps in a node's memory."""

import msgspec
import pytest

from elastic.supervisor.memory_tier import JobMemory, reason_to_keep
from peerstore.shard_records import VersionId
from tieredckpt.agent.agent_api import StepInventory, StepStatus
from tieredckpt.resolve_step import Tier
from tieredckpt.settings import DurableSettings

DURABLE = DurableSettings(url="/somewhere")


def group(step, epoch=1):
    return VersionId(epoch, step, 0, "a")


def survey(*durable, **changed):
    views = tuple(StepStatus(group(step), 2, {}, durable=step in durable) for step in range(6))
    return msgspec.structs.replace(StepInventory(views, durable=DURABLE), **changed)


HELD = JobMemory([group(3), group(4)], [], used=False)


@pytest.mark.parametrize(
    ("held", "seen", "why"),
    [
        (HELD, survey(4), ""),
        (HELD, survey(5), ""),
        (HELD, survey(3), "step 4 is not in the durable tier"),
        (HELD, survey(), "step 4 is not in the durable tier"),
        (HELD._replace(pinned=[group(3)]), survey(4), "step 3 is pinned"),
        (HELD._replace(used=True), survey(4), "it has been started again"),
        (HELD, survey(4, durable=None), "it has no durable tier"),
        (HELD, survey(4, unreachable={Tier.DURABLE: "timed out"}), "the durable tier does not answer: timed out"),
        (HELD, survey(4, unreachable={Tier.PEER: "n2 is silent"}), ""),
        (HELD._replace(versions=[group(3), group(7, epoch=2)]), survey(4), "step 7 is not in the durable tier"),
    ],
)
def test_memory_is_released_only_if_durable(held, seen, why):
    assert reason_to_keep(held, seen) == why


def test_quarantined_durable_step_does_not_release_memory():
    bad = StepStatus(group(4), 2, {}, durable=True, quarantined="it is damaged")
    assert reason_to_keep(HELD, StepInventory((bad,), durable=DURABLE)) == "step 4 is not in the durable tier"
