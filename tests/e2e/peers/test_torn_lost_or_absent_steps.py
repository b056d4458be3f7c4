"""A restore tells apart a job without saves, an incomplete first save, and a lost complete step."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.e2e.peers.test_node_lost import restore, save, sharded
from tests.support.bits import zeros_like_state
from tests.support.clusters import make_cluster
from tests.support.local_nodes import wait_until
from tieredckpt import Checkpointer, TieredReader
from tieredckpt.cli import main
from tieredckpt.dcp.rank_group import unwrap_load_error
from tieredckpt.errors import (
    CheckpointLostError,
    CheckpointNotFoundError,
    CheckpointTornError,
    StoreBusyError,
    TieredCheckpointError,
)
from tieredckpt.session.session import Session
from tieredckpt.session.slot_pool import SlotPool

pytestmark = pytest.mark.e2e


def killed_in_its_first_save(job, step):
    """Kill rank 1 before its seal, and rank 0 after its own."""
    seal = Session.seal

    def dies(*args, **more):
        os.kill(os.getpid(), signal.SIGKILL)

    Session.seal = dies if dist.get_rank() == 1 else seal
    ckpt = Checkpointer(job, on_sigterm="ignore")
    assert ckpt.restore(zeros_like_state(sharded(0))) == -1
    assert ckpt.last_restore is None
    ckpt.save(sharded(step), step).wait(timeout_s=60)
    os.kill(os.getpid(), signal.SIGKILL)


def sealed_on(host, job):
    with host.agent(job) as agent:
        return [fact.key.version for fact in agent.store.list_shards(job)]


def begin(job, step=None):
    """Return the restored step, its report, and the errors of restores of a named step."""
    state = zeros_like_state(sharded(0))
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        found = ckpt.restore(state)
        report = ckpt.last_restore
        named = other = ""
        if step is not None:
            with pytest.raises(CheckpointTornError) as error:
                ckpt.restore(state, step)
            named = str(error.value)
        with pytest.raises(CheckpointNotFoundError) as absent:
            ckpt.restore(state, 99)
        assert not isinstance(absent.value, CheckpointTornError)
        try:
            dcp.load(state, storage_reader=TieredReader(job))
        except CheckpointException as error:
            other = type(unwrap_load_error(error)).__name__
    return found, None if report is None else (report.step, report.mode, report.refused), named, other


def test_job_killed_in_its_first_save_restarts_and_reports_it(ranks, capsys):
    with make_cluster(ranks, "n1", "n2") as cluster:
        where = ["n1", "n2"]
        for found, report, _, other in cluster.run(where, begin):
            assert (found, report, other) == (-1, None, "CheckpointNotFoundError")
        with pytest.raises(AssertionError, match="died"):
            cluster.run(where, killed_in_its_first_save, 3)
        wait_until(lambda: sealed_on(cluster["n1"], cluster.job) == [3])
        for name in where:  # the agents' records survive a restart
            cluster[name].kill_agent()
            cluster[name].start()
        for found, report, named, other in cluster.run(where, begin, 3):
            assert found == -1
            step, mode, refused = report
            assert (step, mode, other) == (-1, "torn", "CheckpointTornError")
            for said in (*refused, named):
                assert "step 3" in said
                assert "missing part 1 of 2" in said
                assert "saved 20" in said
        with cluster["n1"].agent(cluster.job) as agent:
            assert [view.version_id.version for view in agent.list_steps(cluster.job).views] == [3]
        directory = ["--agent-dir", str(cluster["n1"].directory)]
        assert main(["ls", cluster.job, *directory]) == 0
        assert re.search(r"3 +torn", capsys.readouterr().out)
        cluster.run(where, save, [3, 4])  # a new save needs no permission
        cluster.run(where, restore, 4)


def leaves_out(job, step):
    """Save a step for which rank 1 has no memory, so that the other ranks' parts are released."""
    stage = SlotPool.lease

    def busy(*args, **more):
        raise StoreBusyError("no room just now")

    SlotPool.lease = busy if dist.get_rank() == 1 else stage
    try:
        with Checkpointer(job, on_busy="wait", on_sigterm="ignore") as ckpt:
            assert ckpt.restore(zeros_like_state(sharded(0))) == -1
            ckpt.save(sharded(step), step)
            ckpt.wait()
    finally:
        SlotPool.lease = stage


def test_incomplete_step_dropped_everywhere_is_reported(ranks):
    with make_cluster(ranks, "n1", "n2") as cluster:
        where = ["n1", "n2"]
        cluster.run(where, leaves_out, 3)
        wait_until(lambda: [sealed_on(cluster[name], cluster.job) for name in where] == [[], []])
        for found, report, named, other in cluster.run(where, begin, 3):
            step, mode, refused = report
            assert (found, step, mode, other) == (-1, -1, "torn", "CheckpointTornError")
            assert "step 3" in str(refused)
            assert "step 3" in named


def fails_to_restore(job):
    with Checkpointer(job, on_sigterm="ignore") as ckpt, pytest.raises(TieredCheckpointError):
        ckpt.restore(zeros_like_state(sharded(0)))


def lost(job):
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        state = zeros_like_state(sharded(0))
        with pytest.raises(CheckpointLostError) as error:
            ckpt.restore(state)
        assert ckpt.restore(state, on_lost="start_fresh") == -1
        report = ckpt.last_restore
        return str(error.value), (report.step, report.mode, report.refused)


def test_once_complete_step_is_lost_even_for_later_agents(ranks, capsys):
    """One node is lost, the other agents restart, and a new node joins."""
    with make_cluster(ranks, "n1", "n2", "n3") as cluster:
        alone = {"TIEREDCKPT_PEER_COPIES": "1"}
        cluster.run(["n1", "n2", "n3"], save, [5, 6], 1, environ=alone)
        for name in ("n2", "n3"):
            with cluster[name].agent(cluster.job) as agent:  # read this node's own record, without a request to n1
                wait_until(
                    lambda: [one.newest_committed for one in agent.store.status().jobs if one.job == cluster.job] == [6]
                )
        cluster["n1"].lose()
        for name in ("n2", "n3"):
            cluster[name].kill_agent()
            cluster[name].start()
        cluster.add("n4")
        cluster.run(["n4", "n2", "n3"], fails_to_restore, environ=alone)  # n4 may not know yet that n1 is dead
        for name in ("n2", "n3", "n4"):
            with cluster[name].agent(cluster.job) as agent:
                # A node that has been dead for long is no longer in the member list.
                wait_until(
                    lambda: (
                        not any(
                            one.node.id == "n1" and one.state in ("alive", "suspect")
                            for one in agent.cluster_status(cluster.job).nodes
                        )
                    )
                )
        for said, (step, mode, refused) in cluster.run(["n4", "n2", "n3"], lost, environ=alone):
            assert "step 6" in said
            assert "was complete once, saved 20" in said
            assert "missing part" in said
            assert (step, mode) == (-1, "lost")
            assert "step 6" in str(refused)
        capsys.readouterr()
        assert main(["ls", cluster.job, "--agent-dir", str(cluster["n2"].directory)]) == 0
        assert re.search(r"6 +lost", capsys.readouterr().out)
