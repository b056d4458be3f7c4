"""Another user of the machine was first: made the directory and runs an agent in it that lets everybody in."""

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
from peerstore.daemon_process import process_identity
from peerstore.errors import PeerRefusedError
from peerstore.server.agent_launcher import connect_or_launch_agent
from peerstore.server.store_client import Client, connect_to_agent
from peerstore.server.store_server import serve_store
from peerstore.settings import AgentPaths, StoreSettings
from peerstore.shard_records import ShardKey
from tests.support.leaks import own_name
from tieredckpt.cli.tier_client import open_tier_client
from tieredckpt.settings import settings_from_mapping

pytestmark = [pytest.mark.system, pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")]
ATTACKER, VICTIM = 20001, 20002


@contextlib.contextmanager
def process_of(user, work):
    """A child that is ``user`` from its first step on; what ``work`` raises is its status 1."""
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
def trap():
    """Where a victim's agent would be, and the attacker's is."""
    place = AgentPaths(Path("/dev/shm") / (own_name("tieredckpt") + uuid.uuid4().hex[:8]))

    def everybody(connection):
        return process_identity(peerstore.server.store_server.peer_credentials(connection)[0])

    def lie_in_wait():
        peerstore.server.store_server._peer = everybody
        place.directory.mkdir(mode=0o700)
        serve_store(place, StoreSettings(budget="64MiB"), version="trap")

    with process_of(ATTACKER, lie_in_wait) as attacker:
        deadline = time.monotonic() + 60
        while not place.socket.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

        def open_the_door():
            place.socket.chmod(0o777)
            place.directory.chmod(0o755)

        assert status_of(ATTACKER, open_the_door) == 0
        yield place
        os.kill(attacker, signal.SIGTERM)
        os.waitpid(attacker, 0)
    shutil.rmtree(place.directory, ignore_errors=True)


def test_planted_directory_works_for_its_owner(trap):
    """The attacker himself can use it, so that it is refused for whose it is and not for being broken."""

    def use():
        with contextlib.closing(Client(lambda: connect_to_agent(trap.socket), job="job", retry_s=0)) as client:
            client.claim("job", "a")
            client.lease(ShardKey("job", 1, 1, "a", 0, 0), 1 << 20, 1)

    assert status_of(ATTACKER, use) == 0


def test_trainer_refuses_a_planted_directory(trap):
    def train():
        with pytest.raises(PeerRefusedError, match="that nobody else can write to"):
            connect_or_launch_agent(trap, ["/bin/false"])

    assert status_of(VICTIM, train) == 0


def test_link_to_the_victims_own_directory_is_refused(trap):
    beside = trap.directory.with_name(trap.directory.name + "-link")

    def plant():
        beside.symlink_to(trap.directory)

    def train():
        with pytest.raises(PeerRefusedError, match="a link is none"):
            connect_or_launch_agent(AgentPaths(beside), ["/bin/false"])

    try:
        assert status_of(ATTACKER, plant) == 0
        assert status_of(VICTIM, train) == 0
    finally:
        beside.unlink()


def test_command_refuses_a_named_planted_directory(trap):
    def look():
        with open_tier_client(settings_from_mapping({"agent": {"directory": str(trap.directory)}})) as sight:
            assert sight.agent is None
            assert "that nobody else can write to" in sight.agent_error

    assert status_of(VICTIM, look) == 0
