"""Ledgers made by hand, with known answers. All times are seconds from an arbitrary start."""

import pytest

from tests.support.event_logs import EventLogBuilder
from tieredckpt.cli.goodput import summary_lines
from tieredckpt.event_log.event_types import FileOpened
from tieredckpt.goodput import TimeCategory, analyse

SECOND = 1_000_000


def seconds(analysis):
    """Return the time by category, without empty categories."""
    return {name: us / SECOND for name, us in analysis.wall.by.items() if us}


def words_of(analysis):
    return "\n".join(str(one) for one in summary_lines(analysis))


def test_a_run_without_faults():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(2, ranks=2)
        .stage("rendezvous", 1, 1)
        .stage("groups", 2, 1)
        .stage("loader", 3, 2)
    )
    told.steps(0, 10, at=5, each=1.0).process_ended(16)
    found = analyse(told.events)
    assert seconds(found) == {"startup": 5, "productive": 10, "ending": 1}
    assert (found.ettr, found.goodput) == (10 / 16, 10 / 16)
    assert (found.steps, found.steps_counted, found.steps_lost, found.faults) == (10, 10, 0, 0)
    assert (found.mttr_s, found.mtbf_s) == (None, None)
    (start,) = found.recoveries
    assert start.category is TimeCategory.STARTUP
    assert start.stages == {"launch": 1, "rendezvous": 1, "groups": 1, "loader": 2}
    assert not found.is_running


def test_a_killed_rank_is_a_recovery_with_its_stages():
    """Steps of 1 s; a fault at 7.5, half a second into step 5, with step 3 as the newest saved one."""
    told = EventLogBuilder().process_began(0).world_formed(0, ranks=2).steps(0, 5, at=2)
    told.fault(7.6, epoch=0, since=7.5, node="n1")
    told.stage("detect", 7.7, 0, epoch=0, rank=0).stage("abort", 7.7, 0.3, epoch=0, rank=0)
    told.world_formed(8.5, ranks=2, epoch=1, how="respawn")
    told.stage("launch", 7.8, 1.0, epoch=1, rank=1).stage("rendezvous", 8.0, 1.0, epoch=1, rank=0)
    told.stage("rendezvous", 8.8, 0.2, epoch=1, rank=1)
    told.stage("groups", 9.0, 0.5, epoch=1, rank=0).stage("groups", 9.0, 0.7, epoch=1, rank=1)
    told.stage("hydrate", 9.5, 0.4, epoch=1, rank=0).stage("hydrate", 9.7, 0.3, epoch=1, rank=1)
    told.steps(4, 4, at=10, epoch=1).process_ended(14)
    found = analyse(told.events)
    assert seconds(found) == {"startup": 2, "productive": 8, "lost": 1.5, "recovery": 2.5}
    (_, recovery) = found.recoveries
    assert recovery.stages == pytest.approx(
        {"detect": 0.2, "abort": 0.3, "launch": 0.8, "rendezvous": 0.2, "groups": 0.7, "hydrate": 0.3}
    )
    assert (recovery.seconds, recovery.steps_lost, recovery.lost_s) == (2.5, 1, 1.5)
    assert recovery.cost_s == 4.0
    assert (recovery.how, recovery.ranks, recovery.next_ranks, recovery.resumed) == ("respawn", 2, 2, True)
    assert [(one.node, one.kind) for one in recovery.faults] == [("n1", "process")]
    assert (found.mttr_s, found.mtbf_s) == (2.5, 9.0)
    assert [one.step for one in found.step_views if not one.counts] == [4]


def test_injection_time_starts_the_recovery():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(0)
        .steps(0, 3, at=1)
        .fault_injected(4.25, "kill", node="n0")
        .fault(5, node="n0", since=4.75)
    )
    told.world_formed(5.5, epoch=1, how="respawn").steps(3, 1, at=6, epoch=1).process_ended(7)
    (_, recovery) = analyse(told.events).recoveries
    assert recovery.seconds == 1.75
    assert recovery.faults[0].injected == "kill"


@pytest.mark.parametrize(
    ("where", "fits"),
    [({"node": "n1"}, False), ({"epoch": 7}, False), ({"local_rank": 1}, False), ({"local_rank": 0}, True), ({}, True)],
)
def test_injection_on_another_rank_is_not_a_cause(where, fits):
    told = EventLogBuilder().process_began(0).world_formed(0).steps(0, 3, at=1).fault_injected(4.25, "kill", **where)
    told.fault(5, node="n0", local_rank=0).world_formed(5.5, epoch=1, how="respawn").steps(3, 1, at=6, epoch=1)
    (_, recovery) = analyse(told.events).recoveries
    assert bool(recovery.faults[0].injected) is fits


def test_a_resize_loses_nothing_and_a_smaller_world_has_less_capacity():
    told = EventLogBuilder().process_began(0).world_formed(0, ranks=4).steps(0, 4, at=0).stop_requested(3.5)
    told.stage("seal", 4, 0.5, epoch=0).stage("leave", 4.5, 0.25, epoch=0)
    told.world_formed(4.75, ranks=1, epoch=1, how="shrink").stage("rendezvous", 4.75, 0.25, epoch=1)
    told.stage("groups", 5, 1, epoch=1).steps(4, 2, at=6, each=2.0, epoch=1).process_ended(10)
    found = analyse(told.events)
    assert seconds(found) == {"productive": 8, "resize": 2}
    assert {name: us / SECOND for name, us in found.capacity.by.items() if us} == {
        "productive": 4 * 4 + 4 * 1,
        "resize": 2,
        "missing": 6 * 3,
    }
    assert found.capacity.total == 4 * found.wall.total
    assert (found.ettr, found.goodput) == (0.8, 0.5)
    resize = found.recoveries[-1]
    assert (resize.category, resize.stages) == (
        TimeCategory.RESIZE,
        {"seal": 0.5, "leave": 0.25, "rendezvous": 0.25, "groups": 1.0},
    )


def test_time_that_a_save_blocks_is_not_productive():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(0)
        .steps(0, 8, at=0)
        .save(1, at=1.75, took=0.25)
        .save(7, at=7.5, took=9)
        .process_ended(8)
    )
    found = analyse(told.events)
    assert seconds(found) == {"productive": 7.25, "save": 0.75, "ending": 8.5}
    assert found.save_s.count == 2


def test_slow_first_step_counts_as_startup():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(0)
        .steps(0, 1, at=1, each=4.0)
        .steps(1, 3, at=5)
        .process_ended(8)
    )
    found = analyse(told.events)
    assert seconds(found) == {"startup": 4, "productive": 4}
    assert found.recoveries[0].stages["first_step"] == 3


def test_steps_that_were_done_again_are_lost_once():
    """Saved every third step: 3 of the 5 are done again, and again."""
    told = EventLogBuilder().process_began(0).world_formed(0).steps(0, 5, at=0).fault(5)
    told.world_formed(5, epoch=1, how="restart").steps(3, 2, at=6, epoch=1).fault(8, epoch=1)
    told.world_formed(8, epoch=2, how="restart").steps(3, 4, at=9, epoch=2).process_ended(13)
    found = analyse(told.events)
    assert (found.steps, found.steps_counted, found.steps_lost) == (11, 7, 4)
    assert [one.steps_lost for one in found.recoveries] == [0, 2, 2]
    assert [one.faults[0].epoch for one in found.recoveries[1:]] == [0, 1]
    assert seconds(found) == {"productive": 7, "lost": 4, "recovery": 2}


def test_final_restore_undoes_later_steps():
    told = EventLogBuilder().process_began(0).world_formed(0).steps(0, 5, at=0).restored(2, at=6)
    found = analyse(told.events)
    assert (found.steps_counted, found.steps_lost) == (3, 2)


def test_restored_step_counts_although_a_killed_rank_did_not_record_it():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(0)
        .steps(0, 2, at=0)
        .fault(3.5, since=3.5)
        .world_formed(4, epoch=1, how="respawn")
    )
    told.restored(2, at=4, took=0.1, epoch=1)
    found = analyse(told.steps(3, 1, at=5, epoch=1).process_ended(6).events)
    assert (found.steps_counted, found.steps_lost) == (4, 0)
    assert seconds(found)["productive"] == 4


def test_unrecorded_step_of_a_killed_rank_is_lost_if_it_is_done_again():
    """Rank 0 is killed in step 2 after another rank has sealed it, so that step 1 is restored."""
    told = EventLogBuilder().process_began(0).world_formed(0).steps(0, 2, at=0).fault(3.5, since=3.25)
    told.world_formed(4, epoch=1, how="respawn").restored(1, at=4, took=0.5, epoch=1, steps_redone=1)
    found = analyse(told.steps(2, 2, at=5, epoch=1).process_ended(7).events)
    assert (found.steps, found.steps_counted, found.steps_lost) == (5, 4, 1)
    (_, recovery) = found.recoveries
    assert (recovery.steps_lost, recovery.lost_s) == (1, 1.25)
    assert seconds(found) == {"productive": 4, "lost": 1.25, "recovery": 1.75}


def test_steps_lost_by_a_restart_from_nothing_include_unrecorded_ones():
    told = EventLogBuilder().process_began(0).world_formed(0).steps(0, 2, at=0).fault(4)
    told.world_formed(4, epoch=1, how="restart").restored(-1, at=4, epoch=1, steps_redone=4)
    found = analyse(told.steps(0, 4, at=5, epoch=1).process_ended(9).events)
    assert (found.steps, found.steps_counted, found.recoveries[1].steps_lost) == (8, 4, 4)


def test_restore_of_another_step_adds_no_unrecorded_steps():
    """A checkpoint of another job is loaded, and the world continues after neither of the two."""
    told = EventLogBuilder().process_began(0).world_formed(0).steps(0, 2, at=0).fault(3)
    told.world_formed(4, epoch=1, how="restart").restored(900, at=4, epoch=1, steps_redone=7)
    found = analyse(told.steps(1, 2, at=5, epoch=1).process_ended(7).events)
    assert (found.steps, found.steps_lost) == (4, 1)


def test_unrecorded_step_without_a_restore_is_not_counted():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(0)
        .steps(0, 2, at=0)
        .fault(3.5, since=3.5)
        .world_formed(4, epoch=1, how="respawn")
    )
    found = analyse(told.steps(3, 1, at=5, epoch=1).process_ended(6).events)
    assert found.steps_counted == 3


def test_a_fault_that_nothing_came_after():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(0)
        .steps(0, 2, at=0)
        .fault(3, since=2.5)
        .process_ended(5, how="job failed", words="too many")
    )
    found = analyse(told.events)
    (_, recovery) = found.recoveries
    assert not recovery.resumed
    assert seconds(found) == {"productive": 2, "lost": 0.5, "recovery": 2.5}
    assert (found.mttr_s, found.mtbf_s, found.runs[0].how) == (None, 2.0, "job failed")


def test_two_faults_before_the_next_step_are_a_single_recovery():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(0)
        .steps(0, 2, at=0)
        .fault(2)
        .world_formed(3, epoch=1, how="restart")
        .fault(4, epoch=1)
    )
    told.world_formed(5, epoch=2, how="replace").steps(2, 2, at=6, epoch=2)
    found = analyse(told.events)
    (_, recovery) = found.recoveries
    assert (len(recovery.faults), recovery.seconds, recovery.how, found.faults) == (2, 4, "replace", 2)


def test_resumed_job_was_down_in_between():
    told = EventLogBuilder().process_began(0).world_formed(0).steps(0, 3, at=1).process_ended(4, how="stopped")
    told.process_began(10).world_formed(10).steps(2, 2, at=11).process_ended(13)
    found = analyse(told.events)
    assert seconds(found) == {"startup": 2, "productive": 4, "lost": 1, "down": 6}
    assert [run.how for run in found.runs] == ["stopped", "finished"]
    assert found.recoveries[-1].steps_lost == 1


def test_a_run_that_came_to_nothing_is_time_too():
    found = analyse(EventLogBuilder().process_began(0).process_began(5).world_formed(5).steps(0, 3, at=5).events)
    assert seconds(found) == {"down": 5, "productive": 3}


def test_file_opened_later_is_not_part_of_the_run():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(0)
        .steps(0, 3, at=0)
        .add(FileOpened(EventLogBuilder.microseconds(900) / 1e6, 1))
    )
    assert analyse(told.events).wall.total == 3 * SECOND


def test_restarted_coordinator_starts_no_new_run():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(0)
        .steps(0, 3, at=1)
        .process_began(2.5, again=True)
        .process_ended(4)
    )
    assert len(analyse(told.events).runs) == 1


def test_running_job_has_no_end():
    found = analyse(EventLogBuilder().process_began(0).world_formed(0).steps(0, 3, at=1).events)
    assert found.is_running
    assert seconds(found) == {"startup": 1, "productive": 3}


def test_faults_are_counted_before_the_first_step_too():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(1)
        .fault(2)
        .world_formed(3, epoch=1, how="respawn")
        .steps(0, 2, at=4, epoch=1)
        .process_ended(6)
    )
    found = analyse(told.events)
    assert (found.faults, len(found.recoveries)) == (1, 1)
    assert seconds(found) == {"startup": 4, "productive": 2}


def test_unrecorded_time_is_unattributed():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(0)
        .steps(0, 2, at=0)
        .world_formed(2, epoch=1, how="grow")
        .steps(2, 2, at=5, epoch=1)
    )
    found = analyse(told.events)
    assert seconds(found) == {"productive": 4, "resize": 3}
    assert found.recoveries[-1].stages == {"unstated": 3}
    assert found.unattributed_us == 3 * SECOND


def test_tokens_are_counted_for_steps_that_count():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(0)
        .steps(0, 3, at=0, tokens=10)
        .fault(3)
        .world_formed(3, epoch=1, how="restart")
    )
    told.steps(2, 1, at=4, epoch=1, tokens=10)
    found = analyse(told.events)
    assert (found.tokens, found.samples) == (30, None)


def test_percentiles_of_stages_are_over_all_ranks():
    told = EventLogBuilder().process_began(0).world_formed(0, ranks=100)
    for rank in range(100):
        told.stage("groups", 1, 1 + rank, rank=rank)
    told.steps(0, 1, at=200)
    (groups,) = [one for one in analyse(told.events).stages if one.name == "groups"]
    assert (groups.count, groups.p50_s, groups.p99_s, groups.most_s) == (100, 50, 99, 100)


def test_a_rank_detects_from_the_fault_on():
    told = EventLogBuilder().process_began(0).world_formed(0, ranks=2).steps(0, 2, at=0).fault(3, since=2.5)
    told.stage("detect", 3, 0, epoch=0, rank=0).stage("detect", 4, 0, epoch=0, rank=1)
    told.world_formed(5, epoch=1, how="respawn").steps(2, 1, at=6, epoch=1)
    found = analyse(told.events)
    (detect,) = [one for one in found.stages if one.name == "detect"]
    assert (detect.count, detect.p50_s, detect.most_s) == (2, 0.5, 1.5)
    assert found.recoveries[1].known_us == told.microseconds(4)


def test_a_spare_that_waited_took_no_time_of_the_recovery():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(0)
        .steps(0, 5, at=0)
        .fault(5)
        .world_formed(5, epoch=1, how="respawn")
    )
    told.stage("launch", 0, 2, epoch=1).stage("rendezvous", 2, 3.5, epoch=1).steps(5, 1, at=6, epoch=1)
    found = analyse(told.events)
    waited = [(one.name, one.count, one.most_s) for one in found.stages if one.category is TimeCategory.RECOVERY]
    assert waited == [("rendezvous", 1, 0.5)]


def test_nothing():
    found = analyse([])
    assert (found.wall.total, found.ettr, found.timeline, found.is_running) == (0, 0.0, (), True)


def test_up_to_which_step_a_job_is_protected_and_since_when_not():
    told = EventLogBuilder().process_began(0).world_formed(0).steps(0, 10, at=0).protection(0, at=1).protection(2, at=3)
    told.protection(2, at=6, since=4, left_out=1).protection(2, at=7, since=4, left_out=2).protection(7, at=8)
    told.protection(8, at=9).process_ended(12)
    found = analyse(told.events)
    assert found.protected_step == 8
    assert [(one.start_us, one.end_us, one.step, one.left_out, one.lasts) for one in found.unprotected] == [
        (EventLogBuilder.microseconds(4), EventLogBuilder.microseconds(8), 2, 2, False)
    ]
    assert found.unprotected_since_us is None
    assert "protected up to step 8; it was unprotected once, for 4.00 s" in words_of(found)


def test_a_job_that_ends_unprotected():
    told = (
        EventLogBuilder()
        .process_began(0)
        .world_formed(0)
        .steps(0, 10, at=0)
        .protection(2, at=3)
        .protection(2, at=6, since=4, left_out=3)
    )
    found = analyse(told.process_ended(12).events)
    assert [(one.start_us, one.end_us, one.lasts) for one in found.unprotected] == [
        (EventLogBuilder.microseconds(4), EventLogBuilder.microseconds(12), True)
    ]
    assert found.unprotected_since_us == EventLogBuilder.microseconds(4)
    assert (
        "protected up to step 2, unprotected since 2023-11-14 22:13:24Z (3 saves skipped or failed); "
        "it was unprotected once, for 8.00 s" in words_of(found)
    )


def test_unprotected_run_followed_by_a_protected_one_is_reported():
    told = (
        EventLogBuilder().process_began(0).world_formed(0).steps(0, 3, at=0).protection(-1, at=2, since=1, left_out=1)
    )
    told.process_began(50).world_formed(50).steps(0, 5, at=50).protection(3, at=54).process_ended(60)
    found = analyse(told.events)
    assert [(one.start_us, one.end_us, one.step, one.lasts) for one in found.unprotected] == [
        (EventLogBuilder.microseconds(1), EventLogBuilder.microseconds(54), -1, False)
    ]
    assert "protected up to step 3; it was unprotected once, for 53.00 s" in words_of(found)


def test_protection_is_omitted_without_records():
    found = analyse(EventLogBuilder().process_began(0).world_formed(0).steps(0, 3, at=0).process_ended(4).events)
    assert (found.protected_step, found.unprotected) == (None, ())
    assert "protected" not in words_of(found)
