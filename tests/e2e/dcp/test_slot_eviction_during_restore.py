"""A slot is evicted between a rank's vote and its read."""

import pytest
import torch

from tieredckpt import Checkpointer
from tieredckpt.settings import settings_from_mapping


def contiguous():
    return torch.zeros(1000, 300)


def strided():
    return torch.zeros(300, 1000).t()


@pytest.mark.parametrize("target", [contiguous, strided])
def test_copy_evicted_after_the_vote_fails_no_restore(agent_dir, tmp_path, monkeypatch, target):
    settings = settings_from_mapping(
        {"agent": {"directory": str(agent_dir), "budget": "1GiB"}, "durable": {"url": f"file://{tmp_path}/durable"}}
    )
    with Checkpointer("tiered://job", settings=settings, on_sigterm="ignore") as ckpt:
        weight = torch.arange(300_000.0).view(1000, 300)
        ckpt.save({"w": weight, "step": 4}, 4).wait("durable")
        store = ckpt.session.agent.store
        dropped = []

        def reach(point):
            if point == "load.voted":
                dropped.extend(fact.key for fact in store.list_shards("job"))
                for key in dropped:
                    store.report_damage(key, "another reader saw other bytes")

        monkeypatch.setattr("tieredckpt.dcp.tiered_reader.failpoint", reach)
        state = {"w": target(), "step": 0}
        assert ckpt.restore(state) == 4
        assert dropped
        assert store.list_shards("job") == []
        assert torch.equal(state["w"], weight)
        assert state["step"] == 4
