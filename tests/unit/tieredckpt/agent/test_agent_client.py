"""Warnings about the directory of the node's agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tieredckpt.agent import agent_client


@pytest.mark.parametrize(("directory", "kind"), [("/dev/shm", "tmpfs"), ("/proc", "proc")])
def test_file_system_type_is_that_of_the_mount(directory, kind):
    assert agent_client.file_system_type(Path(directory)) == kind


def test_agent_directory_on_a_disk_is_a_warning(caplog):
    agent_client.warn_unless_in_memory(Path("/proc/sys"))
    agent_client.warn_unless_in_memory(Path("/dev/shm/job"))
    (said,) = [one.getMessage() for one in caplog.records]
    assert said.startswith("agent.directory /proc/sys is on proc and not on tmpfs")
