"""A control plane that needs only a store: its guarantees and its limits."""

from __future__ import annotations

import collections
import contextlib
import itertools
import signal
import threading
import time

import msgspec
import pytest
import torch.distributed as dist

from elastic.control.control_plane import Dismissed, NoticeKind, RankAssignment, RankProgress
from elastic.control.hang_detector import HangTimeouts
from elastic.errors import (
    ControlDeadlineError,
    ControlPlaneUnavailableError,
    JobFailedError,
    PolicyError,
    StaleEpochError,
)
from elastic.rendezvous.rootless_tcpstore import RootlessStore
from elastic.rendezvous.store_server_client import StoreTimeouts
from elastic.workers.launch_environment import connect_store, detect_control_plane, single_process_control_plane
from elastic.workers.native_connections import close_store_connections
from elastic.workers.store_control_plane import StoreControlPlane, pauses_s
from tests.support.control_planes import PATIENCE_S, start_all, wait_all_assigned, wait_results, wanted_notice
from tests.support.local_nodes import wait_until
from tests.support.store_servers import server_processes


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def start(server):
    """Start all processes of one attempt, like a launcher."""
    with contextlib.ExitStack() as stack:

        def planes(size):
            def connect():
                return connect_store("127.0.0.1", server.port)

            places = [
                RankAssignment(0, rank, size, 0, 1, rank, size, f"127.0.0.1:{server.port}") for rank in range(size)
            ]
            made = [StoreControlPlane(connect, place) for place in places]
            stack.callback(lambda: wait_results(start_all(*(plane.close for plane in made))))
            return made

        yield planes


def test_a_world_is_the_same_for_all_its_ranks(start):
    places = wait_all_assigned(start(3))
    assert {(place.epoch, place.world_size, place.store) for place in places} == {(0, 3, places[0].store)}
    assert [place.rank for place in places] == [0, 1, 2]


def test_ranks_receive_the_hang_timeout(server):
    """Their collectives wait longer than that."""
    place = RankAssignment(0, 0, 1, 0, 1, 0, 1, f"127.0.0.1:{server.port}")
    for number, (limits, hang_s) in enumerate(
        [(HangTimeouts(40.0, 50.0), 50.0), (HangTimeouts(0, 50.0), None), (None, None)]
    ):
        plane = StoreControlPlane(
            lambda: connect_store("127.0.0.1", server.port), place, limits=limits, prefix=f"{number}/"
        )
        try:
            assert plane.wait_for_assignment(timeout_s=PATIENCE_S).hang_s == hang_s
        finally:
            plane.close()


def test_new_attempt_ignores_the_state_of_the_previous_one(start):
    first = start(3)
    wait_all_assigned(first)
    first[0].request_change(NoticeKind.RESIZE, "other numbers")
    assert wait_results(start_all(*(lambda p=plane: p.agree_on_step(8) for plane in first))) == [8, 8, 8]
    second = start(2)  # the messages of the first attempt are still in the store
    late = start_all(lambda: second[1].wait_for_assignment(timeout_s=PATIENCE_S))
    places = [second[0].wait_for_assignment(timeout_s=PATIENCE_S), *wait_results(late)]
    assert [(place.epoch, place.world_size) for place in places] == [(1, 2), (1, 2)]
    assert [plane.notice() for plane in second] == [None, None]
    second[1].request_change(NoticeKind.RESIZE, "once more")
    assert wait_results(start_all(*(lambda p=plane: p.agree_on_step(16) for plane in second))) == [16, 16]


def test_broken_world_has_a_deadline_of_its_own(server):
    """A longer or shorter one of an earlier request does not count."""
    place = RankAssignment(0, 0, 1, 0, 1, 0, 1, f"127.0.0.1:{server.port}")
    for number, (leave_s, request_s) in enumerate([(50.0, 0.5), (50.0, 900.0), (None, 900.0)]):
        plane = StoreControlPlane(
            lambda: connect_store("127.0.0.1", server.port), place, leave_s=leave_s, prefix=f"leave-{number}/"
        )
        try:
            plane.wait_for_assignment(timeout_s=PATIENCE_S)
            plane.request_change(NoticeKind.RESIZE, "preempted", deadline_s=request_s)
            wait_until(plane.notice)
            plane.report_fault("a fault")
            wait_until(lambda plane=plane: wanted_notice(plane) is NoticeKind.RESTART)
            found = plane.notice().deadline_s
            assert found is None if leave_s is None else 1.0 < found <= leave_s
        finally:
            plane.close()


def test_waiting_for_a_missing_rank_times_out(start):
    first, _ = start(2)
    with pytest.raises(ControlDeadlineError):
        first.wait_for_assignment(timeout_s=0.05)


def test_one_request_stops_all_ranks_at_the_greatest_step(start):
    planes = start(3)
    wait_all_assigned(planes)
    assert [plane.notice() for plane in planes] == [None] * 3
    planes[1].request_change(NoticeKind.RESIZE, "preempted", deadline_s=60.0)
    wait_until(lambda: all(wanted_notice(plane) is NoticeKind.STOP for plane in planes))
    assert all(0 < plane.notice().deadline_s <= 60 for plane in planes)
    said = wait_results(
        start_all(*(lambda p=plane, n=n: p.agree_on_step(n) for plane, n in zip(planes, (16, 8, 0), strict=True)))
    )
    assert said == [16, 16, 16]
    assert planes[0].agree_on_step(17) == 16  # once is what counts
    for plane in planes:
        plane.report_progress(RankProgress(16))
        plane.report_sealed(16)
        with pytest.raises(Dismissed):
            plane.wait_for_assignment()


def test_fault_ends_the_wait_of_other_ranks_without_a_second_world(start):
    planes = start(3)
    wait_all_assigned(planes)
    heard = [threading.Event() for _ in planes]
    for plane, event in zip(planes, heard, strict=True):
        plane.on_broken(lambda _notice, event=event: event.set())
    planes[0].request_change(NoticeKind.STOP, "enough")
    waiting = start_all(*(lambda p=plane: p.agree_on_step(5) for plane in planes[:2]))
    planes[2].report_fault("its loss is not finite")
    for one in waiting:
        with pytest.raises(StaleEpochError):
            one.result(PATIENCE_S)
    assert all(event.wait(PATIENCE_S) for event in heard)
    assert {wanted_notice(plane) for plane in planes} == {NoticeKind.RESTART}
    with pytest.raises(JobFailedError, match="rank 2: its loss is not finite"):
        planes[0].wait_for_assignment()
    late = threading.Event()
    planes[1].on_broken(lambda _notice: late.set())
    assert late.wait(PATIENCE_S)
    with pytest.raises(StaleEpochError):
        planes[1].report_finished()


def test_a_pause_ends_in_time(start):
    planes = start(2)
    wait_all_assigned(planes)
    with pytest.raises(ControlDeadlineError):
        planes[0].agree_on_step(1, timeout_s=0.01)


def test_finished_rank_is_not_awaited(start):
    planes = start(2)
    wait_all_assigned(planes)
    for plane in planes:
        plane.report_finished()
        with pytest.raises(Dismissed):
            plane.wait_for_assignment()


def test_calls_before_the_assignment_are_refused(start):
    plane = start(1)[0]
    for call in (lambda: plane.agree_on_step(0), lambda: plane.report_sealed(0), lambda: plane.report_fault("x")):
        with pytest.raises(StaleEpochError):
            call()
    with pytest.raises(ControlPlaneUnavailableError):
        plane.request_change(NoticeKind.STOP, "too early")


def test_deadline_is_independent_of_clock_differences(start, monkeypatch):
    """The deadline is requested and read on clocks an hour apart."""
    (plane,) = start(1)
    wait_all_assigned([plane])
    real = time.time
    plane.request_change(NoticeKind.STOP, "soon", deadline_s=50.0)
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    wait_until(plane.notice)
    assert 0 < plane.notice().deadline_s <= 50
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    assert 0 < plane.notice().deadline_s <= 50


def test_earlier_of_two_deadlines_holds(start):
    plane = start(1)[0]
    plane.wait_for_assignment()
    plane.request_change(NoticeKind.STOP, "soon", deadline_s=50.0)
    wait_until(plane.notice)
    plane.request_change(NoticeKind.STOP, "later", deadline_s=5000.0)
    wait_until(lambda: plane.notice().reason == "later")
    assert plane.notice().deadline_s <= 50


def test_process_without_a_launcher_is_a_world_of_one():
    plane = single_process_control_plane()
    try:
        place = plane.wait_for_assignment(timeout_s=PATIENCE_S)
        assert (place.rank, place.world_size, place.node_count) == (0, 1, 1)
    finally:
        plane.close()


def test_half_an_environment_is_an_error():
    with pytest.raises(PolicyError, match="MASTER_ADDR, MASTER_PORT are not"):
        detect_control_plane({"RANK": "0", "WORLD_SIZE": "2"})


def test_launcher_environment_gives_the_assignment(server):
    plane = detect_control_plane(
        {
            "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "ELASTIC_HANG_TIMEOUT": "90",
        }
    )  # fmt: skip
    assert plane._limits == HangTimeouts(step_s=90.0)
    place = plane._place
    assert (place.rank, place.local_rank, place.node_rank, place.node_count, place.restarts) == (9, 1, 1, 2, 2)
    plane.close()


def test_epoch_is_newer_than_any_earlier_epoch_of_its_ranks(server):
    def connect():
        return connect_store("127.0.0.1", server.port)

    def world(*least):
        places = [RankAssignment(floor, rank, len(least), 0, 1, rank, 1, "n:1") for rank, floor in enumerate(least)]
        made = [StoreControlPlane(connect, place, last=False) for place in places]
        epochs = {place.epoch for place in wait_all_assigned(made)}
        wait_results(start_all(*(plane.close for plane in made)))
        return epochs

    assert world(0, 5, 0) == {5}
    assert world(0, 0) == {6}  # even though all earlier ranks have left
    assert world(6, 7) == {7}


def test_agreement_is_stale_if_the_plane_is_closed_meanwhile(start, monkeypatch):
    """Its store is closed too, and does not answer."""
    (plane,) = start(1)
    wait_all_assigned([plane])
    add = plane._store.add

    def add_after_the_end(key, value):
        plane.close()
        return add(key, value)

    monkeypatch.setattr(plane._store, "add", add_after_the_end)
    with pytest.raises(StaleEpochError):
        plane.agree_on_step(5)


def test_wait_ends_when_the_world_is_marked_broken(start):
    first, _ = start(2)
    waiting = start_all(lambda: first.wait_for_assignment(timeout_s=PATIENCE_S))
    first.mark_broken("the other one is lost")
    with pytest.raises(StaleEpochError, match="the other one is lost"):
        waiting[0].result(PATIENCE_S)


def test_resize_is_not_a_stop_if_the_processes_stay(server):
    def connect():
        return connect_store("127.0.0.1", server.port)

    plane = StoreControlPlane(connect, RankAssignment(0, 0, 1, 0, 1, 0, 1, "n:1"), last=False)
    plane.wait_for_assignment()
    plane.request_change(NoticeKind.RESIZE, "other numbers")
    wait_until(lambda: wanted_notice(plane) is NoticeKind.RESIZE)
    plane.mark_broken("the launcher says so")
    assert (wanted_notice(plane), plane.notice().reason) == (NoticeKind.RESTART, "the launcher says so")
    plane.close()


PATIENCE = StoreTimeouts(wait_slice_s=0.2, response_timeout_s=3.0, connect_timeout_s=5.0)
"""Torch's own client waits for a stopped server without a limit."""


@pytest.fixture
def stoppable(zygote):
    """A store server in its own process, and a factory of control planes that use it."""
    with server_processes(zygote, 1) as (server,), contextlib.ExitStack() as stack:

        def planes(size, beat_s=0.05):
            places = [RankAssignment(0, rank, size, 0, 1, rank, size, server.address) for rank in range(size)]

            def connect():
                return connect_store(server.host, server.port, timeouts=PATIENCE)

            made = [StoreControlPlane(connect, place, limits=HangTimeouts(), beat_s=beat_s) for place in places]
            stack.callback(lambda: wait_results(start_all(*(plane.close for plane in made))))
            return made

        yield server, planes


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda plane: plane.request_change(NoticeKind.RESIZE, "other numbers"), id="request"),
        pytest.param(lambda plane: plane.report_fault("its loss is not finite"), id="fault", marks=pytest.mark.nightly),
        pytest.param(lambda plane: plane.agree_on_step(3), id="pause", marks=pytest.mark.nightly),
        pytest.param(lambda plane: plane.gather("the end"), id="gather", marks=pytest.mark.nightly),
    ],
)
def test_no_call_waits_for_a_stopped_store(stoppable, call):
    server, start = stoppable
    (plane,) = start(1, beat_s=3600.0)  # no other rank detects that the store does not answer
    plane.wait_for_assignment()
    server.suspend()
    (told,) = start_all(lambda: call(plane))
    with pytest.raises(ControlPlaneUnavailableError, match="does not answer"):
        told.result(PATIENCE_S)
    (closed,) = start_all(plane.close)
    closed.result(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_waits_for_others_at_a_stopped_store(stoppable, rank):
    server, start = stoppable
    plane = start(2)[rank]
    (coming,) = start_all(plane.wait_for_assignment)
    wait_until(lambda: plane._store.check(["elastic/plane/epochs"]) or rank == 1)
    server.suspend()
    with pytest.raises(ControlPlaneUnavailableError, match="does not answer"):
        coming.result(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wait", [lambda plane: plane.agree_on_step(3), lambda plane: plane.gather("the end")], ids=["pause", "gather"]
)
def test_waiting_rank_reports_a_stopped_store(stoppable, wait):
    server, start = stoppable
    planes = start(2)
    wait_all_assigned(planes)
    (waiting,) = start_all(lambda: wait(planes[0]))
    came = ["elastic/plane/0/paused", "elastic/plane/0/came/the end"]
    wait_until(lambda: any(planes[1]._store.check([name]) for name in came))
    server.suspend()
    with pytest.raises(StaleEpochError, match="the store that the ranks met at is gone"):
        waiting.result(PATIENCE_S)
    wait_until(lambda: all(wanted_notice(plane) is NoticeKind.RESTART for plane in planes))
    wait_results(start_all(*(plane.close for plane in planes)))


# -- who hangs, and what it costs to know -----------------------------------------------------------------------------


class Counted(RootlessStore):
    """A rank's client that counts its requests."""

    def __init__(self, port):
        super().__init__((f"127.0.0.1:{port}",), close_connections=close_store_connections, copies=1)
        self.asked = collections.Counter()


def _counted(name):
    def call(self, *args):
        self.asked[name] += 1
        return getattr(RootlessStore, name)(self, *args)

    return call


for _name in ("set", "get", "wait", "check", "add", "compare_set", "multi_get", "multi_set"):
    setattr(Counted, _name, _counted(_name))


@pytest.mark.parametrize("size", [2, 6])
def test_store_requests_of_a_rank_are_independent_of_the_world_size(server, size):
    """At rest one request waits. An event answers it, and the rank reads the event."""
    places = [RankAssignment(0, rank, size, 0, 1, rank, size, "n:1") for rank in range(size)]
    made = [
        StoreControlPlane(lambda: Counted(server.port), place, limits=HangTimeouts(), beat_s=3600.0, last=False)
        for place in places
    ]
    wait_all_assigned(made)
    wait_until(lambda: all(plane._store.asked["wait"] == 1 and plane._heartbeats._beats == 1 for plane in made))
    wait_until(lambda: made[0]._store.asked["multi_get"] == 2)  # of the meeting, and of the judge
    before = [plane._store.asked.copy() for plane in made]
    made[1].request_change(NoticeKind.RESIZE, "other numbers")
    wait_until(lambda: all(plane._store.asked["wait"] == 2 for plane in made))
    after = [dict(plane._store.asked - earlier) for plane, earlier in zip(made, before, strict=True)]
    heard = {"wait": 1, "get": 1}
    assert after == [heard, heard | {"compare_set": 1, "multi_set": 1}, *[heard] * (size - 2)]
    wait_results(start_all(*(plane.close for plane in made)))


def test_polling_pauses_grow_up_to_a_second():
    pauses = list(itertools.islice(pauses_s(), 700))
    assert pauses[0] <= 0.02
    assert max(pauses) == 1.0
    assert sum(pauses) > 600.0


def test_event_of_a_rank_that_ended_before_waking_others_is_received(start):
    first, second = start(2)
    wait_all_assigned([first, second])
    told = msgspec.json.encode({"want": "restart", "reason": "rank 0: it is about to end", "by": "0.1"})
    first._store.compare_set(first._name("event/0"), "", told.decode())
    wait_until(lambda: {wanted_notice(first), wanted_notice(second)} == {NoticeKind.RESTART})


def test_malformed_event_breaks_the_world(start):
    (plane,) = start(1)
    plane.wait_for_assignment()
    plane._store.set(plane._name("event/0"), "no event")
    plane._store.set(plane._name("wake/0/0"), "1")
    wait_until(lambda: wanted_notice(plane) is NoticeKind.RESTART)


def _hangs(say, port, leaves):
    """Run a world of one whose rank does no step."""
    limits = HangTimeouts(step_s=0.3, first_s=0.3)
    place = RankAssignment(0, 0, 1, 0, 1, 0, 1, "n:1")
    plane = StoreControlPlane(lambda: connect_store("127.0.0.1", port), place, limits=limits, beat_s=0.05, leave_s=0.3)
    plane.wait_for_assignment()
    wait_until(plane.notice)
    say(plane.notice().reason)
    if leaves:
        plane.report_progress(RankProgress(-1, idle=True))
        threading.Event().wait(1.0)
        return "out of it"
    signal.pause()
    return "never"


def test_process_that_does_not_leave_a_hanging_world_fails(server, zygote):
    running = zygote.start(_hangs, server.port, False)
    wait_until(lambda: running.has_ended)
    assert "no rank has got on for" in running.lines()[0]
    with pytest.raises(AssertionError):  # it ended with an error
        running.wait()


def test_process_that_left_a_hanging_world_may_take_its_time(server, zygote):
    assert zygote.start(_hangs, server.port, True).wait().result == "out of it"
