"""Agent sockets that another user could have made: clients refuse to connect to them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from peerstore.client.agent_launcher import connect_or_launch_agent
from peerstore.daemon_process import trusted_users
from peerstore.errors import AgentUnreachableError, PeerRefusedError
from peerstore.settings import AgentPaths
from peerstore.transport.unix import connect_to_agent
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.cli.tier_client import open_tier_client
from tieredckpt.settings import settings_from_mapping

OTHER_UID = 54321


@pytest.fixture
def foreign_agent(tmp_path):
    """Open a listening socket in an agent directory, to which no client may connect."""
    folder = tmp_path / "agent"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "agent.sock"))
        listener.listen(8)
        listener.settimeout(0)
        yield AgentPaths(folder), listener


def make_world_writable(folder, _):
    folder.chmod(0o777)


def make_group_writable(folder, _):
    folder.chmod(0o770)


def make_linked(folder, _):
    real = folder.with_name("real")
    folder.rename(real)
    folder.symlink_to(real)


def make_foreign_owned(folder, monkeypatch):
    if os.getuid() == 0:
        os.chown(folder, OTHER_UID, OTHER_UID)
    else:
        monkeypatch.setattr(os, "getuid", lambda: OTHER_UID)


UNSAFE = [make_world_writable, make_group_writable, make_linked, make_foreign_owned]


def connect_client(place):
    connect_to_agent(place.socket).close()


def connect_or_launch(place):
    connect_or_launch_agent(place, ["/bin/false"]).close()


def connect_trainer(place):
    NodeAgentClient(
        settings_from_mapping({"agent": {"directory": str(place.directory), "embedded": False}}), "job"
    ).close()


@pytest.mark.parametrize("connect", [connect_client, connect_or_launch, connect_trainer], ids=lambda one: one.__name__)
@pytest.mark.parametrize("unsafe", UNSAFE, ids=lambda one: one.__name__)
def test_directory_writable_by_others_is_refused_before_connecting(foreign_agent, unsafe, connect, monkeypatch):
    if os.getuid() == 0 and unsafe is make_foreign_owned and connect is connect_trainer:
        pytest.skip("root may use the agent of the user that a configured directory belongs to")
    at, listener = foreign_agent
    unsafe(at.directory, monkeypatch)
    with pytest.raises(PeerRefusedError, match=r"must be a directory of user .* that no other user can write to"):
        connect(at)
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize("unsafe", UNSAFE[:3], ids=lambda one: one.__name__)
def test_commands_report_an_unsafe_directory(foreign_agent, unsafe, monkeypatch):
    at, listener = foreign_agent
    unsafe(at.directory, monkeypatch)
    settings = settings_from_mapping({"agent": {"directory": str(at.directory)}})
    with open_tier_client(settings) as client:
        assert client.agent is None
        assert "no other user can write to" in client.agent_error
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize("uid", [OTHER_UID, 0])
def test_owner_of_the_socket_is_checked_with_the_kernel(foreign_agent, monkeypatch, uid):
    """The directory could be replaced between its check and the connection."""
    at, _ = foreign_agent
    real = os.getuid()
    monkeypatch.setattr("peerstore.transport.unix.peer_credentials", lambda _: (os.getpid(), uid))
    if uid in (real, 0):
        connect_to_agent(at.socket).close()
    else:
        with pytest.raises(PeerRefusedError, match=f"a process of user {OTHER_UID} listens on"):
            connect_to_agent(at.socket)


def test_only_root_trusts_the_owner_of_a_named_directory(tmp_path, monkeypatch):
    owner = tmp_path.stat().st_uid
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: OTHER_UID)
    if owner != 0:  # every user trusts root
        with pytest.raises(PermissionError):
            trusted_users(tmp_path, named=True)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert trusted_users(tmp_path, named=True) == {0, owner}
    assert trusted_users(Path("/"), named=False) == {0}


def test_missing_directory_is_unreachable(tmp_path):
    with pytest.raises(AgentUnreachableError, match="no agent answers"):
        connect_to_agent(tmp_path / "none" / "agent.sock")
