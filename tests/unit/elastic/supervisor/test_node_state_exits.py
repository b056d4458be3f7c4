"""Processes that exit without calling ``elastic.run``, before they connect to a supervisor."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elastic.control.control_messages import ExitReason
from elastic.supervisor.rank_exits import describe_unjoined_exit
from tests.support.control_simulation import ControlSimulation


def exits(table: ControlSimulation, name: str, status: int) -> None:
    """End the first process of a node before it has connected."""
    node = table.nodes[name]
    token = next(iter(node.ranks))
    del node.ranks[token]
    never = node.seats.never_joins(token, status)
    node.seats.process_exited(token, f"status {status}", never_joined=never)
    node.apply_effects()


@pytest.mark.parametrize("status", [0, 1])
def test_script_that_never_joins_ends_the_job_after_one_run(status):
    table = ControlSimulation(2, nproc=2, spares=1)
    started = sum(len(node.ranks) for node in table.nodes.values())
    exits(table, "n0", status)
    nodes = list(table.nodes.values())
    table.run_without_faults(20)
    assert (table.desk.snapshot().outcome.exit, table.desk.snapshot().outcome.reason) == (
        ExitReason.NEVER_JOINED,
        f"status {status}",
    )
    assert {node.seats.exit for node in nodes} == {ExitReason.NEVER_JOINED}
    assert sum(node.seats.attempts for node in nodes) == started


def test_spare_that_never_joins_is_not_started_again():
    table = ControlSimulation(1, nproc=1, spares=1)
    node = table.nodes["n0"]
    spare = node.seats.spares()[0].token
    node.seats.process_exited(spare, "status 0", never_joined=node.seats.never_joins(spare, 0))
    assert node.seats.attempts == 2


def test_process_killed_by_a_signal_is_replaced():
    table = ControlSimulation(1, nproc=1)
    exits(table, "n0", -9)
    table.run_without_faults(20)
    table.check_one_world()
    assert table.desk.snapshot().outcome.exit is None


def test_process_that_connected_is_replaced():
    table = ControlSimulation(1, nproc=1)
    node = table.nodes["n0"]
    node.seats.process_connected(next(iter(node.ranks)))
    exits(table, "n0", 1)
    table.run_without_faults(20)
    table.check_one_world()
    assert table.desk.snapshot().outcome.exit is None


def test_unjoined_exit_names_the_script_and_the_remedy(tmp_path):
    log = tmp_path / "rank-0.1.log"
    log.write_text("Traceback (most recent call last):\n  ...\nModuleNotFoundError: No module named 'foo'\n\n")
    command = (sys.executable, "-u", "/home/me/p.py", "--lr", "1")
    assert describe_unjoined_exit(command, 0, log) == (
        "p.py exited without calling elastic.run / @elastic.recoverable; not retried. "
        "To run an unmodified script use torchrun"
    )
    assert describe_unjoined_exit(command, 3, log) == (
        "p.py exited with status 3 before it called elastic.run / @elastic.recoverable; not retried: "
        f"ModuleNotFoundError: No module named 'foo' (see {log})"
    )
    module = (sys.executable, "-u", "-m", "pkg.train")
    assert describe_unjoined_exit(module, 0, log).startswith("pkg.train exited without")
    assert describe_unjoined_exit(("./train.sh",), 2, Path("/nowhere")).startswith("train.sh exited with status 2")
