"""A process between worlds: threads as ranks, and no groups."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading

import pytest
import torch
from torch.distributed import is_torchelastic_launched
from torch.distributed.checkpoint.api import CheckpointException

from elastic.control.control_plane import ControlNotice, NoticeKind
from elastic.errors import ElasticError, JobFailedError, PolicyError, WorldChanged
from elastic.testing import InMemoryCoordinator
from elastic.workers import step_barrier
from elastic.workers.step_barrier import StepBarrier
from elastic.workers.train_loop import RecoveryPolicy, RunOutcome, RunResult, current_world, recoverable, run
from elastic.workers.world_handle import resolve_mesh_shape
from tests.support.control_planes import PATIENCE_S, start_all, wait_results
from tieredckpt import Checkpointer, NullCheckpointer, SaveFailedError
from tieredckpt.checkpointer.preemption import PreemptionHandler, sigterm_handled_elsewhere
from tieredckpt.session.session import close_sessions
from tieredckpt.testing import memory_node

QUIET = RecoveryPolicy(backend="none", peer_loss_wait_s=0.0)
PATIENT = RecoveryPolicy(backend="none", peer_loss_wait_s=PATIENCE_S)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Skip the garbage collection, which is slow here because of all the modules tests import."""
    monkeypatch.setattr("elastic.workers.in_process_restart.gc.collect", lambda: 0)


def job(plane, train, policy=QUIET):
    return start_all(*(lambda s=seat: run(train, plane=s, policy=policy) for seat in plane.planes))


def steps_to(total):
    def train(world):
        for step in world.steps(0, total):
            last = step
        return last

    return train


def test_all_finish():
    ends = wait_results(job(InMemoryCoordinator(3), steps_to(5)))
    assert [(end.outcome, end.value, end.steps, end.worlds) for end in ends] == [(RunOutcome.FINISHED, 4, 5, 1)] * 3


def test_resize_resumes_at_the_agreed_step():
    plane = InMemoryCoordinator(2)
    done, sealed, lock = {0: [], 1: []}, [], threading.Lock()

    def train(world):
        first = max(sealed, default=-1) + 1
        for step in world.steps(first, 20, seal=sealed.append):
            with lock:
                done[world.epoch].append(step)
            if step == 7 and world.rank == 0:
                plane.resize(1)
                world._gate.poll()
            if world.size == 2:
                meeting.wait(PATIENCE_S)

    meeting = threading.Barrier(2)
    ends = wait_results(job(plane, train))
    assert sorted(end.outcome.value for end in ends) == ["dismissed", "finished"]
    assert len(set(sealed)) == 1
    target = sealed[0]
    assert sorted(done[0]) == sorted([*range(target + 1)] * 2)
    assert done[1] == list(range(target + 1, 20))


def resized_once(save_between_worlds):
    """Run a resized job that saves between its worlds; return its end, restored steps and faults."""
    plane, restored = InMemoryCoordinator(1), []

    def between_worlds():
        close_sessions()
        with Checkpointer("tiered://job") as other:
            save_between_worlds(other)
        close_sessions()

    def train(world):
        state = {"step": torch.tensor(-1)}
        with Checkpointer("tiered://job") as ckpt:
            first = ckpt.restore(state) + 1
            restored.append(int(state["step"]))
            for step in world.steps(first, 12, checkpoint=(ckpt, state)):
                state["step"].fill_(step)
                ckpt.save(state, step)
                if step == 9 and world.epoch == 0:
                    plane.resize(1)
            restored.append(int(state["step"]))

    with memory_node():
        policy = RecoveryPolicy(backend="none", peer_loss_wait_s=0.0, health_check=between_worlds)
        (ended,) = wait_results(job(plane, train, policy))
    return ended, restored, plane.planes[0].faults


def test_resized_world_restores_the_sealed_step_despite_a_later_branch():
    """Another session of the job restored an older step and saved: newer, but not sealed."""

    def go_back(other):
        state = {"step": torch.tensor(0)}
        assert other.restore(state, 8) == 8
        assert other.save(state, 8).wait()

    ended, restored, faults = resized_once(go_back)
    assert (ended.outcome, ended.worlds, faults) == (RunOutcome.FINISHED, 2, [])
    assert restored == [-1, 9, 11]


def test_same_step_of_another_incarnation_is_not_restored():
    """The other incarnation's step has the same number."""

    def save_again(other):
        state = {"step": torch.tensor(0)}
        assert other.restore(state, 8) == 8
        assert other.save({"step": torch.tensor(1000)}, 9).wait()

    ended, restored, faults = resized_once(save_again)
    assert (ended.outcome, ended.worlds, faults) == (RunOutcome.FINISHED, 2, [])
    assert restored == [-1, 9, 11]


def test_missing_sealed_step_is_a_fault_and_the_newest_is_restored_next():
    def delete(other):
        session = other.session
        groups = {view.version_id for view in session.agent.list_steps("job").views}
        session.commits.drop_steps([group for group in groups if group.version == 9])

    ended, restored, faults = resized_once(delete)
    assert (ended.outcome, ended.worlds) == (RunOutcome.FINISHED, 3)
    assert restored == [-1, 8, 11]
    assert len(faults) == 1
    assert "the ranks sealed step 9 before this world: tiered://job/step-9: no complete step found" in faults[0]


def test_stopped_job_is_sealed_and_names_the_step_that_it_resumes_from():
    plane = InMemoryCoordinator(2)
    seen = []

    def train(world):
        for step in world.steps(3, seal=seen.append):
            if step == 5 and world.rank == 0:
                plane.stop("the night is over")

    ends = wait_results(job(plane, train))
    assert {end.outcome for end in ends} == {RunOutcome.STOPPED}
    assert len({end.steps for end in ends}) == 1
    assert set(seen) == {ends[0].steps - 1}
    assert str(ends[0]) == f"stopped after step {seen[0]}; start it again to resume from step {seen[0]}"


def test_job_stopped_before_its_first_step_names_no_step():
    assert str(RunResult(RunOutcome.STOPPED)) == "stopped before the first step"


def test_sealed_step_is_in_the_progress_when_it_is_reported():
    """The save of the last step completes after the step: only the seal waits for it."""
    plane = InMemoryCoordinator(1)
    (rank,) = plane.planes
    reported, report_sealed = [], rank.report_sealed

    def record(step, **rest):
        reported.append((rank.last_progress.sealed, rest["checkpoint"].step))
        report_sealed(step, **rest)

    rank.report_sealed = record

    def train(world):
        state = {"step": torch.tensor(0)}
        with Checkpointer("tiered://job") as ckpt:
            for step in world.steps(0, checkpoint=(ckpt, state)):
                state["step"].fill_(step)
                if step == 5:
                    plane.stop("the night is over")

    with memory_node():
        wait_results(job(plane, train))
    ((progress, checkpoint),) = reported
    assert progress == checkpoint == 5


def test_exception_is_a_fault_and_all_ranks_restart():
    plane = InMemoryCoordinator(2)

    def train(world):
        for step in world.steps(0, 4):
            if world.restarts == 0 and world.rank == 1 and step == 2:
                raise ZeroDivisionError("a step too far")
            if world.restarts == 0 and step == 3:  # the other one
                assert world._gate.wait_broken(PATIENCE_S)
        return world.restarts

    ends = wait_results(job(plane, train))
    assert [(end.outcome, end.value) for end in ends] == [(RunOutcome.FINISHED, 1)] * 2
    (fault,) = (fault for seat in plane.planes for fault in seat.faults)
    assert re.fullmatch(r"ZeroDivisionError: a step too far \(test_train_loop.py:\d+ in train\)", fault)


def test_exception_is_raised_with_on_error_raise():
    plane = InMemoryCoordinator(1)

    def train(_world):
        raise ZeroDivisionError("a step too far")

    with pytest.raises(ZeroDivisionError):
        run(train, plane=plane.planes[0], policy=RecoveryPolicy(backend="none", on_error="raise"))
    (fault,) = plane.planes[0].faults
    assert fault.startswith("ZeroDivisionError: a step too far (test_train_loop.py:")


def test_failed_job_raises_with_its_reason():
    plane = InMemoryCoordinator(1)

    def train(_world):
        plane.fail("two faults in a row")
        raise ZeroDivisionError("a step too far")

    plane.planes[0].report_fault = lambda _reason: None
    with pytest.raises(JobFailedError, match="two faults"):
        run(train, plane=plane.planes[0], policy=QUIET)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31422"),
        ConnectionResetError(104, "Connection reset by peer"),
        SaveFailedError("step 7 left no shard"),
        CheckpointException("save", {0: (RuntimeError("NCCL communicator was aborted"), None)}),
    ],
)
def test_error_after_the_loss_of_another_rank_is_not_a_fault(error):
    plane = InMemoryCoordinator(1, spares=1)
    left = threading.Event()

    def train(world):
        if world.restarts == 0:
            left.set()
            raise error
        return "again"

    ends = job(plane, train, PATIENT)
    assert left.wait(PATIENCE_S)
    plane.restart("another rank was lost")
    assert {end.outcome for end in wait_results(ends)} == {RunOutcome.FINISHED, RunOutcome.DISMISSED}
    assert [seat.faults for seat in plane.planes] == [[], []]


def test_error_without_a_lost_rank_is_a_fault():
    plane = InMemoryCoordinator(1)

    def train(world):
        if world.restarts == 0:
            raise RuntimeError("[gloo] Timed out waiting 1ms for recv operation to complete")

    assert wait_results(job(plane, train))[0].outcome is RunOutcome.FINISHED
    assert len(plane.planes[0].faults) == 1


def test_a_loss_while_others_seal_is_handled():
    plane = InMemoryCoordinator(2)

    def train(world):
        def seal(_step):
            if world.rank == 1:
                plane.lose_rank(plane.members[1])
            else:
                assert world._gate.wait_broken(PATIENCE_S)
            raise RuntimeError("gloo: Connection closed by peer")

        for step in world.steps(0, 5, seal=seal):
            if world.epoch == 0 and step == 1:
                plane.resize(1)

    assert sorted(end.outcome.value for end in wait_results(job(plane, train))) == ["dismissed", "finished"]
    assert plane.restarts == 1


def test_unsealed_step_is_not_reported_as_sealed():
    plane = InMemoryCoordinator(1)

    def seal(step):
        raise SaveFailedError(f"step {step} left no shard")

    def train(world):
        for step in world.steps(0, 5, seal=seal):
            if world.epoch == 0 and step == 1:
                plane.resize(1)
        return world.epoch

    assert wait_results(job(plane, train))[0].value == 1
    assert plane.restarts == 1


def test_errors_while_leaving_a_world_are_not_faults():
    plane = InMemoryCoordinator(1)

    def train(world):
        try:
            for step in world.steps(0, 5):
                if world.epoch == 0 and step == 1:
                    plane.resize(1)
        except WorldChanged:
            raise ZeroDivisionError("in a with block's exit") from None
        return world.epoch

    assert wait_results(job(plane, train))[0].value == 1
    assert plane.planes[0].faults == []
    assert plane.restarts == 0


def test_rank_loss_at_the_last_step_is_handled_before_the_end():
    plane = InMemoryCoordinator(2)

    def train(world):
        for _ in world.steps(0, 3):
            pass
        if world.epoch == 0:
            if world.rank == 1:
                plane.lose_rank(plane.members[1])
            else:
                assert world._gate.wait_broken(PATIENCE_S)
        return world.epoch

    def lonely(world):
        plane.size = 1
        return train(world)

    ends = wait_results(job(plane, lonely))
    assert sorted((end.outcome.value, end.value) for end in ends) == [("dismissed", None), ("finished", 1)]


def test_loop_that_counts_its_own_steps_polls_each_step():
    plane = InMemoryCoordinator(2)
    meeting = threading.Barrier(2)

    def train(world):
        done = 0
        while world.epoch == 0 and not world.event_detected():
            if done == 3 and world.rank == 1:
                plane.resize(2)
                world._gate.poll()
            meeting.wait(PATIENCE_S)
            done += 1
        return done

    assert [end.outcome for end in wait_results(job(plane, train))] == [RunOutcome.FINISHED] * 2
    assert {seat.epoch for seat in plane.planes} == {1}


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        ({}, "elastic"),
        ({"ELASTIC_JOB": "llama"}, "llama"),
        ({"ELASTIC_JOB": "llama", "TORCHELASTIC_RUN_ID": "of-torchrun"}, "of-torchrun"),
    ],
)
def test_frameworks_detect_a_launcher_inside_a_world(monkeypatch, before, inside):
    for name in ("ELASTIC_JOB", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)

    def train(_world):
        return is_torchelastic_launched(), os.environ.get("TORCHELASTIC_RUN_ID")

    assert run(train, plane=InMemoryCoordinator(1).planes[0], policy=QUIET).value == (True, inside)
    assert os.environ.get("TORCHELASTIC_RUN_ID") == before.get("TORCHELASTIC_RUN_ID")


def test_the_environment_is_that_of_the_world_and_given_back(monkeypatch):
    monkeypatch.setenv("RANK", "8")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    plane = InMemoryCoordinator(1, store="127.0.0.1:4711")

    def train(world):
        assert current_world() is world
        return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}

    assert run(train, plane=plane.planes[0], policy=QUIET).value == {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"
    }  # fmt: skip
    assert os.environ["RANK"] == "8"
    assert "WORLD_SIZE" not in os.environ
    assert current_world() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_is_forwarded_to_its_previous_handler(number):
    heard = []
    before = signal.signal(number, lambda *_: heard.append("before"))
    plane = InMemoryCoordinator(1)
    notices = []

    def train(world):
        inside = PreemptionHandler(lambda _s: heard.append("flushed"), 1.0)  # like that of a Checkpointer
        for step in world.steps(0, seal=lambda _step: inside.close()):
            if step == 1 and world.epoch == 0:
                signal.raise_signal(number)
                assert plane.wait_for(lambda: plane.planes[0].notice() is not None, PATIENCE_S)
                notices.append(plane.planes[0].notice())
            if world.epoch == 1:
                plane.stop()

    try:
        run(train, plane=plane.planes[0], policy=QUIET)
        now = signal.getsignal(number)
        assert now.__name__ == "<lambda>"
    finally:
        signal.signal(number, before)
    assert heard == ["before"]
    assert notices[0].kind is NoticeKind.RESIZE
    assert (notices[0].deadline_s is not None) is (number == signal.SIGTERM)


def test_a_checkpointer_leaves_sigterm_to_the_loop():
    before = signal.getsignal(signal.SIGTERM)
    with sigterm_handled_elsewhere():
        inside = PreemptionHandler(lambda _s: None, 1.0)
        assert signal.getsignal(signal.SIGTERM) is before
        inside.close()
    outside = PreemptionHandler(lambda _s: None, 1.0)
    assert signal.getsignal(signal.SIGTERM) is not before
    outside.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_decorated_function_takes_no_arguments():
    plane = InMemoryCoordinator(1)

    @recoverable(plane=plane.planes[0], policy=QUIET)
    def train(world):
        """Trains."""
        for _ in world.steps(0, 2, checkpoint=(NullCheckpointer(), {})):
            pass
        return world.size

    assert train.__doc__ == "Trains."
    assert train().value == 1


def test_checkpoint_and_seal_together_are_refused():
    plane = InMemoryCoordinator(1)

    def train(world):
        next(world.steps(0, 1, checkpoint=(NullCheckpointer(), {}), seal=lambda _step: None))

    with pytest.raises(PolicyError, match="not both"):
        run(train, plane=plane.planes[0], policy=RecoveryPolicy(backend="none", on_error="raise"))


@pytest.mark.parametrize(
    ("size", "shape", "expected"),
    [(8, (-1,), (8,)), (8, (2, -1), (2, 4)), (8, (-1, 8), (1, 8)), (6, (2, 3), (2, 3)), (16, (2, -1, 2), (2, 4, 2))],
)
def test_meshes_are_fitted(size, shape, expected):
    assert resolve_mesh_shape(size, shape) == expected


@pytest.mark.parametrize(("size", "shape"), [(8, (3, -1)), (8, (2, 2)), (8, (-1, -1)), (8, (0, -1)), (4, (-2, -2))])
def test_meshes_that_do_not_fit(size, shape):
    with pytest.raises(PolicyError, match="mesh"):
        resolve_mesh_shape(size, shape)


def test_a_notice_of_an_epoch_that_was_left_aborts_nothing():
    plane = InMemoryCoordinator(1)
    aborted = []

    class Groups:
        def abort(self):
            aborted.append(True)

    from elastic.workers.step_barrier import NoticeWatcher

    watch = NoticeWatcher(plane.planes[0], lambda _notice: Groups().abort())
    watch._broken(ControlNotice(3, NoticeKind.RESTART, "long ago"))
    watch.close()
    assert aborted == []


def test_package_errors_share_a_base_class():
    assert issubclass(JobFailedError, ElasticError)
    assert not issubclass(WorldChanged, Exception)


def test_imported_objects_are_frozen_for_the_garbage_collector():
    def train(_world):
        return gc.get_freeze_count()

    gc.unfreeze()
    (end,) = wait_results(job(InMemoryCoordinator(1), train))
    assert end.value > 1000
    assert gc.get_freeze_count() == 0


def test_broken_world_is_aborted_repeatedly_until_it_is_left(monkeypatch):
    """The first abort cannot close connections that are still being made."""
    monkeypatch.setattr(step_barrier, "_AGAIN_S", 0.0)
    plane, again = InMemoryCoordinator(1), threading.Semaphore(0)
    watch = step_barrier.NoticeWatcher(plane.planes[0], lambda _notice: None, lambda _epoch: again.release())
    try:
        place = plane.planes[0].wait_for_assignment()
        gate = StepBarrier(plane.planes[0], place.epoch)
        watch.watch_barrier(gate)
        assert not again.acquire(timeout=0.2)
        watch._broken(ControlNotice(place.epoch, NoticeKind.RESTART, "lost"))
        assert again.acquire(timeout=PATIENCE_S)
        assert again.acquire(timeout=PATIENCE_S)
        watch.watch_barrier(StepBarrier(plane.planes[0], place.epoch + 1))
        while again.acquire(timeout=0.2):
            pass
    finally:
        watch.close()


def test_result_of_an_unused_spare_says_that_it_was_not_needed():
    assert str(RunResult(RunOutcome.DISMISSED)) == "not needed: this process ended without having been in a world"
    assert str(RunResult(RunOutcome.DISMISSED, worlds=1)) == "dismissed after 1 world"
