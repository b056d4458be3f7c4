"""Contract of every control plane, as its ranks see it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import pytest

from elastic.control.control_plane import ControlNotice, Dismissed, NoticeKind, RankProgress
from elastic.errors import (
    ControlDeadlineError,
    ControlPlaneUnavailableError,
    ElasticError,
    JobFailedError,
    StaleEpochError,
)
from elastic.world.world_state import SealedStep
from tests.support.control_planes import (
    PATIENCE_S,
    ControlPlaneJob,
    memory_job,
    rootless_job,
    start_all,
    supervised_job,
    wait_all_assigned,
    wait_results,
    wanted_notice,
)
from tests.support.fake_hyperpod_job import hyperpod_agent_job
from tests.support.launched_jobs import launched_job, process_level_job
from tests.support.local_nodes import wait_until

Start = Callable[..., ControlPlaneJob]
PLANES: dict[str, Callable[..., AbstractContextManager[ControlPlaneJob]]] = {
    "memory": memory_job,
    "supervisor": supervised_job,
    "rootless": rootless_job,
    "hyperpod in process": hyperpod_agent_job,
    "hyperpod processes": process_level_job,
    "torchrun": launched_job,
}


@pytest.fixture(params=PLANES)
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Start a job of N nodes with one rank each.

    Some planes cannot promise everything: docs/explanation/control-plane.md and the tests say what they do instead.
    """
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(PLANES[request.param](*args, **options))


def next_world(job: ControlPlaneJob, seats: list[Any], *, size: int | None = None) -> list[Any]:
    """Return the ranks' assignments after a fault, or those of new ranks if the launcher restarts all."""
    if not job.starts_anew:
        return wait_all_assigned(seats)
    for seat in seats:
        with pytest.raises(JobFailedError, match="its launcher has to start the next one"):
            seat.wait_for_assignment(timeout_s=PATIENCE_S)
    return wait_all_assigned(job.restart(size or len(seats)))


def assert_not_needed(job: ControlPlaneJob, seat: Any, coming: Future[Any]) -> None:
    """Assert that a rank has no place in the next world, not even as a spare."""
    if job.ends_leftovers:
        assert not coming.done()
        job.lose_rank(seat)  # the operator ends its pod
        assert isinstance(coming.exception(PATIENCE_S), ControlPlaneUnavailableError)
    else:
        assert isinstance(coming.exception(PATIENCE_S), Dismissed)


def assert_all_dismissed(coming: list[Future[Any]]) -> None:
    assert {type(one.exception(PATIENCE_S)) for one in coming} == {Dismissed}


def rejoin_all(seats: list[Any]) -> list[Future[Any]]:
    return start_all(*(lambda s=seat: s.wait_for_assignment(timeout_s=PATIENCE_S) for seat in seats))


def test_a_world_is_the_same_for_all_its_ranks(start):
    places = wait_all_assigned(start(3).planes)
    assert {place.epoch for place in places} == {places[0].epoch}
    assert {place.store for place in places} == {places[0].store}
    assert {place.stores for place in places} == {places[0].stores}
    assert {place.world_size for place in places} == {3}
    assert sorted(place.rank for place in places) == [0, 1, 2]
    assert sorted(place.node_rank for place in places) == [0, 1, 2]
    assert {(place.local_rank, place.local_world_size, place.node_count) for place in places} == {(0, 1, 3)}


def test_ranks_know_the_store_of_every_node():
    with rootless_job(3, spares=1) as job:
        ready = start_all(*(lambda s=seat: s.wait_for_assignment(timeout_s=PATIENCE_S) for seat in job.planes))
        wait_until(lambda: sum(one.done() for one in ready) == 3)
        places = [one.result() for one in ready if one.done()]
        assert {len(place.stores) for place in places} == {3}
        assert {place.store for place in places} == {places[0].stores[0]}
        inside = {seat.supervisor.settings.node for seat, one in zip(job.planes, ready, strict=True) if one.done()}
        assert {store.removesuffix(":1") for store in places[0].stores} == inside
        placed = [seat for seat, one in zip(job.planes, ready, strict=True) if one.done()]
        for seat in placed:  # once all have finished, the spare is dismissed
            seat.report_finished()


def test_plane_says_whether_a_fault_restarts_its_process(start):
    job = start(1)
    assert [seat.restarts_processes for seat in job.planes] == [job.starts_anew]


def test_healthy_world_has_no_notice(start):
    job = start(2)
    wait_all_assigned(job.planes)
    assert [seat.notice() for seat in job.planes] == [None, None]


def test_wait_for_a_world_times_out(start):
    job = start(2)
    with pytest.raises(ControlDeadlineError):
        job.planes[0].wait_for_assignment(timeout_s=0.01)
    assert [place.world_size for place in wait_all_assigned(job.planes)] == [2, 2]


def test_resize_pauses_all_ranks_at_the_greatest_step(start):
    job = start(3)
    before = wait_all_assigned(job.planes)
    job.resize(2)
    wait_until(lambda: all(wanted_notice(seat) is job.resize_is for seat in job.planes))
    assert {seat.notice().epoch for seat in job.planes} == {before[0].epoch}
    targets = wait_results(
        start_all(*(lambda s=seat, n=n: s.agree_on_step(n) for seat, n in zip(job.planes, (16, 8, 0), strict=True)))
    )
    assert targets == [16, 16, 16]
    wait_results(start_all(*(lambda s=seat: s.report_sealed(16, timeout_s=PATIENCE_S) for seat in job.planes)))
    after = rejoin_all(job.planes)
    if job.starts_anew:
        assert_all_dismissed(after)
        after = rejoin_all(job.restart(2, fault=False))
    wait_until(lambda: sum(one.done() for one in after) == 2)
    inside = [(seat, one.result()) for seat, one in zip(job.planes, after, strict=True) if one.done()]
    assert {place.world_size for _, place in inside} == {2}
    assert sorted(place.rank for _, place in inside) == [0, 1]
    assert {place.epoch for _, place in inside} == {inside[0][1].epoch}
    assert inside[0][1].epoch > before[0].epoch or job.starts_anew
    wait_results(start_all(*(seat.report_finished for seat, _ in inside)))
    for seat, one in zip(job.planes, after, strict=True):
        if seat not in dict(inside):  # the coordinator had kept it as a possible spare
            assert_not_needed(job, seat, one)


SEALED = SealedStep("job", 15, 1_764_000_000_000)


def resized_world(start, checkpoints):
    """Return the assignments of two ranks of three, after they sealed these steps."""
    job = start(3)
    wait_all_assigned(job.planes)
    job.resize(2)
    wait_until(lambda: all(wanted_notice(seat) is job.resize_is for seat in job.planes))
    wait_results(start_all(*(lambda s=seat: s.agree_on_step(16) for seat in job.planes)))
    pairs = list(zip(job.planes, checkpoints, strict=True))
    wait_results(
        start_all(
            *(lambda s=seat, c=one: s.report_sealed(16, checkpoint=c, timeout_s=PATIENCE_S) for seat, one in pairs)
        )
    )
    after = rejoin_all(job.planes)
    wait_until(lambda: sum(one.done() for one in after) == 2)
    inside = [(seat, one.result()) for seat, one in zip(job.planes, after, strict=True) if one.done()]
    wait_results(start_all(*(seat.report_finished for seat, _ in inside)))
    for one in after:
        assert one.done() or isinstance(one.exception(PATIENCE_S), Dismissed)
    return [place for _, place in inside]


@pytest.mark.parametrize("kind", ["memory", "supervisor", "rootless"])
@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        ([SEALED] * 3, SEALED),
        ([SEALED, SEALED, None], None),
        ([SEALED, SealedStep("job", 15, SEALED.epoch + 1), SEALED], None),
        ([None] * 3, None),
    ],
    ids=["the same", "one rank sealed nothing", "steps of two incarnations", "nobody checkpoints"],
)
def test_resize_names_the_step_of_the_next_world(kind, checkpoints, expected):
    with contextlib.ExitStack() as stack:
        places = resized_world(lambda *args: stack.enter_context(PLANES[kind](*args)), checkpoints)
    assert [place.resume_from for place in places] == [expected] * 2


def test_a_world_after_a_fault_restores_the_newest_step(start):
    job = start(2)
    wait_all_assigned(job.planes)
    job.planes[0].report_fault("its loss is not finite")
    assert [place.resume_from for place in next_world(job, job.planes)] == [None, None]


def test_notice_ends_with_its_epoch(start):
    job = start(2)
    wait_all_assigned(job.planes)
    job.resize(1)
    wait_until(lambda: all(wanted_notice(seat) is job.resize_is for seat in job.planes))
    _seal_all(job.planes, 4)
    after = rejoin_all(job.planes)
    if job.starts_anew:
        assert_all_dismissed(after)
        after = rejoin_all(job.restart(1, fault=False))
    inside = wait_until(lambda: next((seat for seat, one in zip(job.planes, after, strict=True) if one.done()), None))
    assert inside.notice() is None
    inside.report_finished()
    for seat, one in zip(job.planes, after, strict=True):
        if seat is not inside:
            assert_not_needed(job, seat, one)


def test_joined_rank_is_in_the_next_world(start):
    job = start(1, grow_s=0.0)
    before = wait_all_assigned(job.planes)
    if job.starts_anew:
        job.resize(2)
        wait_until(lambda: wanted_notice(job.planes[0]) is job.resize_is)
        _seal_all(job.planes, 7)
        assert_all_dismissed(rejoin_all(job.planes))
        places = wait_all_assigned(job.restart(2, fault=False))
        assert [(place.world_size, place.rank, place.epoch >= before[0].epoch) for place in places] == [
            (2, 0, True),
            (2, 1, True),
        ]
        return
    newcomer = job.add_rank()
    coming = start_all(lambda: newcomer.wait_for_assignment(timeout_s=PATIENCE_S))
    job.resize(2)
    wait_until(lambda: wanted_notice(job.planes[0]) is NoticeKind.RESIZE)
    _seal_all(job.planes[:1], 7)
    places = [*wait_all_assigned(job.planes[:1]), *wait_results(coming)]
    assert [place.world_size for place in places] == [2, 2]
    assert [place.rank for place in places] == [0, 1]


def test_later_notice_replaces_an_earlier_one_and_keeps_pauses(start):
    job = start(3)
    wait_all_assigned(job.planes)
    job.resize(2)
    wait_until(lambda: all(wanted_notice(seat) is job.resize_is for seat in job.planes))
    waiting = start_all(*(lambda s=seat: s.agree_on_step(5) for seat in job.planes[:2]))
    job.stop()
    wait_until(lambda: wanted_notice(job.planes[2]) is NoticeKind.STOP and "stopped" in job.planes[2].notice().reason)
    assert wait_results([*waiting, *start_all(lambda: job.planes[2].agree_on_step(6))]) == [6, 6, 6]


def test_lost_rank_ends_the_wait_of_others(start):
    job = start(3)
    wait_all_assigned(job.planes)
    job.resize(2)
    wait_until(lambda: all(wanted_notice(seat) is job.resize_is for seat in job.planes))
    waiting = start_all(*(lambda s=seat: s.agree_on_step(5) for seat in job.planes[:2]))
    job.lose_rank(job.planes[2])
    for one in waiting:
        with pytest.raises(StaleEpochError):
            one.result(PATIENCE_S)
    if job.starts_anew:
        places = wait_all_assigned(job.restart(2))
    else:
        wait_until(lambda: all(wanted_notice(seat) is NoticeKind.RESTART for seat in job.planes[:2]))
        places = wait_all_assigned(job.planes[:2])
    assert [place.world_size for place in places] == [2, 2]


def test_fault_is_reported_to_all_ranks_and_runs_aborts(start):
    job = start(2)
    heard: dict[int, threading.Event] = {}
    for number, seat in enumerate(job.planes):
        heard[number] = threading.Event()
        seat.on_broken(lambda notice, number=number: heard[number].set() if notice.kind is NoticeKind.RESTART else None)
    before = wait_all_assigned(job.planes)
    job.planes[0].report_fault("its loss is not finite")
    assert all(event.wait(PATIENCE_S) for event in heard.values())
    wait_until(lambda: all(wanted_notice(seat) is NoticeKind.RESTART for seat in job.planes))
    with pytest.raises(StaleEpochError):
        job.planes[1].agree_on_step(3)
    after = next_world(job, job.planes)
    assert after[0].epoch > before[0].epoch or job.starts_anew  # newer than any other of the same process
    assert after[0].restarts == 1
    assert [seat.notice() for seat in job.planes] == [None, None]


def test_several_faults_of_an_epoch_count_once(start):
    job = start(2)
    wait_all_assigned(job.planes)
    wait_results(start_all(*(lambda s=seat: s.report_fault("the other one is gone") for seat in job.planes)))
    assert {place.restarts for place in next_world(job, job.planes)} == {1}


def test_fault_in_a_broken_epoch_changes_nothing(start):
    job = start(2)
    wait_all_assigned(job.planes)
    job.planes[0].report_fault("the other one is gone")
    wait_until(lambda: all(wanted_notice(seat) is NoticeKind.RESTART for seat in job.planes))
    reasons = [seat.notice().reason for seat in job.planes]
    for seat in job.planes:
        seat.report_fault("the other one is gone, too")
    assert [seat.notice().reason for seat in job.planes] == reasons
    assert {place.restarts for place in next_world(job, job.planes)} == {1}


def test_late_subscriber_of_a_broken_epoch_is_notified(start):
    job = start(2)
    wait_all_assigned(job.planes)
    job.planes[0].report_fault("lost")
    wait_until(lambda: wanted_notice(job.planes[1]) is NoticeKind.RESTART)
    heard: list[ControlNotice] = []
    job.planes[1].on_broken(heard.append)
    wait_until(lambda: heard)


def test_a_closed_rank_is_a_lost_rank(start):
    job = start(2, spares=1)
    if job.starts_anew:  # without spares: the launcher ends the other processes and restarts all
        places = wait_all_assigned(job.planes)
        job.lose_rank(job.planes[1])
        with pytest.raises((JobFailedError, StaleEpochError)):
            job.planes[0].wait_for_assignment(timeout_s=PATIENCE_S)
        assert [place.rank for place in wait_all_assigned(job.restart(2))] == [place.rank for place in places]
        return
    places = wait_results(
        start_all(*(lambda s=seat: s.wait_for_assignment(timeout_s=PATIENCE_S) for seat in job.planes[:2]))
    )
    job.planes[1].close()
    wait_until(lambda: wanted_notice(job.planes[0]) is NoticeKind.RESTART)
    after = wait_all_assigned([job.planes[0], job.planes[2]])
    assert {place.world_size for place in after} == {2}
    assert after[0].rank == places[0].rank


def test_rank_that_ignores_a_resize_is_lost(start):
    job = start(2, grace_s=0.3)
    wait_all_assigned(job.planes)
    job.resize(1)
    wait_until(lambda: wanted_notice(job.planes[0]) is not None)
    good = job.planes[0]
    if job.starts_anew or job.ends_leftovers:  # by the platform alone
        with pytest.raises(ControlDeadlineError):
            good.agree_on_step(2, timeout_s=1.0)
        job.lose_rank(job.planes[1])
        with pytest.raises(StaleEpochError):
            good.agree_on_step(2, timeout_s=PATIENCE_S)
        (place,) = wait_all_assigned(job.restart(1) if job.starts_anew else [good])
        assert place.world_size == 1
        return
    with pytest.raises(StaleEpochError):
        good.agree_on_step(2, timeout_s=PATIENCE_S)
    assert good.wait_for_assignment(timeout_s=PATIENCE_S).world_size == 1
    for refused in (
        lambda: job.planes[1].agree_on_step(2),
        lambda: job.planes[1].report_sealed(2),
        lambda: job.planes[1].report_fault("x"),
    ):
        with pytest.raises((StaleEpochError, ElasticError)):
            refused()
    assert good.notice() is None


def test_rank_may_request_a_change(start):
    job = start(2)
    wait_all_assigned(job.planes)
    job.planes[1].request_change(NoticeKind.RESIZE, "half is enough", nodes=1)
    wait_until(lambda: all(wanted_notice(seat) is job.resize_is for seat in job.planes))
    assert "half is enough" in job.planes[0].notice().reason


def test_preempted_rank_is_not_in_the_next_world(start):
    job = start(2)
    wait_all_assigned(job.planes)
    job.planes[0].request_change(NoticeKind.RESIZE, "preempted", deadline_s=60.0)
    wait_until(lambda: all(wanted_notice(seat) is job.resize_is for seat in job.planes))
    assert 0 < job.planes[1].notice().deadline_s <= 60.0
    _seal_all(job.planes, 4)
    if job.starts_anew:
        job.resize(1)
        assert_all_dismissed(rejoin_all(job.planes))
        (place,) = wait_all_assigned(job.restart(1, fault=False))
        assert place.world_size == 1
        return
    if job.ends_leftovers:  # with its pod, which the operator no longer counts
        (goes,) = rejoin_all(job.planes[:1])
        job.lose_rank(job.planes[0])
        assert isinstance(goes.exception(PATIENCE_S), (ControlPlaneUnavailableError, StaleEpochError))
        assert job.planes[1].wait_for_assignment(timeout_s=PATIENCE_S).world_size == 1
        return
    stays, goes = start_all(
        *(lambda s=seat: s.wait_for_assignment(timeout_s=PATIENCE_S) for seat in reversed(job.planes))
    )
    assert stays.result(PATIENCE_S).world_size == 1
    with pytest.raises(Dismissed):
        goes.result(PATIENCE_S)


def test_after_a_stop_there_is_no_next_world(start):
    job = start(2)
    wait_all_assigned(job.planes)
    for seat in job.planes:
        seat.report_progress(RankProgress(3))
    job.stop()
    wait_until(lambda: all(wanted_notice(seat) is NoticeKind.STOP for seat in job.planes))
    _seal_all(job.planes, 4)
    for one in start_all(*(lambda s=seat: s.wait_for_assignment(timeout_s=PATIENCE_S) for seat in job.planes)):
        with pytest.raises(Dismissed):
            one.result(PATIENCE_S)


def test_a_spare_is_dismissed_when_all_have_finished(start):
    job = start(1, spares=1)
    wait_all_assigned(job.planes[:1])
    if job.starts_anew:
        assert len(job.planes) == 1  # this plane has no spares
        job.planes[0].report_finished()
        assert_all_dismissed(rejoin_all(job.planes))
        return
    (coming,) = rejoin_all(job.planes[1:])
    job.planes[0].report_finished()
    assert_not_needed(job, job.planes[1], coming)


def test_calls_outside_a_world_are_refused(start):
    seat = start(1).planes[0]
    with pytest.raises(StaleEpochError):
        seat.agree_on_step(0)
    with pytest.raises(StaleEpochError):
        seat.report_sealed(0)


def test_second_close_has_no_effect(start):
    job = start(1)
    wait_all_assigned(job.planes)
    job.planes[0].report_finished()
    job.planes[0].close()
    job.planes[0].close()


def _seal_all(seats, step):
    assert set(wait_results(start_all(*(lambda s=seat: s.agree_on_step(step) for seat in seats)))) == {step}
    wait_results(start_all(*(lambda s=seat: s.report_sealed(step, timeout_s=PATIENCE_S) for seat in seats)))
