"""One half of a step is in memory, the other in a store that lists it and then stops responding."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.support.faults import ReplyWithStatus
from tests.support.jobs import CheckpointJob, durable_settings
from tieredckpt import Checkpointer, TierUnavailableError
from tieredckpt.settings import DurableSettings, settings_from_mapping

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_own(name, durable):
    with Checkpointer(name, settings=settings_from_mapping({"agent": agent(), "durable": durable})) as ckpt:
        ckpt.save({f"own{dist.get_rank()}": torch.ones(1000)}, 4).wait("durable")


def agent():
    return {"directory": os.environ["TIEREDCKPT_AGENT_DIRECTORY"], "budget": "1GiB"}


def test_temporarily_unreadable_entry_is_unknown_and_no_mismatch(agent_dir, rclone, rclone_proxy, ranks):
    settings = durable_settings(rclone, retry_s=0.3, timeout_s=1.0)
    settings = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": rclone_proxy.endpoint}})
    job = CheckpointJob(agent_dir, settings)
    ranks.run(2, save_own, job.name, vars(settings))
    job.kill_agent()  # the next agent has not read the manifest
    with job.checkpointer() as ckpt:
        store = ckpt.session.agent.store
        for fact in store.list_shards(job.name):
            if fact.key.part == 1:
                store.report_damage(fact.key, "lost by a test")
        away = rclone_proxy.add_rule("GET", r"\.manifest", times=10**6)
        away.fail(ReplyWithStatus(503, "SlowDown"))
        state = {"own0": torch.zeros(1000), "own1": torch.zeros(1000)}
        with pytest.raises(TierUnavailableError):
            ckpt.restore(state)
        assert float(state["own0"].sum()) == 0
