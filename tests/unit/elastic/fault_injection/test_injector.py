"""A rank's injector: faults at the right rank and moment, each only once."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from elastic.fault_injection import FaultInjection, FaultPlan, InjectionKind, InjectionPhase
from elastic.fault_injection.fault_actions import InjectedFaultError, InjectionRecord, injected_here
from elastic.fault_injection.fault_spec import RankLocation
from elastic.fault_injection.injector import FaultInjector
from tests.support.injections import injected_faults


@dataclass
class Somewhere:
    """The part of a world that the injector uses."""

    rank: int = 0
    local_rank: int = 0
    epoch: int = 0
    restarts: int = 0
    step: int = -1


def injector_of(tmp_path, faults: FaultPlan, world: Somewhere, *, node="n0", cut=lambda _: None):
    one = FaultInjector(faults.injections, InjectionRecord(tmp_path), node, request_partition=cut)
    one.enter_world(world)
    return one


def steps_done(injector, world, phase, steps):
    """Return the steps in which a fault was injected."""
    found = []
    for world.step in steps:
        try:
            injector.at_phase(phase)
        except InjectedFaultError:
            found.append(world.step)
    return found


def test_fault_fires_once_at_its_step(tmp_path):
    faults, world = FaultPlan().at(step=3, rank=8, phase="save").exception(), Somewhere(rank=8)
    one = injector_of(tmp_path, faults, world)
    assert steps_done(one, world, InjectionPhase.SEAL, range(6)) == []
    assert steps_done(one, world, InjectionPhase.SAVE, range(6)) == [3]
    again = injector_of(tmp_path, faults, world)  # the restarted process
    assert steps_done(again, world, InjectionPhase.SAVE, range(6)) == []


def test_injection_waits_for_a_step_with_its_phase(tmp_path):
    world = Somewhere()
    one = injector_of(tmp_path, FaultPlan().at(step=3, rank=0, phase="save").exception(), world)
    assert steps_done(one, world, InjectionPhase.SAVE, range(0, 20, 5)) == [5]


def test_injection_does_not_match_another_rank(tmp_path):
    world = Somewhere(rank=0)
    one = injector_of(tmp_path, FaultPlan().at(step=3, rank=8).exception(), world)
    assert steps_done(one, world, InjectionPhase.FORWARD, range(6)) == []


def test_node_injection_hits_a_single_rank(tmp_path):
    faults, happened = FaultPlan().at(node="n1", step=0).exception(), []
    worlds = [Somewhere(rank=16, local_rank=0), Somewhere(rank=17, local_rank=1)]
    both = [injector_of(tmp_path, faults, world, node="n1") for world in worlds]
    threads = [
        threading.Thread(
            target=lambda one=one, world=world: happened.extend(steps_done(one, world, InjectionPhase.FORWARD, [0]))
        )
        for one, world in zip(both, worlds, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert happened == [0]


def test_recovery_phase_is_entering_a_world_after_a_fault(tmp_path):
    faults = FaultPlan().at(step=3, rank=1).exception().then(phase="recovery", rank=0).exception()
    world = Somewhere(rank=0)
    one = injector_of(tmp_path, faults, world)
    one.enter_world(Somewhere(rank=0, restarts=1, epoch=1))  # the injection that it follows has not happened
    InjectionRecord(tmp_path).claim(injected_here(faults.injections[0], RankLocation(1, "n1", 0)))
    one.enter_world(Somewhere(rank=0, restarts=0, epoch=2))
    with pytest.raises(InjectedFaultError):
        one.enter_world(Somewhere(rank=0, restarts=2, epoch=3))
    one.enter_world(Somewhere(rank=0, restarts=3, epoch=4))
    assert [happened.epoch for happened in injected_faults(InjectionRecord(tmp_path)) if happened.injection.then] == [3]


def test_after_s_counts_from_the_start_of_the_job(tmp_path):
    world = Somewhere(step=1)
    record = InjectionRecord(tmp_path)
    (record.folder).mkdir(parents=True)
    record.job_started_at()
    one = injector_of(tmp_path, FaultPlan().at(after_s=1e6, rank=0).exception(), world)
    assert one.at_phase(InjectionPhase.FORWARD) is None
    two = injector_of(tmp_path, FaultPlan().at(after_s=0.0, rank=0).exception(), world)
    with pytest.raises(InjectedFaultError):
        two.at_phase(InjectionPhase.FORWARD)


def test_nan_is_for_the_caller_and_a_partition_for_the_supervisor(tmp_path):
    cuts, world = [], Somewhere(step=1)
    faults = FaultPlan().at(rank=0, phase="backward").nan().at(rank=0, phase="optimizer").partition(seconds=7)
    one = injector_of(tmp_path, faults, world, cut=cuts.append)
    assert one.at_phase(InjectionPhase.BACKWARD) is InjectionKind.NAN
    assert one.at_phase(InjectionPhase.OPTIMIZER) is InjectionKind.PARTITION
    assert cuts == [7]


def test_slow_lasts_for_its_steps(tmp_path, monkeypatch):
    slept, world = [], Somewhere()
    monkeypatch.setattr("elastic.fault_injection.injector.time.sleep", slept.append)
    one = injector_of(tmp_path, FaultPlan().at(rank=0, step=2).slow(seconds=0.5, times=3), world)
    for world.step in range(8):
        one.at_phase(InjectionPhase.FORWARD)
        one.at_phase(InjectionPhase.FORWARD)
    assert slept == [0.5] * 3


def test_outside_a_world_nothing_happens(tmp_path):
    one = injector_of(tmp_path, FaultPlan().at(rank=0).exception(), Somewhere(step=1))
    one.leave_world()
    assert one.at_phase(InjectionPhase.FORWARD) is None


def test_fault_added_at_run_time_is_registered_once(tmp_path):
    world = Somewhere(step=1)
    one = injector_of(tmp_path, FaultPlan(), world)
    fault = FaultInjection(kind=InjectionKind.EXCEPTION, rank=0, name="later")
    one.add([fault, fault])
    one.add([fault])
    assert steps_done(one, world, InjectionPhase.FORWARD, range(4)) == [0]


def test_injection_record_is_kept_until_cleared(tmp_path):
    record = InjectionRecord(tmp_path)
    assert injected_faults(record) == []
    fault = injected_here(FaultInjection(kind=InjectionKind.OOM, rank=0, name="a"), RankLocation(0, "n0", 0))
    assert [record.claim(fault), record.claim(fault)] == [True, False]
    (record.folder / "torn").write_bytes(b'{"inj')
    assert injected_faults(record) == [fault]
    record.clear()
    assert not record.is_done("a")
