"""Lines of ``elastic status`` above its table of nodes."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from elastic.cli.job_control import show_job_status
from elastic.control.control_messages import ElasticJobStatus, NodeSummary, ReplacementWait
from elastic.world.world_state import WorldPhase

ONE = NodeSummary("n0", 0, "training", 1, 0, 1, 41, 40, 0.25)
RUNNING = ElasticJobStatus("llama", WorldPhase.RUNNING, 3, (ONE,), 1, 2, None, 1, "n1 was lost", 41, 40, "")


def lines(**changes):
    out = io.StringIO()
    show_job_status(Console(file=out, width=200), msgspec.structs.replace(RUNNING, **changes))
    text, _, _ = out.getvalue().partition("\nnode ")
    return text.splitlines()


def test_lost_node_and_seconds_left_are_shown_while_the_job_waits():
    outside = msgspec.structs.replace(ONE, node_rank=None, state="standby")
    wait = ReplacementWait(("n1",), 24.4, 1)
    assert lines(phase=WorldPhase.WAITING, nodes=(outside,), requested_nodes=1, replacement_wait=wait) == [
        "llama waiting, world 3, 0 ranks: n1 was lost",
        "the job waits 24 s for a replacement of n1, then continues with 1 node",
    ]


def test_running_job_shows_how_many_nodes_it_could_use():
    assert lines() == ["llama running, world 3, 1 rank: n1 was lost"]
    assert lines(requested_nodes=1)[1:] == ["the job could use 1 more node"]
    assert lines(requested_nodes=2)[1:] == ["the job could use 2 more nodes"]
