"""Random histories of a job's incarnations, compared with a simple model.

One driver sends random actions to real ranks and DCP's real background processes:

- save in any way that DCP offers,
- load any existing step,
- continue in a smaller world, or restart with another number of ranks,
- be killed, even during a background save.

After every action a reader returns the newest step, and every load compares every value. A step of an abandoned branch
or of the other job is therefore found at once.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from tests.support.oldest_torch import OLDEST
from tieredckpt import Checkpointer, CheckpointNotFoundError, TieredReader, TieredWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
    pytest.mark.e2e,
]

JOBS = ["tiered://story-a", "tiered://story-b"]
WAYS = ["plain", "cached", "no collectives", "thread", "cached thread", "process", "checkpointer", "subgroup"]
KILLED_IN = ["plain", "no collectives", "checkpointer", "thread", "process"]
if OLDEST:  # its dcp.save has no use_collectives
    WAYS.remove("no collectives")
    KILLED_IN.remove("no collectives")


# -- in the ranks -------------------------------------------------------------------------------------------------


class Rank:
    """One rank of a world; all ranks execute every action."""

    def __init__(self):
        self.checkpointers, self.writers = {}, {}
        self.meet()

    def meet(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.some = dist.new_group([*range(max(1, self.size - 1))])

    def resize(self, size, where):
        """Continue in a smaller world with the same processes and writers, and new checkpointers."""
        self.close()  # DCP's own background process would stay in its first world
        dist.destroy_process_group()
        if self.rank < size:
            dist.init_process_group("gloo", init_method=f"file://{where}", rank=self.rank, world_size=size)
            self.meet()

    def state(self, value):
        return {"w": torch.full((4,), float(value)), f"own{self.rank}": torch.full((self.rank + 1,), value + 0.5)}

    def save(self, job, step, value, way):
        state, planner = self.state(value), None
        if way.startswith("cached"):
            planner = DefaultSavePlanner(enable_plan_caching=True)
        if way == "checkpointer":
            saved = self.checkpointer(job).save(state, step)
            saved.wait(timeout_s=60)
        elif way.endswith("thread") or way == "process":
            writer = self.writers.setdefault((job, way), TieredWriter(job, step))
            kind = AsyncCheckpointerType.PROCESS if way == "process" else AsyncCheckpointerType.THREAD
            future = dcp.async_save(
                state,
                checkpoint_id=f"{job}/step-{step}",
                storage_writer=writer,
                planner=planner,
                async_checkpointer_type=kind,
            )
            for tensor in state.values():
                tensor.fill_(-1)  # training continues
            future.result()
        elif way == "subgroup":
            if self.rank < max(1, self.size - 1):
                dcp.save(state, storage_writer=TieredWriter(job, step), process_group=self.some)
        else:
            writer = TieredWriter(job, step)
            options = {"use_collectives": False} if way == "no collectives" else {}
            dcp.save(state, storage_writer=writer, planner=planner, **options)
            assert writer.error is None, writer.error

    def checkpointer(self, job):
        if job not in self.checkpointers:
            self.checkpointers[job] = Checkpointer(job, every=1, on_failure="raise", on_sigterm="ignore")
        return self.checkpointers[job]

    def load(self, job, step, how):
        """Load, and return the step and all its values."""
        target = {"w": torch.zeros(4)}
        if how == "checkpointer":
            found = self.checkpointer(job).restore(target, step, strict=False)
        else:
            reader = TieredReader(job, step)
            dcp.load(target, storage_reader=reader)
            found = reader.restored_step
        return found, sorted(set(target["w"].tolist()))

    def close(self):
        for one in self.checkpointers.values():
            one.close()
        self.checkpointers.clear()
        _async_process_executor._CHECKPOINT_PROCESS = None
        gc.collect()


def run_actions(say, actions):
    """Run the actions of one world on this rank and return its observations."""
    me, seen = Rank(), []
    try:
        for name, *arguments in actions:
            if name == "killed":
                say("saving")
                me.save(*arguments)
                dist.barrier()
                say("saved")
                threading.Event().wait()
            seen.append(getattr(me, name)(*arguments))
            if not dist.is_initialized():  # this rank has left the world
                break
            dist.barrier()
            seen.append([newest(job) for job in JOBS])
            dist.barrier()
    finally:
        me.close()
    return seen


def newest(job):
    """Return the step that a reader would load, without any change."""
    try:
        return TieredReader(job).check_choice().step
    except CheckpointNotFoundError:
        return None


# -- the model ----------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """The expected content of one job."""

    values: dict[int, float] = field(default_factory=dict)
    """The value of each step on the job's current branch."""
    base: int | None = None
    """The loaded step, until a save continues from it."""
    by_some: bool = False
    """Whether only a subgroup saved the newest step: the next fast save needs an agreement of all ranks."""

    def save(self, step, value):
        if self.base is not None:
            self.values = {s: v for s, v in self.values.items() if s <= self.base}
            self.base = None
        self.values[step] = value

    def load(self, step):
        found = max(self.values) if step is None else step
        self.base = found
        return found, [self.values[found]]

    @property
    def newest(self):
        return max(self.values, default=None)


class RandomHistory:
    """Random actions and the expected observations after each."""

    def __init__(self, chance, folder):
        self.chance, self.folder, self.meetings = chance, folder, itertools.count()
        self.models = {job: Model() for job in JOBS}
        self.value = 0

    def world(self, size, length):
        """Return the actions of one world and the expected observations of every rank."""
        actions, expected = [], []
        for model in self.models.values():
            model.base, model.by_some = None, False
        for _ in range(length):
            if size > 1 and self.chance.random() < 0.1:
                size = self.chance.randint(1, size - 1)
                actions.append(("resize", size, f"{self.folder}/meet-{next(self.meetings)}"))
                expected += [None, [self.models[one].newest for one in JOBS]]
                continue
            job = self.chance.choice(JOBS)
            model = self.models[job]
            if model.values and self.chance.random() < 0.35:
                step = self.chance.choice([None, *model.values])
                how = self.chance.choice(["reader", "checkpointer"])
                actions.append(("load", job, step, how))
                expected.append(model.load(step))
                model.by_some = False
            else:
                at = model.base if model.base is not None else model.newest
                step = (at if at is not None else 0) + self.chance.choice([1, 1, 1, 5])
                self.value += 1
                way = self.chance.choice([way for way in WAYS if not (model.by_some and way == "checkpointer")])
                model.by_some = way == "subgroup" and size > 1
                actions.append(("save", job, step, float(self.value), way))
                model.save(step, float(self.value))
                expected.append(None)
            expected.append([self.models[job].newest for job in JOBS])
        return actions, expected


def run_history(zygote, seed, folder, *, worlds, length):
    chance = random.Random(seed)
    story = RandomHistory(chance, folder)
    for _ in range(worlds):
        size = chance.randint(1, 3)
        actions, expected = story.world(size, length)
        for rank, seen in enumerate(run_world(zygote, size, actions)):
            stays = [rank < arguments[0] for name, *arguments in actions if name == "resize"]
            assert len(seen) == len(expected) or not all(stays)
            for number, (found, wanted) in enumerate(zip(seen, expected, strict=False)):
                told = "\n".join(map(str, actions[: number // 2 + 1]))
                assert found == wanted, f"seed {seed}, rank {rank} of {size}, after\n{told}"
        kill(zygote, story, chance)


def run_world(zygote, size, actions):
    """Run the actions on every rank and return the observations, or raise with every rank's error."""
    running, found, failed = zygote.start_world(size, run_actions, actions), [], []
    try:
        for one in running:
            try:
                found.append(one.wait().result)
            except AssertionError as error:
                failed.append(str(error))
    finally:
        for one in running:
            one.kill_if_alive()
    assert not failed, "\n".join([*map(str, actions), *failed])
    return found


def kill(zygote, story, chance):
    """Kill a world during or after a save, and check that the step is complete or absent."""
    job, when = chance.choice(JOBS), chance.choice(["saving", "saved"])
    model = story.models[job]
    step = (model.newest or 0) + 1
    story.value += 1
    action = ("killed", job, step, float(story.value), chance.choice(KILLED_IN))
    running = zygote.start_world(chance.randint(1, 3), run_actions, [action])
    try:
        for one in running:
            one.wait_line(when)
    finally:
        for one in running:
            one.kill()
    for one in running:
        one.wait()
    (found,) = zygote.run_world(1, restore_newest, job)
    if when == "saved" or found[0] == step:
        model.base = None
        model.save(step, float(story.value))
    newest = model.newest
    assert found == ((None, []) if newest is None else (newest, [model.values[newest]])), action


def restore_newest(say, job):
    return (None, []) if newest(job) is None else Rank().load(job, None, "reader")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_random_history_of_incarnations_is_consistent(agent_dir, zygote, monkeypatch, tmp_path, seed):
    monkeypatch.setenv("TIEREDCKPT_AGENT_SLOTS_PER_RANK", "64")
    run_history(zygote, seed, tmp_path, worlds=2, length=8)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 140))
def test_long_random_history_of_incarnations_is_consistent(agent_dir, zygote, monkeypatch, tmp_path, seed):
    monkeypatch.setenv("TIEREDCKPT_AGENT_SLOTS_PER_RANK", "256")
    run_history(zygote, seed, tmp_path, worlds=4, length=20)
