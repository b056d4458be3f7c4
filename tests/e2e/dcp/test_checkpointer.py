"""The training loop's checkpointer with a real agent."""

import copy
import gc
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.agents import agent_pid, stop_agent
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.local_nodes import wait_until
from tests.support.models import build_model, full_state, get_state, set_state, train_steps
from tests.support.scripts import run_script
from tieredckpt import CheckpointDamagedError, Checkpointer, CheckpointNotFoundError, NullCheckpointer, TieredWriter
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.errors import MismatchError, SettingsError, StoreBusyError, UsageError
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB = "tiered://loop"


def state_at(step):
    return {"w": torch.full((1000,), float(step)), "nested": {"b": torch.arange(5) + step}, "step": step, "lr": 0.1}


class Awaited(threading.Thread):
    """A thread that ends when a caller joins it."""

    def __init__(self):
        super().__init__(daemon=True)
        self.wanted = threading.Event()
        self.start()

    def run(self):
        self.wanted.wait()

    def join(self, timeout=None):
        self.wanted.set()
        super().join(timeout)


def test_close_waits_for_slots_that_are_being_prepared(agent_dir, monkeypatch):
    """``close`` waits for the preparation of every restore, which could otherwise start a new agent."""
    threads = []

    def prepare(slots, *_):
        threads.append(Awaited())
        slots._preparing.append(threads[-1])

    monkeypatch.setattr("tieredckpt.session.slot_pool.SlotPool.prepare", prepare)
    with Checkpointer("tiered://loop") as ckpt:
        ckpt.restore({"w": torch.zeros(4)})
        ckpt.restore({"w": torch.zeros(4)})
        assert [one.is_alive() for one in threads] == [True, True]
    assert [one.is_alive() for one in threads] == [False, False]


def test_restore_returns_minus_one_only_without_a_checkpoint(agent_dir):
    with Checkpointer(JOB) as ckpt:
        assert ckpt.restore(state_at(0)) == -1
        ckpt.save(state_at(0), 0).wait()
        state = zeros_like_state(state_at(0))
        assert ckpt.restore(state) == 0
        assert_same_bits(state_at(0), state)


def test_agent_imports_numpy_after_the_first_save(agent_dir):
    """A load after a fault does not wait for imports of the agent."""
    with Checkpointer(JOB) as ckpt:
        ckpt.save(state_at(0), 0).wait()
        maps = Path(f"/proc/{agent_pid(agent_dir)}/maps")
        wait_until(lambda: "numpy" in maps.read_text(), "the agent has imported numpy")


def test_loop_resumes_at_its_step(agent_dir):
    for begin in (0, 4, 8):
        with Checkpointer(JOB) as ckpt:
            state = state_at(-1)
            step = ckpt.restore(state) + 1
            assert step == begin
            if begin:
                assert_same_bits(state_at(begin - 1), state)
            for current in range(step, step + 4):
                saved = ckpt.save(state_at(current), current)
                assert saved.ok
        assert saved.wait() is SaveState.SEALED


def test_saved_state_is_the_state_at_the_call(agent_dir):
    with Checkpointer(JOB) as ckpt:
        state = state_at(0)
        for step in range(5):
            state["w"].fill_(step)
            state["step"] = step
            saved = ckpt.save(state, step)
            state["w"].fill_(-1)
            state["step"] = -1
            saved.wait()
            found = zeros_like_state(state)
            Checkpointer(JOB, on_sigterm="ignore").restore(found)
            assert (float(found["w"][0]), found["step"]) == (step, step)


def test_later_saves_need_no_planning(agent_dir, monkeypatch):
    with Checkpointer(JOB) as ckpt:
        ckpt.save(state_at(0), 0)
        monkeypatch.setattr(dcp, "save", lambda *a, **k: pytest.fail("the save planned again"))
        for step in range(1, 5):
            assert ckpt.save(state_at(step), step).wait() is SaveState.SEALED


def test_state_with_a_changed_structure_is_planned_again(agent_dir):
    with Checkpointer(JOB) as ckpt:
        ckpt.save(state_at(0), 0)
        ckpt.save(state_at(1), 1)
        grown = state_at(2) | {"new": torch.ones(7), "w": torch.ones(10)}
        ckpt.save(grown, 2).wait()
        found = zeros_like_state(grown)
        assert ckpt.restore(found) == 2
        assert_same_bits(grown, found)
        ckpt.save(state_at(3), 3).wait()
        found = zeros_like_state(state_at(3))
        assert ckpt.restore(found) == 3
        assert_same_bits(state_at(3), found)


def test_save_follows_its_interval(agent_dir, tmp_path):
    with Checkpointer(JOB, every=3) as ckpt:
        states = [ckpt.save(state_at(step), step).state for step in range(7)]
        assert [s is not SaveState.NOT_DUE for s in states] == [True, False, False, True, False, False, True]
        assert ckpt.save(state_at(7), 7, force=True).ok
        ckpt.wait()
        assert [info.step for info in ckpt.steps()][-1] == 7


def test_damaged_step_is_reported_and_the_older_one_restored(agent_dir):
    with Checkpointer(JOB) as ckpt:
        for step in range(3):
            ckpt.save(state_at(step), step).wait()
        damage_newest(agent_dir)
        found = zeros_like_state(state_at(0))
        assert ckpt.restore(found) == 1
        assert_same_bits(state_at(1), found)
        assert "part 0 in memory: damaged" in " ".join(ckpt.last_restore.refused)
        assert "step 2" in " ".join(ckpt.last_restore.refused)
        status = ckpt.session.agent.store.status()
        assert any("/2 part 0" in damage.what for damage in status.damage_reports)


def damage_newest(agent_dir, at=-1):
    """Flip a bit in the tensors of the slot that was sealed last."""
    notes = sorted((agent_dir / "notes").glob("seal.*"), key=lambda path: path.stat().st_mtime_ns)
    slot = agent_dir / "slots" / notes[at].name.removeprefix("seal.")
    with slot.open("r+b") as file:
        file.seek(4096 + 100)
        byte = file.read(1)
        file.seek(4096 + 100)
        file.write(bytes([byte[0] ^ 1]))


def test_damage_of_every_step_is_an_error(agent_dir):
    with Checkpointer(JOB) as ckpt:
        for step in range(2):
            ckpt.save(state_at(step), step).wait()
        damage_newest(agent_dir, -1)
        damage_newest(agent_dir, -2)
        with pytest.raises(CheckpointDamagedError):
            ckpt.restore(zeros_like_state(state_at(0)))


def test_damage_is_remembered_until_a_newer_step_is_complete(agent_dir):
    """The next agent finds the damage record and reports the checkpoint as lost, not as never saved."""
    with Checkpointer(JOB) as ckpt:
        ckpt.save(state_at(0), 0).wait()
        damage_newest(agent_dir)
        stop_agent(agent_dir, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(CheckpointDamagedError, match=r"step 0 .*damaged"):
                ckpt.restore(zeros_like_state(state_at(0)))
            stop_agent(agent_dir, signal.SIGKILL)
        ckpt.save(state_at(1), 1).wait()
        found = zeros_like_state(state_at(0))
        assert ckpt.restore(found) == 1
        assert [info.step for info in ckpt.steps()] == [1]


def test_restore_loads_a_named_step(agent_dir):
    with Checkpointer(JOB) as ckpt:
        for step in range(2):
            ckpt.save(state_at(step), step).wait()
        found = zeros_like_state(state_at(0))
        assert ckpt.restore(found, step=0) == 0
        assert_same_bits(state_at(0), found)
        with pytest.raises(CheckpointNotFoundError):
            ckpt.restore(found, step=17)


def test_state_with_other_shapes_is_refused(agent_dir):
    with Checkpointer(JOB) as ckpt:
        ckpt.save(state_at(0), 0).wait()
        with pytest.raises(MismatchError, match="Size mismatch"):
            ckpt.restore(state_at(0) | {"w": torch.zeros(3)})
        with pytest.raises(MismatchError, match="the state has more, which the step does not"):
            ckpt.restore(state_at(0) | {"more": torch.zeros(3)})
        with pytest.raises(MismatchError, match="float32"):
            ckpt.restore(state_at(0) | {"w": torch.zeros(1000, dtype=torch.float64)})


def test_steps_saved_after_a_rewind_replace_later_ones(agent_dir):
    with Checkpointer(JOB) as ckpt:
        for step in range(2):
            ckpt.save(state_at(step), step).wait()
    from tieredckpt.session.session import close_sessions

    close_sessions()
    with Checkpointer(JOB) as ckpt:
        assert ckpt.restore(zeros_like_state(state_at(0)), step=0) == 0
        other = state_at(0) | {"w": torch.full((1000,), 77.0)}
        ckpt.save(other, 0, force=True).wait()
    close_sessions()
    with Checkpointer(JOB) as ckpt:
        found = zeros_like_state(other)
        assert ckpt.restore(found) == 0
        assert float(found["w"][0]) == 77


def test_reading_a_checkpoint_leaves_it_unchanged(agent_dir, tmp_path):
    """Notebooks, evaluations and reruns of a finished script do not count as crashed restarts."""
    from tieredckpt.session.session import close_sessions

    with Checkpointer(JOB, durable=f"file://{tmp_path}") as ckpt:
        for step in range(2):
            ckpt.save(state_at(step), step).wait("durable")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    for _ in range(12):
        close_sessions()
        with Checkpointer(JOB, durable=f"file://{tmp_path}") as ckpt:
            assert ckpt.restore(zeros_like_state(state_at(0))) == 1
            assert not any(info.quarantined for info in ckpt.steps())
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_the_agent_is_killed_between_saves(agent_dir):
    with Checkpointer(JOB) as ckpt:
        for step in range(4):
            assert ckpt.save(state_at(step), step).wait() is SaveState.SEALED
            stop_agent(agent_dir, signal.SIGKILL)
        found = zeros_like_state(state_at(0))
        assert ckpt.restore(found) == 3
        assert_same_bits(state_at(3), found)


def test_busy_node_skips_the_save_and_training_continues(agent_dir):
    with Checkpointer(JOB, on_busy="skip") as ckpt:
        for step in range(3):
            ckpt.save(state_at(step), step).wait()
        store = ckpt.session.agent.store
        pins = [store.pin(fact.key) for fact in store.list_shards("loop")]
        results = [ckpt.save(state_at(step), step) for step in range(3, 8)]
        assert results[0].ok  # the extra slot
        results[0].wait()
        skipped = [r for r in results if r.state is SaveState.SKIPPED]
        assert skipped
        assert isinstance(skipped[0].error, StoreBusyError)
        for pin in pins:
            store.unpin(pin.id)
        assert ckpt.save(state_at(8), 8).wait() is SaveState.SEALED


def test_save_failures_are_reported_or_raised_by_option(agent_dir, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_BUDGET", "1MiB")
    large = {"w": torch.zeros(1 << 20)}
    with Checkpointer(JOB) as ckpt:
        saved = ckpt.save(large, 0)
        assert saved.state is SaveState.FAILED
        assert "budget" in str(saved.error)
        with pytest.raises(BaseException, match="budget"):
            saved.wait()
    with Checkpointer(JOB, on_failure="raise") as ckpt, pytest.raises(BaseException, match="budget"):
        ckpt.save(large, 1)


def test_invalid_arguments_are_refused_before_any_side_effect(agent_dir):
    with pytest.raises(UsageError):
        Checkpointer("tiered://loop/step-3")
    with pytest.raises(SettingsError, match=r"memory\.every"):
        Checkpointer(JOB, every=0)
    with pytest.raises(SettingsError, match=r"durable\.every"):
        Checkpointer(JOB, every=3, durable_every=10)
    assert not agent_dir.exists()
    with Checkpointer(JOB) as ckpt, pytest.raises(UsageError):
        ckpt.save({}, -1)


def test_null_checkpointer_has_the_same_methods():
    public = {name for name in vars(Checkpointer) if not name.startswith("_")} - {"session"}
    assert public <= set(dir(NullCheckpointer))
    with NullCheckpointer() as ckpt:
        assert ckpt.restore({}) == -1
        assert not ckpt.save({}, 3).ok
        assert ckpt.wait("durable")
        assert ckpt.steps() == []
        assert ckpt.loadable_versions() == ()


def test_memory_node_needs_no_agent_or_files(agent_dir):
    with memory_node() as node:
        with Checkpointer(JOB) as ckpt:
            for step in range(3):
                ckpt.save(state_at(step), step).wait()
            found = zeros_like_state(state_at(0))
            assert ckpt.restore(found) == 2
            assert_same_bits(state_at(2), found)
        assert node.store.status().jobs[0].newest_committed == 2
    assert not agent_dir.exists()


def test_garbage_collector_state_is_unchanged(agent_dir):
    with Checkpointer(JOB) as ckpt:
        assert gc.isenabled()
        ckpt.save(state_at(0), 0)
        assert gc.isenabled()
        gc.disable()
        ckpt.save(state_at(1), 1)
        assert not gc.isenabled()
        gc.enable()


def test_closed_checkpointer_leaves_no_thread(agent_dir):
    before = {thread.name for thread in threading.enumerate()}
    with Checkpointer(JOB) as ckpt:
        ckpt.restore(state_at(0))
        ckpt.save(state_at(0), 0)
    from tieredckpt.session.session import close_sessions

    close_sessions()
    assert {thread.name for thread in threading.enumerate()} <= before


# -- several ranks ------------------------------------------------------------------------------------------------


def loop(kind, steps, every_restart=2):
    """Train with restarts in between, and return the final state."""
    done = -1
    while done < steps - 1:
        model, optimizer = build_model(kind, dist.get_world_size(), seed=5)
        with Checkpointer(JOB) as ckpt:
            state = get_state(model, optimizer)
            begin = ckpt.restore(state) + 1
            assert begin == done + 1
            if begin:
                set_state(model, optimizer, state)
            for step in range(begin, min(steps, begin + every_restart)):
                train_steps(model, optimizer, 1)
                ckpt.save(get_state(model, optimizer), step)
                done = step
            ckpt.wait()
            dist.barrier()
        from tieredckpt.session.session import close_sessions

        close_sessions()
    return full_state(get_state(model, optimizer))


def reference_state(kind, steps):
    model, optimizer = build_model(kind, dist.get_world_size(), seed=5)
    get_state(model, optimizer)  # creates the optimizer's state, as the loop does before a restore
    for _ in range(steps):
        train_steps(model, optimizer, 1)
    return full_state(get_state(model, optimizer))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_loop_with_restarts_matches_an_undisturbed_one(agent_dir, ranks, kind):
    expected = ranks.run(2, reference_state, kind, 6)
    found = ranks.run(2, loop, kind, 6)
    for a, b in zip(expected, found, strict=True):
        assert_same_bits(a, b)


def restore_only(kind):
    model, optimizer = build_model(kind, dist.get_world_size(), seed=9)
    train_steps(model, optimizer, 1)
    with Checkpointer(JOB) as ckpt:
        state = get_state(model, optimizer)
        step = ckpt.restore(state)
        set_state(model, optimizer, state)
    return step, full_state(get_state(model, optimizer))


def test_all_ranks_restore_the_same_step_at_another_world_size(agent_dir, ranks):
    expected = ranks.run(4, loop, "fsdp", 4)
    for world in (1, 2, 3):
        for step, found in ranks.run(world, restore_only, "fsdp"):
            assert step == 3
            assert_same_bits(expected[0], found)


def damaged_on_one_rank(agent_dir):
    """Both ranks fall back together although only one needs the damaged bytes."""
    w = torch.full((1000,), 1.0)
    with Checkpointer(JOB) as ckpt:
        for step in range(2):
            ckpt.save({f"own{dist.get_rank()}": w * step}, step).wait()
        dist.barrier()
        if dist.get_rank() == 0:
            damage_newest(Path(agent_dir))
        dist.barrier()
        state = {f"own{dist.get_rank()}": torch.zeros(1000)}
        step = ckpt.restore(state)
        return step, float(state[f"own{dist.get_rank()}"][0])


def test_ranks_agree_on_the_older_step(agent_dir, ranks):
    assert ranks.run(2, damaged_on_one_rank, str(agent_dir)) == [(0, 0.0), (0, 0.0)]


# -- signals ------------------------------------------------------------------------------------------------------

PREEMPTED = """
import os, signal, sys, torch
from tieredckpt import Checkpointer
state = {"w": torch.zeros(1000)}
with Checkpointer("tiered://loop", every=10, durable="%s", durable_every=1000, grace_s=20) as ckpt:
    for step in range(100000):
        state["w"].fill_(step)
        ckpt.save(state, step)
        if step == 25:
            print("ready", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
    print("never", flush=True)
"""


def test_sigterm_makes_the_next_step_the_last_and_durable(agent_dir, tmp_path):
    done = run_script(tmp_path, PREEMPTED % f"file://{tmp_path}")
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "never" not in done.stdout
    stop_agent(agent_dir)
    import shutil

    shutil.rmtree(agent_dir)
    with Checkpointer(JOB, durable=f"file://{tmp_path}") as ckpt:
        found = {"w": torch.zeros(1000)}
        assert ckpt.restore(found) == 26
        assert float(found["w"][0]) == 26


def test_preempted_loop_without_another_save_ends(agent_dir, tmp_path):
    script = """
import os, signal, time, torch
from tieredckpt import Checkpointer
with Checkpointer("tiered://loop", grace_s=1.0) as ckpt:
    ckpt.save({"w": torch.zeros(10)}, 0)
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        time.sleep(0.01)
"""
    done = run_script(tmp_path, script)
    assert done.returncode == -signal.SIGTERM


def test_previous_signal_handler_is_called_and_restored(agent_dir):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
    try:
        with Checkpointer(JOB) as ckpt:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not seen
            ckpt.save(state_at(0), 0)
            assert seen == ["mine"]
            found = zeros_like_state(state_at(0))
            assert ckpt.restore(found) == 0
        assert signal.getsignal(signal.SIGTERM) is not before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_writers_and_checkpointers_share_a_job(agent_dir):
    state = state_at(3)
    dcp.save(copy.deepcopy(state), storage_writer=TieredWriter(JOB, 3), no_dist=True)
    with Checkpointer(JOB) as ckpt:
        found = zeros_like_state(state)
        assert ckpt.restore(found) == 3
        assert_same_bits(state, found)
    assert agent_pid(agent_dir)


def loop_with_optimizer(steps, seed_step=0):
    """Run the README's loop with stateful objects, and return losses by step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optim": optimizer}
    losses = {}
    with Checkpointer(JOB) as ckpt:
        first = ckpt.restore(state) + 1
        for step in range(first, steps):
            loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[step] = loss.item().hex()
            ckpt.save(state, step)
    return losses


def test_restore_fills_the_moments_of_an_unused_optimizer(agent_dir):
    with memory_node():
        undisturbed = loop_with_optimizer(6)
    assert loop_with_optimizer(3) | loop_with_optimizer(6) == undisturbed


def test_fresh_start_does_not_change_the_optimizer(agent_dir):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(JOB) as ckpt:
        assert ckpt.restore({"optim": optimizer}) == -1
        assert not optimizer.state
        ckpt.save({"optim": optimizer}, 0).wait()  # saved before the first step, without moments
        assert ckpt.restore({"optim": optimizer}) == 0
        assert not optimizer.state


def test_closed_checkpointer_raises(agent_dir):
    ckpt = Checkpointer(JOB)
    ckpt.save(state_at(0), 0).wait()
    ckpt.close()
    with pytest.raises(UsageError, match="loop is closed"):
        ckpt.save(state_at(1), 1)
    with pytest.raises(UsageError, match="loop is closed"):
        ckpt.restore(state_at(1))
    ckpt.close()


def test_closed_checkpointer_starts_no_agent(agent_dir):
    from tieredckpt.session.session import close_sessions

    ckpt = Checkpointer(JOB)
    saved = ckpt.save(state_at(0), 0)
    saved.wait()
    ckpt.close()
    stop_agent(agent_dir)
    for call in (ckpt.steps, lambda: ckpt.seal(state_at(0), 0), lambda: ckpt.drop(0)):
        with pytest.raises(UsageError, match="closed"):
            call()
    close_sessions()
    for ask in (ckpt.steps, lambda: saved.wait("durable"), lambda: ckpt.session):
        with pytest.raises(UsageError, match="closed"):
            ask()
    assert agent_pid(agent_dir) is None
