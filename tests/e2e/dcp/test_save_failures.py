"""A failed save is reported, training continues, and the next save works normally."""

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from peerstore.errors import AgentUnreachableError, ArenaFullError, RequestError
from peerstore.store.node_store import NodeStore
from tests.support.agents import agent_pid, stop_agent, stop_process
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.jobs import CheckpointJob, state_at
from tests.support.oldest_torch import without_collectives
from tests.support.scripts import run_script
from tests.support.stores import flip_byte, pinned_file
from tieredckpt import (
    CheckpointDamagedError,
    Checkpointer,
    CheckpointNotFoundError,
    NullCheckpointer,
    SaveFailedError,
    TieredWriter,
    TierUnavailableError,
)
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.errors import MismatchError, StoreBusyError, UsageError
from tieredckpt.session.session import close_sessions, use_agent_factory
from tieredckpt.session.slot_pool import SlotPool
from tieredckpt.settings import DurableSettings, load_settings, override_settings
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB = "tiered://loop"


@pytest.fixture
def directory(tmp_path):
    return DurableSettings(url=f"file://{tmp_path}/durable")


def small(step):
    return {"w": torch.full((1000,), float(step)), "step": step}


def unreachable_agent(settings, job):
    raise AgentUnreachableError("the agent does not answer")


def test_missing_agent_fails_the_save_and_not_the_training(agent_dir):
    with use_agent_factory(unreachable_agent), Checkpointer(JOB) as ckpt:
        for step in range(3):
            saved = ckpt.save(small(step), step)
            assert (saved.state, saved.ok) == (SaveState.FAILED, False)
            assert "the agent does not answer" in str(saved.error)
            with pytest.raises(SaveFailedError, match="the agent does not answer"):
                saved.wait()
        assert ckpt.wait()
    with use_agent_factory(unreachable_agent), Checkpointer(JOB, on_failure="raise") as ckpt:
        with pytest.raises(SaveFailedError):
            ckpt.save(small(0), 0)
        with pytest.raises(TierUnavailableError):  # unknown is not a reason to start fresh
            ckpt.restore(small(0))


def test_recovered_agent_is_used_again(agent_dir):
    with Checkpointer(JOB) as ckpt:
        with use_agent_factory(unreachable_agent):
            assert not ckpt.save(small(0), 0).ok
        assert ckpt.save(small(1), 1).wait() is SaveState.SEALED
        assert ckpt.restore(zeros_like_state(small(0))) == 1


def test_invalid_directory_is_an_unavailable_tier(tmp_path):
    def refused(settings, job):
        raise NotADirectoryError(20, "Not a directory", str(tmp_path))

    with use_agent_factory(refused), Checkpointer(JOB) as ckpt:
        assert "Not a directory" in str(ckpt.save(small(0), 0).error)


class UnreachableAgent:
    """An agent that is unreachable for reports about a step's outcome while ``deaf`` is set."""

    def __init__(self, settings, job):
        self._node = NodeAgentClient(settings, job)
        self.store = self.versions = self
        self.deaf = False
        self.refused = 0

    def mark_committed(self, job, group):
        self._report("mark_committed", job, group)

    def abort_part(self, job, group, part):
        self._report("abort_part", job, group, part)

    def _report(self, what, *args):
        if self.deaf:
            self.refused += 1
            raise AgentUnreachableError("gone for a moment")
        getattr(self._node.store.versions, what)(*args)

    def __getattr__(self, name):
        parts = (self._node, self._node.store, self._node.store.versions)
        return next(getattr(part, name) for part in parts if hasattr(part, name))

    def close(self):
        self._node.close()


def saves_while_deaf():
    states = []
    with (
        use_agent_factory(UnreachableAgent),
        Checkpointer(JOB, settings=override_settings(load_settings(), peer={"discovery": "off"})) as ckpt,
    ):
        for step in range(5):
            saved = ckpt.save(small(step), step)
            states.append(saved.wait().value)
            dist.barrier()
            ckpt.session.agent.deaf = step in (0, 1, 2)
        assert ckpt.session.agent.refused
        return states, ckpt.session.commits.committed.version >= 3


def test_saves_continue_after_an_agent_outage(agent_dir, ranks):
    """Each rank reports committed steps to its own agent, because the agents are not connected."""
    for states, told in ranks.run(2, saves_while_deaf, environ={"LOCAL_WORLD_SIZE": "1"}):
        assert states == ["sealed"] * 5
        assert told


def leaves_out_while_deaf():
    rank, stage, left = dist.get_rank(), SlotPool.lease, {0: (2,), 1: (3,)}

    def busy(slots, key, *args, **more):
        if key.version in left[rank]:
            raise StoreBusyError("no room just now")
        return stage(slots, key, *args, **more)

    with use_agent_factory(UnreachableAgent), Checkpointer(JOB) as ckpt:
        SlotPool.lease = busy
        try:
            for step in range(6):
                ckpt.session.agent.deaf = step in (2, 3)
                ckpt.save(small(step), step)
                ckpt.wait()
                dist.barrier()
        finally:
            SlotPool.lease = stage
        assert ckpt.session.agent.refused
        return sorted({fact.key.version for fact in ckpt.session.agent.store.list_shards("loop")})


def test_steps_skipped_without_an_agent_are_reported_with_the_next_save(agent_dir, ranks):
    for here in ranks.run(2, leaves_out_while_deaf):
        assert here
        assert not {2, 3} & {*here}


class Stubborn:
    def __reduce__(self):
        raise TypeError("not me")


def test_an_object_that_cannot_be_pickled_is_named(agent_dir):
    with Checkpointer(JOB) as ckpt:
        first = ckpt.save({**small(0), "hook": Stubborn()}, 0)
        assert not first.ok
        ckpt.save({**small(1), "hook": 1}, 1).wait()
        later = ckpt.save({**small(2), "hook": Stubborn()}, 2)
        assert isinstance(later.error, UsageError)
        assert "hook is a Stubborn that cannot be pickled: not me" in str(later.error)
        assert ckpt.save({**small(3), "hook": 3}, 3).wait() is SaveState.SEALED


def test_failed_save_has_a_typed_error(agent_dir, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_BUDGET", "1MiB")
    with Checkpointer(JOB) as ckpt:
        saved = ckpt.save({"w": torch.zeros(1 << 20)}, 0)
        assert isinstance(saved.error, SaveFailedError)
        assert "budget" in str(saved.error)
        assert "Traceback" not in repr(saved)
        with pytest.raises(CheckpointNotFoundError):
            ckpt.restore({"w": torch.zeros(1 << 20)}, step=0)
        assert ckpt.restore({"w": torch.zeros(1 << 20)}) == -1


def test_save_policy_can_wait_for_a_slot(agent_dir):
    """A save with ``on_busy="wait"`` blocks while readers pin every slot."""
    with Checkpointer(JOB, on_busy="wait") as ckpt:
        for step in range(3):
            ckpt.save(small(step), step).wait()
        store = ckpt.session.agent.store
        pins = [store.pin(fact.key) for fact in store.list_shards("loop")]
        ckpt.save(small(3), 3).wait()  # the extra slot
        pins += [store.pin(fact.key) for fact in store.list_shards("loop")]
        waiting = threading.Event()
        done = []

        def save():
            waiting.set()
            done.append(ckpt.save(small(4), 4))

        thread = threading.Thread(target=save)
        thread.start()
        waiting.wait()
        assert store.epoch("loop") > 0  # the agent still serves other requests
        assert not done
        for pin in pins:
            store.unpin(pin.id)
        thread.join()
        assert done[0].wait() is SaveState.SEALED
        assert ckpt.restore(zeros_like_state(small(0))) == 4


def test_wait_for_a_slot_times_out(agent_dir, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_MEMORY_WAIT_S", "0.3")
    with Checkpointer(JOB, on_busy="wait") as ckpt:
        for step in range(3):
            ckpt.save(small(step), step).wait()
        store = ckpt.session.agent.store
        for step in (9, 10):
            for fact in store.list_shards("loop"):
                store.pin(fact.key)
            last = ckpt.save(small(step), step)
        assert last.state is SaveState.SKIPPED
        assert isinstance(last.error, StoreBusyError)


def test_refusing_durable_tier_is_reported_by_the_wait(agent_dir, directory):
    path = Path(directory.url.removeprefix("file://"))
    with CheckpointJob(agent_dir, DurableSettings(url=directory.url, retry_s=0.2)).checkpointer() as ckpt:
        assert ckpt.save(state_at(0), 0).wait("durable") is SaveState.DURABLE
        shutil.rmtree(path)
        path.write_text("not a directory")
        saved = ckpt.save(state_at(1), 1)
        assert saved.wait() is SaveState.SEALED
        with pytest.raises((SaveFailedError, TierUnavailableError)):
            saved.wait("durable", timeout_s=3)
        assert not ckpt.wait("durable", timeout_s=0.1)
        assert ckpt.restore(zeros_like_state(state_at(1))) == 1


def test_wait_times_out_when_the_agent_is_silent(agent_dir, directory):
    with CheckpointJob(agent_dir, directory).checkpointer() as ckpt:
        saved = ckpt.save(state_at(0), 0)
        assert saved.wait("durable", timeout_s=60) is SaveState.DURABLE
        later = ckpt.save(state_at(1), 1)
        assert later.wait(timeout_s=60) is SaveState.SEALED
        stop_process(agent_pid(agent_dir))
        assert not ckpt.wait("durable", timeout_s=0.5)
        with pytest.raises(TierUnavailableError, match="whether step 1 is durable is not known"):
            later.wait("durable", timeout_s=0.5)
        assert saved.wait("durable", timeout_s=0.5) is SaveState.DURABLE, "the agent reported it earlier"
        os.kill(agent_pid(agent_dir), signal.SIGCONT)
        assert ckpt.wait("durable", timeout_s=60)


def test_seal_times_out_when_the_agent_is_silent(agent_dir):
    """The timeout is shorter than the time to replace the hung agent."""
    with CheckpointJob(agent_dir, DurableSettings()).checkpointer() as ckpt:
        assert ckpt.save(state_at(0), 0).wait(timeout_s=60) is SaveState.SEALED
        pid = agent_pid(agent_dir)
        stop_process(pid)
        try:
            with pytest.raises((TierUnavailableError, StoreBusyError)):
                ckpt.seal(state_at(1), 1, timeout_s=0.5)
            assert agent_pid(agent_dir) == pid
        finally:
            os.kill(pid, signal.SIGCONT)
        assert ckpt.seal(state_at(2), 2, timeout_s=60).state is SaveState.SEALED


def test_restore_of_damaged_steps_raises_with_the_cause(agent_dir):
    with Checkpointer(JOB) as ckpt:
        ckpt.save(small(0), 0).wait()
        for fact in ckpt.session.agent.store.list_shards("loop"):
            ckpt.session.agent.store.report_damage(fact.key, "a test says so")
        state = small(7)
        with pytest.raises((CheckpointDamagedError, CheckpointNotFoundError)):
            ckpt.restore(state, step=0)
        assert_same_bits(small(7), state)


def test_entry_that_cannot_be_pickled_is_named(agent_dir):
    with Checkpointer(JOB) as ckpt:
        saved = ckpt.save(small(0) | {"schedule": lambda step: 1.0}, 0)
        assert saved.state is SaveState.FAILED
        with pytest.raises(UsageError, match=r"schedule cannot be pickled.*Leave it out of the state"):
            saved.wait()
        assert ckpt.save(small(1), 1).wait() is SaveState.SEALED


def test_damaged_step_is_not_called_left_behind(agent_dir, caplog):
    with Checkpointer(JOB) as ckpt:
        for step in (0, 1):
            ckpt.save(small(step), step).wait()
        store = ckpt.session.agent.store
        pin = store.pin(max((shard.key for shard in store.list_shards("loop")), key=lambda key: key.version))
        flip_byte(pinned_file(pin), pin.record.size_bytes // 2)
        pin.close()
        store.unpin(pin.id)
    close_sessions()
    with Checkpointer(JOB) as ckpt:
        assert ckpt.restore(small(9)) == 0
        assert ckpt.last_restore.newer_steps == ()
    assert "looking for another copy" in caplog.text
    assert "To keep step" not in caplog.text


def test_null_checkpointer_matches_the_real_interface():
    with NullCheckpointer() as ckpt:
        state = small(3)
        assert ckpt.restore(state) == ckpt.restore(state, step=2) == -1
        assert_same_bits(small(3), state)
        saved = ckpt.save(state, 0, force=True)
        assert (saved.state, saved.wait(), saved.wait("durable")) == (SaveState.NOT_DUE,) * 3
        assert ckpt.last_restore is None
        with pytest.raises(UsageError):
            ckpt.save(state, -1)


def test_checkpointer_in_a_thread_installs_no_signal_handlers():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with memory_node(), Checkpointer(JOB) as ckpt:
            seen.append(ckpt.save(small(0), 0).wait())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [SaveState.SEALED]
    assert signal.getsignal(signal.SIGTERM) is before


# torch warns only once per process
SPARSE = pytest.mark.filterwarnings("ignore:Sparse")


def made(dense, layout):
    return dense.to_sparse(layout=getattr(torch, layout))


@SPARSE
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc"])
def test_sparse_tensors_round_trip(agent_dir, layout):
    saved = {"s": made(torch.eye(4), layout), "d": torch.ones(2)}
    for target in ("same", "dense"):
        with Checkpointer(JOB) as ckpt:
            ckpt.save(saved, 0).wait()
            empty = torch.zeros(4, 4) if target == "dense" else made(torch.zeros(4, 4), layout)
            found = {"s": empty, "d": torch.zeros(2)}
            assert ckpt.restore(found) == 0
            assert found["s"].layout is (torch.strided if target == "dense" else saved["s"].layout)
            assert torch.equal(found["s"].to_dense(), torch.eye(4))
    if layout == "sparse_coo":
        with Checkpointer(JOB) as ckpt, pytest.raises(MismatchError, match="sparse_coo"):
            ckpt.restore({"s": torch.zeros(4, 4).to_sparse_csr(), "d": torch.zeros(2)})


# -- SIGTERM ------------------------------------------------------------------------------------------------------

LOOP = """
import os, signal, sys, torch
from tieredckpt import Checkpointer
state = {{"w": torch.zeros(1000)}}
with Checkpointer("tiered://loop", {arguments}) as ckpt:
    for step in range(10):
        state["w"].fill_(step)
        ckpt.save(state, step).wait()
        if step == 4:
            {then}
print("finished", flush=True)
"""


def run(folder, arguments, then):
    return run_script(folder, LOOP.format(arguments=arguments, then=then))


def lose_memory(agent_dir):
    close_sessions()
    stop_agent(agent_dir)
    shutil.rmtree(agent_dir)


def test_sigterm_between_steps_keeps_the_step_that_follows(agent_dir, tmp_path):
    done = run(tmp_path, f'durable="file://{tmp_path}", durable_every=1000', "os.kill(os.getpid(), signal.SIGTERM)")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr
    lose_memory(agent_dir)
    with Checkpointer(JOB, durable=f"file://{tmp_path}") as ckpt:
        found = {"w": torch.zeros(1000)}
        assert ckpt.restore(found) == 5
        assert float(found["w"][0]) == 5


def test_sigterm_does_not_exceed_its_grace_period(agent_dir, tmp_path):
    """The process ends although its durable tier is lost; memory has its last step."""
    lose = f"ckpt.wait('durable'); os.rename('{tmp_path}/durable', '{tmp_path}/away'); open('{tmp_path}/durable', 'w')"
    done = run(
        tmp_path,
        f'durable="file://{tmp_path}/durable", durable_every=1000, grace_s=1.0',
        f"{lose}; os.kill(os.getpid(), signal.SIGTERM)",
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert agent_pid(agent_dir) is not None
    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        assert ckpt.restore({"w": torch.zeros(1000)}) == 5


def test_sigterm_handling_can_be_disabled(agent_dir, tmp_path):
    done = run(tmp_path, 'on_sigterm="ignore"', "os.kill(os.getpid(), signal.SIGTERM)")
    assert done.returncode == -signal.SIGTERM
    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        assert ckpt.restore({"w": torch.zeros(1000)}) == 4


def test_second_sigterm_has_no_effect(agent_dir, tmp_path):
    done = run(tmp_path, "grace_s=30.0", "[os.kill(os.getpid(), signal.SIGTERM) for _ in range(5)]")
    assert done.returncode == -signal.SIGTERM, done.stderr
    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        assert ckpt.restore({"w": torch.zeros(1000)}) == 5


def test_returning_signal_handler_is_called_once(agent_dir):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
    try:
        with Checkpointer(JOB, every=5) as ckpt:
            os.kill(os.getpid(), signal.SIGTERM)
            states = [ckpt.save(small(step), step).state for step in range(1, 7)]
            assert seen == ["mine"]
            assert [state is not SaveState.NOT_DUE for state in states] == [True, False, False, False, True, False]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("kind", [OSError, MemoryError, RuntimeError, ArenaFullError])
def test_any_failure_of_a_seal_is_reported_and_releases_its_slot(monkeypatch, kind):
    def none_left(*_):
        monkeypatch.undo()
        raise kind("no memory for a page")

    with memory_node() as node, Checkpointer(JOB) as ckpt:
        ckpt.save(small(0), 0).wait()
        monkeypatch.setattr("tieredckpt.tensors.slot_copy.MappedSlot.write", none_left)
        saved = ckpt.save(small(1), 1)
        with pytest.raises(SaveFailedError, match="no memory for a page"):
            saved.wait()
        assert saved.state is SaveState.FAILED
        assert node.store.status().arena.leases == 0
        for step in range(2, 6):
            assert ckpt.save(small(step), step).wait() is SaveState.SEALED


def test_skippable_save_does_not_wait_for_a_slow_seal(monkeypatch):
    seal, may_go_on = NodeStore.seal, threading.Event()

    def slow(*args):
        may_go_on.wait(20)
        return seal(*args)

    with memory_node(), Checkpointer(JOB, on_busy="skip") as ckpt:
        ckpt.save(small(0), 0).wait()
        monkeypatch.setattr(NodeStore, "seal", slow)
        sealing = ckpt.save(small(1), 1)
        assert ckpt.save(small(2), 2).state is SaveState.SKIPPED
        assert sealing.state is SaveState.STAGED
        may_go_on.set()
        assert sealing.wait() is SaveState.SEALED


def test_closed_session_starts_no_agent(agent_dir):
    with Checkpointer(JOB) as ckpt:
        ckpt.save(small(0), 0).wait()
        session = ckpt.session
    close_sessions()
    stop_agent(agent_dir)
    with pytest.raises(RequestError, match="closed"):
        session.agent.list_steps("loop")
    assert agent_pid(agent_dir) is None


@without_collectives
def test_failed_save_without_collectives_raises_on_no_rank(monkeypatch):
    """An error on one rank would block the others at DCP's barrier."""

    def none_left(*_):
        raise ArenaFullError("no memory for a page")

    monkeypatch.setattr("tieredckpt.tensors.slot_copy.MappedSlot.copy_in", none_left)
    with memory_node() as node:
        writer = TieredWriter(JOB, 1)
        dcp.save(small(1), storage_writer=writer, no_dist=True, use_collectives=False)
        assert isinstance(writer.error, SaveFailedError)
        assert "no memory for a page" in str(writer.error)
        assert node.store.status().arena.leases == 0


def save_behind_without_collectives():
    for step in (1, 2):
        dcp.save(small(step), storage_writer=TieredWriter(JOB, step), use_collectives=False)
    writer = TieredWriter(JOB, 1)
    dcp.save(small(1), storage_writer=writer, use_collectives=False)
    return repr(writer.error)


@without_collectives
def test_step_behind_newer_ones_is_a_usage_error_without_collectives(agent_dir, ranks):
    for error in ranks.run(2, save_behind_without_collectives):
        assert error.startswith("UsageError(")
        assert "rank 0 cannot save step 1 of loop: Step 1 of job 'loop' is behind step 2" in error


def test_state_staged_before_its_step_is_known_is_named_by_its_part(monkeypatch):
    """The staged state has an internal number until then, which means nothing to the user."""

    def away(store, key, *_args, **_kwargs):
        raise AgentUnreachableError(f"no slot for {key}: the agent does not answer")

    with memory_node():
        for step in (1, 2):
            dcp.async_save(small(step), storage_writer=TieredWriter(JOB, step), no_dist=True).result()
        monkeypatch.setattr(NodeStore, "lease", away)
        with pytest.raises(TierUnavailableError, match="part 0 of loop") as info:
            dcp.async_save(small(3), storage_writer=TieredWriter(JOB, 3), no_dist=True).result()
        assert "the agent does not answer" in str(info.value)
        assert "attempt" not in str(info.value)
