"""A simulated node knows this machine's agent, which may have steps of its job."""

from __future__ import annotations

from elastic import settings
from elastic.cli import run


def test_simulated_node_knows_the_configured_agent(tmp_path, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(tmp_path / "configured"))
    environ = run._own_agent(tmp_path / "n0" / "agent")
    assert settings.shared_agent_directory(environ) == str(tmp_path / "configured")
    assert environ["TIEREDCKPT_AGENT_DIRECTORY"] == str(tmp_path / "n0" / "agent")
    assert environ["TIEREDCKPT_AGENT_NODE"] == "n0"
