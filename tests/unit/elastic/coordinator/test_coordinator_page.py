"""Contents of the coordinator's page in each phase, in which names and reasons are never markup."""

from __future__ import annotations

import msgspec
import pytest

from elastic.control.control_messages import ElasticJobStatus, NodeSummary, ReplacementWait
from elastic.control.control_plane import NoticeKind
from elastic.control.epoch_state import ChangeMessage
from elastic.coordinator.coordinator_page import coordinator_page
from elastic.coordinator.world_changes import WorldChange
from elastic.world.world_state import WorldPhase
from tests.support.page_text import PageText
from tieredckpt.event_log.event_types import FaultEvent

NOW_US = 1_800_000_000_000_000
HOSTILE = "<script>alert('x')</script>\x00&\ud800"
replace = msgspec.structs.replace


def node(name, rank=None, state="training", **changes):
    return replace(NodeSummary(name, rank, state, 2, 0, 1, 41 if rank is not None else -1, 40, 0.25), **changes)


def status(*nodes, phase=WorldPhase.RUNNING, **changes):
    return replace(ElasticJobStatus("llama", phase, 3, nodes, 2, 2, None, 1, "", 41, 40, ""), **changes)


def change(epoch=1, **changes):
    known = {"at_us": NOW_US, "epoch": epoch, "how": "respawn", "reason": "", "ranks_before": 4, "ranks": 4}
    return WorldChange(**{**known, **changes})


def page_of(one, changes=()):
    return PageText(coordinator_page(one, changes, NOW_US))


def test_training_job_shows_its_world_nodes_and_steps():
    text = page_of(status(node("n0", 0), node("n1", 1, step=43), node("n2", state="standby", spares=1))).text
    assert "llama training" in text
    assert "world 3" in text
    assert "ranks 4 2 nodes with 2 ranks each" in text
    assert "step reached 41" in text
    assert "n0 training 0 to 1 0 41 40 250 ms" in text
    assert "n1 training 2 to 3 0 43 40 250 ms" in text
    assert "n2 standby - 1 none 40 250 ms" in text
    assert "Waiting" not in text


def test_forming_job_names_the_nodes_it_waits_for():
    one = status(node("n0", state="standby"), node("n1", state="starting"), phase=WorldPhase.FORMING, epoch=-1)
    text = page_of(one).text
    assert "llama forming" in text
    assert "none yet" in text
    assert "no world runs" in text
    assert "1 of 2 nodes ready for the next world. Waiting for n1 (starting)." in text


def test_waiting_job_says_that_a_replacement_may_come():
    wait = ReplacementWait(("n1",), 24.4, 1)
    one = status(node("n0", state="standby"), phase=WorldPhase.WAITING, reason="n1 was lost", replacement_wait=wait)
    text = page_of(one).text
    assert "waiting for nodes" in text
    assert "Last change: n1 was lost. 1 of 2 nodes ready for the next world. The job waits 24 s for" in text
    assert "for a replacement of n1, then continues with 1 node." in text


def test_pausing_job_names_the_nodes_whose_ranks_have_not_sealed():
    pause = ChangeMessage(NoticeKind.RESIZE, "elastic resize", 30.0)
    one = status(node("n0", 0, "sealed"), node("n1", 1, "pausing"), phase=WorldPhase.PAUSING, pause=pause)
    assert "save it, for at most 30 s. Waiting for n1." in page_of(one).text


@pytest.mark.parametrize(
    ("phase", "shown"),
    [(WorldPhase.STOPPED, "stopped"), (WorldPhase.FINISHED, "finished"), (WorldPhase.FAILED, "failed")],
)
def test_job_that_has_ended_shows_its_reason_and_waits_for_nothing(phase, shown):
    text = page_of(status(node("n0", state="starting"), phase=phase, reason="all ranks have finished")).text
    assert f"llama {shown}" in text
    assert "Last change: all ranks have finished." in text
    assert "Waiting" not in text


def test_node_with_a_problem_is_listed_first():
    text = page_of(status(node("n0", 0), node("n1", 1), node("zz", state="disconnected"))).text
    assert text.index("zz disconnected") < text.index("n0 training")


def test_recovery_shows_its_fault_time_and_stages():
    fault = FaultEvent(1.0, 0, "n1", 1, "process", "SIGKILL: exit code -9")
    one = change(faults=(fault,), seconds=2.5, stages=(("detect", 0.5), ("hydrate", 2.0)))
    page = page_of(status(node("n0", 0)), [change(0, how="start", ranks_before=0, reason="2 nodes are ready"), one])
    text = page.text
    assert "respawn, world 1 4 to 4 2.5 s n1 local rank 1: SIGKILL: exit code -9" in text
    assert "start, world 0 4 - 2 nodes are ready" in text
    assert text.index("world 1") < text.index("start, world 0")
    assert "The median recovery took 2.5 s." in text
    assert {("title", "detect: 500 ms"), ("title", "hydrate: 2 s")} <= {*page.attributes}
    assert ("style", "display:flex;width:160px") in page.attributes
    assert {("style", "flex:0.500000"), ("style", "flex:2.000000")} <= {*page.attributes}


def test_fault_without_a_new_world_is_not_over_yet():
    fault = FaultEvent(1.0, 3, "n1", -1, "node", "no report for 10 s")
    text = page_of(status(), [change(None, how="", ranks=0, faults=(fault,))]).text
    assert "no world yet 4 not yet n1: no report for 10 s" in text


def test_page_without_changes_or_event_log_says_so():
    assert "No world has formed yet." in page_of(status()).text
    assert "writes no event log" in page_of(status(), None).text


def test_page_is_short_for_many_nodes_faults_and_changes():
    nodes = [node(f"n{number}", number) for number in range(4000)]
    faults = tuple(FaultEvent(1.0, 0, f"n{number}") for number in range(500))
    page = page_of(status(*nodes), [change(number, faults=faults, seconds=1.0) for number in range(300)])
    assert "and 3,936 more nodes" in page.text
    assert "and 497 more faults" in page.text
    assert "and 280 before them" in page.text
    assert page.names.count("tr") < 100


def test_names_and_reasons_are_not_markup():
    fault = FaultEvent(1.0, 0, HOSTILE, 1, "process", HOSTILE)
    one = status(node(HOSTILE, 0, HOSTILE), job=HOSTILE, reason=HOSTILE)
    page = page_of(
        one, [change(how=HOSTILE, reason=HOSTILE), change(faults=(fault,), seconds=1.0, stages=((HOSTILE, 1.0),))]
    )
    assert "script" not in page.names
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("<script>") > 5
