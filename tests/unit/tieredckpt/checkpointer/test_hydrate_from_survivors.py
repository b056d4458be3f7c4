"""The next world saves the state that survivors retained: one rank, and an in-process node."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from elastic.workers.in_process_restart import reset_process_state
from tests.support.oldest_torch import worlds_that_end
from tieredckpt import Checkpointer, SaveFailedError
from tieredckpt.agent.node_step_reader import NodeStepReader
from tieredckpt.checkpointer.hydrate_from_survivors import hydrate_from_survivors
from tieredckpt.checkpointer.progress_hook import expect_reached_step
from tieredckpt.event_log.event_types import RestoreEvent
from tieredckpt.event_log.log_reader import read_event_log
from tieredckpt.event_log.log_writer import EVENT_LOG_ENV
from tieredckpt.live.survivor_state import track_step_boundaries
from tieredckpt.testing import memory_node

pytestmark = worlds_that_end


class Job:
    """A job of one rank that moves from world to world."""

    def __init__(self, held, node):
        self.held, self.node, self.epoch = held, node, -1

    def enter(self, *, strict=True):
        """Enter a new world with a new model, and return the source of its state."""
        self.epoch += 1
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        found = hydrate_from_survivors(self.held, dist.distributed_c10d._get_default_store(), 0, 1)
        self.held.enter_world(self.epoch)
        torch.manual_seed(self.epoch)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = {"model": self.model, "optim": self.optimizer, "n": torch.tensor(0)}
        self.ckpt = Checkpointer("tiered://job", every=5)
        self.first = self.ckpt.restore(self.state, strict=strict) + 1
        return found[0] if found else None

    def train(self, stop, *, save=True):
        for step in range(self.first, stop):
            self.model(torch.full((1, 3), float(step))).square().sum().backward()
            self.optimizer.step()
            self.state["n"] = torch.tensor(step)
            if save:
                self.ckpt.save(self.state, step).wait()

    def lose_all_steps(self):
        store = self.node.store
        store.versions.delete("job", sorted({fact.key.version_id for fact in store.list_shards("job")}))

    def leave(self):
        self.ckpt.close()
        self.held.retain_after_fault()
        dist.destroy_process_group()
        reset_process_state()


@pytest.fixture
def job(monkeypatch):
    # Skip the garbage collection, which is slow here because of all the modules tests import.
    monkeypatch.setattr("elastic.workers.in_process_restart.gc.collect", lambda: 0)
    with memory_node() as node, track_step_boundaries() as held:
        one = Job(held, node)
        yield one
        if dist.is_initialized():
            one.leave()


def said(found):
    return found.mode, found.step, found.reached


def test_the_step_that_was_reached_is_given(job):
    assert job.enter() is None
    job.train(9)
    weight, moments = (
        job.model.weight.detach().clone(),
        job.optimizer.state[job.model.weight]["momentum_buffer"].clone(),
    )
    job.leave()
    assert job.held.retained["job"].step == 8
    found = job.enter()
    assert said(found) == ("live", 8, 8)
    assert (
        str(found)
        == "job: resuming from the state that the surviving ranks have of step 8; the last step reached was 8"
    )
    assert job.held.retained == {}
    assert (job.first, job.state["n"].item()) == (9, 8)
    assert torch.equal(job.model.weight, weight)
    assert torch.equal(job.optimizer.state[job.model.weight]["momentum_buffer"], moments)
    report = job.ckpt.last_restore
    assert (report.mode, report.steps_redone, set(report.bytes_by_tier)) == ("live", 0, {"memory"})
    # The following steps are saved as usual, and older steps remain to fall back to.
    job.train(11)
    assert [info.step for info in job.ckpt.steps() if info.is_complete][-2:] == [8, 10]


def test_complete_step_is_not_saved_again(job):
    job.enter()
    job.train(6)
    job.leave()
    found = job.enter()
    assert (*said(found), found.why) == ("snapshot", -1, 5, "step 5 is a complete checkpoint")
    assert (job.first, job.ckpt.last_restore.mode, job.ckpt.last_restore.steps_redone) == (6, "snapshot", 0)


def test_only_the_names_of_the_complete_step_are_requested(job, monkeypatch):
    job.enter()
    job.train(6)
    job.leave()
    monkeypatch.setattr(
        NodeStepReader, "describe", lambda *_: pytest.fail("the checksums of all shards were requested")
    )
    assert job.enter().why == "step 5 is a complete checkpoint"


def test_incomplete_boundary_costs_the_unsaved_steps(job):
    job.enter()
    job.train(9)
    job.optimizer.step()
    job.leave()
    found = job.enter()
    assert (*said(found), found.why) == ("snapshot", -1, 8, "no survivor stood between two steps")
    assert (job.first, job.ckpt.last_restore.steps_redone) == (6, 3)


def test_restore_without_survivors_reports_the_repeated_steps(job, caplog):
    job.enter()
    job.train(7)
    with expect_reached_step("job", 8):
        assert job.ckpt.restore(job.state, 5) == 5
        assert job.ckpt.last_restore.steps_redone is None  # the caller chose the step
        for redone in (3, None):  # later restores of a world go back on purpose
            assert job.ckpt.restore(job.state) == 5
            assert job.ckpt.last_restore.steps_redone == redone
    assert caplog.text.count("resumed from step 5 because no newer one is complete; 3 steps are done again") == 1


def test_single_repeated_step_is_logged_in_the_singular(job, caplog):
    job.enter()
    job.train(7)
    with expect_reached_step("job", 6):
        assert job.ckpt.restore(job.state) == 5
    assert "resumed from step 5 because no newer one is complete; 1 step is done again" in caplog.text


def test_step_that_lost_ranks_had_sealed_counts_beside_the_survivors(job, caplog):
    job.enter()
    job.train(9)
    job.optimizer.step()
    job.leave()
    with expect_reached_step("job", 9):
        assert job.enter().reached == 8
    assert (job.first, job.ckpt.last_restore.steps_redone) == (6, 4)
    (warning,) = (one.message for one in caplog.records if "are done again" in one.message and one.levelname != "INFO")
    assert warning.endswith("4 steps are done again (a rank had sealed step 9)")


@pytest.mark.parametrize("sealed", [7, 8])
def test_repeated_sealed_steps_are_a_warning_beside_survivors(job, caplog, sealed):
    """A part of the sealed step was on a lost node only, so the survivors resume from an older one."""
    job.enter()
    job.train(9)
    job.optimizer.step()
    job.leave()
    with expect_reached_step("job", sealed):
        assert job.enter().reached == 8
    assert (job.first, job.ckpt.last_restore.steps_redone) == (6, 3)
    (warning,) = (one.message for one in caplog.records if "are done again" in one.message and one.levelname != "INFO")
    assert warning.endswith(f"3 steps are done again (a rank had sealed step {sealed})")


def test_repeated_unsealed_steps_are_no_warning(job, caplog):
    job.enter()
    job.train(9)
    job.optimizer.step()
    job.leave()
    with expect_reached_step("job", 5):
        assert job.enter().reached == 8
    assert job.ckpt.last_restore.steps_redone == 3
    assert {one.levelname for one in caplog.records if "are done again" in one.message} <= {"INFO"}


@pytest.mark.parametrize("of", ["job", "another job"])
def test_start_from_nothing_names_the_step_that_was_reached(job, caplog, of):
    with expect_reached_step(of, 8):
        assert job.enter() is None
    assert (job.first, job.ckpt.last_restore) == (0, None)
    said = "job starts from nothing, although a rank had sealed step 8" in caplog.text
    assert said == (of == "job")


def test_event_log_records_the_source_of_each_restore(job, monkeypatch, tmp_path):
    monkeypatch.setenv(EVENT_LOG_ENV, str(tmp_path))
    job.enter()
    job.train(9)
    job.leave()
    job.enter()
    job.leave()
    job.enter()
    told = [event for event in read_event_log(tmp_path).events if isinstance(event, RestoreEvent)]
    assert [(event.mode, event.step) for event in told] == [("nothing", -1), ("live", 8), ("snapshot", 8)]


def test_no_survivor_state_is_used_before_a_complete_step(job):
    job.enter()
    job.first = 1
    job.train(4)
    job.leave()
    found = job.enter()
    assert (said(found), job.first) == (("snapshot", -1, 3), 0)
    assert found.why == "no step is complete, and no survivor knows the names of the whole state"


def test_survivor_state_is_used_when_all_saved_steps_are_lost(job):
    job.enter()
    job.train(9)
    job.leave()
    job.lose_all_steps()
    assert said(job.enter()) == ("live", 8, 8)
    assert (job.first, job.state["n"].item()) == (9, 8)
    # This world saved no step: the names in the state are known from the step it restored.
    job.train(10)
    job.leave()
    job.lose_all_steps()
    assert said(job.enter()) == ("live", 9, 9)


def test_survivor_state_is_used_when_the_first_save_was_interrupted(job, monkeypatch):
    job.enter()
    with monkeypatch.context() as broken:
        broken.setattr("tieredckpt.session.session.Session.seal", lambda *_args, **_named: 1 / 0)
        job.train(1, save=False)
        job.ckpt.save(job.state, 0)
    job.leave()
    assert said(job.enter()) == ("live", 0, 0)


def test_uncompared_names_are_not_taken_as_complete(job):
    job.enter()
    job.train(6)
    job.state["only here"] = torch.ones(2)
    job.first = 6
    job.train(8)
    job.leave()
    job.lose_all_steps()
    found = job.enter(strict=False)
    assert found.why == "no step is complete, and no survivor knows the names of the whole state"


def test_state_held_only_by_a_lost_rank_cannot_be_restored(job):
    job.enter()
    job.state["only there"] = torch.ones(2)
    job.train(6)
    del job.state["only there"]
    job.first = 6
    job.train(8)
    job.leave()
    found = job.enter(strict=False)
    assert (said(found), found.why) == (("snapshot", -1, 7), "of step 7 no survivor has only there")


def test_snapshot_is_used_when_saving_survivor_state_fails(job, monkeypatch, caplog):
    job.enter()
    job.train(9)
    job.leave()

    def full(*_args):
        raise SaveFailedError("there is no room")

    monkeypatch.setattr("tieredckpt.checkpointer.hydrate_from_survivors._save", full)
    found = job.enter()
    assert (said(found), found.failed, job.first) == (("snapshot", -1, 8), True, 6)
    assert any("the save of the survivors' state failed: there is no room" in one.message for one in caplog.records)
    assert job.held.retained == {}


def test_survivor_state_is_retained_for_the_world_after_next(job, monkeypatch):
    job.enter()
    job.train(9)
    job.leave()
    with monkeypatch.context() as broken:
        broken.setattr("tieredckpt.checkpointer.hydrate_from_survivors._choose", lambda *_args: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                job.enter()
            job.leave()
    assert said(job.enter()) == ("live", 8, 8)


def test_failed_hydration_is_not_retried_forever(job, monkeypatch):
    job.enter()
    job.train(9)
    job.leave()
    monkeypatch.setattr("tieredckpt.checkpointer.hydrate_from_survivors._choose", lambda *_args: 1 / 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            job.enter()
        job.leave()
    assert said(job.enter()) == ("snapshot", -1, 8)
    assert job.first == 6


def test_a_world_that_ended_well_leaves_nothing(job):
    job.enter()
    job.train(9)
    job.held.end_world()
    job.leave()
    assert job.enter() is None
    assert (job.first, job.ckpt.last_restore.steps_redone) == (6, None)
