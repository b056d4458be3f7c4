"""A control plane that is nothing but a store: what it promises as every other one does, and where it ends."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch.distributed as dist

from elastic.control.plane import Assignment, Dismissed, Progress, Want
from elastic.errors import ControlLostError, DeadlineError, GaveUpError, PolicyError, StaleEpochError
from elastic.rootless.holders import Patience
from elastic.workers.launched import alone, connected, launched_plane
from elastic.workers.store_plane import StorePlane
from tests.support.neighbours import until
from tests.support.planes import PATIENCE_S, all_ready, at_once, results, wants
from tests.support.store_servers import server_processes


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def start(server):
    """Starts the processes of one attempt: all of them, as a launcher does."""
    with contextlib.ExitStack() as stack:

        def planes(size):
            def connect():
                return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)

            places = [Assignment(0, rank, size, 0, 1, rank, size, f"127.0.0.1:{server.port}") for rank in range(size)]
            made = [StorePlane(connect, place) for place in places]
            stack.callback(lambda: results(at_once(*(plane.close for plane in made))))
            return made

        yield planes


def test_a_world_is_the_same_for_all_its_ranks(start):
    places = all_ready(start(3))
    assert {(place.epoch, place.world_size, place.store) for place in places} == {(0, 3, places[0].store)}
    assert [place.rank for place in places] == [0, 1, 2]


def test_an_attempt_has_nothing_of_the_one_before(start):
    first = start(3)
    all_ready(first)
    first[0].request(Want.RESIZE, "other numbers")
    assert results(at_once(*(lambda p=plane: p.pause(8) for plane in first))) == [8, 8, 8]
    second = start(2)  # what the first ones said is all still in the store
    late = at_once(lambda: second[1].ready(timeout_s=PATIENCE_S))
    places = [second[0].ready(timeout_s=PATIENCE_S), *results(late)]
    assert [(place.epoch, place.world_size) for place in places] == [(1, 2), (1, 2)]
    assert [plane.notice() for plane in second] == [None, None]
    second[1].request(Want.RESIZE, "once more")
    assert results(at_once(*(lambda p=plane: p.pause(16) for plane in second))) == [16, 16]


def test_who_is_not_there_is_not_waited_for_for_ever(start):
    first, _ = start(2)
    with pytest.raises(DeadlineError):
        first.ready(timeout_s=0.05)


def test_one_rank_asks_and_all_stop_at_the_greatest_step_said(start):
    planes = start(3)
    all_ready(planes)
    assert [plane.notice() for plane in planes] == [None] * 3
    planes[1].request(Want.RESIZE, "asked back", deadline_s=60.0)
    until(lambda: all(wants(plane) is Want.STOP for plane in planes))
    assert all(0 < plane.notice().deadline_s <= 60 for plane in planes)
    said = results(at_once(*(lambda p=plane, n=n: p.pause(n) for plane, n in zip(planes, (16, 8, 0), strict=True))))
    assert said == [16, 16, 16]
    assert planes[0].pause(17) == 16  # once is what counts
    for plane in planes:
        plane.progress(Progress(16))
        plane.sealed(16)
        with pytest.raises(Dismissed):
            plane.ready()


def test_a_fault_ends_the_wait_of_others_and_there_is_no_second_world(start):
    planes = start(3)
    all_ready(planes)
    heard = [threading.Event() for _ in planes]
    for plane, event in zip(planes, heard, strict=True):
        plane.on_broken(lambda _notice, event=event: event.set())
    planes[0].request(Want.STOP, "enough")
    waiting = at_once(*(lambda p=plane: p.pause(5) for plane in planes[:2]))
    planes[2].fault("its loss is not finite")
    for one in waiting:
        with pytest.raises(StaleEpochError):
            one.result(PATIENCE_S)
    assert all(event.wait(PATIENCE_S) for event in heard)
    assert {wants(plane) for plane in planes} == {Want.RESTART}
    with pytest.raises(GaveUpError, match="rank 2: its loss is not finite"):
        planes[0].ready()
    late = threading.Event()
    planes[1].on_broken(lambda _notice: late.set())
    assert late.wait(PATIENCE_S)
    with pytest.raises(StaleEpochError):
        planes[1].finished()


def test_a_pause_ends_in_time(start):
    planes = start(2)
    all_ready(planes)
    with pytest.raises(DeadlineError):
        planes[0].pause(1, timeout_s=0.01)


def test_who_has_finished_is_not_needed_any_more(start):
    planes = start(2)
    all_ready(planes)
    for plane in planes:
        plane.finished()
        with pytest.raises(Dismissed):
            plane.ready()


def test_what_is_said_before_the_beginning_is_refused(start):
    plane = start(1)[0]
    for call in (lambda: plane.pause(0), lambda: plane.sealed(0), lambda: plane.fault("x")):
        with pytest.raises(StaleEpochError):
            call()
    with pytest.raises(ControlLostError):
        plane.request(Want.STOP, "too early")


def test_of_two_deadlines_the_earlier_one_holds(start):
    plane = start(1)[0]
    plane.ready()
    plane.request(Want.STOP, "soon", deadline_s=50.0)
    until(plane.notice)
    plane.request(Want.STOP, "later", deadline_s=5000.0)
    until(lambda: plane.notice().reason == "later")
    assert plane.notice().deadline_s <= 50


def test_nobody_started_it():
    plane = alone()
    try:
        place = plane.ready(timeout_s=PATIENCE_S)
        assert (place.rank, place.world_size, place.node_count) == (0, 1, 1)
    finally:
        plane.close()


def test_half_an_environment_is_an_error():
    with pytest.raises(PolicyError, match="MASTER_ADDR, MASTER_PORT are not"):
        launched_plane({"RANK": "0", "WORLD_SIZE": "2"})


def test_a_launcher_says_where_a_rank_is(server):
    plane = launched_plane(
        {
            "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    )  # fmt: skip
    place = plane._place
    assert (place.rank, place.local_rank, place.node_rank, place.node_count, place.restarts) == (9, 1, 1, 2, 2)
    plane.close()


def test_an_epoch_is_newer_than_all_that_any_of_its_ranks_has_been_in(server):
    def connect():
        return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)

    def world(*least):
        places = [Assignment(floor, rank, len(least), 0, 1, rank, 1, "n:1") for rank, floor in enumerate(least)]
        made = [StorePlane(connect, place, last=False) for place in places]
        epochs = {place.epoch for place in all_ready(made)}
        results(at_once(*(plane.close for plane in made)))
        return epochs

    assert world(0, 5, 0) == {5}
    assert world(0, 0) == {6}  # also where none of those is there any more
    assert world(6, 7) == {7}


def test_who_knows_that_nobody_comes_any_more_waits_no_longer(start):
    first, _ = start(2)
    waiting = at_once(lambda: first.ready(timeout_s=PATIENCE_S))
    first.end("the other one is lost")
    with pytest.raises(StaleEpochError, match="the other one is lost"):
        waiting[0].result(PATIENCE_S)


def test_another_size_is_no_stop_where_the_processes_stay(server):
    def connect():
        return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)

    plane = StorePlane(connect, Assignment(0, 0, 1, 0, 1, 0, 1, "n:1"), last=False)
    plane.ready()
    plane.request(Want.RESIZE, "other numbers")
    until(lambda: wants(plane) is Want.RESIZE)
    plane.end("the launcher says so")
    assert (wants(plane), plane.notice().reason) == (Want.RESTART, "the launcher says so")
    plane.close()


def test_a_store_that_is_stopped_is_a_lost_one_and_keeps_nobody(zygote):
    """Torch's own client waits for ever for the answer of a server that is stopped."""
    patience = Patience(look_s=0.2, answer_s=1.0, connect_s=1.0)
    with server_processes(zygote, 1) as (server,):

        def connect():
            return connected(server.host, server.port, patience=patience)

        plane = StorePlane(connect, Assignment(0, 0, 1, 0, 1, 0, 1, server.address))
        plane.ready()
        server.stop()
        (told,) = at_once(lambda: plane.request(Want.RESIZE, "other numbers"))
        with pytest.raises(ControlLostError, match="does not answer"):
            told.result(PATIENCE_S)
        until(lambda: wants(plane) is Want.RESTART)
        (closed,) = at_once(plane.close)
        closed.result(PATIENCE_S)
