"""A rank killed by the kernel at its control group's memory limit, as in a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.elastic_runs import elastic_job
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.system

LIMIT = 768 << 20
VERSIONS = {
    Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",
    Path("/sys/fs/cgroup"): "memory.max",
}


@pytest.fixture
def group():
    """Yield the ``cgroup.procs`` file of a control group with that limit."""
    for root, limit in VERSIONS.items():
        made = root / f"tieredckpt-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            if (made / limit).exists():
                (made / limit).write_text(str(LIMIT))
                yield made / "cgroup.procs"
                wait_until(lambda made=made: not (made / "cgroup.procs").read_text(), "all of them have ended")
                return
        finally:
            made.rmdir()
    pytest.skip("cannot create a control group with a memory limit: needs root and a memory controller")


def test_out_of_memory_rank_is_replaced_with_its_reason(group) -> None:
    with elastic_job() as job:
        job.inside = ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group))
        run = job.run("--simulate-nodes", "2", "--nnodes", "2")
        before = job.wait_world(2)
        job.touch("hungry-n1")
        after = job.wait_world(2, after=before[0]["epoch"])
        by_node = [{one["node"]: one["pid"] for one in world} for world in (before, after)]
        assert by_node[0]["n0"] == by_node[1]["n0"]
        assert by_node[0]["n1"] != by_node[1]["n1"]
        assert "out of memory: the kernel says so of its control group" in job.output()
        job.finish()
        assert job.wait_ended(run) == 0
