"""The control plane of ranks that the agent restarts for every world: when and how each exits."""

from __future__ import annotations

import contextlib
import functools
import threading

import pytest
import torch.distributed as dist

from elastic.control.control_plane import Dismissed, NoticeKind, RankAssignment, RankProgress
from elastic.errors import JobFailedError, PolicyError
from elastic.rendezvous.store_server_client import StoreTimeouts
from elastic.workers.launch_environment import connect_store
from elastic.workers.store_control_plane import StoreControlPlane
from integration.hyperpod.elastic_agent import process_mode as module
from integration.hyperpod.elastic_agent.environment import launched_worker
from integration.hyperpod.elastic_agent.process_mode import ProcessControlPlane
from integration.hyperpod.elastic_agent.stop_signal import GroupSignalListener
from tests.support.control_planes import PATIENCE_S, start_all, wait_all_assigned, wait_results
from tests.support.local_nodes import wait_until
from tests.support.ports import free_port
from tests.support.store_servers import server_processes

pytestmark = pytest.mark.slow


class Asked(GroupSignalListener):
    """An agent's signal that a test sends to one rank."""

    def send(self) -> None:
        self._hear()


class Told:
    """An account of which only this is looked at."""

    flushed = 0

    def flush(self) -> None:
        self.flushed += 1


class Node:
    def __init__(self, rank: int, size: int, port: int, patience_s: float) -> None:
        self.asked = Asked()
        self.account = Told()
        worker = launched_worker(
            {
                "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "GROUP_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }
        )  # fmt: skip
        self.plane = ProcessControlPlane(worker, self.asked, patience_s, self.account)  # type: ignore[arg-type]


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:

        def nodes(size: int, patience_s: float = PATIENCE_S) -> list[Node]:
            port = free_port()
            made = [Node(rank, size, port, patience_s) for rank in range(size)]
            stack.callback(lambda: wait_results(start_all(*(node.plane.close for node in made))))
            wait_all_assigned([node.plane for node in made])
            return made

        yield nodes


def sealed(nodes: list[Node], step: int = 8) -> None:
    wait_results(start_all(*(lambda n=node: n.plane.agree_on_step(step) for node in nodes)))
    for node in nodes:
        node.plane.report_sealed(step)


def leaves(node: Node) -> None:
    with pytest.raises(Dismissed):
        node.plane.wait_for_assignment(timeout_s=PATIENCE_S)


def test_request_of_one_agent_is_handled_once_by_all_ranks(start):
    nodes = start(3)
    nodes[1].asked.send()
    wait_until(lambda: all(node.plane.notice() is not None for node in nodes))
    assert {node.plane.notice().kind for node in nodes} == {NoticeKind.RESIZE}  # in memory: the next start is at once
    nodes[1].plane.request_change(NoticeKind.RESIZE, "the same, by the script's handler")
    nodes[2].asked.send()
    steps = wait_results(
        start_all(*(lambda p=node.plane, at=at: p.agree_on_step(at) for at, node in enumerate(nodes, 5)))
    )
    assert steps == [7, 7, 7]


def test_rank_exits_only_after_the_request_of_its_own_agent(start):
    nodes = start(2)
    nodes[0].asked.send()
    sealed(nodes)
    first, second = start_all(lambda: leaves(nodes[0]), lambda: leaves(nodes[1]))
    first.result(PATIENCE_S)
    nodes[0].plane.close()  # the store, with the process that ran it
    assert not second.done()
    nodes[1].asked.send()
    second.result(PATIENCE_S)
    assert [node.account.flushed for node in nodes] == [1, 1]


def test_rank_without_a_stop_signal_fails(start):
    nodes = start(2, patience_s=0.0)
    nodes[0].asked.send()
    sealed(nodes)
    done = start_all(lambda: leaves(nodes[0]), lambda: nodes[1].plane.wait_for_assignment(timeout_s=PATIENCE_S))
    done[0].result(PATIENCE_S)
    with pytest.raises(JobFailedError, match="has still not stopped this rank"):
        done[1].result(PATIENCE_S)


def test_preempted_pod_exits_without_an_agent_request(start):
    nodes = start(2)
    nodes[1].plane.request_change(NoticeKind.RESIZE, "SIGTERM: this process ends", deadline_s=20.0)
    sealed(nodes)
    nodes[0].asked.send()
    wait_results(start_all(lambda: leaves(nodes[0]), lambda: leaves(nodes[1])))


def test_agent_request_before_the_rendezvous_is_handled(start, monkeypatch):
    asked = Asked()
    asked.send()
    monkeypatch.setattr(Node, "__init__", _with(asked, Node.__init__))
    nodes = start(2)
    wait_until(lambda: all(node.plane.notice() is not None for node in nodes))


def _with(asked, init):
    def made(self, rank, size, port, patience_s):
        init(self, rank, size, port, patience_s)
        if rank == 0:
            self.plane._asked = asked

    return made


def test_the_store_outlives_the_first_ranks_work_until_all_have_finished(start):
    nodes = start(2)
    for node in nodes:
        node.plane.report_progress(RankProgress(9))
    nodes[0].plane.report_finished()
    closing = start_all(nodes[0].plane.close)[0]
    assert not closing.done()
    nodes[1].plane.report_finished()  # over the store that the first rank runs
    nodes[1].plane.close()
    closing.result(PATIENCE_S)


def test_request_after_the_last_step_does_not_wait_for_finished_ranks(start):
    nodes = start(2)
    for node in nodes:
        node.plane.report_progress(RankProgress(9))
    nodes[0].plane.report_finished()
    nodes[1].asked.send()
    assert nodes[1].plane.agree_on_step(9, timeout_s=PATIENCE_S) == 9
    nodes[1].plane.report_finished()


def test_fault_ends_all_processes_with_an_error(start):
    nodes = start(2)
    nodes[1].plane.report_fault("out of luck")
    wait_until(lambda: all(node.plane.notice() is not None for node in nodes))
    for node in nodes:
        with pytest.raises(JobFailedError, match="its launcher has to start the next one"):
            node.plane.wait_for_assignment(timeout_s=PATIENCE_S)
    assert [node.account.flushed for node in nodes] == [0, 0]


def test_rank_that_could_not_seal_fails_without_blocking_others(start):
    nodes = start(2)
    nodes[0].asked.send()
    wait_results(start_all(*(lambda n=node: n.plane.agree_on_step(8) for node in nodes)))
    nodes[0].plane.report_sealed(8)
    with pytest.raises(JobFailedError, match="its launcher has to start the next one"):
        nodes[1].plane.wait_for_assignment(timeout_s=PATIENCE_S)
    assert (
        nodes[0].plane._plane._store.add(nodes[0].plane._plane._name("came/departed"), 0) == 1
    )  # the rank with the store waits until all ranks have left
    leaves(nodes[0])


def test_store_shares_its_port_with_a_store_of_the_script(start):
    port = free_port()
    theirs = dist.TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False, multi_tenant=True)
    node = Node(0, 1, port, 0.0)
    try:
        assert node.plane.wait_for_assignment(timeout_s=PATIENCE_S).world_size == 1
        theirs.set("of the script", "there")
    finally:
        node.plane.close()


def test_stopped_store_process_delays_no_exit(zygote, monkeypatch):
    """The first rank, which runs the store, hangs after all ranks have sealed."""
    patience = StoreTimeouts(wait_slice_s=0.2, response_timeout_s=1.0, connect_timeout_s=10.0)
    monkeypatch.setattr(module, "connect_store", functools.partial(connect_store, timeouts=patience))
    with server_processes(zygote, 1) as (server,):
        place = RankAssignment(0, 0, 2, 0, 1, 0, 2, server.address)
        first = StoreControlPlane(lambda: connect_store(server.host, server.port, timeouts=patience), place, last=False)
        second = Node(1, 2, server.port, PATIENCE_S)
        wait_all_assigned([first, second.plane])
        second.asked.send()
        wait_results(start_all(lambda: first.agree_on_step(8), lambda: second.plane.agree_on_step(8)))
        for plane in (first, second.plane):
            plane.report_sealed(8)
        server.suspend()
        (leaving,) = start_all(lambda: leaves(second))
        leaving.result(PATIENCE_S)
        wait_results(start_all(second.plane.close, first.close))
        assert second.account.flushed == 1


def test_a_place_that_cannot_be_is_refused_before_anything_is_made():
    with pytest.raises(PolicyError, match="is not a HyperPod worker's"):
        module.process_control_plane({"RANK": "0"})
    assert not [one for one in threading.enumerate() if one.name == "elastic-store"]
