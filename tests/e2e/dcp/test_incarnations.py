"""Every kind of DCP save belongs to the current incarnation of the job's ranks.

The job continues from the loaded step, and abandoned later steps never become the newest again.
"""

import gc

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import tieredckpt
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.local_nodes import wait_until
from tests.support.oldest_torch import without_collectives, without_first_rank
from tieredckpt import TieredReader, TieredWriter
from tieredckpt.session.session import open_session
from tieredckpt.settings import load_settings

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
    pytest.mark.e2e,
]

JOB = "tiered://incarnations"
WAYS = {
    "plain": {},
    "cached plans": {"cached": True},
    "no collectives": {"use_collectives": False},
    "cached plans, no collectives": {"cached": True, "use_collectives": False},
}
EACH_WAY = [
    pytest.param(name, marks=without_collectives if "use_collectives" in how else ()) for name, how in WAYS.items()
]
BACKGROUND = pytest.mark.nightly
"""One test of a background process per push, because its start takes seconds of CPU time."""


def state_of(value, extra=0):
    """Return a replicated tensor, a tensor of this rank, and an object."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "w": torch.full((5,), float(value)),
        f"own{rank}": torch.full((3 + extra,), value + rank / 8),
        f"object{rank}": (value, rank),
    }


def save(step, value, job=JOB, *, cached=False, extra=0, **how):
    writer = TieredWriter(job, step)
    planner = DefaultSavePlanner(enable_plan_caching=True) if cached else None
    dcp.save(state_of(value, extra), storage_writer=writer, planner=planner, **how)
    if writer.error is not None:
        raise writer.error
    return writer.record.key


def load(step=None, job=JOB, extra=0, **how):
    """Load, and return the step and its single value."""
    reader = TieredReader(job, step)
    target = zeros_like_state(state_of(1, extra))
    how.pop("use_collectives", None)
    dcp.load(target, storage_reader=reader, **how)
    value = target["w"][0].item()
    assert_same_bits(state_of(int(value) if value == int(value) else value, extra), normal(target))
    return reader.restored_step, value


def normal(target):
    """Return the state with the objects' values as integers, as they were saved."""
    return {name: one if torch.is_tensor(one) else (int(one[0]), one[1]) for name, one in target.items()}


def go_back(say, how):
    save(10, 10, **how)
    save(20, 20, **how)
    assert load(10) == (10, 10.0)
    dist.barrier()
    save(11, 111, **how)
    found = [load()]
    dist.barrier()
    save(12, 112, **how)
    return [*found, load()]


@pytest.mark.parametrize("way", EACH_WAY)
@pytest.mark.parametrize("world", [1, 2])
def test_step_saved_after_loading_an_older_one_is_the_newest(agent_dir, zygote, way, world):
    for found in zygote.run_world(world, go_back, WAYS[way]):
        assert found == [(11, 111.0), (12, 112.0)]


def change_plans_after_going_back(say):
    """Change the size of rank 1's part, so that only rank 1 plans again and rank 0's plan stays cached."""
    extra = 2 * dist.get_rank()
    how = {"cached": True}
    save(10, 10, **how)
    save(20, 20, **how)
    load(10)
    save(11, 111, **how)
    save(12, 112, extra=extra, **how)
    found = [load(extra=extra)]
    save(13, 113, extra=extra, **how)
    return [*found, load(extra=extra)]


def test_a_cached_plan_that_changes_on_some_ranks_is_saved(agent_dir, zygote):
    for found in zygote.run_world(2, change_plans_after_going_back):
        assert found == [(12, 112.0), (13, 113.0)]


def save_two_jobs(say):
    names = ["tiered://model", "tiered://average"]
    for step in range(3):
        for number, job in enumerate(names):
            save(step, 10 * number + step, job, cached=True)
    return [load(job=job) for job in names]


@pytest.mark.parametrize("world", [1, 2])
def test_two_jobs_with_the_same_plan_stay_separate(agent_dir, zygote, world):
    for found in zygote.run_world(world, save_two_jobs):
        assert found == [(2, 2.0), (2, 12.0)]


def save_in_a_subgroup(say, how):
    group = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        save(1, 1, process_group=group, **how)
        save(2, 2, process_group=group, **how)
        load(1, process_group=group)
        dist.barrier(group)
        save(2, 3, process_group=group, **how)
        found = load(process_group=group)
    else:
        found = None
    dist.barrier()
    return found


@without_first_rank
@pytest.mark.parametrize("way", EACH_WAY)
def test_some_ranks_save_without_the_others(agent_dir, zygote, way):
    assert zygote.run_world(3, save_in_a_subgroup, WAYS[way]) == [None, (2, 3.0), (2, 3.0)]


def save_alone(say, how):
    found = None
    if dist.get_rank() == 1:
        for step in (1, 2):
            save(step, step, no_dist=True, **how)
        found = load(no_dist=True)
    dist.barrier()
    return found


@pytest.mark.parametrize("way", EACH_WAY)
def test_single_rank_saves_alone(agent_dir, zygote, way):
    assert zygote.run_world(2, save_alone, WAYS[way]) == [None, (2, 2.0)]


def save_what_is_staged_last(say, kind):
    """Write for a new incarnation at rank 1 while rank 0 has a staged slot.

    Rank 1 needs the new incarnation because it has loaded alone. Its write invalidates rank 0's slot.
    """
    try:
        save(1, 1)
        dist.barrier()
        if dist.get_rank() == 1:
            load(1, no_dist=True)
        writer = (TieredWriter if dist.get_rank() == 1 else WritesLast)(JOB, 2)
        dcp.async_save(state_of(2), storage_writer=writer, async_checkpointer_type=kind).result()
        dist.barrier()
        return load()
    finally:
        end_background_process()


class WritesLast(TieredWriter):
    """A writer that writes its staged slot after another rank of the node wrote for a new incarnation."""

    def _relabel(self, session, staged, key):
        assert staged is not None
        wait_until(lambda: session.agent.store.epoch("incarnations") == key.epoch, "the other rank's write")
        return super()._relabel(session, staged, key)


@pytest.mark.parametrize(
    "kind", [AsyncCheckpointerType.THREAD, pytest.param(AsyncCheckpointerType.PROCESS, marks=BACKGROUND)]
)
def test_staged_state_is_saved_even_if_another_rank_starts_the_incarnation(agent_dir, zygote, kind):
    assert zygote.run_world(2, save_what_is_staged_last, kind) == [(2, 2.0), (2, 2.0)]


# -- DCP's background processes -----------------------------------------------------------------------------------


def end_background_process():
    _async_process_executor._CHECKPOINT_PROCESS = None
    gc.collect()


def save_in_background(step, value, writer=None, **how):
    """Save in DCP's own background process."""
    how = how or {"storage_writer": writer or TieredWriter(JOB, step)}
    dcp.async_save(state_of(value), async_checkpointer_type=AsyncCheckpointerType.PROCESS, **how).result()


def save_by_turns(say):
    try:
        found = []
        for step in range(9):
            (save_in_background if step % 2 else save)(step, step)
            found.append(newest())
        epochs = {
            fact.key.epoch
            for fact in open_session("incarnations", load_settings()).agent.store.list_shards("incarnations")
        }
    finally:
        end_background_process()
    return found, epochs


def newest():
    """Return the step that a load would choose, without any change."""
    return TieredReader(JOB).check_choice().step


def session_of(job):
    return open_session(job, load_settings())


@BACKGROUND
@pytest.mark.parametrize("world", [1, 2])
def test_trainer_and_background_process_save_alternately(agent_dir, zygote, world):
    for found, epochs in zygote.run_world(world, save_by_turns):
        assert found == list(range(9))
        assert len(epochs) == 1, "the background process writes for its trainer's incarnation"


def background_after_going_back(say):
    try:
        save_in_background(10, 10)
        save_in_background(20, 20)
        load(10)
        dist.barrier()
        save_in_background(11, 111)
        found = [load()]
        dist.barrier()
        save(12, 112)
        save_in_background(13, 113)
        found.append(load())
    finally:
        end_background_process()
    return found


@pytest.mark.parametrize("world", [pytest.param(1, marks=BACKGROUND), 2])
def test_background_process_continues_from_the_step_its_trainer_loaded(agent_dir, zygote, world):
    for found in zygote.run_world(world, background_after_going_back):
        assert found == [(11, 111.0), (13, 113.0)]


def save_url_in_background(say):
    with tieredckpt.enable_urls():
        try:
            for step in (1, 2):
                save_in_background(step, step, checkpoint_id=f"{JOB}/step-{step}")
            target = zeros_like_state(state_of(1))
            dcp.load(target, checkpoint_id=JOB)
        finally:
            end_background_process()
    return target["w"].tolist(), load()


@BACKGROUND
@pytest.mark.parametrize("world", [1, 2])
def test_a_url_saved_by_the_background_process_is_found(agent_dir, zygote, world):
    for found in zygote.run_world(world, save_url_in_background):
        assert found == ([2.0] * 5, (2, 2.0))


# -- locations ----------------------------------------------------------------------------------------------------


def test_url_without_a_step_does_not_change_reader_or_writer(agent_dir):
    for step in (0, 4):
        dcp.save(state_of(step), checkpoint_id=JOB, storage_writer=TieredWriter(JOB, step=step), no_dist=True)
    target = zeros_like_state(state_of(1))
    reader = TieredReader(JOB, step=0)
    dcp.load(target, checkpoint_id=JOB, storage_reader=reader, no_dist=True)
    assert reader.restored_step == 0
    assert_same_bits(state_of(0), normal(target))
    dcp.load(target, checkpoint_id=f"{JOB}/step-4", storage_reader=reader, no_dist=True)
    assert reader.restored_step == 4
