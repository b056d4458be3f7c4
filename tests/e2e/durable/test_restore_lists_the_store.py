"""A restore loads steps that another process wrote to the durable tier a moment ago."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from peerstore.testing import memory_store
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.jobs import CheckpointJob, state_at
from tieredckpt import Checkpointer, TieredReader
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import UsageError
from tieredckpt.session.session import close_sessions, use_agent_factory
from tieredckpt.settings import DurableSettings
from tieredckpt.testing import _Shared, memory_node

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


@pytest.fixture
def job(agent_dir, tmp_path):
    return CheckpointJob(agent_dir, DurableSettings(url=f"file://{tmp_path}/durable"))


def save_plain(job, step):
    """Save a plain checkpoint, with the package disabled."""
    settings = replace(job.settings, enabled=False)
    with Checkpointer(f"tiered://{job.name}", settings=settings, on_sigterm="ignore") as ckpt:
        assert ckpt.save(state_at(step), step, durable=True).ok


def save_on_another_node(job, step):
    close_sessions()
    with memory_node(), job.checkpointer() as ckpt:
        assert ckpt.restore(zeros_like_state(state_at(0))) < step
        assert ckpt.save(state_at(step), step).wait("durable")
    close_sessions()


def restore(job):
    with job.checkpointer() as ckpt:
        found = zeros_like_state(state_at(0))
        step = ckpt.restore(found)
    assert_same_bits(state_at(step), found)
    return step


def load(job):
    found, reader = zeros_like_state(state_at(0)), TieredReader(job.name, settings=job.settings)
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert_same_bits(state_at(reader.restored_step), found)
    return reader.restored_step


@pytest.mark.parametrize("read", [restore, load])
@pytest.mark.parametrize("save", [save_plain, save_on_another_node])
def test_restore_finds_a_step_that_another_process_just_wrote(job, save, read):
    job.save(1)
    assert read(job) == 1
    save(job, 2)
    assert read(job) == 2
    save(job, 3)
    assert read(job) == 3


def test_first_save_is_refused_behind_a_step_just_written(job):
    job.save(1)
    with job.checkpointer() as ckpt:
        assert [one.step for one in ckpt.steps()] == [1]
    save_on_another_node(job, 5)
    with (
        job.checkpointer() as ckpt,
        pytest.raises(UsageError, match=r"Step 3 of job .* behind step 5 of an earlier run"),
    ):
        ckpt.save(state_at(3), 3)


class Counted:
    """A store that counts its listings of manifests."""

    def __init__(self, store):
        self._store, self.count = store, 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def list(self, prefix, **options):
        self.count += prefix.endswith("/manifests/")
        return self._store.list(prefix, **options)


@pytest.fixture
def listings():
    """Return a function that counts the listings of an agent in this process since its last call."""
    opened, counted = [], [0]

    def opener(*arguments):
        opened.append(Counted(open_store(*arguments)))
        return opened[-1]

    def since():
        before, counted[0] = counted[0], sum(one.count for one in opened)
        return counted[0] - before

    with contextlib.ExitStack() as cleanup:
        store = cleanup.enter_context(memory_store("1GiB"))
        node = cleanup.enter_context(contextlib.closing(NodeAgentService(store, open_durable=opener)))
        cleanup.enter_context(use_agent_factory(lambda *_: _Shared(node)))
        yield since


@pytest.mark.parametrize("read", [restore, load])
def test_restore_lists_the_store_once_per_rank(job, read, listings):
    job.save(1)
    close_sessions()
    listings()
    for _ in range(2):
        assert read(job) == 1
        assert listings() == 1


@pytest.mark.parametrize("strict", [True, False])
def test_restore_of_an_optimizer_lists_the_store_once(job, listings, strict):
    def state():
        model = torch.nn.Linear(4, 4)
        return {"model": model, "optim": torch.optim.AdamW(model.parameters())}

    trained = state()
    trained["model"](torch.ones(4)).sum().backward()
    trained["optim"].step()
    with job.checkpointer() as ckpt:
        assert ckpt.save(trained, 1).wait("durable")
        listings()
        assert ckpt.restore(state(), strict=strict) == 1
        assert listings() == 1
