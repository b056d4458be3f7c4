"""All ranks of a load read the same step or none, for any planner."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan

from tests.support.agents import stop_agent
from tieredckpt import Checkpointer, TieredReader, TieredWriter
from tieredckpt.dcp.plain_checkpoints import plain_writer
from tieredckpt.settings import DurableSettings, load_settings, override_settings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB = "tiered://decided"


class Finishes(DefaultLoadPlanner):
    """A planner whose final plan has only the items of the coordinator's plan."""

    def finish_plan(self, new_plan):
        return LoadPlan(super().finish_plan(new_plan).items)


class Globalises(DefaultLoadPlanner):
    """A planner whose global plan has only the items of the ranks' plans."""

    def create_global_plan(self, global_plan):
        return [LoadPlan(plan.items) for plan in super().create_global_plan(global_plan)]


class Both(Finishes, Globalises):
    pass


class Copies(DefaultLoadPlanner):
    """A planner that returns copies of the plans, unchanged."""

    def create_global_plan(self, global_plan):
        return super().create_global_plan(copy.deepcopy(global_plan))

    def finish_plan(self, new_plan):
        return super().finish_plan(copy.deepcopy(new_plan))


PLANNERS = {planner.__name__: planner for planner in (DefaultLoadPlanner, Finishes, Globalises, Both, Copies)}


def settings_of(directory, url):
    return override_settings(load_settings(), agent={"directory": directory}, durable={"url": url, "every": 10**6})


@pytest.fixture
def places(tmp_path, agent_dir):
    """Step 10 is only in the first node's memory, step 0 is also durable, and the second node is empty."""
    nodes, url = [str(agent_dir / name) for name in ("a", "b")], f"file://{tmp_path}/durable"
    with Checkpointer(JOB, settings=settings_of(nodes[0], url), on_sigterm="ignore") as ckpt:
        for step in (0, 10):
            ckpt.save({"w": torch.full((1000,), float(step))}, step).wait()
        assert ckpt.wait("durable", timeout_s=60)
    yield nodes, url
    for node in nodes:
        stop_agent(Path(node))


def load(nodes, url, planner, **how):
    """Load on this rank's own node and return a value of the tensor and the step or error."""
    reader = TieredReader(JOB, settings=settings_of(nodes[dist.get_rank()], url))
    state = {"w": torch.full((1000,), -1.0)}
    try:
        dcp.load(state, storage_reader=reader, planner=PLANNERS[planner](), **how)
    except CheckpointException as error:
        return float(state["w"][0]), str(next(iter(error.failures.values()))[0])
    return float(state["w"][0]), reader.restored_step


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("order", [pytest.param(1, marks=pytest.mark.nightly), -1])
def test_ranks_that_would_choose_different_steps_read_the_same(places, ranks, planner, order):
    nodes, url = places
    assert ranks.run(2, load, nodes[::order], url, planner) == [(0.0, 0)] * 2


@pytest.mark.parametrize("order", [1, -1])
def test_plain_checkpoint_missing_on_one_rank_is_read_by_no_rank(places, ranks, order, tmp_path):
    nodes, url = places
    elsewhere = f"file://{tmp_path}/elsewhere"
    with_plain = DurableSettings(url=elsewhere)
    dcp.save({"w": torch.full((1000,), 20.0)}, storage_writer=plain_writer(with_plain, "decided", 20), no_dist=True)
    found = ranks.run(2, load_from, nodes[::order], [url, elsewhere][::order])
    assert [value for value, _ in found] == [-1.0] * 2, found
    assert all("plain checkpoint" in str(why) for _, why in found), found


def load_from(nodes, urls):
    return load(nodes, urls[dist.get_rank()], "DefaultLoadPlanner")


def test_lone_rank_reads_the_step_it_chose(places, ranks):
    nodes, url = places
    assert ranks.run(2, load_alone, nodes, url) == [(10.0, 10), (0.0, 0)]


def load_alone(nodes, url):
    return load(nodes, url, "Both", no_dist=True)


class CopiesToSave(DefaultSavePlanner):
    """A planner that returns copies of the plans, unchanged."""

    def create_global_plan(self, all_plans):
        return super().create_global_plan(copy.deepcopy(all_plans))

    def finish_plan(self, new_plan):
        return super().finish_plan(copy.deepcopy(new_plan))


def test_a_planner_may_copy_the_plans_of_a_save(agent_dir, ranks):
    assert ranks.run(2, save_and_load, JOB) == [3.0, 3.0]


def save_and_load(job):
    rank = dist.get_rank()
    dcp.save({f"w{rank}": torch.full((100,), 3.0)}, storage_writer=TieredWriter(job, 3), planner=CopiesToSave())
    state = {f"w{rank}": torch.zeros(100)}
    dcp.load(state, storage_reader=TieredReader(job))
    return float(state[f"w{rank}"].mean())
