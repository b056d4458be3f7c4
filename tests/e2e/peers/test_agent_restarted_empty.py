"""An agent restarts at once with an empty memory, before its peers consider it dead."""

from __future__ import annotations

import pytest

from peerstore.settings import ReplicationSettings
from tests.support.agent_jobs import SIZE, agent_job
from tests.support.local_nodes import wait_until
from tests.support.stores import shard_content

pytestmark = pytest.mark.e2e

NAMES = ("n1", "n2", "n3", "n4")


def test_data_lost_by_a_restarted_agent_is_rebuilt_from_parity():
    parity = ReplicationSettings(mode="parity", parity_group_size=3)
    with agent_job(*NAMES, settings=parity, quick=False) as job:  # without ``quick``, a node is dead only after 8 s
        keys = job.save(1, parts=4)
        job.wait_replicated(1)
        assert [job.holders(of) for of in keys] == [(name,) for name in NAMES]
        job["n2"].lose()
        job["n2"].start()
        job.join_all()
        for of in keys:
            wait_until(lambda of=of: job.holders(of), f"{of} is rebuilt", timeout_s=60)
            data, pulled = job.read(of, job.holders(of))
            assert data == shard_content(of, SIZE)
            assert pulled.failed == {}
