"""The coordinator's HTTP listener before, during and after its lead."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import threading

import msgspec
import pytest

from elastic.control.control_messages import ElasticJobStatus
from elastic.coordinator import status_server as module
from elastic.coordinator.coordinator import Coordinator
from elastic.coordinator.job_snapshot import CoordinatorSettings
from elastic.coordinator.status_server import StatusServer
from elastic.testing import MemoryLeadership
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import WorldPhase
from tests.support.local_nodes import wait_until
from tieredckpt.event_log.event_types import FaultEvent, ProcessBegan, WorldFormed
from tieredckpt.event_log.log_writer import EventLogWriter

SECRET = b"a secret of the tests, long enough"
STATUS = ElasticJobStatus("llama", WorldPhase.FORMING, -1, (), 2, 2, None, 0, "", -1, -1, "")


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return "127.0.0.1", one.getsockname()[1]


@pytest.fixture
def address():
    return free_address()


def get(address, path="/status", method="GET", **headers):
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=30)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def reaches(address):
    with contextlib.suppress(OSError):
        return get(address)[0]
    return None


@contextlib.contextmanager
def serving(address, event_log=""):
    with contextlib.closing(StatusServer("llama", address, event_log)) as server:
        server.publish(STATUS)
        wait_until(lambda: reaches(address), "it listens")
        yield server


def test_status_is_the_published_one(address):
    with serving(address) as server:
        assert get(address) == (200, msgspec.json.encode(STATUS).decode())
        server.publish(msgspec.structs.replace(STATUS, epoch=7))
        assert msgspec.json.decode(get(address)[1])["epoch"] == 7
    assert reaches(address) is None


def test_page_has_the_changes_of_the_event_log(address, tmp_path):
    writer = EventLogWriter(tmp_path, name="coordinator")
    writer.write(ProcessBegan(100.0, "llama", "coordinator"))
    writer.write(WorldFormed(101.0, 0, 4))
    writer.write(FaultEvent(102.0, 0, "n1", 1, "process", "SIGKILL: exit code -9"))
    with serving(address, str(tmp_path)):
        code, page = get(address, "/")
        assert code == 200
        assert "n1 local rank 1: SIGKILL: exit code -9" in page


def test_server_does_not_listen_before_the_coordinator_leads(address):
    with contextlib.closing(StatusServer("llama", address, "")) as server:
        server.publish(None)
        assert reaches(address) is None


def test_coordinator_that_does_not_lead_any_more_refuses(address):
    with serving(address) as server:
        server.publish(None)
        assert get(address)[0] == get(address, "/")[0] == 503


def test_other_methods_paths_and_web_pages_are_refused(address):
    with serving(address):
        assert get(address, method="POST")[0] == 501
        assert get(address, "/else") == (404, "known paths: /, /status\n")
        assert get(address, Origin="http://evil.example")[0] == 403
        assert get(address, Host="rebound.evil.example")[0] == 421


def test_address_in_use_is_logged_and_tried_again(address, monkeypatch, caplog):
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    with contextlib.closing(StatusServer("llama", address, "")) as server:
        with socket.create_server(address), caplog.at_level(logging.WARNING):
            server.publish(STATUS)
            wait_until(lambda: "cannot be served" in caplog.text, "the problem is logged")
        wait_until(lambda: reaches(address) == 200, "it listens")


@contextlib.contextmanager
def candidate(leadership, name, address):
    settings = CoordinatorSettings("llama", ScalingPolicy(min_replicas=1, max_replicas=2), 1)
    server = StatusServer("llama", address, "")
    one = Coordinator(
        settings, SECRET, fresh=False, leadership=leadership, candidate=name, stands_by=True, status_server=server
    )
    thread = threading.Thread(target=one.run)
    thread.start()
    try:
        yield one
    finally:
        one.request_stop()
        thread.join(60)
        assert not thread.is_alive()


def test_only_the_leading_coordinator_serves_and_then_its_successor(address):
    leadership, other = MemoryLeadership(duration_s=2.0), free_address()
    with candidate(leadership, "a", address) as leader:
        wait_until(lambda: reaches(address) == 200, "the leader serves", 60)
        with candidate(leadership, "b", other) as successor:
            wait_until(lambda: successor._elector.follows, "the other one follows it", 60)
            assert reaches(other) is None
            leader.request_stop()
            wait_until(lambda: reaches(other) == 200, "the successor serves", 60)
            assert msgspec.json.decode(get(other)[1])["job"] == "llama"
            wait_until(lambda: reaches(address) is None, "the former leader does not", 60)
