"""If one rank cannot reach its node's agent, no rank blocks in the store and all report the reason."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from peerstore.errors import AgentUnreachableError
from tieredckpt import Checkpointer, TierUnavailableError
from tieredckpt.session import agent_discovery
from tieredckpt.session.session import use_agent_factory

pytestmark = pytest.mark.e2e


def nobody(*_):
    raise AgentUnreachableError("the agent does not answer")


def refused(job, how):
    """Return the error of a restore, and the result of the next one in the same world."""
    unreachable = contextlib.ExitStack()
    with unreachable, mock.patch.object(agent_discovery, "_TIMEOUT_S", 5.0 - 30.0):
        if dist.get_rank() == 1:
            unreachable.enter_context(
                use_agent_factory(nobody)
                if how == "never there"
                else mock.patch.object(agent_discovery, "_wait_for_known_peers", nobody)
            )
        with Checkpointer(f"tiered://{job}", on_sigterm="ignore") as ckpt:
            with pytest.raises(TierUnavailableError) as caught:
                ckpt.restore({"w": torch.zeros(3)})
            unreachable.close()
            return str(caught.value), ckpt.restore({"w": torch.zeros(3)})


@pytest.mark.parametrize("how", ["never there", "gone meanwhile"])
def test_all_ranks_report_the_reason_of_the_failing_rank(cluster, how):
    told = cluster.run(["n1", "n2", "n3"], refused, how)
    assert [restored for _, restored in told] == [-1] * 3
    assert all("the agent does not answer" in why for why, _ in told)
    assert all("rank 1: " in told[rank][0] for rank in (0, 2))
    assert all("rank 0" not in why and "rank 2" not in why for why, _ in told)
