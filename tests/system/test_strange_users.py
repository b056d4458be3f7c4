"""Another user's directory and open agent at the path of a victim's own agent."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
import traceback
import uuid
from pathlib import Path

import pytest

import peerstore.server.store_server
from peerstore.client.agent_launcher import connect_or_launch_agent
from peerstore.client.store_client import Client
from peerstore.daemon_process import process_identity
from peerstore.errors import PeerRefusedError
from peerstore.server.store_server import serve_store
from peerstore.settings import AgentPaths, StoreSettings
from peerstore.shard_records import ShardKey
from peerstore.transport.unix import connect_to_agent
from tests.support.leaks import process_prefix
from tieredckpt.cli.tier_client import open_tier_client
from tieredckpt.settings import settings_from_mapping

pytestmark = [pytest.mark.system, pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")]
ATTACKER, VICTIM = 20001, 20002


@contextlib.contextmanager
def process_of(user, work):
    """Fork a child that runs ``work`` as ``user``; it exits with status 1 if ``work`` raises."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def status_of(user, work):
    with process_of(user, work) as child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def planted_directory():
    """Yield the path of a victim's agent, where the attacker's agent runs."""
    place = AgentPaths(Path("/dev/shm") / (process_prefix("tieredckpt") + uuid.uuid4().hex[:8]))

    def accept_any_peer(connection):
        return process_identity(peerstore.server.store_server.peer_credentials(connection)[0])

    def serve_attacker():
        peerstore.server.store_server._client_process = accept_any_peer
        place.directory.mkdir(mode=0o700)
        serve_store(place, StoreSettings(budget="64MiB"), version="trap")

    with process_of(ATTACKER, serve_attacker) as attacker:
        deadline = time.monotonic() + 60
        while not place.socket.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

        def open_permissions():
            place.socket.chmod(0o777)
            place.directory.chmod(0o755)

        assert status_of(ATTACKER, open_permissions) == 0
        yield place
        os.kill(attacker, signal.SIGTERM)
        os.waitpid(attacker, 0)
    shutil.rmtree(place.directory, ignore_errors=True)


def test_planted_directory_works_for_its_owner(planted_directory):
    """The attacker can use it, so others refuse it because of its owner, not because it is broken."""

    def use():
        with contextlib.closing(
            Client(lambda: connect_to_agent(planted_directory.socket), job="job", retry_s=0)
        ) as client:
            client.claim("job", "a")
            client.lease(ShardKey("job", 1, 1, "a", 0, 0), 1 << 20, 1)

    assert status_of(ATTACKER, use) == 0


def test_trainer_refuses_a_planted_directory(planted_directory):
    def train():
        with pytest.raises(PeerRefusedError, match="that no other user can write to"):
            connect_or_launch_agent(planted_directory, ["/bin/false"])

    assert status_of(VICTIM, train) == 0


def test_link_to_the_victims_own_directory_is_refused(planted_directory):
    beside = planted_directory.directory.with_name(planted_directory.directory.name + "-link")

    def plant():
        beside.symlink_to(planted_directory.directory)

    def train():
        with pytest.raises(PeerRefusedError, match="a link is none"):
            connect_or_launch_agent(AgentPaths(beside), ["/bin/false"])

    try:
        assert status_of(ATTACKER, plant) == 0
        assert status_of(VICTIM, train) == 0
    finally:
        beside.unlink()


def test_command_refuses_a_named_planted_directory(planted_directory):
    def look():
        with open_tier_client(
            settings_from_mapping({"agent": {"directory": str(planted_directory.directory)}})
        ) as sight:
            assert sight.agent is None
            assert "that no other user can write to" in sight.agent_error

    assert status_of(VICTIM, look) == 0
