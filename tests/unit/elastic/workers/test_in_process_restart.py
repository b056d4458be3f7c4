"""A process between worlds: finalizers, health checks, abort order, warmup."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from elastic.control.control_plane import ControlNotice, NoticeKind
from elastic.errors import UnhealthyProcessError
from elastic.testing import InMemoryCoordinator
from elastic.workers.in_process_restart import DeviceHealthCheck, run_within
from elastic.workers.rank_timeline import RankTimeline
from elastic.workers.train_loop import RecoveryPolicy, RunOutcome, _Rank, recoverable, run
from elastic.workers.world_handle import CleanupStack
from tests.support.control_planes import PATIENCE_S
from tieredckpt.event_log import NullEventLog
from tieredckpt.live.abort_fence import AbortFence
from tieredckpt.tensors.device import CpuBackend, use_device_backend

QUIET = RecoveryPolicy(backend="none", peer_loss_wait_s=0.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Skip the garbage collection, which is slow here because of all the modules tests import."""
    monkeypatch.setattr("elastic.workers.in_process_restart.gc.collect", lambda: 0)


def test_cleanups_run_once_in_reverse_order(caplog):
    called, finalizers = [], CleanupStack()
    finalizers.add(lambda: called.append("first"))

    @finalizers.add
    def fails():
        called.append("second")
        raise ZeroDivisionError("while leaving")

    finalizers.add(lambda: finalizers.add(lambda: called.append("late")))
    with caplog.at_level(logging.ERROR):
        finalizers.run()
        finalizers.run()
    assert called == ["late", "second", "first"]
    assert "fails failed" in caplog.text


@pytest.mark.parametrize("how", ["returns", "raises", "resize", "restart"])
def test_cleanups_run_however_the_world_is_left(how):
    plane, undone = InMemoryCoordinator(1), []

    def train(world):
        world.add_cleanup(lambda: undone.append(world.epoch))
        if world.epoch:
            return
        for step in world.steps(0, 5):
            if step == 2 and how == "raises":
                raise ZeroDivisionError("a step too far")
            if step == 2 and how == "resize":
                plane.resize(1)
            if step == 2 and how == "restart":
                plane.restart()
        if how == "returns":
            plane.restart()

    assert run(train, plane=plane.planes[0], policy=QUIET).outcome is RunOutcome.FINISHED
    assert undone == [0, 1]


def test_unhealthy_process_ends_instead_of_joining():
    plane, asked = InMemoryCoordinator(1), []

    def health():
        asked.append(1)
        raise RuntimeError("an error that the device remembers")

    def train(_world):
        raise ZeroDivisionError("a step too far")

    with pytest.raises(UnhealthyProcessError, match="the device remembers"):
        run(
            train,
            plane=plane.planes[0],
            policy=RecoveryPolicy(backend="none", peer_loss_wait_s=0.0, health_check=health),
        )
    assert asked == [1]
    assert not plane.planes[0].is_alive


def test_unresponsive_device_is_unhealthy():
    hangs = threading.Event()
    with pytest.raises(UnhealthyProcessError, match="has not answered for"):
        run_within(0.01, hangs.wait, "the device")
    hangs.set()
    with pytest.raises(UnhealthyProcessError, match="the device is broken: division"):
        run_within(PATIENCE_S, lambda: 1 / 0, "the device")
    run_within(PATIENCE_S, lambda: None, "the device")
    DeviceHealthCheck()()  # no test has used one


def test_health_check_uses_the_device_of_the_rank():
    """The current device belongs to a thread, and a new thread starts with the first device."""

    class Two(CpuBackend):
        def __init__(self):
            self.index, self.synchronized = threading.local(), []

        def is_initialized(self):
            return True

        def set_current(self, index):
            self.index.value = index

        def current(self):
            return torch.device("cuda", getattr(self.index, "value", 0))

        def synchronize(self, place):
            self.synchronized.append(place)

    with use_device_backend(Two()) as device:
        device.set_current(1)
        DeviceHealthCheck()()
        device.set_current(0)
    assert device.synchronized == [torch.device("cuda", 1)]


def test_device_memory_leak_is_measured_against_the_initial_usage():
    class Full(CpuBackend):
        in_bytes, released = 100, 0

        def is_initialized(self):
            return True

        def memory_allocated(self):
            return self.in_bytes

        def empty_cache(self):
            self.released += 1

    with use_device_backend(Full()) as device:
        health = DeviceHealthCheck(most_left_bytes=10)
        health()
        device.in_bytes = 110
        health()
        device.in_bytes = 111
        with pytest.raises(UnhealthyProcessError, match="11 bytes more"):
            health()
        assert device.released == 3


def test_broken_world_is_aborted_in_the_configured_order(caplog):
    order = []

    class Groups:
        def abort_groups(self):
            order.append("groups")

        def close_connections(self):
            order.append("connections")

    def fails():
        order.append("mine")
        raise ZeroDivisionError("while leaving")

    policy = RecoveryPolicy(abort_steps=("connections", fails, "groups"))
    rank = _Rank(
        lambda _: None,
        InMemoryCoordinator(1).planes[0],
        policy,
        record=RankTimeline(NullEventLog()),
        hydrating=None,
        faults=None,
    )
    rank._groups = Groups()
    with caplog.at_level(logging.ERROR):
        rank._abort(ControlNotice(0, NoticeKind.RESTART, "broken"))
    assert order == ["connections", "mine", "groups"]
    assert "while leaving" in caplog.text


def test_process_warms_up_once_before_joining():
    plane, order = InMemoryCoordinator(1), []

    @recoverable(plane=plane.planes[0], policy=QUIET, warmup=lambda: order.append(plane.epoch))
    def train(world):
        order.append(world.epoch)
        if world.epoch == 0:
            raise ZeroDivisionError("a step too far")

    assert train().outcome is RunOutcome.FINISHED
    assert order == [-1, 0, 1]


def test_a_process_that_cannot_be_warmed_up_ends():
    plane = InMemoryCoordinator(1)
    with pytest.raises(ZeroDivisionError):
        run(lambda _: None, plane=plane.planes[0], policy=QUIET, warmup=lambda: 1 / 0)
    assert not plane.planes[0].is_alive


def test_completed_device_work_is_queried_before_the_abort():
    """Their work ends with the abort, after which no state can be queried."""
    aborted = []

    class Work:
        def has_completed(self):
            return bool(aborted)

    class Groups:
        epoch = 0

        def abort_groups(self):
            aborted.append("groups")

        def close_connections(self):
            aborted.append("connections")

    policy = RecoveryPolicy(abort_steps=(lambda: aborted.append("mine"), "groups", "connections"))
    rank = _Rank(
        lambda _: None,
        InMemoryCoordinator(1).planes[0],
        policy,
        record=RankTimeline(NullEventLog()),
        hydrating=None,
        faults=None,
    )
    work = Work()
    rank._groups, rank._fence = Groups(), AbortFence(lambda: None)
    rank._fence._recorded.add(work)
    rank._abort(ControlNotice(0, NoticeKind.RESTART, "broken"))
    assert aborted == ["mine", "groups", "connections"]
    assert work.has_completed()
    assert not rank._fence.trusts(work)
