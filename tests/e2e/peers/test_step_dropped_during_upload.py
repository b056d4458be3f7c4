"""A step that is dropped while another node uploads its part does not return."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.clusters import make_cluster
from tests.support.jobs import durable_settings, list_objects
from tests.support.local_nodes import wait_until
from tieredckpt import Checkpointer
from tieredckpt.settings import DurableSettings, load_settings, override_settings

pytestmark = pytest.mark.e2e


def save(job, durable):
    rank = dist.get_rank()
    with Checkpointer(job, settings=override_settings(load_settings(), durable=durable), on_sigterm="ignore") as ckpt:
        ckpt.save({f"own{rank}": torch.full((100_000,), float(rank))}, 1).wait()
        dist.barrier()


def test_step_dropped_during_an_upload_on_another_node_does_not_return(ranks, rclone, rclone_proxy):
    settings = durable_settings(rclone, timeout_s=120.0)
    behind = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": rclone_proxy.endpoint}})
    held = rclone_proxy.add_rule("PUT", r"000001\.safetensors").hold()
    with make_cluster(ranks, "n1", "n2") as cluster:
        cluster.run(["n1", "n2"], save, vars(behind), environ={"TIEREDCKPT_PEER_COPIES": "1"})
        with cluster["n1"].agent(cluster.job) as one, cluster["n2"].agent(cluster.job) as two:
            rclone_proxy.wait_for(lambda proxy: proxy.requests("PUT", r"000001\.safetensors"))
            wait_until(lambda: "other parts" in one.drain_status(cluster.job)[0].error)
            one.drop_steps(cluster.job, [one.drain_status(cluster.job)[0].version_id])
            held.release()
            (after,) = wait_until(
                lambda: [view for view in two.drain_status(cluster.job) if view.state in ("done", "skipped")]
            )
            assert after.state == "skipped"
            assert two.list_steps(cluster.job, fresh=True).views == ()
    assert [name for name in list_objects(rclone, settings) if name.endswith((".manifest", ".index"))] == []
